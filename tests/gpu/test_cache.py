"""The engine's caches on a GPU: hit, grown, spilled, restored and swapped, the tokens are those of an engine without a cache.

In bf16 with `batch_invariant`, where equal means equal: whatever was copied too early, too late or to the wrong place shows.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sparkrt import LLM, SamplingParams
from sparkrt.engine import offloading
from sparkrt.runtime.cuda import CudaBackend

pytestmark = pytest.mark.gpu

OPTIONS: dict[str, Any] = {
    "device": "cuda",
    "dtype": "bfloat16",
    "batch_invariant": True,
    "max_model_len": 1024,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
    "debug": True,
}
GREEDY = {"temperature": 0, "ignore_eos": True}
DRAWN = {"temperature": 1.1, "seed": 5, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "ignore_eos": True}
SPILL = {"kv_offloading_size": 1 / 16, "state_cache_slots": 3}


@pytest.fixture(autouse=True)
def every_copy_is_worth_it(opened: CudaBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offloading, "_FLOPS", {"cuda": 1.0})


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """A tree: beginnings of every length around the page, repeats, and branches."""
    rng = random.Random(3)
    base = [rng.randrange(6000) for _ in range(640)]
    texts = [base[:n] for n in (640, 320, 64, 63, 65, 1, 129, 321, 640)]
    texts += [base[:cut] + [rng.randrange(6000) for _ in range(90)] for cut in (100, 128, 192, 400, 512)]
    return texts + [[rng.randrange(6000) for _ in range(n)] for n in (500, 330, 200)]


def each(prompts: list[list[int]], max_tokens: int) -> list[SamplingParams]:
    return [SamplingParams(**(DRAWN if i % 3 == 1 else GREEDY), max_tokens=max_tokens) for i in range(len(prompts))]


def answers(llm: LLM, prompts: list[list[int]], max_tokens: int, together: bool) -> list[list[int]]:
    params = each(prompts, max_tokens)
    if together:
        results = llm.generate(prompts, params, use_tqdm=False)
    else:
        results = [llm.generate([p], q, use_tqdm=False)[0] for p, q in zip(prompts, params, strict=True)]
    return [result.outputs[0].token_ids for result in results]


@pytest.fixture(scope="module")
def cold(opened: CudaBackend, prompts: list[list[int]]) -> Iterator[dict[int, list[list[int]]]]:
    with LLM(enable_prefix_caching=False, **OPTIONS) as llm:
        yield {n: answers(llm, prompts, n, together=False) for n in (24, 200)}


@pytest.mark.parametrize("together", [False, True], ids=["one by one", "together"])
def test_prefix_hits_and_growing_tables(prompts: list[list[int]], cold: dict[int, list[list[int]]], together: bool) -> None:
    """200 tokens of answer: every row's block table grows by uploads of its tail alone, three times and more."""
    with LLM(**OPTIONS) as llm:
        for _ in range(2):
            assert answers(llm, prompts, 200, together) == cold[200]
        assert llm.core.stats().prefix_cache_hits > 1000


@pytest.mark.parametrize("together", [False, True], ids=["one by one", "together"])
def test_spilled_and_restored(prompts: list[list[int]], cold: dict[int, list[list[int]]], together: bool) -> None:
    with LLM(num_gpu_blocks_override=24, **SPILL, **OPTIONS) as llm:
        for _ in range(4):
            assert answers(llm, prompts, 24, together) == cold[24]
        stats = llm.core.stats().offload
        assert stats is not None
        assert stats.hits > 1000
        assert stats.restored_bytes > 0


def test_over_a_restart(prompts: list[list[int]], cold: dict[int, list[list[int]]], tmp_path: Path) -> None:
    disk = {"kv_offloading_dir": str(tmp_path), "kv_offloading_disk_size": 1}
    for life in range(2):
        with LLM(num_gpu_blocks_override=24, **SPILL, **disk, **OPTIONS) as llm:
            assert answers(llm, prompts, 24, together=True) == cold[24]
            stats = llm.core.stats().offload
            assert stats is not None
            assert stats.corrupt_files == 0
            assert stats.loaded_bytes > 0 or life == 0


def test_swapped_out_and_back(prompts: list[list[int]], cold: dict[int, list[list[int]]]) -> None:
    """With pages for a third of the demand: preempted requests go on at the very token, so their answers have the same bits."""
    chosen = [i for i, prompt in enumerate(prompts) if len(prompt) <= 330]
    some, want = [prompts[i] for i in chosen], [cold[200][i] for i in chosen]
    params = [each(prompts, 200)[i] for i in chosen]
    with LLM(num_gpu_blocks_override=20, **SPILL, **OPTIONS) as llm:
        for _ in range(3):
            llm.core.scheduler.forecast.share = 0.0
            llm.reset_prefix_cache()
            got = [result.outputs[0].token_ids for result in llm.generate(some, params, use_tqdm=False)]
            assert got == want
        stats = llm.core.stats()
        assert stats.offload is not None
        assert stats.preemptions >= stats.offload.swaps > 3
