"""The memory plan: pools bounded, wishes cut with a warning, and impossible ones refused with numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sparkrt.engine.config import EngineConfig
from sparkrt.engine.loading import HOST_SHARE, plan_memory, weight_bytes
from sparkrt.errors import LoadError
from sparkrt.model.config import AttentionConfig, GdnConfig, LayerConfig, ModelConfig, RopeConfig
from sparkrt.runtime.backend import MemoryInfo
from sparkrt.runtime.dtypes import float32

GIB = 1 << 30
HYBRID = ModelConfig(
    family="qwen3_5",
    architecture="Test",
    vocab_size=1000,
    hidden_size=64,
    layers=(LayerConfig("gdn", "dense"), LayerConfig("attention", "dense")),
    attention=AttentionConfig(2, 1, 32, RopeConfig(10000.0, 32)),
    rms_norm_eps=1e-6,
    max_position=4096,
    gdn=GdnConfig(1, 2, 16, 16),
    intermediate_size=128,
)


def plan(model=HYBRID, free=8 * GIB, **options):
    return plan_memory(model, EngineConfig(**{"device": "host", "dtype": "float32", **options}), MemoryInfo(free, 16 * GIB, 0))


def test_a_small_model_gets_all_it_can_use():
    p = plan()
    assert (p.slots, p.length, p.block_size) == (32, 4096, 64)
    assert p.num_blocks == 32 * 4096 // 64  # never more than all slots can fill
    assert p.num_blocks * p.block_size == 32 * 4096
    assert p.warnings == []
    assert all(isinstance(a, str) and isinstance(b, str) for a, b in p.lines)


def test_the_host_pool_is_a_bounded_share():
    p = plan(replace(HYBRID, max_position=10**7), free=GIB)
    assert p.kv_bytes + p.state_bytes <= HOST_SHARE * GIB
    assert p.length == p.num_blocks * p.block_size < 10**7
    assert "max_model_len is cut from 10000000" in p.warnings[0]


def on_cuda(free, unified=False):
    config = EngineConfig(device="cuda", dtype="float32")
    return plan_memory(replace(HYBRID, max_position=10**7), config, MemoryInfo(free, 16 * GIB, 0, unified))


def test_memory_that_others_hold_is_left_to_them():
    mine, shared = on_cuda(15 * GIB), on_cuda(5 * GIB)
    assert mine.kv_bytes > shared.kv_bytes
    assert sum((shared.kv_bytes, shared.state_bytes, shared.weight_bytes)) < 5 * GIB
    with pytest.raises(LoadError, match=r"weights need .* as float32, 1\.00 MiB of 16\.00 GiB are free"):
        on_cuda(1 << 20)


def test_unified_memory_leaves_the_system_its_share():
    alone, unified = on_cuda(15 * GIB), on_cuda(15 * GIB, unified=True)
    assert alone.kv_bytes - unified.kv_bytes > (0.125 - 0.08 - 0.01) * 16 * GIB


def test_auto_length_is_what_fits_without_a_warning():
    p = plan(replace(HYBRID, max_position=10**7), free=GIB, max_model_len="auto")
    assert (p.length, p.warnings) == (p.num_blocks * p.block_size, [])


def test_wishes_are_kept_or_cut_with_a_warning():
    assert plan(max_model_len=100, max_num_seqs=3, max_num_batched_tokens=64).num_blocks == 3 * 2
    p = plan(max_model_len=5000)
    assert p.length == 4096
    assert "beyond the model's 4096" in p.warnings[0]
    p = plan(free=64 << 20, max_num_seqs=5000)
    assert p.slots < 5000
    assert "max_num_seqs 5000" in p.warnings[0]
    p = plan(num_gpu_blocks_override=10)
    assert (p.num_blocks, p.length) == (10, 640)
    assert plan(kv_cache_memory_bytes="1M").kv_bytes <= 1 << 20


def test_more_slots_than_fit_by_default_is_no_fault():
    p = plan(free=2 << 20)
    assert 1 <= p.slots < 32
    assert not [w for w in p.warnings if "max_num_seqs" in w]


def test_what_cannot_work_is_refused_with_numbers():
    # I08
    with pytest.raises(LoadError, match=r"weights need \d+\.\d+ .iB as float32, 512.00 KiB of 16.00 GiB are free"):
        plan(free=512 << 10)
    with pytest.raises(LoadError, match="no room for a KV cache"):
        plan(kv_cache_memory_bytes=100)


def test_a_gpu_is_used_up_to_the_utilization():
    big = replace(HYBRID, max_position=10**7)
    p = plan(big, free=12 * GIB, device="cuda", dtype="bfloat16", gpu_memory_utilization=0.5)
    used = 4 * GIB + p.weight_bytes + p.kv_bytes + p.state_bytes
    assert 7 * GIB < used <= 8 * GIB
    assert p.slots == 256


def test_a_model_without_attention_needs_no_pool():
    p = plan(replace(HYBRID, layers=(LayerConfig("gdn", "dense"),)))
    assert p.kv_bytes == 0
    assert p.length == 4096


def test_a_tied_head_is_counted_twice_on_the_host_alone():
    untied = weight_bytes(HYBRID, float32, True)
    tied = weight_bytes(replace(HYBRID, tie_word_embeddings=True), float32, True)
    assert tied == untied
    assert weight_bytes(replace(HYBRID, tie_word_embeddings=True), float32, False) < untied


def test_a_prefix_cache_without_room_for_snapshots_is_told_of():
    """H02: it would never hit, and nobody would know why."""
    slot = 2 * 16 * 16 * 4 + 4 * 3 * 32 * 4
    options = {"free": weight_bytes(HYBRID, float32, True) + 24 * slot, "max_num_seqs": 1, "max_model_len": 16, "block_size": 16}
    tight, off = plan(**options), plan(**options, enable_prefix_caching=False)
    assert (tight.snapshots, plan().snapshots > 0) == (0, True)
    assert any("no room for snapshots" in warning for warning in tight.warnings)
    assert not any("snapshots" in warning for warning in off.warnings)


def test_staging_for_what_is_spilled_is_planned():
    free = weight_bytes(HYBRID, float32, True) + (64 << 20)
    options = {"max_model_len": "auto", "max_num_seqs": 4, "num_gpu_blocks_override": None}
    without, spilling = (
        plan_memory(
            replace(HYBRID, max_position=10**7),
            EngineConfig(device="cuda", dtype="float32", gpu_memory_utilization=1.0, kv_offloading_size=size, **options),
            MemoryInfo(free, free, 0),
        )
        for size in (None, 1.0)
    )
    page = without.kv_bytes // (without.num_blocks + 1)
    assert 3 * 8 <= without.num_blocks - spilling.num_blocks <= 3 * 8 + 1
    assert page == spilling.kv_bytes // (spilling.num_blocks + 1)
