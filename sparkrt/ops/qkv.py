"""From the fused q|k|v projection to attention: head norms, RoPE and the cache write, in one operator."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparkrt.ops.norm import EPS, rms_norm_ref, rms_scale
from sparkrt.ops.operator import Case, Operator, Rng
from sparkrt.ops.rope import inverse_frequencies, rope_inplace, rope_ref, rope_table


def split_qkv(
    proj: np.ndarray, heads: int, kv_heads: int, head_dim: int, gated: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Views q [T, heads, D], k and v [T, kv_heads, D] of the columns q | k | v; gated: per head D of q, then D of gate."""
    tokens, width = len(proj), 2 * head_dim if gated else head_dim
    q_end, kv = heads * width, kv_heads * head_dim
    q = proj[:, :q_end].reshape(tokens, heads, width)
    k = proj[:, q_end : q_end + kv].reshape(tokens, kv_heads, head_dim)
    v = proj[:, q_end + kv : q_end + 2 * kv].reshape(tokens, kv_heads, head_dim)
    return q[..., :head_dim], k, v


def qk_norm(x: np.ndarray, w: np.ndarray | None, eps: float, offset: float) -> np.ndarray:
    """RMS norm of every head of x [T, heads, D], or x where the model has none."""
    return x if w is None else rms_norm_ref(x, w, eps, offset)


