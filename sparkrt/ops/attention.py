"""Attention over the paged cache: prefill slices (ragged), decode rows, the merge of two parts, and the output gate.

Pools are [pages, kv heads, page size, head_dim]; the block tables of all slots lie in one device table, and a call names the
slots it works on. Query head h reads kv head h // (Hq / Hkv).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sparkrt.ops.activation import times_sigmoid
from sparkrt.ops.attention_host import paged_attention_decode, paged_attention_prefill
from sparkrt.ops.attention_reference import (
    CAUSAL,
    FULL,
    merge_attention_ref,
    paged_attention_decode_ref,
    paged_attention_prefill_ref,
)
from sparkrt.ops.elementwise import sigmoid
from sparkrt.ops.operator import Case, Operator, Rng


def merge_attention(
    out: np.ndarray, lse: np.ndarray, out_a: np.ndarray, lse_a: np.ndarray, out_b: np.ndarray, lse_b: np.ndarray
) -> None:
    """In place is fine: `out` may be out_a and `lse` lse_a."""
    out[...], lse[...] = merge_attention_ref(out_a, lse_a, out_b, lse_b)


def sigmoid_gate_ref(x: np.ndarray, proj: np.ndarray) -> np.ndarray:
    gated: np.ndarray = x * sigmoid(_gates(x, proj))
    return gated


def sigmoid_gate(x: np.ndarray, proj: np.ndarray) -> None:
    times_sigmoid(x, _gates(x, proj), x)


def _gates(x: np.ndarray, proj: np.ndarray) -> np.ndarray:
    """The gate half of each head's 2·D columns in the gated q layout, as x [T, Hq, D]."""
    tokens, heads, dim = x.shape
    return proj[:, : heads * 2 * dim].reshape(tokens, heads, 2 * dim)[..., dim:]


