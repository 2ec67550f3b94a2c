"""Real models whose prefix cache spills: through host memory and disk, after preemption, a restart and kill -9, hot = cold."""

from __future__ import annotations

import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from sparkrt import LLM, SamplingParams
from sparkrt.engine import loading, offloading
from sparkrt.engine.config import EngineConfig
from sparkrt.errors import LoadError
from sparkrt.runtime import OutOfMemory, machine, open_backend
from tests import rigs
from tests.engine.test_real import same, tokens

ROOT = Path(__file__).parents[2]
DRAWN = {"temperature": 1.1, "seed": 5, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "ignore_eos": True}
GREEDY = {"temperature": 0, "ignore_eos": True, "logprobs": 1}
OPTIONS = {"max_model_len": 448, "max_num_seqs": 4, "debug": True, "max_num_batched_tokens": 128}
MIB = 1 / 1024  # of a GiB


@pytest.fixture(scope="module")
def r2(tmp_path_factory):
    folder = tmp_path_factory.mktemp("r2")
    rigs.r2(folder)
    return folder


@pytest.fixture(autouse=True)
def slow_processor(monkeypatch):
    """On which every copy is worth it, whatever the model."""
    monkeypatch.setattr(offloading, "_FLOPS", {"host": 1.0})


def prompts_for(vocab):
    rng = random.Random(9)
    base = [rng.randrange(vocab) for _ in range(330)]
    texts = [base[:n] for n in (320, 330, 64, 1, 63, 65, 320)]
    return [*texts, base[:200] + [rng.randrange(vocab) for _ in range(70)] + base[270:], base, base[:129]]


def each(prompts, max_tokens):
    return [SamplingParams(**(DRAWN if i % 3 == 1 else GREEDY), max_tokens=max_tokens) for i in range(len(prompts))]


def one_by_one(llm, prompts, max_tokens=6):
    return [llm.generate([p], e, use_tqdm=False)[0] for p, e in zip(prompts, each(prompts, max_tokens), strict=True)]


@pytest.mark.parametrize(("which", "ahead"), [("tiny", False), ("r2", False), ("r2", True)])
def test_hot_is_cold_through_host_memory_and_disk(r2, which, ahead, tmp_path):
    """H01: whatever was evicted, and wherever it comes back from; then over a restart."""
    model, vocab = (str(r2), 256) if which == "r2" else (None, 6000)
    prompts, options = prompts_for(vocab), {**OPTIONS, "async_scheduling": ahead}
    tight = {"num_gpu_blocks_override": 8, "state_cache_slots": 2}
    with LLM(model, enable_prefix_caching=False, **options) as llm:
        cold = one_by_one(llm, prompts)
    with LLM(model, kv_offloading_size=64 * MIB, **tight, **options) as llm:
        for _ in range(2):
            same(one_by_one(llm, prompts), cold)
        stats = llm.core.stats().offload
        assert stats.hits > 0
        assert stats.host_bytes <= stats.total_host_bytes <= 64 << 20
        backend = llm.core.model._backend
    assert backend.leak_report() == ""
    disk = {"kv_offloading_size": 4 * MIB, "kv_offloading_dir": str(tmp_path), "kv_offloading_disk_size": 64 * MIB}
    for life in range(2):
        with LLM(model, **disk, **tight, **options) as llm:
            hot = one_by_one(llm, prompts)
            same(hot, cold)
            assert (hot[0].num_cached_tokens > 0) == (life == 1)  # warm from its first prompt on
            assert llm.core.stats().offload.corrupt_files == 0
            backend = llm.core.model._backend
        assert backend.leak_report() == ""


