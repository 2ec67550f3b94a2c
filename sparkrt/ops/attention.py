"""Attention over the paged cache: prefill slices (ragged), decode rows, the merge of two parts, and the output gate.

Pools are [pages, kv heads, page size, head_dim]; the block tables of all slots lie in one device table, and a call names the
slots it works on. Query head h reads kv head h // (Hq / Hkv).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sparkrt.ops.activation import sigmoid, times_sigmoid
from sparkrt.ops.attention_host import FULL, MASKED, paged_attention_decode, paged_attention_prefill
from sparkrt.ops.operator import Array, Operator


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


def paged_attention_prefill_ref(*call: Any) -> tuple[Array, Array | None]:
    _, lse, q, k_pool, v_pool, block_tables, slots, cu_q, kv_len, scale, mask, window, bias = call
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


def paged_attention_decode_ref(*call: Any) -> Array:
    _, q, k_pool, v_pool, block_tables, slots, kv_len, scale, _ = call
    out: Array = np.zeros_like(q)
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
    """Joins attention over two disjoint sets of keys, given each part's log-sum-exp; -inf means a part saw nothing.

    out A [T, Hq, D], lse f32 [T, Hq] ← out_a A [T, Hq, D], lse_a f32 [T, Hq], out_b A [T, Hq, D], lse_b f32 [T, Hq]
    lse = log(e^lse_a + e^lse_b); out = e^(lse_a - lse) · out_a + e^(lse_b - lse) · out_b. `out` may be out_a, `lse` lse_a.
    parity: T=1 Hq=4 D=64; T=65 Hq=3 D=64 empty; T=0 Hq=2 D=64
    bench: T=512 Hq=16 D=256
    """
    out[...], lse[...] = merge_attention_ref(out_a, lse_a, out_b, lse_b)


def sigmoid_gate(x: Array, proj: Array) -> None:
    """Output gate of gated attention; the gate is the second half of each head's columns of the q projection.

    x A [T, Hq, D] in/out ← proj A [T, N]
    x *= sigmoid(proj[:, : Hq·2·D].reshape(T, Hq, 2·D)[..., D:])
    parity: T=1 Hq=4 D=64 N=517; T=65 Hq=2 D=256 N=1029; T=0 Hq=2 D=64 N=261; T=3 Hq=2 D=64 N=261 proj=300
    bench: T=1 Hq=4 D=64 N=517; T=512 Hq=4 D=64 N=517; T=512 Hq=16 D=256 N=8197
    """
    times_sigmoid(x, _gates(x, proj), x)


def _gates(x: Array, proj: Array) -> Array:
    tokens, heads, dim = x.shape
    return proj[:, : heads * 2 * dim].reshape(tokens, heads, 2 * dim)[..., dim:]


def kv_lengths(s: Any) -> Array:
    """Keys of each sequence of a case: `L` of decode rows, `ctx` before slices of T tokens."""
    return np.full(s.B, s.L, np.int32) if s.B else np.add(s.lengths, s.ctx, dtype=np.int32)


def _work(s: Any) -> tuple[float, float]:
    kv_len, queries = kv_lengths(s).astype(np.int64), np.ones(s.B, np.int64) if s.B else np.array(s.lengths)
    hidden = 0 if s.mask == FULL else queries * (queries - 1) // 2
    traffic = 8 * (queries.sum() * s.Hq + kv_len.sum() * s.Hkv) * s.D
    return traffic, 4 * (queries * kv_len - hidden).sum() * s.Hq * s.D


PAGED_ATTENTION_PREFILL = Operator(paged_attention_prefill, paged_attention_prefill_ref, "spark_paged_attention_prefill", _work)
PAGED_ATTENTION_DECODE = Operator(paged_attention_decode, paged_attention_decode_ref, "spark_paged_attention_decode", _work)
MERGE_ATTENTION = Operator(merge_attention, merge_attention_ref, "spark_merge_attention", lambda s: (12 * s.T * s.Hq * s.D, 0))
SIGMOID_GATE = Operator(
    sigmoid_gate, lambda x, proj: x * sigmoid(_gates(x, proj)), "spark_sigmoid_gate", lambda s: (12 * s.T * s.Hq * s.D, 0)
)
OPERATORS = (PAGED_ATTENTION_PREFILL, PAGED_ATTENTION_DECODE, MERGE_ATTENTION, SIGMOID_GATE)
