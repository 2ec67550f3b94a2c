"""GDN_PREFILL: the gated delta rule over prompt slices, 64 tokens at a time.

With G the inclusive cumulative sum of g within a chunk, L_ij = exp(G_i - G_j) for i ≥ j, and all of it per value head:

    T  = (I + strict_lower(beta_i k_i·k_j))^-1            solved without gates, so it never sees a large ratio
    V' = (T ⊙ L ⊙ beta_j) (V - e^G ⊙ K S)                 the corrections d_i of the token recurrence
    O  = e^G ⊙ Q S + (Q Kᵀ ⊙ L) V'
    S ← e^{G_C} S + (e^{G_C - G} ⊙ V')ᵀ K                 S is [DV, DK]

Everything but the lines with S depends on one chunk alone and runs for many chunks at once. Chunks lie on absolute multiples
of 64 and a short one is padded with zero rows (beta = g = 0, q = k = 0), which change nothing: every product then has one
shape whatever the slice, so a prompt cut on that grid gives the same bits as the whole.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sparkrt.ops.operator import Array

L2_EPS = 1e-6  # inside the root of the norms of q and k; a constant of the layer, not the model's rms_norm_eps
CHUNK = 64
_BLOCK = 16  # rows solved by substitution before blocks are merged
_FORGET = -200.0  # e^-200 is 0 in float32; a larger decay would only cost the sums digits
_HEADS_AT_ONCE = 32  # chunks × value heads prepared together: their 64 × 64 matrices stay in the L2 cache
_LOWER = np.tril(np.ones((CHUNK, CHUNK), np.float32))
_STRICT = np.tril(np.ones((CHUNK, CHUNK), np.float32), -1)


class _Chunk(NamedTuple):
    sequence: int
    row: int  # of qkv
    rows: int  # 1 … 64
    end: int  # rows of its slice up to here


def _grid(cu: list[int], starts: list[int]) -> list[_Chunk]:
    """Cut slices at absolute multiples of 64."""
    chunks = []
    for sequence, start in enumerate(starts):
        row, last = cu[sequence], cu[sequence + 1]
        while row < last:
            rows = min(CHUNK - (start + row - cu[sequence]) % CHUNK, last - row)
            row += rows
            chunks.append(_Chunk(sequence, row - rows, rows, row - cu[sequence]))
    return chunks


class _Prepared(NamedTuple):
    """What chunks need for the recurrence over S; leading axes [chunk, key head (, value head of the group)]."""

    kq: Array  # [n, HK, 1, 128, DK]: 64 rows of keys, 64 of queries, normalized
    v: Array  # [n, HK, r, 64, DV]
    solve: Array  # [n, HK, r, 64, 64]: T ⊙ L ⊙ beta_j
    scores: Array  # [n, HK, r, 64, 64]: Q Kᵀ ⊙ L
    decay: Array  # [n, HK, r, 64, 1]: e^G
    to_end: Array  # [n, HK, r, 64, 1]: e^{G_C - G}
    total: Array  # [n, HK, r, 1, 1]: e^{G_C}


def gdn_prefill(
    out: Array,
    state: Array,
    snapshots: Array | None,
    qkv: Array,
    g: Array,
    beta: Array,
    slots: Array,
    cu: Array,
    starts: Array,
    snap_rows: Array | None,
    k_heads: int,
    workspace: Array | None = None,
) -> None:
    """The gated delta rule over prompt slices, in chunks of 64 on absolute positions.

    out A [T, HV, DV], state f32 [slots, HV, DV, DK] in/out; snapshots f32 [n, HV, DV, DK] or none
    ← qkv A [T, C], g, beta f32 [T, HV], slots i32 [S], cu i32 [S+1], starts i32 [S], snap_rows i32 [n, 2] or none, k_heads,
    workspace u32 [workspace_words(T, S, HV) or more] or none
    A slice at start 0 begins from zero, whatever its slot holds; snapshots are states after snap_rows[i, 1] tokens of slice
    snap_rows[i, 0], a chunk's end (-1: skipped). On a device, heads of 128 x 128 in bf16 or f16 go to the tensor cores if there
    is a workspace, anything else token by token.
    parity: T=1 HK=1 HV=2 DK=32 DV=48; T=0+1+63+64+65 starts=7+64+0+128+0 HK=1 HV=2 DK=32 DV=48;
    T=130 starts=37 HK=2 HV=4 DK=32 DV=48; T=100 starts=64 HK=1 HV=2 DK=32 DV=48 decay=1000;
    T=200+64 starts=30+0 HK=1 HV=2 DK=32 DV=48 snaps=0+34+0+98+1+64+0+200+1+0; T=1 HK=1 HV=2 DK=128 DV=128;
    T=0+1+63+64+65+2 starts=7+64+0+128+0+63 HK=1 HV=2 DK=128 DV=128; T=130 starts=37 HK=2 HV=6 DK=128 DV=128;
    T=100 starts=64 HK=1 HV=2 DK=128 DV=128 decay=1000; T=300 starts=64 HK=1 HV=1 DK=128 DV=128 decay=1e-3;
    T=200+64 starts=30+0 HK=1 HV=2 DK=128 DV=128 snaps=0+34+0+98+1+64+0+200+1+0; T=70+64 HK=16 HV=48 DK=128 DV=128
    bench: T=512 HK=2 HV=4 DK=128 DV=128; T=1024 HK=16 HV=32 DK=128 DV=128
    """
    _, v_heads, v_dim, k_dim = state.shape
    heads = (k_heads, v_heads // k_heads, v_dim, k_dim)
    pool = state.reshape(-1, *heads)
    slot_of, start_of = slots.tolist(), starts.tolist()
    chunks = _grid(cu.tolist(), start_of)
    wanted: dict[tuple[int, int], list[int]] = {}
    if snapshots is not None and snap_rows is not None:
        ends = {(sequence, 0) for sequence in range(len(start_of))} | {(c.sequence, c.end) for c in chunks}
        for i, (sequence, offset) in enumerate(snap_rows.tolist()):
            if sequence >= 0:
                wanted.setdefault((sequence, offset), []).append(i)
        if wanted.keys() - ends:
            raise ValueError(f"gdn_prefill: no chunk of the slices ends at snap_rows {sorted(wanted.keys() - ends)}")

    def snapshot(sequence: int, offset: int) -> None:
        if snapshots is not None and (rows := wanted.get((sequence, offset))):
            snapshots[rows] = state[slot_of[sequence]]

    for sequence, start in enumerate(start_of):
        if start == 0:
            state[slot_of[sequence]] = 0
        snapshot(sequence, 0)
    at_once = max(1, _HEADS_AT_ONCE // v_heads)
    update = np.empty(heads, np.float32)
    for first in range(0, len(chunks), at_once):
        group = chunks[first : first + at_once]
        ready = _prepare(group, qkv, g, beta, k_heads, v_dim, k_dim)
        for i, chunk in enumerate(group):
            o = _advance(pool[slot_of[chunk.sequence]], ready, i, update)
            out[chunk.row : chunk.row + chunk.rows] = o.reshape(v_heads, CHUNK, v_dim)[:, : chunk.rows].swapaxes(0, 1)
            snapshot(chunk.sequence, chunk.end)


def _advance(s: Array, ready: _Prepared, i: int, update: Array) -> Array:
    """One chunk: s [HK, r, DV, DK] moves to the chunk's end; returns o [HK, r, 64, DV]."""
    kq = ready.kq[i]
    seen = np.matmul(kq, s.swapaxes(2, 3))  # K S and Q S
    seen *= np.concatenate((ready.decay[i], ready.decay[i]), axis=2)
    d = np.matmul(ready.solve[i], ready.v[i] - seen[:, :, :CHUNK])
    o: Array = np.matmul(ready.scores[i], d)
    o += seen[:, :, CHUNK:]
    d *= ready.to_end[i]
    np.matmul(d.swapaxes(2, 3), kq[:, :, :CHUNK], out=update)
    s *= ready.total[i]
    s += update
    return o