@pytest.mark.parametrize("ahead", [False, True], ids=["depth0", "depth1"])
def test_swapped_out_and_back_is_never_preempted(r2, ahead):
    """H05, with its state brought back: at the very token, and no token of it is computed again."""
    rng = random.Random(4)
    prompts = [[rng.randrange(256) for _ in range(n)] for n in (70, 33, 64, 1)]
    params = each(prompts, 110)
    options = {"max_model_len": 192, "max_num_seqs": 4, "block_size": 16, "async_scheduling": ahead, "debug": True}
    with LLM(str(r2), enable_prefix_caching=False, **options) as llm:
        expected = llm.generate(prompts, params, use_tqdm=False)
    with LLM(str(r2), num_gpu_blocks_override=18, kv_offloading_size=64 * MIB, **options) as llm:
        llm.core.scheduler.forecast.share = 0.0
        computed = llm.core.stats().prompt_tokens
        got = llm.generate(prompts, params, use_tqdm=False)
        stats = llm.core.stats()
        assert stats.preemptions > 1
        assert stats.offload.swaps > 1
        assert stats.prompt_tokens - computed == sum(map(len, prompts))
        backend = llm.core.model._backend
    assert tokens(got) == tokens(expected)
    for a, b in zip(got, expected, strict=True):
        for t, x, y in zip(a.outputs[0].token_ids, a.outputs[0].logprobs or (), b.outputs[0].logprobs or (), strict=False):
            assert x[t].logprob == pytest.approx(y[t].logprob, abs=1e-4)
    assert backend.leak_report() == ""


def test_memory_is_what_was_asked_for_to_the_byte(r2):
    """Snapshots on the device and what is spilled in host memory, before any traffic and after it."""

    def held(label):
        return int(re.search(rf"^{label}: ([\d,]+)", backend.leak_report(), re.MULTILINE)[1].replace(",", ""))

    with LLM(str(r2), kv_offloading_size=3.3 * MIB, state_cache_slots=5, **OPTIONS) as llm:
        backend, spill, states = llm.core.model._backend, llm.core.model.prefix.spill, llm.core.model.states
        for _ in range(2):
            assert held("recurrent state") + held("conv state") == (4 + 1 + 5) * states.slot_bytes
            assert spill.used <= 3.3 * (1 << 20)
            one_by_one(llm, prompts_for(256))
        pinned = held(r"spill \(pinned\)")
        assert pinned == spill.pool.num_blocks * spill.mover.chunk_bytes
        assert pinned <= int(3.3 * (1 << 20)) < pinned + spill.mover.chunk_bytes


def test_every_failed_allocation_of_a_start_gives_everything_back(r2, tmp_path, monkeypatch):
    """Weights, caches, staging, arena and folder: whichever is refused, nothing is kept, and the next start finds all free."""
    backend = None

    def opened(*options, **more):
        nonlocal backend
        backend = open_backend(*options, **more)
        backend.fail_allocation(n)
        return backend

    monkeypatch.setattr(loading, "open_backend", opened)
    disk = {"kv_offloading_size": 4 * MIB, "kv_offloading_dir": str(tmp_path), "kv_offloading_disk_size": MIB}
    n = 1
    while True:
        try:
            LLM(str(r2), num_gpu_blocks_override=8, **disk, **OPTIONS).close()
            break
        except OutOfMemory:
            assert backend.leak_report() == "", f"allocation {n}"
            n += 1
    assert n > 50


def test_only_the_same_model_reads_what_another_run_left(r2, tmp_path):
    """Config, weights, page size and rules of rounding are in the name of every page."""
    other = tmp_path / "other"
    rigs.r2(other, seed=1)
    disk = {"kv_offloading_size": 4 * MIB, "kv_offloading_dir": str(tmp_path / "kv"), "kv_offloading_disk_size": 64 * MIB}
    prompts = [[i, *range(200)] for i in range(5)]

    def first(model, **changes):
        with LLM(str(model), num_gpu_blocks_override=16, **{**OPTIONS, **changes}, **disk) as llm:
            return one_by_one(llm, prompts)[0].num_cached_tokens

    assert first(r2, block_size=32) == 0
    assert first(r2, block_size=32) > 0
    assert first(other, block_size=32) == 0
    assert first(r2, block_size=32, batch_invariant=True) == 0
    assert first(r2, block_size=16) == 0
    assert first(r2, block_size=32) > 0


_SERVE = """
import sys
from tests.engine import test_offloading as t
t.offloading._FLOPS = {"host": 1.0}
folder, disk = sys.argv[1:]
with t.LLM(folder, kv_offloading_dir=disk, kv_offloading_size=4 * t.MIB, kv_offloading_disk_size=64 * t.MIB,
           num_gpu_blocks_override=8, state_cache_slots=2, **t.OPTIONS) as llm:
    while True:
        t.one_by_one(llm, t.prompts_for(256))
        print("round", flush=True)
"""