def kv_append(
    k_pool: np.ndarray, v_pool: np.ndarray, k: np.ndarray, v: np.ndarray, slot_map: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Pools [P, Hkv, page, D] with row t of k, v [T, Hkv, D] at slot_map[t] = page · page_size + offset; -1 skips."""
    pools, page_size = (k_pool.copy(), v_pool.copy()), k_pool.shape[2]
    for row, slot in enumerate(slot_map):
        if slot >= 0:
            for pool, values in zip(pools, (k, v), strict=True):
                pool[slot // page_size, :, slot % page_size] = values[row]
    return pools


def qk_norm_rope_append_ref(
    k_pool: np.ndarray,
    v_pool: np.ndarray,
    proj: np.ndarray,
    positions: np.ndarray,
    slot_map: np.ndarray,
    cos_sin: np.ndarray,
    q_w: np.ndarray | None,
    k_w: np.ndarray | None,
    gated: int,
    eps: float,
    offset: float,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    kv_heads, dim = k_pool.shape[1], k_pool.shape[3]
    heads = (proj.shape[1] // dim - 2 * kv_heads) // (2 if gated else 1)
    raw_q, raw_k, v = split_qkv(proj, heads, kv_heads, dim, gated)
    q = rope_ref(qk_norm(raw_q, q_w, eps, offset), positions, cos_sin)
    k = rope_ref(qk_norm(raw_k, k_w, eps, offset), positions, cos_sin)
    return q, *kv_append(k_pool, v_pool, k, v, slot_map)


def qk_norm_rope_append(
    q: np.ndarray,
    k_pool: np.ndarray,
    v_pool: np.ndarray,
    proj: np.ndarray,
    positions: np.ndarray,
    slot_map: np.ndarray,
    cos_sin: np.ndarray,
    q_w: np.ndarray | None,
    k_w: np.ndarray | None,
    gated: int,
    eps: float,
    offset: float,
) -> None:
    tokens, heads, dim = q.shape
    kv_heads, page_size = k_pool.shape[1:3]
    raw_q, raw_k, v = split_qkv(proj, heads, kv_heads, dim, gated)
    qk = np.empty((tokens, heads + kv_heads, dim), q.dtype)  # together, so that both are scaled and rotated in one go
    new_q, new_k = qk[:, :heads], qk[:, heads:]
    new_q[...], new_k[...] = raw_q, raw_k
    if q_w is not None and k_w is not None:
        rms_scale(qk, qk, eps)
        for part, w in ((new_q, q_w), (new_k, k_w)):
            np.multiply(part, w + offset if offset else w, part)
    rope_inplace(qk, positions, cos_sin)
    q[...] = new_q
    if slot_map.min(initial=0) < 0:
        written = slot_map >= 0
        slot_map, new_k, v = slot_map[written], new_k[written], v[written]
    page, at = np.divmod(slot_map, page_size)
    k_pool[page, :, at] = new_k
    v_pool[page, :, at] = v


def _case(
    tokens: int,
    heads: tuple[int, int],
    dim: int,
    rotary: int,
    page: int = 64,
    gated: int = 0,
    norm: bool = True,
    offset: float = 0.0,
    skipped: bool = False,
) -> Case:
    """Rows land in distinct random cache slots; the first row may be at position 0, the last at the table's end."""
    q_heads, kv_heads = heads

    def make(rng: Rng) -> list[Any]:
        pages, max_position = tokens // page + 3, 4096
        width = (q_heads * (1 + gated) + 2 * kv_heads) * dim
        proj = rng.standard_normal((tokens, width), dtype=np.float32)
        pools = [rng.standard_normal((pages, kv_heads, page, dim), dtype=np.float32) for _ in range(2)]
        positions = rng.integers(0, max_position, tokens, dtype=np.int32)
        positions[:1], positions[-1:] = 0, max_position - 1
        slot_map = rng.permutation(pages * page)[:tokens].astype(np.int32)
        if skipped:
            slot_map[::2] = -1
        weights = [rng.standard_normal(dim, dtype=np.float32) if norm else None for _ in range(2)]
        cos_sin = rope_table(inverse_frequencies(1e6, rotary), 1.0, max_position)
        q = np.empty((tokens, q_heads, dim), np.float32)
        return [q, *pools, proj, positions, slot_map, cos_sin, *weights, gated, EPS, offset]

    label = f"T={tokens} Hq={q_heads} Hkv={kv_heads} D={dim} R={rotary} page={page} gated={gated} norm={int(norm)}"
    traffic = 4 * tokens * dim * (2 * q_heads + 4 * kv_heads)
    return Case(label + (" skipped=1" if skipped else ""), make, outputs=(0, 1, 2), bytes=traffic)


QK_NORM_ROPE_APPEND = Operator(
    "qk_norm_rope_append",
    """Head norms and RoPE of q and k, and the write of k and v into the paged cache.

    q A [T, Hq, D], k_pool and v_pool A [P, Hkv, page, D] in/out ← proj A [T, N], positions i32 [T], slot_map i32 [T],
    cos_sin f32 [max position, R], q_w and k_w f32 [D] (or both none), gated, eps, offset
    proj columns: q (gated: per head D of q, then D of gate) | k | v; slot_map = page · page_size + offset, -1 writes nothing
    q, k = rope(rms_norm(·)) on the first R channels, pair i being channels i and i + R/2
    """,
    qk_norm_rope_append_ref,
    qk_norm_rope_append,
    cuda="spark_qk_norm_rope_append",
    parity=(
        _case(1, (4, 2), 64, 32, gated=1, offset=1.0),
        _case(65, (4, 2), 64, 32, page=16, gated=1, offset=1.0, skipped=True),
        _case(63, (9, 3), 64, 64, page=32, norm=False),
        _case(5, (2, 1), 256, 64, gated=1, offset=1.0),
        _case(64, (3, 3), 128, 128),
        _case(2, (16, 1), 64, 64, page=16, skipped=True),
        _case(0, (4, 2), 64, 32),
    ),
    bench=(
        _case(1, (4, 2), 64, 32, gated=1, offset=1.0),
        _case(16, (4, 2), 64, 32, gated=1, offset=1.0),
        _case(512, (4, 2), 64, 32, gated=1, offset=1.0),
        _case(512, (16, 2), 256, 64, gated=1, offset=1.0),
    ),
)

OPERATORS = (QK_NORM_ROPE_APPEND,)
