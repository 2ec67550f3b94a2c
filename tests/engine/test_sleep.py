"""A model that sleeps: answers as before, nobody runs meanwhile, and whatever fails on waking up leaves it asleep and whole."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparkrt import LLM, SamplingParams
from sparkrt.errors import CapacityError, LoadError, RequestError
from sparkrt.model.checkpoint import bundled_model
from sparkrt.runtime import HostBackend, OutOfMemory

PROMPTS = ["Once upon a time", "The king said " * 30]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the bundled model, that can be moved away."""
    return Path(shutil.copytree(bundled_model(), tmp_path_factory.mktemp("sleep") / "model"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), enable_sleep_mode=True, device="host", max_num_seqs=4, num_gpu_blocks_override=32, debug=True) as llm:
        yield llm


def answers(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def allocated(llm: LLM) -> int:
    return llm.core.model.backend.memory_info().allocated  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize("level", [1, 2])
def test_it_answers_as_before(llm: LLM, level: int) -> None:
    wanted, awake = answers(llm), allocated(llm)
    given = llm.sleep(level)
    assert allocated(llm) == awake - given
    assert given >= (llm.core.model.kv.groups[0].nbytes(32) if level == 1 else llm.info.weight_bytes)  # type: ignore[attr-defined]
    assert llm.core.stats().asleep == level
    assert llm.sleep(1) == 0
    for ask in (lambda: answers(llm), lambda: llm.decode_loop([1, 2, 3])):
        with pytest.raises(CapacityError, match="asleep"):
            ask()
    llm.wake_up()
    llm.wake_up()
    assert (llm.core.stats().asleep, allocated(llm)) == (0, awake)
    assert answers(llm) == wanted
    llm.core.check_integrity()


def test_who_runs_is_not_disturbed(llm: LLM) -> None:
    with llm.decode_loop(llm.tokenizer.encode(PROMPTS[0]), SamplingParams(temperature=0, max_tokens=12)) as loop:
        first = [next(loop) for _ in range(3)]
        with pytest.raises(CapacityError, match="running"):
            llm.sleep()
        assert [*first, *loop] == answers(llm)[0]
    llm.sleep()
    llm.wake_up()


def test_what_fails_on_waking_up_leaves_it_asleep(llm: LLM, folder: Path) -> None:
    wanted, backend = answers(llm), llm.core.model.backend  # type: ignore[attr-defined]
    assert isinstance(backend, HostBackend)
    llm.sleep(2)
    asleep = allocated(llm)
    for n in (1, 3, 50):
        backend.fail_allocation(n)
        with pytest.raises(OutOfMemory):
            llm.wake_up()
        assert (llm.core.stats().asleep, allocated(llm)) == (2, asleep)
    shards = [path.rename(path.with_suffix(".gone")) for path in folder.glob("*.safetensors")]
    with pytest.raises(LoadError):
        llm.wake_up()
    assert (llm.core.stats().asleep, allocated(llm)) == (2, asleep)
    for path in shards:
        path.rename(path.with_suffix(".safetensors"))
    llm.wake_up()
    assert answers(llm) == wanted


def test_it_can_be_closed_in_its_sleep() -> None:
    for level in (1, 2):
        with LLM(enable_sleep_mode=True, device="host", max_num_seqs=2, num_gpu_blocks_override=8) as llm:
            llm.sleep(level)


def test_levels_and_preparation(llm: LLM) -> None:
    for level in (0, 3, True, "1"):
        with pytest.raises(RequestError, match="level must be 1"):
            llm.sleep(level)  # type: ignore[arg-type]
    with LLM(device="host", max_num_seqs=2, num_gpu_blocks_override=8) as other, pytest.raises(RequestError, match="prepared"):
        other.sleep()
