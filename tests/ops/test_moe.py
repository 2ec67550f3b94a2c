"""Router and experts against the plain definition."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkrt.ops.moe import experts_reference, moe_experts, router_topk


def route(logits: np.ndarray, k: int, renormalize: int = 1) -> tuple[np.ndarray, np.ndarray]:
    weights, ids = np.full((len(logits), k), np.nan, np.float32), np.full((len(logits), k), -1, np.int32)
    router_topk(weights, ids, logits, k, renormalize)
    return weights, ids


def run(x: np.ndarray, gate_up: np.ndarray, down: np.ndarray, ids: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """With checkpoint-shaped weights: packs them as the host takes them."""
    out = np.zeros_like(x)
    kn = [np.ascontiguousarray(w.swapaxes(1, 2)) for w in (gate_up, down)]
    moe_experts(out, x, *kn, ids, weights)
    return out


def experts(rng: np.random.Generator, count: int, hidden: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    return rng.standard_normal((count, 2 * width, hidden), np.float32), rng.standard_normal((count, hidden, width), np.float32)


def test_softmax_runs_over_all_experts_and_is_renormalized_only_on_request() -> None:
    logits = np.log(np.array([[0.1, 0.4, 0.3, 0.2]], np.float32))
    weights, ids = route(logits, 2, renormalize=0)
    assert ids.tolist() == [[1, 2]]
    np.testing.assert_allclose(weights, [[0.4, 0.3]], rtol=1e-6)
    np.testing.assert_allclose(route(logits, 2)[0], [[4 / 7, 3 / 7]], rtol=1e-6)


def test_exact_ties_go_to_the_lowest_index() -> None:
    logits = np.zeros((3, 6), np.float32)
    logits[1, 4] = 1
    logits[2, [1, 3, 5]] = 2
    assert route(logits, 3)[1].tolist() == [[0, 1, 2], [4, 0, 1], [1, 3, 5]]


def test_router_survives_large_logits() -> None:
    weights, ids = route(np.array([[-3e4, 3e4, 2e4, 1e4]], np.float32), 2, renormalize=0)
    assert ids.tolist() == [[1, 2]]
    assert weights.tolist() == [[1, 0]]


@given(st.integers(0, 2**32), st.integers(0, 40), st.integers(1, 9), st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_experts_equal_the_dense_loop(seed: int, tokens: int, count: int, k: int) -> None:
    rng = np.random.default_rng(seed)
    k = min(k, count)
    gate_up, down = experts(rng, count, 20, 12)
    x = rng.standard_normal((tokens, 20), np.float32)
    weights, ids = route(rng.standard_normal((tokens, count), np.float32), k)
    want = experts_reference(
        *(a.astype(np.float64) for a in (np.zeros_like(x), x, gate_up, down)), ids, weights.astype(np.float64)
    )
    np.testing.assert_allclose(run(x, gate_up, down, ids, weights), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tokens", [1, 2, 17])
def test_a_token_does_not_see_its_neighbours(tokens: int) -> None:
    rng = np.random.default_rng(7)
    gate_up, down = experts(rng, 8, 64, 32)
    x = rng.standard_normal((tokens, 64), np.float32)
    weights, ids = route(rng.standard_normal((tokens, 8), np.float32), 2)
    together = run(x, gate_up, down, ids, weights)
    for t in range(tokens):
        alone = run(x[t : t + 1], gate_up, down, ids[t : t + 1], weights[t : t + 1])
        np.testing.assert_allclose(together[t], alone[0], rtol=1e-6, atol=1e-6 * abs(alone).max())


def test_a_sick_token_stays_alone() -> None:
    rng = np.random.default_rng(8)
    gate_up, down = experts(rng, 3, 16, 8)
    x = rng.standard_normal((4, 16), np.float32)
    x[2] = np.nan
    out = run(x, gate_up, down, np.array([[0], [1], [0], [2]], np.int32), np.ones((4, 1), np.float32))
    assert np.isfinite(out).all(1).tolist() == [True, True, False, True]
