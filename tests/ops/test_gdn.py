"""Gated delta net: the chunk algorithm against the token recurrence, and the bits that must not move."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkrt.ops.gdn import delta_step, gdn_gates, gdn_recurrence, split_heads
from sparkrt.ops.gdn_chunk import gdn_prefill, unit_lower_inverse

HK, HV, DK, DV = 1, 2, 16, 24


def i32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


@dataclass(slots=True)
class Sequence:
    """Inputs of one sequence; methods run them through the operators on a pool of states."""

    qkv: np.ndarray
    g: np.ndarray
    beta: np.ndarray

    @classmethod
    def random(cls, seed: int, tokens: int, decay: float = 0.1, nearness: float = 0.3) -> Sequence:
        rng = np.random.default_rng(seed)
        qkv = rng.standard_normal((tokens, 2 * HK * DK + HV * DV), np.float32)
        qkv[:, HK * DK : 2 * HK * DK] += nearness
        return cls(qkv, -rng.exponential(decay, (tokens, HV)).astype(np.float32), rng.random((tokens, HV), np.float32))

    def __len__(self) -> int:
        return len(self.g)

    def part(self, lo: int, hi: int) -> Sequence:
        return Sequence(self.qkv[lo:hi], self.g[lo:hi], self.beta[lo:hi])

    def prefill(self, state: np.ndarray, slot: int = 0, start: int = 0) -> np.ndarray:
        return prefill([self], state, i32(slot), i32(start))

    def step(self, state: np.ndarray, slot: int = 0) -> np.ndarray:
        out = np.full((len(self), HV, DV), np.nan, np.float32)
        for t in range(len(self)):
            row = slice(t, t + 1)
            delta_step(out[row], state, self.qkv[row], self.g[row], self.beta[row], i32(slot), HK)
        return out

    def exact(self, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """float64, token by token."""
        wide = (a.astype(np.float64) for a in (self.g, self.beta, state))
        return gdn_recurrence(*split_heads(self.qkv.astype(np.float64), HK, HV, DV, DK), *wide)


def prefill(parts: list[Sequence], state: np.ndarray, slots: np.ndarray, starts: np.ndarray) -> np.ndarray:
    joined = [np.concatenate([getattr(p, name) for p in parts]) for name in ("qkv", "g", "beta")]
    out = np.full((len(joined[0]), HV, DV), np.nan, np.float32)
    cu = np.cumsum([0, *map(len, parts)]).astype(np.int32)
    gdn_prefill(out, state, None, *joined, slots, cu, starts, None, HK)
    return out


def pool(seed: int, slots: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((slots, HV, DV, DK), np.float32)


def error(got: np.ndarray, want: np.ndarray) -> float:
    assert np.isfinite(got).all()
    return float(np.linalg.norm(got - want) / max(float(np.linalg.norm(want)), 1e-30))


@given(
    st.integers(0, 2**32),
    st.lists(st.tuples(st.lists(st.integers(0, 90), max_size=4), st.integers(0, 200)), min_size=1, max_size=3),
    st.sampled_from((0.0, 0.1, 3.0, 100.0, 1000.0)),
    st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_any_split_into_slices_and_sequences(seed: int, plan: list[tuple[list[int], int]], decay: float, steps: bool) -> None:
    """Each sequence has its own cuts and start; slice i of all of them goes through in one call, or step by step."""
    whole = [Sequence.random(seed + s, sum(cuts), decay) for s, (cuts, _) in enumerate(plan)]
    state = pool(seed, len(plan))
    for s, (_, start) in enumerate(plan):
        if start == 0:
            state[s] = 0  # a step, unlike a slice, takes the slot as it is
    want = [seq.exact(state[s]) for s, seq in enumerate(whole)]
    got: list[list[np.ndarray]] = [[] for _ in plan]
    at = [0] * len(plan)
    for i in range(max(len(cuts) for cuts, _ in plan)):
        live = [s for s, (cuts, _) in enumerate(plan) if i < len(cuts)]
        parts = [whole[s].part(at[s], at[s] + plan[s][0][i]) for s in live]
        if steps and i == 1:
            outs = [p.step(state, s) for s, p in zip(live, parts, strict=True)]
        else:
            joined = prefill(parts, state, i32(*live), i32(*(plan[s][1] + at[s] for s in live)))
            outs = np.split(joined, np.cumsum([len(p) for p in parts])[:-1])
        for s, part, out in zip(live, parts, outs, strict=True):
            got[s].append(out)
            at[s] += len(part)
    for s, (o, final) in enumerate(want):
        if got[s]:
            assert error(np.concatenate(got[s]), o) < 1e-5
        assert error(state[s], final) < 1e-5


@pytest.mark.parametrize("initial", [False, True])
def test_every_length_that_does_not_fill_the_last_chunk(initial: bool) -> None:
    """K04: the state after L tokens is the token-by-token state."""
    seq, first = Sequence.random(1, 130), pool(2)
    now = first[0].astype(np.float64) * initial
    for length in range(131):
        if length:
            _, now = seq.part(length - 1, length).exact(now)
        state = first.copy() if initial else np.full_like(first, np.nan)
        seq.part(0, length).prefill(state, start=64 * initial)
        assert error(state[0], now) < 1e-5, length


@pytest.mark.parametrize("decay", [3.0, 40.0, 1000.0])
def test_strong_decay_inside_a_chunk(decay: float) -> None:
    """K01: exp of the wrong difference overflows, and inf times the mask's zero is NaN."""
    seq = Sequence.random(3, 64)
    seq.g[:] = -decay
    for state, run in ((pool(4), lambda s: seq.prefill(s, start=64)), (pool(4), seq.step)):
        want, final = seq.exact(state[0])
        assert error(run(state), want) < 1e-5
        assert error(state[0], final) < 1e-5


