"""Attention over the paged cache: prefill slices (ragged), decode rows, the merge of two parts, and the output gate.

Pools are [pages, kv heads, page size, head_dim]; the block tables of all slots lie in one device table, and a call names the
slots it works on. Query head h reads kv head h // (Hq / Hkv). Cases: `ctx` counts keys before each slice, `L` those of a row.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sparkrt.ops.activation import sigmoid, times_sigmoid
from sparkrt.ops.attention_host import FULL, MASKED, paged_attention_decode, paged_attention_prefill
from sparkrt.ops.operator import Array, Operator, Rng, Sizes, normal


def attention_ref(q: Array, k: Array, v: Array, scale: float, visible: Array, bias: Array | float = 0.0) -> tuple[Array, Array]:
    """Softmax attention of q [T, Hq, D] over k, v [L, Hkv, D] where `visible` [T, L]; bias [Hq, T, L] is added to the scores.

    Returns (out [T, Hq, D], lse [T, Hq]); a row that sees nothing gives zeros and -inf.
    """
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = np.where(visible, np.einsum("thd,lhd->htl", q, k) * scale + bias, -np.inf)
    top = np.max(scores, axis=-1, keepdims=True, initial=MASKED)
    p = np.exp(scores - top)
    total = p.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (top + np.log(total))[..., 0].T
    return np.einsum("htl,lhd->thd", p / np.where(total > 0, total, 1), v), lse


def gather_ref(pool: Array, table: Array, length: int) -> Array:
    """The first `length` tokens of a sequence, [L, Hkv, D], out of the pages its table lists."""
    tokens: Array = pool[table[: -(-length // pool.shape[2])]].transpose(0, 2, 1, 3)
    return tokens.reshape(-1, *tokens.shape[2:])[:length]


def paged_attention_prefill_ref(
    lse: Array | None,
    q: Array,
    k_pool: Array,
    v_pool: Array,
    block_tables: Array,
    slots: Array,
    cu_q: Array,
    kv_len: Array,
    scale: float,
    mask: int,
    window: int,
    bias: Array | None,
) -> tuple[Array, Array | None]:
    out, every_lse = np.zeros_like(q), np.full(q.shape[:2], -np.inf, q.dtype)
    for s, (slot, length) in enumerate(zip(slots, kv_len, strict=True)):
        rows = slice(cu_q[s], cu_q[s + 1])
        position, key = np.arange(length - rows.stop + rows.start, length)[:, None], np.arange(length)
        visible = (key <= position) | (mask == FULL)
        if window:
            visible &= key > position - window
        k, v = (gather_ref(pool, block_tables[slot], length) for pool in (k_pool, v_pool))
        part = 0.0 if bias is None else bias[:, rows, :length]
        out[rows], every_lse[rows] = attention_ref(q[rows], k, v, scale, visible, part)
    return out, None if lse is None else every_lse


def decode_workspace_words(heads: int, kv_heads: int, head_dim: int) -> int:
    """32-bit words a row that PAGED_ATTENTION_DECODE wants of a device: counters, then outputs, maxima and sums of 8 groups."""
    return kv_heads * 8 + heads * 8 * (head_dim + 2)


def paged_attention_decode_ref(
    q: Array,
    k_pool: Array,
    v_pool: Array,
    block_tables: Array,
    slots: Array,
    kv_len: Array,
    scale: float,
    workspace: Array | None = None,
) -> Array:
    out = np.zeros_like(q)
    for row, (slot, length) in enumerate(zip(slots, kv_len, strict=True)):
        k, v = (gather_ref(pool, block_tables[slot], length) for pool in (k_pool, v_pool))
        out[row] = attention_ref(q[row : row + 1], k, v, scale, np.ones((1, length), bool))[0][0]
    return out


def merge_attention_ref(out_a: Array, lse_a: Array, out_b: Array, lse_b: Array) -> tuple[Array, Array]:
    top = np.maximum(np.maximum(lse_a, lse_b), MASKED)
    a, b = np.exp(lse_a - top), np.exp(lse_b - top)
    total = a + b
    with np.errstate(divide="ignore"):
        lse = top + np.log(total)
    share = np.where(total > 0, total, 1)
    return out_a * (a / share)[..., None] + out_b * (b / share)[..., None], lse


def merge_attention(out: Array, lse: Array, out_a: Array, lse_a: Array, out_b: Array, lse_b: Array) -> None:
    """In place is fine: `out` may be out_a and `lse` lse_a."""
    out[...], lse[...] = merge_attention_ref(out_a, lse_a, out_b, lse_b)


def _gates(x: Array, proj: Array) -> Array:
    """The gate half of each head's 2·D columns in the gated q layout, as x [T, Hq, D]."""
    tokens, heads, dim = x.shape
    return proj[:, : heads * 2 * dim].reshape(tokens, heads, 2 * dim)[..., dim:]


