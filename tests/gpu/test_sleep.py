"""Memory that comes and goes behind addresses that stay, and a model that sleeps on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from sparkrt import LLM, SamplingParams
from sparkrt.runtime import OutOfMemory
from sparkrt.runtime.cuda import CudaBackend

ROOT = Path(__file__).parents[2]
MIB = 1 << 20


@pytest.fixture
def sleepable(backend: CudaBackend) -> Iterator[CudaBackend]:
    second = CudaBackend(sleepable=True)
    yield second
    second.close()


def free(backend: CudaBackend) -> int:
    backend.synchronize()
    return backend.memory_info().free


def test_memory_goes_and_comes_back_at_its_address(sleepable: CudaBackend) -> None:
    before = free(sleepable)
    large, small = sleepable.alloc(256 * MIB, "large"), sleepable.alloc(1000, "small")
    pattern, out = np.arange(1000, dtype=np.uint8), np.zeros(1000, np.uint8)
    sleepable.copy_h2d(small, pattern)
    assert before - free(sleepable) >= 256 * MIB
    assert sleepable.suspend(large) == 256 * MIB
    assert sleepable.suspend(large) == sleepable.suspend(small) == 0
    assert before - free(sleepable) < 32 * MIB
    assert sleepable.memory_info().allocated == 1000
    sleepable.resume(large)
    sleepable.resume(small)
    assert sleepable.memory_info().allocated == 256 * MIB + 1000
    sleepable.copy_d2h(out, small)
    np.testing.assert_array_equal(out, pattern)
    end = large.offset(256 * MIB - 1000)
    sleepable.copy_h2d(end, pattern)
    sleepable.copy_d2h(out, end)
    np.testing.assert_array_equal(out, pattern)
    sleepable.suspend(large)
    sleepable.free(large)
    sleepable.free(small)
    assert sleepable.memory_info().allocated == 0


def test_memory_that_was_taken_meanwhile_cannot_be_resumed(sleepable: CudaBackend) -> None:
    most = free(sleepable) * 3 // 5 // (2 * MIB) * 2 * MIB
    first = sleepable.alloc(most, "first")
    with pytest.raises(OutOfMemory):
        sleepable.alloc(most, "too much")
    sleepable.suspend(first)
    second = sleepable.alloc(most, "second")
    with pytest.raises(OutOfMemory):
        sleepable.resume(first)
    sleepable.free(second)
    sleepable.resume(first)
    sleepable.memset(first, 1, most)
    sleepable.synchronize()
    sleepable.free(first)


def test_a_model_sleeps_and_answers_as_before(backend: CudaBackend) -> None:
    """Through the graphs captured before it slept; a sleeper leaves the card to others."""
    before = free(backend)
    options = {"max_num_seqs": 8, "max_model_len": 16384, "kv_cache_memory_bytes": "1G", "load_format": "dummy"}
    options |= {"tokenizer": str(ROOT / "sparkrt/assets/sparkrt-tiny")}
    params, prompts = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True), [list(range(5, 205)), list(range(300, 390))]
    with LLM(str(ROOT / "benchmarks/models/0.6b"), device="cuda", enable_sleep_mode=True, **options) as llm:

        def answers() -> list[list[int]]:
            return [o.outputs[0].token_ids for o in llm.generate([{"prompt_token_ids": p} for p in prompts], params)]

        wanted, awake = answers(), free(backend)
        assert len(set(map(tuple, wanted))) == 2
        for level in (1, 2, 1):
            given = llm.sleep(level)
            asleep = free(backend)
            assert asleep - awake >= given >= 2 * 10**9  # 1.2 GB of weights, 1 GiB of KV
            llm.wake_up()
            assert free(backend) < asleep - given + 64 * MIB
            assert answers() == wanted
    assert before - free(backend) < 64 * MIB