def test_killed_while_it_spills_the_next_run_is_right(r2, tmp_path):
    """W01, with a whole engine: kill -9 in the middle of its work, and over what is left the answers are the cold ones."""
    prompts = prompts_for(256)
    with LLM(str(r2), enable_prefix_caching=False, **OPTIONS) as llm:
        cold = one_by_one(llm, prompts)
    for _ in range(2):
        server = subprocess.Popen([sys.executable, "-c", _SERVE, r2, tmp_path], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == "round\n"
        finally:
            server.send_signal(signal.SIGKILL)
            server.wait()
            server.stdout.close()
    disk = {"kv_offloading_size": 4 * MIB, "kv_offloading_dir": str(tmp_path), "kv_offloading_disk_size": 64 * MIB}
    with LLM(str(r2), num_gpu_blocks_override=8, state_cache_slots=2, **disk, **OPTIONS) as llm:
        hot = one_by_one(llm, prompts)
        same(hot, cold)
        stats = llm.core.stats().offload
        assert stats.loaded_bytes > 0
        assert stats.corrupt_files == 0


def test_options_that_cannot_be(tmp_path):
    def refused(message, **options):
        with pytest.raises(LoadError, match=message):
            EngineConfig(**options)

    assert EngineConfig(kv_offloading_size=0) == EngineConfig()
    refused("kv_offloading_size must be a number of GiB, got -1", kv_offloading_size=-1)
    refused("kv_offloading_size must be a number of GiB, got nan", kv_offloading_size=float("nan"))
    refused("kv_offloading_dir needs kv_offloading_disk_size", kv_offloading_dir="x", kv_offloading_size=1.0)
    refused("kv_offloading_disk_size needs kv_offloading_dir", kv_offloading_disk_size=1.0)
    refused("kv_offloading_dir needs kv_offloading_size", kv_offloading_dir="x", kv_offloading_disk_size=1.0)
    refused("without enable_prefix_caching", kv_offloading_size=1.0, enable_prefix_caching=False)
    too_much = machine.total_memory() / 2**30 + 1
    with pytest.raises(LoadError, match=r"GiB of host memory are wanted, \d+\.\d are free"):
        LLM(kv_offloading_size=too_much, max_model_len=64, max_num_seqs=1)
    (tmp_path / "file").write_text("")
    with pytest.raises(LoadError, match=r"kv_offloading_dir .*: cannot be used"):
        LLM(kv_offloading_size=MIB, kv_offloading_dir=str(tmp_path / "file"), kv_offloading_disk_size=MIB, max_model_len=64)


def test_costs_come_from_the_model():
    """A token of the bundled model is multiplied with the weights of the experts it is sent to, and no others."""
    from sparkrt.model.checkpoint import bundled_model, open_checkpoint
    from sparkrt.model.spec import expected_tensors

    config = open_checkpoint(bundled_model()).config
    total = sum(int(np.prod(shape)) for shape in expected_tensors(config).values())
    moe, embed = config.moe, config.vocab_size * config.hidden_size
    idle = len(config.layers) * 3 * (moe.num_experts - moe.top_k) * moe.intermediate_size * config.hidden_size
    assert offloading.active_weights(config) == total - embed - idle


def test_who_wakes_up_with_other_weights_leaves_nothing_for_a_later_run(r2, tmp_path):
    disk = {"kv_offloading_size": 4 * MIB, "kv_offloading_dir": str(tmp_path), "kv_offloading_disk_size": 64 * MIB}
    prompts = [[i, *range(200)] for i in range(5)]
    options = {**OPTIONS, **disk, "num_gpu_blocks_override": 16, "enable_sleep_mode": True}
    for level, warm in ((1, True), (2, False)):
        with LLM(str(r2), **options) as llm:
            one_by_one(llm, prompts)
            llm.sleep(level)
            assert llm.core.stats().offload.host_bytes == 0
            llm.wake_up()
            cold = one_by_one(llm, prompts)
        with LLM(str(r2), **options) as llm:
            again = one_by_one(llm, prompts)
            assert (again[0].num_cached_tokens > 0) == warm
            assert tokens(again) == tokens(cold)
            llm.reset_prefix_cache()