def _prepare(chunks: list[_Chunk], qkv: Array, g: Array, beta: Array, k_heads: int, v_dim: int, k_dim: int) -> _Prepared:
    """All that does not need the state, for several chunks at once."""
    n, group = len(chunks), g.shape[1] // k_heads
    steps = np.arange(CHUNK)
    rows = np.array([c.rows for c in chunks])[:, None]
    padding = steps >= rows
    # A padding row repeats its chunk's last row, so that nothing of a neighbour, be it NaN, gets in.
    index = np.array([c.row for c in chunks])[:, None] + np.minimum(steps, rows - 1)
    x = qkv[index]

    qk = x[:, :, : 2 * k_heads * k_dim].reshape(n, CHUNK, 2, k_heads, k_dim)
    scale = np.vecdot(qk, qk)
    scale += np.float32(L2_EPS)
    scale = 1 / np.sqrt(scale)
    scale[:, :, 0] *= np.float32(k_dim**-0.5)
    scale[padding] = 0
    kq = np.empty((n, k_heads, 2, CHUNK, k_dim), np.float32)
    np.multiply(qk[:, :, ::-1].transpose(0, 3, 2, 1, 4), scale[:, :, ::-1].transpose(0, 3, 2, 1)[..., None], out=kq)
    kq = kq.reshape(n, k_heads, 1, 2 * CHUNK, k_dim)
    products = np.matmul(kq, kq[:, :, :, :CHUNK].swapaxes(3, 4))

    def by_head(gate: Array) -> Array:
        gate = gate[index]
        gate[padding] = 0
        return np.ascontiguousarray(gate.reshape(n, CHUNK, k_heads, group).transpose(0, 2, 3, 1))

    total = by_head(np.maximum(g, _FORGET)).cumsum(axis=-1, dtype=np.float64)
    ratio = (total[..., :, None] - total[..., None, :]).astype(np.float32)
    np.minimum(ratio, 0, out=ratio)  # above the diagonal exp would overflow before the mask could drop it
    np.exp(ratio, out=ratio)
    ratio *= _LOWER
    share = by_head(beta)
    a = products[:, :, :, :CHUNK] * share[..., None]
    a *= _STRICT
    solve = unit_lower_inverse(a)
    solve *= ratio
    solve *= share[..., None, :]
    ratio *= products[:, :, :, CHUNK:]
    last = total[..., -1:]
    return _Prepared(
        kq=kq,
        v=x[:, :, 2 * k_heads * k_dim :].reshape(n, CHUNK, k_heads, group, v_dim).transpose(0, 2, 3, 1, 4),
        solve=solve,
        scores=ratio,
        decay=np.exp(total).astype(np.float32)[..., None],
        to_end=np.exp(last - total).astype(np.float32)[..., None],
        total=np.exp(last).astype(np.float32)[..., None],
    )


