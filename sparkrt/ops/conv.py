"""Causal depthwise convolution (width K, no bias) with SiLU, over the q|k|v channels of a gated delta net layer.

A sequence's past is a ring of columns, position modulo ring length, that holds the *pre-convolution* inputs: a step reads the
K-1 columns before its own and writes its own, so nothing is shifted and, on a device, readers and the writer never meet.
Positions below zero count as zero whatever the ring holds: a fresh slot needs no clearing.

    y[t, c] = silu( sum_j w[c, K-1-j] * x[t-j, c] ),  j = 0 … K-1, summed in that order on every path, so that
    step and prefill agree bit for bit.
"""

from __future__ import annotations

import numpy as np

from sparkrt.ops.activation import silu
from sparkrt.ops.operator import Array, Operator

_BLOCK = 1 << 16  # elements per block of a prefill: taps, accumulator and output stay in the L2 cache


def conv_step_reference(ring_state: Array, proj: Array, w: Array, slots: Array, positions: Array) -> tuple[Array, Array]:
    """One token per row. Returns (out [B, C], ring_state)."""
    state = ring_state.copy()
    channels, taps = w.shape
    ring = state.shape[1]
    out = np.empty((len(slots), channels), proj.dtype)
    for row, (slot, position) in enumerate(zip(slots, positions, strict=True)):
        state[slot, position % ring] = proj[row, :channels]
        columns = range(position - taps + 1, position + 1)
        window = np.stack([state[slot, p % ring] if p >= 0 else np.zeros(channels) for p in columns], axis=1)
        out[row] = silu((window * w).sum(1))
    return out, state


def conv_prefill_reference(
    ring_state: Array, proj: Array, w: Array, slots: Array, cu: Array, starts: Array
) -> tuple[Array, Array]:
    """Token after token through the step. Returns (out [T, C], ring_state)."""
    out = np.empty((len(proj), w.shape[0]), proj.dtype)
    for s, slot in enumerate(slots):
        for row in range(cu[s], cu[s + 1]):
            position = np.array([starts[s] + row - cu[s]])
            out[row : row + 1], ring_state = conv_step_reference(ring_state, proj[row : row + 1], w, slot[None], position)
    return out, ring_state


def conv_step(out: Array, ring_state: Array, proj: Array, w: Array, slots: Array, positions: Array) -> None:
    """One token per row: out [B, C], ring_state [slots, ring, C] ← proj [B, N], w [C, 4], slots, positions [B]."""
    channels, taps = w.shape
    ring = ring_state.shape[1]
    columns = positions[:, None] - np.arange(taps)  # newest first, as w.T[::-1]
    rows = columns % ring
    rows += (slots * ring)[:, None]
    flat = ring_state.reshape(-1, channels)
    flat[rows[:, 0]] = proj[:, :channels]
    window = flat.take(rows, axis=0)
    if positions.min(initial=taps) < taps:
        window[columns < 0] = 0
    window *= w.T[::-1].copy()
    silu(np.add.reduce(window, axis=1), out=out)


def conv_prefill(out: Array, ring_state: Array, proj: Array, w: Array, slots: Array, cu: Array, starts: Array) -> None:
    """Causal depthwise convolution and SiLU of prompt slices, continuing from the ring and leaving it for the next.

    out A [T, C], ring_state A [slots, ring, C] in/out ← proj A [T, N] (columns 0 … C), w A [C, 4], slots i32 [S],
    cu i32 [S+1], starts i32 [S]
    Rows cu[s] … cu[s+1] are positions starts[s] … of the sequence in slots[s]; a slice may be empty.
    parity: T=1 C=64 N=64 ring=4; T=0+1+2+63+64+65 starts=5+0+3+1+0+64 C=48 N=64 ring=4; T=3+9 starts=2+7 C=64 N=64 ring=7;
    T=5+33 starts=0+2 C=130 N=131 ring=4; T=1+0+16+17+3*30 starts=0+4+1+2+9*30 C=64 N=64 ring=4
    bench: T=512 C=1024 N=1024 ring=4; T=2048 C=8192 N=12288 ring=4
    """
    channels, taps = w.shape
    ring = ring_state.shape[1]
    by_tap = np.ascontiguousarray(w.T)
    block = max(1, _BLOCK // channels)
    bounds = cu.tolist()
    for slot, start, lo, hi in zip(slots.tolist(), starts.tolist(), bounds[:-1], bounds[1:], strict=True):
        if lo == hi:
            continue
        x = np.empty((taps - 1 + hi - lo, channels), proj.dtype)
        before = np.arange(start - taps + 1, start)
        x[: taps - 1] = ring_state[slot, before % ring]
        x[: taps - 1][before < 0] = 0
        x[taps - 1 :] = proj[lo:hi, :channels]
        for row in range(0, hi - lo, block):
            n = min(block, hi - lo - row)
            acc = x[row + taps - 1 : row + taps - 1 + n] * by_tap[-1]
            for back in range(1, taps):
                acc += x[row + taps - 1 - back : row + taps - 1 - back + n] * by_tap[-1 - back]
            silu(acc, out=out[lo + row : lo + row + n])
        kept = min(ring, hi - lo)
        ring_state[slot, np.arange(start + hi - lo - kept, start + hi - lo) % ring] = x[len(x) - kept :]


CONV_PREFILL = Operator(
    conv_prefill, conv_prefill_reference, "spark_conv_prefill", lambda s: (4 * s.C * (2 * s.T + 4), 8 * s.T * s.C)
)
OPERATORS = (CONV_PREFILL,)
