"""What attention over the paged cache means: the readable, float64-capable specification of `sparkrt.ops.attention`."""

from __future__ import annotations

import numpy as np

CAUSAL, FULL = 0, 1

MASKED = -1e30  # a running maximum that no real score undercuts, and that is finite: exp(-inf - MASKED) = 0


def attention_ref(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    scale: float,
    visible: np.ndarray,
    bias: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Softmax attention of q [T, Hq, D] over k, v [L, Hkv, D] where `visible` [T, L]; bias [Hq, T, L] is added to the scores.

    Returns (out [T, Hq, D], lse [T, Hq]); a row that sees nothing gives zeros and -inf.
    """
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = np.einsum("thd,lhd->htl", q, k) * scale
    if bias is not None:
        scores = scores + bias
    scores = np.where(visible, scores, -np.inf)
    top = np.max(scores, axis=-1, keepdims=True, initial=MASKED)
    p = np.exp(scores - top)
    total = p.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (top + np.log(total))[..., 0].T
    return np.einsum("htl,lhd->thd", p / np.where(total > 0, total, 1), v), lse


def gather_ref(pool: np.ndarray, table: np.ndarray, length: int) -> np.ndarray:
    """The first `length` tokens of a sequence, [L, Hkv, D], out of the pages its table lists."""
    pages = -(-length // pool.shape[2])
    tokens = pool[table[:pages]].transpose(0, 2, 1, 3)
    flat: np.ndarray = tokens.reshape(-1, *tokens.shape[2:])
    return flat[:length]


def paged_attention_prefill_ref(
    lse: np.ndarray | None,
    q: np.ndarray,
    k_pool: np.ndarray,
    v_pool: np.ndarray,
    block_tables: np.ndarray,
    slots: np.ndarray,
    cu_q: np.ndarray,
    kv_len: np.ndarray,
    scale: float,
    mask: int,
    window: int,
    bias: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray | None]:
    out, every_lse = np.zeros_like(q), np.full(q.shape[:2], -np.inf, q.dtype)
    for s, (slot, length) in enumerate(zip(slots, kv_len, strict=True)):
        rows = slice(cu_q[s], cu_q[s + 1])
        count = cu_q[s + 1] - cu_q[s]
        position, key = np.arange(length - count, length)[:, None], np.arange(length)
        visible = np.ones((count, length), bool) if mask == FULL else key <= position
        if window:
            visible = visible & (key > position - window)
        k, v = (gather_ref(pool, block_tables[slot], length) for pool in (k_pool, v_pool))
        part = None if bias is None else bias[:, rows, :length]
        out[rows], every_lse[rows] = attention_ref(q[rows], k, v, scale, visible, part)
    return out, None if lse is None else every_lse


def paged_attention_decode_ref(
    q: np.ndarray,
    k_pool: np.ndarray,
    v_pool: np.ndarray,
    block_tables: np.ndarray,
    slots: np.ndarray,
    kv_len: np.ndarray,
    scale: float,
) -> np.ndarray:
    out = np.zeros_like(q)
    for row, (slot, length) in enumerate(zip(slots, kv_len, strict=True)):
        k, v = (gather_ref(pool, block_tables[slot], length) for pool in (k_pool, v_pool))
        out[row] = attention_ref(q[row : row + 1], k, v, scale, np.ones((1, length), bool))[0][0]
    return out


def merge_attention_ref(
    out_a: np.ndarray, lse_a: np.ndarray, out_b: np.ndarray, lse_b: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    top = np.maximum(np.maximum(lse_a, lse_b), MASKED)
    a, b = np.exp(lse_a - top), np.exp(lse_b - top)
    total = a + b
    with np.errstate(divide="ignore"):
        lse = top + np.log(total)
    share = np.where(total > 0, total, 1)
    return out_a * (a / share)[..., None] + out_b * (b / share)[..., None], lse