def _paged(rng: Rng, lengths: tuple[int, ...], kv_heads: int, dim: int, page: int, run: bool) -> tuple[list[np.ndarray], ...]:
    """Pools, tables and slots of sequences with `lengths` tokens, pages shuffled or in runs. Whatever may not be read is NaN."""
    counts = [-(-n // page) for n in lengths]
    total, slots = sum(counts) + 2, len(lengths) + 1
    order = np.arange(total) if run else rng.permutation(total)
    pools = [np.full((total, kv_heads, page, dim), np.nan, np.float32) for _ in range(2)]
    tables = np.full((slots, max([1, *counts])), total - 1, np.int32)
    chosen = rng.permutation(slots)[: len(lengths)].astype(np.int32)
    at = 0
    for slot, length, count in zip(chosen, lengths, counts, strict=True):
        tables[slot, :count] = order[at : at + count]
        at += count
        for pool in pools:
            for i in range(count):
                used = min(page, length - i * page)
                pool[tables[slot, i], :, :used] = rng.standard_normal((kv_heads, used, dim), dtype=np.float32)
    return pools, [tables, chosen]


def _prefill_case(
    shape: tuple[int, int, int],
    queries: tuple[int, ...],
    lengths: tuple[int, ...],
    page: int = 64,
    mask: int = CAUSAL,
    window: int = 0,
    lse: bool = False,
    bias: bool = False,
    run: bool = False,
) -> Case:
    heads, kv_heads, dim = shape

    def make(rng: Rng) -> list[Any]:
        tokens = sum(queries)
        pools, tables = _paged(rng, lengths, kv_heads, dim, page, run)
        q = rng.standard_normal((tokens, heads, dim), dtype=np.float32)
        cu = np.cumsum([0, *queries], dtype=np.int32)
        added = rng.standard_normal((heads, tokens, max(lengths)), dtype=np.float32) if bias else None
        outputs = [np.empty_like(q), np.empty((tokens, heads), np.float32) if lse else None]
        return [*outputs, q, *pools, *tables, cu, np.array(lengths, np.int32), dim**-0.5, mask, window, added]

    label = f"q={'+'.join(map(str, queries))} kv={'+'.join(map(str, lengths))} Hq={heads} Hkv={kv_heads} D={dim} page={page}"
    options = {"mask": mask, "window": window, "lse": lse, "bias": bias, "run": run}
    label += "".join(f" {name}={int(value)}" for name, value in options.items() if value)
    seen = sum(t * n if mask == FULL else t * n - t * (t - 1) // 2 for t, n in zip(queries, lengths, strict=True))
    traffic = 8 * (sum(queries) * heads + sum(lengths) * kv_heads) * dim
    return Case(label, make, outputs=(0, 1), bytes=traffic, flops=4 * seen * heads * dim)


def _decode_case(shape: tuple[int, int, int], lengths: tuple[int, ...], page: int = 64, run: bool = False) -> Case:
    heads, kv_heads, dim = shape

    def make(rng: Rng) -> list[Any]:
        pools, tables = _paged(rng, lengths, kv_heads, dim, page, run)
        q = rng.standard_normal((len(lengths), heads, dim), dtype=np.float32)
        return [np.empty_like(q), q, *pools, *tables, np.array(lengths, np.int32), dim**-0.5]

    spelled = f"{lengths[0]}" if len(set(lengths)) == 1 else "+".join(map(str, lengths))
    label = f"B={len(lengths)} kv={spelled} Hq={heads} Hkv={kv_heads} D={dim} page={page}" + (" run=1" if run else "")
    tokens = sum(lengths)
    return Case(label, make, bytes=8 * (tokens * kv_heads + len(lengths) * heads) * dim, flops=4 * tokens * heads * dim)


def _merge_case(tokens: int, heads: int, dim: int, empty: bool = False) -> Case:
    def make(rng: Rng) -> list[Any]:
        parts = []
        for side in range(2):
            part = rng.standard_normal((tokens, heads, dim), dtype=np.float32)
            lse = rng.standard_normal((tokens, heads), dtype=np.float32) * np.float32(30)
            if empty:  # rows that saw nothing: on one side, and (the first) on both
                lse[side::2], part[side::2] = -np.inf, 0
                lse[0], part[0] = -np.inf, 0
            parts += [part, lse]
        return [np.empty((tokens, heads, dim), np.float32), np.empty((tokens, heads), np.float32), *parts]

    label = f"T={tokens} Hq={heads} D={dim}" + (" empty=1" if empty else "")
    return Case(label, make, outputs=(0, 1), bytes=12 * tokens * heads * dim)


def _gate_case(tokens: int, heads: int, dim: int, scale: float = 1.0) -> Case:
    def make(rng: Rng) -> list[Any]:
        x = rng.standard_normal((tokens, heads, dim), dtype=np.float32)
        return [x, rng.standard_normal((tokens, heads * 2 * dim + 5), dtype=np.float32) * np.float32(scale)]

    return Case(f"T={tokens} Hq={heads} D={dim} scale={scale:g}", make, bytes=12 * tokens * heads * dim)


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
    parity=(
        _prefill_case((4, 2, 64), (1,), (1,), lse=True),
        _prefill_case((4, 2, 64), (63, 0, 64, 65, 1), (63, 0, 130, 65, 200), page=16, lse=True),
        _prefill_case((16, 1, 64), (7, 0, 33), (40, 9, 33), page=32, run=True),
        _prefill_case((8, 8, 128), (65,), (129,), lse=True),
        _prefill_case((3, 1, 256), (20, 64), (600, 64), run=True, lse=True),
        _prefill_case((4, 2, 64), (70, 3), (70, 640), window=9, lse=True),
        _prefill_case((2, 1, 64), (5, 40), (700, 530), page=32, mask=FULL, bias=True, lse=True),
        _prefill_case((2, 2, 64), (4, 2), (0, 64), mask=FULL, lse=True),  # cross attention to an empty memory
        _prefill_case((4, 4, 64), (90,), (90,), bias=True, window=64),
        _prefill_case((4, 2, 64), (0,), (0,)),
    ),
    bench=(
        _prefill_case((4, 2, 64), (512,), (512,), run=True),
        _prefill_case((4, 2, 64), (64,), (4096,)),
        _prefill_case((9, 3, 64), (512,), (512,), run=True),
        _prefill_case((16, 2, 256), (256,), (2048,)),
    ),
)

PAGED_ATTENTION_DECODE = Operator(
    "paged_attention_decode",
    """Attention of one query a sequence over its whole cache. A row of kv_len 0 is padding and gives zeros.

    out A [B, Hq, D] ← q A [B, Hq, D], k_pool and v_pool A [P, Hkv, page, D], block_tables i32 [slots, max blocks],
    slots i32 [B], kv_len i32 [B], scale
    out = softmax(scale · q·kᵀ) · v
    """,
    paged_attention_decode_ref,
    paged_attention_decode,
    parity=(
        _decode_case((4, 2, 64), (1,)),
        _decode_case((4, 2, 64), (63, 64, 65, 0, 200), page=64),
        _decode_case((16, 1, 64), (31, 32, 33, 640), page=32, run=True),
        _decode_case((8, 8, 128), (15, 16, 17), page=16),
        _decode_case((8, 2, 256), (129, 1, 0), page=16, run=True),
        _decode_case((9, 3, 64), (5, 192)),
        _decode_case((4, 2, 64), (0,)),
    ),
    bench=(
        _decode_case((4, 2, 64), (200,), run=True),
        _decode_case((4, 2, 64), (200,) * 16),
        _decode_case((9, 3, 64), (200,), run=True),
        _decode_case((16, 2, 256), (2048,)),
    ),
)

MERGE_ATTENTION = Operator(
    "merge_attention",
    """Joins attention over two disjoint sets of keys, given each part's log-sum-exp; -inf means a part saw nothing.

    out A [T, Hq, D], lse f32 [T, Hq] ← out_a A, lse_a f32, out_b A, lse_b f32, shaped alike
    lse = log(e^lse_a + e^lse_b); out = e^(lse_a - lse) · out_a + e^(lse_b - lse) · out_b
    """,
    merge_attention_ref,
    merge_attention,
    cuda="spark_merge_attention",
    parity=(_merge_case(1, 4, 64), _merge_case(65, 3, 64, empty=True), _merge_case(0, 2, 64)),
    bench=(_merge_case(512, 16, 256),),
)

SIGMOID_GATE = Operator(
    "sigmoid_gate",
    """Output gate of gated attention; the gate is the second half of each head's columns of the q projection.

    x A [T, Hq, D] in/out ← proj A [T, N]
    x *= sigmoid(proj[:, : Hq·2·D].reshape(T, Hq, 2·D)[..., D:])
    """,
    sigmoid_gate_ref,
    sigmoid_gate,
    cuda="spark_sigmoid_gate",
    parity=tuple(_gate_case(*s) for s in ((1, 4, 64), (65, 2, 256), (0, 2, 64), (3, 2, 64, 300.0))),
    bench=(_gate_case(1, 4, 64), _gate_case(512, 4, 64), _gate_case(512, 16, 256)),
)

OPERATORS = (PAGED_ATTENTION_PREFILL, PAGED_ATTENTION_DECODE, MERGE_ATTENTION, SIGMOID_GATE)
