"""The causal convolution: a prompt may be cut anywhere, also into single steps, and gives the same bits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkrt.ops.conv import conv_prefill, conv_prefill_reference, conv_step

CHANNELS = 24


def i32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def inputs(seed: int, tokens: int, ring: int, slots: int = 1) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """proj wider than the channels, taps, and a ring full of NaN: a fresh slot holds anything."""
    rng = np.random.default_rng(seed)
    proj = rng.standard_normal((tokens, CHANNELS + 5), np.float32)
    w = rng.standard_normal((CHANNELS, 4), np.float32)
    return proj, w, np.full((slots, ring, CHANNELS), np.nan, np.float32)


def prefill(state: np.ndarray, proj: np.ndarray, w: np.ndarray, slot: int, start: int) -> np.ndarray:
    out = np.full((len(proj), CHANNELS), np.nan, np.float32)
    conv_prefill(out, state, proj, w, i32(slot), i32(0, len(proj)), i32(start))
    return out


@given(st.integers(0, 2**32), st.sampled_from((4, 5, 7)), st.lists(st.integers(0, 9), min_size=1, max_size=8), st.booleans())
@settings(max_examples=40, deadline=None)
def test_any_split_into_slices_and_steps_gives_the_same_bits(seed: int, ring: int, cuts: list[int], by_steps: bool) -> None:
    proj, w, whole = inputs(seed, sum(cuts), ring)
    split = whole.copy()
    want = prefill(whole, proj, w, 0, 0)
    at, got = 0, np.empty_like(want)
    for i, n in enumerate(cuts):
        if by_steps and i % 2:
            for t in range(at, at + n):
                conv_step(got[t : t + 1], split, proj[t : t + 1], w, i32(0), i32(t))
        else:
            got[at : at + n] = prefill(split, proj[at : at + n], w, 0, at)
        at += n
    assert np.array_equal(got, want)
    assert np.array_equal(split, whole, equal_nan=True)


def test_a_long_slice_crosses_blocks() -> None:
    rng = np.random.default_rng(1)
    proj, w = rng.standard_normal((300, 1024), np.float32), rng.standard_normal((1024, 4), np.float32)
    state = rng.standard_normal((2, 4, 1024), np.float32)
    args = (proj, w, i32(1), i32(0, 300), i32(9))
    want, ring = conv_prefill_reference(state.astype(np.float64), proj.astype(np.float64), *args[1:])
    out = np.empty((300, 1024), np.float32)
    conv_prefill(out, state, *args)
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(state, ring)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2)])
def test_a_step_row_does_not_depend_on_its_neighbours(order: tuple[int, ...]) -> None:
    proj, w, state = inputs(3, 4, 4, slots=6)
    state[...] = np.random.default_rng(4).standard_normal(state.shape)
    slots, positions = i32(5, 2, 0, 3), i32(0, 2, 31, 4000)
    alone = []
    for row in range(4):
        out, ring = np.empty((1, CHANNELS), np.float32), state.copy()
        conv_step(out, ring, proj[row : row + 1], w, slots[row : row + 1], positions[row : row + 1])
        alone.append((out[0], ring[slots[row]]))
    pick = list(order)
    out = np.empty((4, CHANNELS), np.float32)
    conv_step(out, state, proj[pick], w, slots[pick], positions[pick])
    for i, row in enumerate(pick):
        assert np.array_equal(out[i], alone[row][0])
        assert np.array_equal(state[slots[row]], alone[row][1])


def test_sequences_of_one_call_do_not_meet() -> None:
    proj, w, state = inputs(5, 11, 4, slots=3)
    proj[3:] = np.nan  # a sick neighbour
    out = np.empty((11, CHANNELS), np.float32)
    conv_prefill(out, state, proj, w, i32(2, 0), i32(0, 3, 11), i32(0, 0))
    assert np.isfinite(out[:3]).all()
    assert np.isfinite(state[2, :3]).all()
    assert np.isnan(state[1]).all()