def test_weak_decay_after_a_strong_one_keeps_its_digits() -> None:
    seq = Sequence.random(5, 64, decay=1e-3)
    seq.g[:32] = -1000
    state = pool(6)
    want, final = seq.exact(state[0])
    assert error(seq.prefill(state, start=64), want) < 1e-5
    assert error(state[0], final) < 1e-5


def test_repeated_keys_without_decay() -> None:
    """K02: 4096 tokens, g = 0, beta near 1, keys almost parallel: where power series and bf16 inverses break down."""
    seq = Sequence.random(7, 4096)
    rng = np.random.default_rng(8)
    keys = seq.qkv[:, HK * DK : 2 * HK * DK]
    keys[:] = rng.standard_normal(HK * DK) + 1e-3 * rng.standard_normal(keys.shape)
    seq.g[:] = 0
    seq.beta[:] = 0.999
    state = pool(9)
    want, final = seq.exact(np.zeros_like(state[0]))
    assert error(seq.prefill(state), want) < 1e-3
    assert error(state[0], final) < 1e-3


def test_inverse_of_near_parallel_keys() -> None:
    rng = np.random.default_rng(10)
    k = rng.standard_normal(128) + 1e-3 * rng.standard_normal((3, 64, 128))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    a = np.tril(0.999 * k @ k.swapaxes(1, 2), -1)
    inverse = unit_lower_inverse(a.astype(np.float32))
    np.testing.assert_allclose(inverse, np.linalg.inv(np.eye(64) + a), atol=1e-5)
    assert abs(inverse).max() <= 1.001


@given(st.integers(0, 2**32), st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(0, 63), st.integers(0, 80))
@settings(max_examples=25, deadline=None)
def test_cuts_on_the_grid_change_no_bit(seed: int, chunks: list[int], offset: int, tail: int) -> None:
    """Slices that end on absolute multiples of 64, wherever the first one starts."""
    start = 64 + offset
    ends = [(64 - offset) + 64 * n for n in np.cumsum(chunks)]
    seq, whole = Sequence.random(seed, ends[-1] + tail), pool(seed)
    split = whole.copy()
    want = seq.prefill(whole, start=start)
    cuts = [0, *ends, len(seq)]
    got = [seq.part(lo, hi).prefill(split, start=start + lo) for lo, hi in pairwise(cuts)]
    assert np.array_equal(np.concatenate(got), want)
    assert np.array_equal(split, whole)


def test_cuts_on_the_grid_change_no_bit_at_real_sizes() -> None:
    """128 × 128 heads take BLAS past its small-matrix and single-thread paths."""
    rng = np.random.default_rng(18)
    qkv, state = rng.standard_normal((300, 1024), np.float32), np.empty((2, 4, 128, 128), np.float32)
    g, beta, out = -rng.random((300, 4), np.float32), rng.random((300, 4), np.float32), np.empty((2, 300, 4, 128), np.float32)
    for slot, cuts in enumerate(((0, 300), (0, 64, 256, 300))):
        for lo, hi in pairwise(cuts):
            rows = slice(lo, hi)
            args = (state, None, qkv[rows], g[rows], beta[rows], i32(slot), i32(0, hi - lo), i32(lo), None, 2)
            gdn_prefill(out[slot, rows], *args)
    assert np.array_equal(out[0], out[1])
    assert np.array_equal(state[0], state[1])


