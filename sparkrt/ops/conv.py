"""Causal depthwise convolution (width K, no bias) with SiLU, over the q|k|v channels of a gated delta net layer.

A sequence's past is a ring of columns, position modulo ring length, that holds the *pre-convolution* inputs: a step reads the
K-1 columns before its own and writes its own, so nothing is shifted and, on a device, readers and the writer never meet.
Positions below zero count as zero whatever the ring holds: a fresh slot needs no clearing.

    y[t, c] = silu( sum_j w[c, K-1-j] * x[t-j, c] ),  j = 0 … K-1, summed in that order on every path, so that
    step and prefill agree bit for bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sparkrt.ops.elementwise import silu
from sparkrt.ops.operator import Case, Operator, Rng

_BLOCK = 1 << 16  # elements per block of a prefill: taps, accumulator and output stay in the L2 cache


def conv_step_reference(
    ring_state: np.ndarray, proj: np.ndarray, w: np.ndarray, slots: np.ndarray, positions: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """One token per row; see `conv_step` for shapes. Returns (out [B, C], ring_state)."""
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
    ring_state: np.ndarray, proj: np.ndarray, w: np.ndarray, slots: np.ndarray, cu: np.ndarray, starts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Token after token through the step; see `conv_prefill` for shapes. Returns (out [T, C], ring_state)."""
    out = np.empty((len(proj), w.shape[0]), proj.dtype)
    for s, slot in enumerate(slots):
        for row in range(cu[s], cu[s + 1]):
            position = np.array([starts[s] + row - cu[s]])
            out[row : row + 1], ring_state = conv_step_reference(ring_state, proj[row : row + 1], w, slot[None], position)
    return out, ring_state


def conv_step(
    out: np.ndarray, ring_state: np.ndarray, proj: np.ndarray, w: np.ndarray, slots: np.ndarray, positions: np.ndarray
) -> None:
    """Decode rows: out [B, C], ring_state [slots, ring ≥ K, C] in/out, proj [B, N] (its first C columns), w [C, K]."""
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


def conv_prefill(
    out: np.ndarray,
    ring_state: np.ndarray,
    proj: np.ndarray,
    w: np.ndarray,
    slots: np.ndarray,
    cu: np.ndarray,
    starts: np.ndarray,
) -> None:
    """Slices of prompts: out [T, C], ring_state [slots, ring ≥ K, C] in/out, proj [T, N], w [C, K], slots/starts [S], cu [S+1].

    Rows cu[s] … cu[s+1] are positions starts[s] … of the sequence in slots[s]; a slice may be empty.
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


def _step_case(label: str, batch: int, channels: int, extra: int = 0, ring: int = 4, positions: tuple[int, ...] = ()) -> Case:
    def make(rng: Rng) -> list[Any]:
        state = rng.standard_normal((batch + 2, ring, channels), np.float32)
        proj = rng.standard_normal((batch, channels + extra), np.float32)
        slots = rng.permutation(batch + 2)[:batch].astype(np.int32)  # the last slot included
        where = np.array(positions or rng.integers(4, 4096, batch), np.int32)
        return [np.empty((batch, channels), np.float32), state, proj, _taps(rng, channels), slots, where]

    return Case(label, make, (0, 1), bytes=4 * channels * (batch * 6 + 4), flops=8 * batch * channels)


def _prefill_case(
    label: str, lengths: tuple[int, ...], starts: tuple[int, ...], channels: int, extra: int = 0, ring: int = 4
) -> Case:
    def make(rng: Rng) -> list[Any]:
        tokens, n = sum(lengths), len(lengths)
        state = rng.standard_normal((n + 1, ring, channels), np.float32)
        proj = rng.standard_normal((tokens, channels + extra), np.float32)
        slots = rng.permutation(n + 1)[:n].astype(np.int32)
        cu = np.cumsum((0, *lengths)).astype(np.int32)
        out = np.empty((tokens, channels), np.float32)
        return [out, state, proj, _taps(rng, channels), slots, cu, np.array(starts, np.int32)]

    return Case(label, make, (0, 1), bytes=4 * channels * (2 * sum(lengths) + 4), flops=8 * sum(lengths) * channels)


def _taps(rng: Rng, channels: int) -> np.ndarray:
    return rng.standard_normal((channels, 4), np.float32) * np.float32(0.5)


CONV_STEP = Operator(
    name="conv_step",
    doc="""Causal depthwise convolution and SiLU of one token per row.

    out A [B, C]; ring_state A [slots, ring, C] in/out ← proj A [B, N] (columns 0 … C), w f32 [C, 4], slots, positions i32 [B]
    out = silu(sum_j w[:, 3-j] · x[t-j]), x in the ring at position mod ring, 0 before position 0
    """,
    reference=conv_step_reference,
    host=conv_step,
    parity=(
        _step_case("one row", 1, 64),
        _step_case("young sequences", 4, 96, extra=32, positions=(0, 1, 2, 3)),
        _step_case("draft ring of 7", 5, 64, ring=7),
    ),
    bench=(_step_case("tiny b1", 1, 1024), _step_case("tiny b16", 16, 1024), _step_case("35b b16", 16, 8192, extra=4096)),
)
CONV_PREFILL = Operator(
    name="conv_prefill",
    doc="""Causal depthwise convolution and SiLU of prompt slices, continuing from the ring and leaving it for the next.

    out A [T, C]; ring_state A [slots, ring, C] in/out ← proj A [T, N] (columns 0 … C), w f32 [C, 4], slots i32 [S],
    cu i32 [S+1], starts i32 [S]
    """,
    reference=conv_prefill_reference,
    host=conv_prefill,
    parity=(
        _prefill_case("one token", (1,), (0,), 64),
        _prefill_case("ragged", (0, 1, 2, 63, 64, 65), (5, 0, 3, 1, 0, 64), 48, extra=16),
        _prefill_case("draft ring of 7", (3, 9), (2, 7), 64, ring=7),
    ),
    bench=(_prefill_case("tiny t512", (512,), (0,), 1024), _prefill_case("35b t2048", (2048,), (0,), 8192, extra=4096)),
)
OPERATORS = (CONV_STEP, CONV_PREFILL)