def _kv_len(s: Sizes) -> Array:
    return np.full(s.B, s.L, np.int32) if s.B else np.add(s.lengths, s.ctx, dtype=np.int32)


def _inputs(rng: Rng, s: Sizes) -> dict[str, Any]:
    """A cache of pages that are shuffled, or one run, with NaN where nothing may be read."""
    kv_len = _kv_len(s)
    counts = -(-kv_len // s.page)
    ends, total, rows = np.cumsum(counts), int(counts.sum()) + 2, len(kv_len)
    order = np.arange(total) if s.run else rng.permutation(total)
    pools = normal(rng, (2, total, s.Hkv, s.page, s.D))
    pools[:, order[ends[-1] :]] = np.nan
    tables = np.full((rows + 1, max(1, counts.max())), total - 1, np.int32)
    slots = rng.permutation(rows + 1)[:rows].astype(np.int32)
    for slot, length, count, end in zip(slots, kv_len, counts, ends, strict=True):
        tables[slot, :count] = order[end - count : end]
        pools[:, tables[slot, max(count - 1, 0)], :, length - (count - 1) * s.page :] = np.nan
    bias = normal(rng, (s.Hq, s.T, kv_len.max())) if s.bias else None
    given = {"k_pool": pools[0], "v_pool": pools[1], "block_tables": tables, "slots": slots, "kv_len": kv_len, "bias": bias}
    if s.B:
        given["workspace"] = np.zeros((s.B, decode_workspace_words(s.Hq, s.Hkv, s.D)), np.float32)
    return given | {"scale": s.D**-0.5}


def _work(s: Sizes) -> tuple[float, float]:
    kv_len, queries = _kv_len(s).astype(np.int64), np.ones(s.B, np.int64) if s.B else np.array(s.lengths)
    hidden = 0 if s.mask == FULL else queries * (queries - 1) // 2
    traffic = 8 * (queries.sum() * s.Hq + kv_len.sum() * s.Hkv) * s.D
    return traffic, 4 * (queries * kv_len - hidden).sum() * s.Hq * s.D


def _merge_inputs(rng: Rng, s: Sizes) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for i, side in enumerate("ab"):
        out, lse = normal(rng, (s.T, s.Hq, s.D)), normal(rng, (s.T, s.Hq), 30)
        if s.empty:  # rows that saw nothing: on one side, and (the first) on both
            lse[i::2] = lse[0] = -np.inf
            out[i::2] = out[0] = 0
        given |= {f"out_{side}": out, f"lse_{side}": lse}
    return given


PAGED_ATTENTION_PREFILL = Operator(
    "paged_attention_prefill",
    """Attention of prompt slices over the cache, which already holds the slices' own keys; any mix of lengths, zero included.

    out A [T, Hq, D], lse f32 [T, Hq] or none ← q A [T, Hq, D], k_pool and v_pool A [P, Hkv, page, D],
    block_tables i32 [slots, max blocks], slots i32 [S], cu_q i32 [S + 1], kv_len i32 [S], scale,
    mask (0 causal, 1 full), window (0 none), bias f32 [Hq, T, ≥ longest kv_len] or none
    Query i of sequence s is at position p = kv_len[s] - q_len[s] + i and sees keys ≤ p (causal), > p - window (window).
    out = softmax(scale · q·kᵀ + bias) · v; lse = log Σ exp(·); a row that sees nothing gives 0 and -inf
    """,
    paged_attention_prefill_ref,
    paged_attention_prefill,
    parity="""T=1 Hq=4 Hkv=2 D=64 page=64 lse; T=63+0+64+65+1 ctx=0+0+66+0+199 Hq=4 Hkv=2 D=64 page=16 lse;
    T=7+0+33 ctx=33+9+0 Hq=16 Hkv=1 D=64 page=32 run; T=65 ctx=64 Hq=8 Hkv=8 D=128 page=64 lse;
    T=20+64 ctx=580+0 Hq=3 Hkv=1 D=256 page=64 run lse; T=70+3 ctx=0+637 Hq=4 Hkv=2 D=64 page=64 window=9 lse;
    T=5+40 ctx=695+490 Hq=2 Hkv=1 D=64 page=32 mask=1 bias lse; T=4+2 ctx=-4+62 Hq=2 Hkv=2 D=64 page=64 mask=1 lse;
    T=90 Hq=4 Hkv=4 D=64 page=64 bias window=64; T=0 Hq=4 Hkv=2 D=64 page=64""",
    bench="""T=512 Hq=4 Hkv=2 D=64 page=64 run; T=64 ctx=4032 Hq=4 Hkv=2 D=64 page=64; T=512 Hq=9 Hkv=3 D=64 page=64 run;
    T=256 ctx=1792 Hq=16 Hkv=2 D=256 page=64""",
    inputs=_inputs,
    work=_work,
    cuda="spark_paged_attention_prefill",
)

PAGED_ATTENTION_DECODE = Operator(
    "paged_attention_decode",
    """Attention of one query a sequence over its whole cache. A row of kv_len 0 is padding and gives zeros.

    out A [B, Hq, D] ← q A [B, Hq, D], k_pool and v_pool A [P, Hkv, page, D], block_tables i32 [slots, max blocks],
    slots i32 [B], kv_len i32 [B], scale; workspace f32 [B, decode_workspace_words(…)] or none
    out = softmax(scale · q·kᵀ) · v
    On a device a workspace, zeros at first, lets more of it share a long row.
    """,
    paged_attention_decode_ref,
    paged_attention_decode,
    parity="""B=1 L=1 Hq=4 Hkv=2 D=64 page=64; B=5 L=63+64+65+0+200 Hq=4 Hkv=2 D=64 page=64;
    B=4 L=31+32+33+640 Hq=16 Hkv=1 D=64 page=32 run; B=3 L=15+16+17 Hq=8 Hkv=8 D=128 page=16;
    B=3 L=129+1+0 Hq=8 Hkv=2 D=256 page=16 run; B=2 L=5+192 Hq=9 Hkv=3 D=64 page=64; B=1 L=0 Hq=4 Hkv=2 D=64 page=64""",
    bench="""B=1 L=200 Hq=4 Hkv=2 D=64 page=64 run; B=16 L=200 Hq=4 Hkv=2 D=64 page=64; B=1 L=200 Hq=9 Hkv=3 D=64 page=64 run;
    B=1 L=2048 Hq=16 Hkv=2 D=256 page=64""",
    inputs=_inputs,
    work=_work,
    cuda="spark_paged_attention_decode",
)

MERGE_ATTENTION = Operator(
    "merge_attention",
    """Joins attention over two disjoint sets of keys, given each part's log-sum-exp; -inf means a part saw nothing.

    out A [T, Hq, D], lse f32 [T, Hq] ← out_a A [T, Hq, D], lse_a f32 [T, Hq], out_b A [T, Hq, D], lse_b f32 [T, Hq]
    lse = log(e^lse_a + e^lse_b); out = e^(lse_a - lse) · out_a + e^(lse_b - lse) · out_b
    """,
    merge_attention_ref,
    merge_attention,
    cuda="spark_merge_attention",
    parity="T=1 Hq=4 D=64; T=65 Hq=3 D=64 empty; T=0 Hq=2 D=64",
    bench="T=512 Hq=16 D=256",
    inputs=_merge_inputs,
    work=lambda s: (12 * s.T * s.Hq * s.D, 0),
)

SIGMOID_GATE = Operator(
    "sigmoid_gate",
    """Output gate of gated attention; the gate is the second half of each head's columns of the q projection.

    x A [T, Hq, D] in/out ← proj A [T, N]
    x *= sigmoid(proj[:, : Hq·2·D].reshape(T, Hq, 2·D)[..., D:])
    """,
    lambda x, proj: x * sigmoid(_gates(x, proj)),
    lambda x, proj: times_sigmoid(x, _gates(x, proj), x),
    cuda="spark_sigmoid_gate",
    parity="T=1 Hq=4 D=64 N=517; T=65 Hq=2 D=256 N=1029; T=0 Hq=2 D=64 N=261; T=3 Hq=2 D=64 N=261 proj=300",
    bench="T=1 Hq=4 D=64 N=517; T=512 Hq=4 D=64 N=517; T=512 Hq=16 D=256 N=8197",
    work=lambda s: (12 * s.T * s.Hq * s.D, 0),
)

OPERATORS = (PAGED_ATTENTION_PREFILL, PAGED_ATTENTION_DECODE, MERGE_ATTENTION, SIGMOID_GATE)