def unit_lower_inverse(a: Array) -> Array:
    """(I + a)^-1 for strictly lower triangular a [..., 64, 64]: 16 × 16 blocks by substitution, then merged 16 → 32 → 64 by

    [[X1, 0], [-X2 A21 X1, X2]]. No power series: with near-parallel keys its terms reach 5e17 before they cancel.
    """
    size = a.shape[-1]
    flat = a.reshape(-1, size, size)
    blocks = np.stack([flat[:, i : i + _BLOCK, i : i + _BLOCK] for i in range(0, size, _BLOCK)], axis=1)
    x = np.zeros_like(blocks)
    x[..., range(_BLOCK), range(_BLOCK)] = 1
    for i in range(1, _BLOCK):
        x[..., i, :i] = -np.matmul(blocks[..., i : i + 1, :i], x[..., :i, :i])[..., 0, :]
    width = _BLOCK
    while width < size:
        upper, lower = x[:, 0::2], x[:, 1::2]
        corner = np.stack([flat[:, i + width : i + 2 * width, i : i + width] for i in range(0, size, 2 * width)], axis=1)
        x = np.zeros((len(flat), size // (2 * width), 2 * width, 2 * width), a.dtype)
        x[..., :width, :width] = upper
        x[..., width:, width:] = lower
        np.negative(np.matmul(lower, np.matmul(corner, upper)), out=x[..., width:, :width])
        width *= 2
    return x.reshape(a.shape)
