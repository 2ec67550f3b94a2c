"""The fused q/k norm, RoPE and cache write: hand-made layouts, and its parts run one by one."""

from __future__ import annotations

import numpy as np
import pytest

from sparkrt.ops.attention import SIGMOID_GATE
from sparkrt.ops.qkv import QK_NORM_ROPE_APPEND, kv_append, qk_norm, split_qkv
from sparkrt.ops.rope import inverse_frequencies, rope_ref, rope_table


@pytest.mark.parametrize("gated", [0, 1])
def test_columns_of_the_projection(gated: int) -> None:
    """Two query heads, one kv head, D = 2: every column is labelled by what it must become."""
    plain = ["q0", "q0", "q1", "q1", "k", "k", "v", "v"]
    layout = ["q0", "q0", "g0", "g0", "q1", "q1", "g1", "g1", "k", "k", "v", "v"] if gated else plain
    codes = {"q0": 1.0, "q1": 2.0, "g0": 30.0, "g1": 40.0, "k": 5.0, "v": 6.0}
    proj = np.array([[codes[name] for name in layout]])
    q, k, v = split_qkv(proj, 2, 1, 2, gated)
    assert q.tolist() == [[[1, 1], [2, 2]]]
    assert k.tolist() == [[[5, 5]]]
    assert v.tolist() == [[[6, 6]]]


def test_gate_is_the_second_half_of_each_head() -> None:
    x = np.ones((1, 2, 2), np.float32)
    proj = np.array([[9, 9, 0, 0, 9, 9, 100, -100, 7, 7, 7, 7]], np.float32)
    SIGMOID_GATE.host(x, proj)
    np.testing.assert_allclose(x, [[[0.5, 0.5], [1.0, 0.0]]], atol=1e-6)


def test_fused_equals_its_parts() -> None:
    rng = np.random.default_rng(0)
    tokens, heads, kv_heads, dim, page = 6, 4, 2, 16, 8
    proj = rng.standard_normal((tokens, (2 * heads + 2 * kv_heads) * dim))
    pools = rng.standard_normal((2, 3, kv_heads, page, dim))
    q_w, k_w = rng.standard_normal((2, dim))
    positions, slot_map = np.array([0, 1, 2, 30, 31, 5]), np.array([23, 0, -1, 7, 8, -1])
    table = rope_table(inverse_frequencies(1e4, 8), 1.0, 32).astype(np.float64)
    q, k_pool, v_pool = QK_NORM_ROPE_APPEND.reference(None, *pools, proj, positions, slot_map, table, q_w, k_w, 1, 1e-6, 1.0)
    raw_q, raw_k, v = split_qkv(proj, heads, kv_heads, dim, 1)
    np.testing.assert_array_equal(q, rope_ref(qk_norm(raw_q, q_w, 1e-6, 1.0), positions, table))
    k = rope_ref(qk_norm(raw_k, k_w, 1e-6, 1.0), positions, table)
    for got, want in zip((k_pool, v_pool), kv_append(*pools, k, v, slot_map), strict=True):
        np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(k_pool[2, :, 7], k[0])  # slot 23 = page 2, offset 7
    np.testing.assert_array_equal(v_pool[1, :, 0], v[4])
    untouched = np.ones((3, page), bool)
    untouched.reshape(-1)[slot_map[slot_map >= 0]] = False
    np.testing.assert_array_equal(k_pool.swapaxes(1, 2)[untouched], pools[0].swapaxes(1, 2)[untouched])


def test_a_row_has_the_same_bits_in_any_company() -> None:
    rng = np.random.default_rng(1)
    proj = rng.standard_normal((9, 8 * 64), dtype=np.float32)
    positions, table = np.arange(9, dtype=np.int32), rope_table(inverse_frequencies(1e4, 32), 1.0, 16)
    weights = rng.standard_normal((2, 64), dtype=np.float32)

    def run(rows: slice) -> tuple[np.ndarray, np.ndarray]:
        n = len(positions[rows])
        q, pools = np.full((n, 4, 64), np.nan, np.float32), np.zeros((2, 1, 2, 16, 64), np.float32)
        QK_NORM_ROPE_APPEND.host(q, *pools, proj[rows], positions[rows], positions[rows], table, *weights, 0, 1e-6, 0.0)
        return q, pools

    q, pools = run(slice(None))
    for i in range(9):
        q_alone, pools_alone = run(slice(i, i + 1))
        np.testing.assert_array_equal(q_alone[0], q[i])
        np.testing.assert_array_equal(pools_alone[:, 0, :, i], pools[:, 0, :, i])