def test_a_batch_of_slices_gives_the_bits_of_each_alone() -> None:
    lengths, starts = (0, 1, 63, 64, 65, 200), (64, 0, 3, 0, 64, 17)
    parts = [Sequence.random(20 + s, n) for s, n in enumerate(lengths)]
    alone, together = pool(11, 7), pool(11, 7)
    slots = i32(6, 2, 0, 5, 1, 3)
    want = [p.prefill(alone, int(slot), start) for p, slot, start in zip(parts, slots, starts, strict=True)]
    got = prefill(parts, together, slots, i32(*starts))
    assert np.array_equal(got, np.concatenate(want))
    assert np.array_equal(together, alone)


def test_a_sick_sequence_stays_alone() -> None:
    parts = [Sequence.random(30 + s, 70) for s in range(3)]
    parts[1].qkv[:] = np.nan
    state = pool(12, 3)
    out = prefill(parts, state, i32(0, 1, 2), i32(0, 0, 0))
    assert np.isfinite(out[:70]).all()
    assert np.isfinite(out[140:]).all()
    assert np.isfinite(state[[0, 2]]).all()


def test_snapshots_are_the_states_at_their_offsets() -> None:
    parts = [Sequence.random(40, 150), Sequence.random(41, 64)]
    state, first = pool(13, 2), pool(13, 2)
    rows = np.array([[0, 34], [1, 0], [0, 150], [-1, 0], [0, 98], [1, 64]], np.int32)
    snapshots = np.full((len(rows), HV, DV, DK), np.nan, np.float32)
    joined = [np.concatenate([getattr(p, name) for p in parts]) for name in ("qkv", "g", "beta")]
    out = np.empty((214, HV, DV), np.float32)
    gdn_prefill(out, state, snapshots, *joined, i32(0, 1), i32(0, 150, 214), i32(30, 64), rows, HK)
    for snapshot, (s, offset) in zip(snapshots, rows.tolist(), strict=True):
        if s < 0:
            assert np.isnan(snapshot).all()
            continue
        want = first.copy()
        parts[s].part(0, offset).prefill(want, s, (30, 64)[s])
        assert np.array_equal(snapshot, want[s])


def test_a_snapshot_off_the_grid_is_refused() -> None:
    """Before anything is changed."""
    seq, state = Sequence.random(42, 100), pool(14)
    with pytest.raises(ValueError, match=r"\(0, 65\)"):
        gdn_prefill(
            np.empty((100, HV, DV), np.float32),
            state,
            np.empty((1, HV, DV, DK), np.float32),
            *(seq.qkv, seq.g, seq.beta, i32(0), i32(0, 100), i32(0), np.array([[0, 65]], np.int32), HK),
        )
    assert np.array_equal(state, pool(14))


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_a_step_row_does_not_depend_on_its_neighbours(rows: int) -> None:
    """Bit for bit, in any slot and any order."""
    seq = Sequence.random(50, rows)
    alone, together = pool(15, 9), pool(15, 9)
    want = [seq.part(r, r + 1).step(alone, 8 - r)[0] for r in range(rows)]
    order = np.random.default_rng(16).permutation(rows)
    out = np.empty((rows, HV, DV), np.float32)
    delta_step(out, together, seq.qkv[order], seq.g[order], seq.beta[order], (8 - order).astype(np.int32), HK)
    for i, r in enumerate(order):
        assert np.array_equal(out[i], want[r])
    assert np.array_equal(together, alone)


def test_large_states_are_updated_tile_by_tile() -> None:
    """States of 4 MiB: heads of a row go in tiles."""
    rng = np.random.default_rng(17)
    heads, batch = 64, 3
    state = rng.standard_normal((batch, heads, 128, 128), np.float32)
    qkv = rng.standard_normal((batch, 3 * heads * 128), np.float32)
    g, beta = -rng.random((batch, heads), np.float32), rng.random((batch, heads), np.float32)
    q, k, v = split_heads(qkv, heads, heads, 128, 128)
    want = [gdn_recurrence(q[r][None], k[r][None], v[r][None], g[r][None], beta[r][None], state[r]) for r in range(batch)]
    out = np.empty((batch, heads, 128), np.float32)
    delta_step(out, state, qkv, g, beta, np.arange(batch, dtype=np.int32), heads)
    for r, (o, final) in enumerate(want):
        assert error(out[r], o[0]) < 1e-5
        assert error(state[r], final) < 1e-5


def test_gates_neither_overflow_nor_vanish() -> None:
    proj = np.array([[9, -200, 0, 200, -200, 0, 200]], np.float32)
    g, beta = np.empty((1, 3), np.float32), np.empty((1, 3), np.float32)
    gdn_gates(g, beta, proj, np.zeros(3, np.float32), np.zeros(3, np.float32), 1)
    np.testing.assert_allclose(beta, [[0, 0.5, 1]], atol=1e-30)
    np.testing.assert_allclose(g, [[0, -np.log(2), -200]], rtol=1e-6, atol=1e-30)
