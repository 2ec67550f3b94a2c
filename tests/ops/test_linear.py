"""A row's result in any company: which row counts share bits, and how lone rows and single columns are run."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkrt.ops.linear import LINEAR, linear, linear_invariant

SHAPES = [
    (256, 1),
    (256, 8),
    (256, 264),
    (256, 1032),
    (256, 1544),
    (512, 256),
    (576, 576),
    (1536, 1000),
    (256, 6144),
    (2560, 300),
]  # K, N


def pack_kn(w: np.ndarray) -> np.ndarray:
    """[..., N, K] as the host takes it."""
    packed: np.ndarray = LINEAR.host_args([None, None, w])[2]
    return packed


def run(op: object, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
    out = np.full((len(x), w.shape[1]), np.nan, np.float32)
    op(out, x, w, bias)  # type: ignore[operator]
    return out


def weights(k: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(k * n)
    return rng.standard_normal((520, k), dtype=np.float32), rng.standard_normal((k, n), dtype=np.float32)


@pytest.mark.parametrize(("k", "n"), SHAPES)
def test_invariant_rows_have_the_same_bits_at_every_row_count(k: int, n: int) -> None:
    x, w = weights(k, n)
    whole = run(linear_invariant, x, w)
    for rows in (1, 2, 3, 7, 8, 31, 64, 257):
        for first in (0, 5, 101):
            np.testing.assert_array_equal(run(linear_invariant, x[first : first + rows], w), whole[first : first + rows])


@pytest.mark.parametrize(("k", "n"), SHAPES)
def test_few_rows_have_the_bits_they_have_in_a_pair(k: int, n: int) -> None:
    """Few: up to 4096 elements, and always a pair. A lone row is gemv's, equal to rounding."""
    x, w = weights(k, n)
    paired = np.concatenate([run(linear, x[i : i + 2], w) for i in range(0, 20, 2)])
    for rows in range(2, max(2, 4096 // k) + 1):
        for first in (0, 4):
            np.testing.assert_array_equal(run(linear, x[first : first + rows], w), paired[first : first + rows])
    alone = np.concatenate([run(linear, x[i : i + 1], w) for i in range(20)])
    np.testing.assert_allclose(alone, paired, atol=2e-6 * k**0.5 * np.abs(paired).max())


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 40), st.integers(1, 70), st.integers(1, 70), st.booleans(), st.integers(0, 2**32 - 1))
def test_both_are_the_product(rows: int, k: int, n: int, biased: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x, w = rng.standard_normal((rows, k)).astype(np.float32), rng.standard_normal((n, k)).astype(np.float32)
    bias = rng.standard_normal(n).astype(np.float32) if biased else None
    want = x.astype(np.float64) @ w.T.astype(np.float64) + (0 if bias is None else bias)
    for op in (linear, linear_invariant):
        np.testing.assert_allclose(run(op, x, pack_kn(w), bias), want, atol=1e-4)


def test_packing_is_a_contiguous_transpose_of_the_last_two_axes() -> None:
    w = np.arange(24).reshape(2, 3, 4)
    packed = pack_kn(w)
    assert packed.shape == (2, 4, 3)
    assert packed.flags.c_contiguous
    assert packed[1, 2, 0] == w[1, 0, 2]
