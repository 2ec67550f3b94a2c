"""Attention on the host. One sequence at a time, so a row's bits depend on its own query, pages and length only."""

from __future__ import annotations

import numpy as np

from sparkrt.ops.operator import Array

CAUSAL, FULL = 0, 1
MASKED = -1e30  # a running maximum that no real score undercuts, and that is finite: exp(-inf - MASKED) = 0
_KEYS = 512  # keys a prefill tile looks at
_TILE = 1 << 18  # scores a prefill tile holds (1 MiB: half a core's L2) unless 16 queries already need more


def paged_attention_prefill(
    out: Array,
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
) -> None:
    """Attention of prompt slices over the cache, which already holds the slices' own keys; any mix of lengths, zero included.

    out A [T, Hq, D], lse f32 [T, Hq] or none ← q A [T, Hq, D], k_pool and v_pool A [P, Hkv, page, D],
    block_tables i32 [slots, max blocks], slots i32 [S], cu_q i32 [S + 1], kv_len i32 [S], scale,
    mask (0 causal, 1 full), window (0 none), bias f32 [Hq, T, ≥ longest kv_len] or none
    Query i of sequence s is at position p = kv_len[s] - q_len[s] + i and sees keys ≤ p (causal), > p - window (window).
    out = softmax(scale · q·kᵀ + bias) · v; lse = log Σ exp(·); a row that sees nothing gives 0 and -inf
    parity: T=1 Hq=4 Hkv=2 D=64 page=64 lse; T=63+0+64+65+1 ctx=0+0+66+0+199 Hq=4 Hkv=2 D=64 page=16 lse;
    T=7+0+33 ctx=33+9+0 Hq=16 Hkv=1 D=64 page=32 run; T=65 ctx=64 Hq=8 Hkv=8 D=128 page=64 lse;
    T=20+64 ctx=580+0 Hq=3 Hkv=1 D=256 page=64 run lse; T=70+3 ctx=0+637 Hq=4 Hkv=2 D=64 page=64 window=9 lse;
    T=5+40 ctx=695+490 Hq=2 Hkv=1 D=64 page=32 mask=1 bias lse; T=4+2 ctx=-4+62 Hq=2 Hkv=2 D=64 page=64 mask=1 lse;
    T=90 Hq=4 Hkv=4 D=64 page=64 bias window=64; T=0 Hq=4 Hkv=2 D=64 page=64
    bench: T=512 Hq=4 Hkv=2 D=64 page=64 run; T=64 ctx=4032 Hq=4 Hkv=2 D=64 page=64; T=512 Hq=9 Hkv=3 D=64 page=64 run;
    T=256 ctx=1792 Hq=16 Hkv=2 D=256 page=64
    """
    # One copy of each sequence's keys and values head by head, then tiles of queries by keys with a running softmax.
    heads, page_size = q.shape[1], k_pool.shape[2]
    bounds = cu_q.tolist()
    for slot, length, first, last in zip(slots.tolist(), kv_len.tolist(), bounds[:-1], bounds[1:], strict=True):
        if first == last:
            continue
        pages = block_tables[slot, : -(-length // page_size)]
        k, v = _by_head(k_pool, pages, length), _by_head(v_pool, pages, length)
        step = max(16, _TILE // (heads * max(min(length, _KEYS), 1)))
        for start in range(first, last, step):
            stop = min(start + step, last)
            position = length - last + start  # of the tile's first query
            keys = (max(0, position - window + 1) if window else 0, length if mask == FULL else position + stop - start)
            tile_bias = None if bias is None else bias[:, start:stop]
            rows, row_lse = _attend_tile(q[start:stop], k, v, scale, position, keys, mask, window, tile_bias)
            out[start:stop] = rows
            if lse is not None:
                lse[start:stop] = row_lse


def _attend_tile(
    q: Array,
    k: Array,
    v: Array,
    scale: float,
    position: int,
    keys: tuple[int, int],
    mask: int,
    window: int,
    bias: Array | None,
) -> tuple[Array, Array]:
    """Queries [R, Hq, D] at positions position … against k, v [Hkv, L, D] in the range `keys`; (out [R, Hq, D], lse [R, Hq])."""
    rows, heads, dim = q.shape
    kv_heads, group = k.shape[0], heads // k.shape[0]
    scaled = np.empty((kv_heads, group, rows, dim), q.dtype)
    np.multiply(q.reshape(rows, kv_heads, group, dim).transpose(1, 2, 0, 3), scale, scaled)
    flat = scaled.reshape(kv_heads, group * rows, dim)
    top = np.full((kv_heads, group * rows, 1), MASKED, q.dtype)
    total, acc = np.zeros_like(top), np.zeros_like(flat)
    for a in range(keys[0], keys[1], _KEYS):
        b = min(a + _KEYS, keys[1])
        scores = np.matmul(flat, k[:, a:b].swapaxes(1, 2))
        by_row = scores.reshape(kv_heads, group, rows, b - a)
        if bias is not None:
            by_row += bias[:, :, a:b].reshape(by_row.shape)
        if (mask == CAUSAL and b - 1 > position) or (window and a <= position + rows - 1 - window):
            at, key = np.arange(position, position + rows)[:, None], np.arange(a, b)
            hidden = (key > at) if mask == CAUSAL else np.zeros((rows, b - a), bool)
            if window:
                hidden |= key <= at - window
            np.copyto(by_row, -np.inf, where=hidden)
        new_top = np.maximum(top, scores.max(-1, keepdims=True))
        scores -= new_top
        np.exp(scores, scores)
        fade = np.exp(top - new_top)
        total = total * fade + scores.sum(-1, keepdims=True)
        acc = acc * fade + np.matmul(scores, v[:, a:b])
        top = new_top
    seen = total > 0
    np.divide(acc, total, acc, where=seen)
    lse = np.where(seen, top + np.log(np.where(seen, total, 1)), -np.inf)
    out = acc.reshape(kv_heads, group, rows, dim).transpose(2, 0, 1, 3).reshape(rows, heads, dim)
    return out, lse.reshape(kv_heads, group, rows).transpose(2, 0, 1).reshape(rows, heads)


def _by_head(pool: Array, pages: Array, length: int) -> Array:
    """A sequence's first `length` tokens as [Hkv, L, D], one copy; not a byte beyond `length` is read."""
    _, kv_heads, page_size, dim = pool.shape
    out = np.empty((kv_heads, length, dim), pool.dtype)
    whole = length // page_size
    aligned = out[:, : whole * page_size].reshape(kv_heads, whole, page_size, dim).transpose(1, 0, 2, 3)
    np.copyto(aligned, pool[_run(pages[:whole])])
    if length > whole * page_size:
        out[:, whole * page_size :] = pool[pages[whole], :, : length - whole * page_size]
    return out


def _run(pages: Array) -> slice | Array:
    """Pages as a slice where they are one ascending run (the pool is then read in place), else as they are (a gather)."""
    n = len(pages)
    if n == 0:
        return slice(0, 0)
    first = int(pages[0])
    if int(pages[-1]) - first == n - 1 and (n < 3 or bool((pages[1:] - pages[:-1] == 1).all())):
        return slice(first, first + n)
    return pages


def paged_attention_decode(
    out: Array,
    q: Array,
    k_pool: Array,
    v_pool: Array,
    block_tables: Array,
    slots: Array,
    kv_len: Array,
    scale: float,
    workspace: Array | None = None,
) -> None:
    """Attention of one query a sequence over its whole cache. A row of kv_len 0 is padding and gives zeros.

    out A [B, Hq, D] ← q A [B, Hq, D], k_pool and v_pool A [P, Hkv, page, D], block_tables i32 [slots, max blocks],
    slots i32 [B], kv_len i32 [B], scale; workspace f32 [B, decode_workspace_words(…)] or none
    out = softmax(scale · q·kᵀ) · v. On a device a workspace, zeros at first, lets more of it share a long row.
    parity: B=1 L=1 Hq=4 Hkv=2 D=64 page=64; B=5 L=63+64+65+0+200 Hq=4 Hkv=2 D=64 page=64;
    B=4 L=31+32+33+640 Hq=16 Hkv=1 D=64 page=32 run; B=3 L=15+16+17 Hq=8 Hkv=8 D=128 page=16;
    B=3 L=129+1+0 Hq=8 Hkv=2 D=256 page=16 run; B=2 L=5+192 Hq=9 Hkv=3 D=64 page=64; B=1 L=0 Hq=4 Hkv=2 D=64 page=64
    bench: B=1 L=200 Hq=4 Hkv=2 D=64 page=64 run; B=16 L=200 Hq=4 Hkv=2 D=64 page=64; B=1 L=200 Hq=9 Hkv=3 D=64 page=64 run;
    B=1 L=2048 Hq=16 Hkv=2 D=256 page=64
    """
    # Row by row. Products go page by page, so that a run of pages is read where it lies; nothing beyond a length is read.
    rows, heads, dim = q.shape
    kv_heads, page_size = k_pool.shape[1:3]
    scaled = (q * scale).reshape(rows, kv_heads, heads // kv_heads, dim)
    grouped = out.reshape(scaled.shape)
    for row, (slot, length) in enumerate(zip(slots.tolist(), kv_len.tolist(), strict=True)):
        if length == 0:
            grouped[row] = 0
            continue
        whole, tail = divmod(length, page_size)
        tail_page = int(block_tables[slot, whole]) if tail else 0
        _attend_row(grouped[row], scaled[row], k_pool, v_pool, _run(block_tables[slot, :whole]), tail_page, tail)


def _attend_row(out: Array, q: Array, k_pool: Array, v_pool: Array, pages: Array | slice, tail_page: int, tail: int) -> None:
    """out, q [Hkv, G, D] over all of `pages` and the first `tail` tokens of `tail_page`."""
    k, v = k_pool[pages], v_pool[pages]
    tail_k, tail_v = k_pool[tail_page, :, :tail], v_pool[tail_page, :, :tail]
    kv_heads, group, _ = q.shape
    count, _, page_size, _ = k.shape
    whole = count * page_size
    scores = np.empty((kv_heads, group, whole + tail), q.dtype)
    by_page = scores[..., :whole].reshape(kv_heads, group, count, page_size).transpose(2, 0, 1, 3)
    if count:
        np.matmul(q, k.swapaxes(2, 3), by_page)
    if tail:
        np.matmul(q, tail_k.swapaxes(1, 2), scores[..., whole:])
    scores -= np.maximum.reduce(scores, -1, keepdims=True)
    np.exp(scores, scores)
    if tail:
        np.matmul(scores[..., whole:], tail_v, out)
    else:
        out[...] = 0
    if count:
        np.add(out, np.add.reduce(np.matmul(by_page, v), 0), out)
    out /= np.add.reduce(scores, -1, keepdims=True)
