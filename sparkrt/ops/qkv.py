"""From the fused q|k|v projection to attention: head norms, RoPE and the cache write, in one operator."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparkrt.ops.norm import rms_norm_ref, rms_scale
from sparkrt.ops.operator import Array, Operator
from sparkrt.ops.rope import rope_inplace, rope_ref


def split_qkv(proj: Array, heads: int, kv_heads: int, head_dim: int, gated: int) -> tuple[Array, Array, Array]:
    """Views q [T, heads, D], k and v [T, kv_heads, D] of the columns q | k | v; gated: per head D of q, then D of gate."""
    tokens, width = len(proj), 2 * head_dim if gated else head_dim
    q_end, kv = heads * width, kv_heads * head_dim
    k, v = (proj[:, a : a + kv].reshape(tokens, kv_heads, head_dim) for a in (q_end, q_end + kv))
    return proj[:, :q_end].reshape(tokens, heads, width)[..., :head_dim], k, v


def qk_norm(x: Array, w: Array | None, eps: float, offset: float) -> Array:
    """RMS norm of every head of x [T, heads, D], or x where the model has none."""
    return x if w is None else rms_norm_ref(x, w, eps, offset)


def kv_append(k_pool: Array, v_pool: Array, k: Array, v: Array, slot_map: Array) -> tuple[Array, Array]:
    """Pools [P, Hkv, page, D] with row t of k, v [T, Hkv, D] at slot_map[t] = page · page_size + offset; -1 skips."""
    pools, page_size = (k_pool.copy(), v_pool.copy()), k_pool.shape[2]
    for row, slot in enumerate(slot_map):
        if slot >= 0:
            for pool, values in zip(pools, (k, v), strict=True):
                pool[slot // page_size, :, slot % page_size] = values[row]
    return pools


def qk_norm_rope_append_ref(*call: Any) -> tuple[Array, Array, Array]:
    _, k_pool, v_pool, proj, positions, slot_map, cos_sin, q_w, k_w, gated, eps, offset = call
    kv_heads, dim = k_pool.shape[1], k_pool.shape[3]
    heads = (proj.shape[1] // dim - 2 * kv_heads) // (2 if gated else 1)
    raw_q, raw_k, v = split_qkv(proj, heads, kv_heads, dim, gated)
    q, k = (rope_ref(qk_norm(x, w, eps, offset), positions, cos_sin) for x, w in ((raw_q, q_w), (raw_k, k_w)))
    return q, *kv_append(k_pool, v_pool, k, v, slot_map)


def qk_norm_rope_append(
    q: Array,
    k_pool: Array,
    v_pool: Array,
    proj: Array,
    positions: Array,
    slot_map: Array,
    cos_sin: Array,
    q_w: Array | None,
    k_w: Array | None,
    gated: int,
    eps: float,
    offset: float,
) -> None:
    """Head norms and RoPE of q and k, and the write of k and v into the paged cache.

    q A [T, Hq, D], k_pool and v_pool A [P, Hkv, page, D] in/out ← proj A [T, N], positions i32 [T], slot_map i32 [T],
    cos_sin f32 [max position, R], q_w and k_w f32 [D] or none (both), gated, eps, offset
    proj columns: q (gated: per head D of q, then D of gate) | k | v; slot_map = page · page_size + offset, -1 writes nothing
    q, k = rope(rms_norm(·)) on the first R channels, pair i being channels i and i + R/2
    parity: T=1 Hq=4 Hkv=2 D=64 R=32 page=64 q_w k_w gated offset=1; T=0 Hq=4 Hkv=2 D=64 R=32 page=64 q_w k_w;
    T=65 Hq=4 Hkv=2 D=64 R=32 page=16 q_w k_w gated offset=1 skipped; T=63 Hq=9 Hkv=3 D=64 R=64 page=32;
    T=5 Hq=2 Hkv=1 D=256 R=64 page=64 q_w k_w gated offset=1; T=64 Hq=3 Hkv=3 D=128 R=128 page=64 q_w k_w;
    T=2 Hq=16 Hkv=1 D=64 R=64 page=16 q_w k_w skipped
    bench: T=1 Hq=4 Hkv=2 D=64 R=32 page=64 q_w k_w gated offset=1; T=16 Hq=4 Hkv=2 D=64 R=32 page=64 q_w k_w gated offset=1;
    T=512 Hq=4 Hkv=2 D=64 R=32 page=64 q_w k_w gated offset=1; T=512 Hq=16 Hkv=2 D=256 R=64 page=64 q_w k_w gated offset=1
    """
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


QK_NORM_ROPE_APPEND = Operator(
    qk_norm_rope_append, qk_norm_rope_append_ref, "spark_qk_norm_rope_append", lambda s: (8 * s.T * s.D * (s.Hq + 2 * s.Hkv), 0)
)
OPERATORS = (QK_NORM_ROPE_APPEND,)
