"""Paged attention as a whole: chunks, decode, merging and company must not change what a query sees."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkrt.ops.attention import MERGE_ATTENTION, PAGED_ATTENTION_DECODE, PAGED_ATTENTION_PREFILL, attention_ref
from sparkrt.ops.attention_host import CAUSAL, FULL

SEEDS = st.integers(0, 2**32 - 1)
SHAPES = st.sampled_from([(4, 2, 64), (16, 1, 64), (3, 3, 64), (8, 2, 128), (2, 1, 256)])
PAGES = st.sampled_from([16, 32, 64])


@dataclass
class Sequence:
    """A sequence in a paged cache of shuffled pages; `q`, `k`, `v` [L, heads, D] are the plain arrays it was made of."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    pools: tuple[np.ndarray, np.ndarray]
    tables: np.ndarray

    @staticmethod
    def random(seed: int, length: int, shape: tuple[int, int, int], page: int = 16) -> Sequence:
        rng = np.random.default_rng(seed)
        heads, kv_heads, dim = shape
        q = rng.standard_normal((length, heads, dim), dtype=np.float32)
        k, v = rng.standard_normal((2, length, kv_heads, dim), dtype=np.float32)
        count = -(-length // page)
        table = rng.permutation(count + 1)[:count].astype(np.int32)
        pools = np.full((2, count + 1, kv_heads, page, dim), np.nan, np.float32)
        for pool, values in zip(pools, (k, v), strict=True):
            for t in range(length):
                pool[table[t // page], :, t % page] = values[t]
        return Sequence(q, k, v, (pools[0], pools[1]), table[None])

    @property
    def scale(self) -> float:
        return float(self.q.shape[2] ** -0.5)

    def prefill(self, first: int, last: int, window: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Queries [first, last) with `last` tokens in the cache."""
        out = np.full_like(self.q[first:last], np.nan)
        lse = np.full(out.shape[:2], np.nan, np.float32)
        numbers = (np.array([0, last - first], np.int32), np.array([last], np.int32), self.scale, CAUSAL, window, None)
        PAGED_ATTENTION_PREFILL.host(out, lse, self.q[first:last], *self.pools, self.tables, np.zeros(1, np.int32), *numbers)
        return out, lse

    def decode(self, length: int) -> np.ndarray:
        """The query at position length - 1."""
        q = self.q[length - 1 : length]
        out = np.full_like(q, np.nan)
        PAGED_ATTENTION_DECODE.host(
            out, q, *self.pools, self.tables, np.zeros(1, np.int32), np.array([length], np.int32), self.scale
        )
        return out[0]


@settings(max_examples=40, deadline=None)
@given(SEEDS, SHAPES, PAGES, st.integers(1, 150), st.data())
def test_any_split_into_chunks_is_the_whole_prompt(
    seed: int, shape: tuple[int, int, int], page: int, length: int, data: st.DataObject
) -> None:
    s = Sequence.random(seed, length, shape, page)
    window = data.draw(st.sampled_from([0, 1, 20]))
    cuts = sorted({0, length, *data.draw(st.lists(st.integers(0, length), max_size=5))})
    whole, whole_lse = s.prefill(0, length, window)
    parts = [s.prefill(a, b, window) for a, b in pairwise(cuts)]
    np.testing.assert_allclose(
        np.concatenate([p[0] for p in parts]), whole, atol=1e-5
    )  # the norm of float32 parity; single elements part by 2.3e-6
    np.testing.assert_allclose(np.concatenate([p[1] for p in parts]), whole_lse, atol=5e-6)


@settings(max_examples=40, deadline=None)
@given(SEEDS, SHAPES, PAGES, st.integers(1, 150))
def test_a_decode_row_is_the_last_row_of_a_prefill(seed: int, shape: tuple[int, int, int], page: int, length: int) -> None:
    s = Sequence.random(seed, length, shape, page)
    np.testing.assert_allclose(s.decode(length), s.prefill(0, length)[0][-1], atol=2e-6)


def test_many_tiles_of_queries_and_keys_are_one_softmax() -> None:
    s = Sequence.random(7, 1300, (2, 1, 64), 64)
    visible = np.tri(1300, dtype=bool)
    want, want_lse = attention_ref(*(a.astype(np.float64) for a in (s.q, s.k, s.v)), s.scale, visible)
    out, lse = s.prefill(0, 1300)
    np.testing.assert_allclose(out, want, atol=2e-6)
    np.testing.assert_allclose(lse, want_lse, atol=5e-6)


@settings(max_examples=40, deadline=None)
@given(SEEDS, st.integers(1, 40), st.integers(0, 30), st.integers(0, 30))
def test_two_halves_merge_into_the_whole(seed: int, rows: int, left: int, right: int) -> None:
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((n, 4, 64)) for n in (rows, left + right, left + right))
    everything = np.ones((rows, left + right), bool)
    whole, whole_lse = attention_ref(q, k, v, 0.125, everything)
    a = attention_ref(q, k[:left], v[:left], 0.125, everything[:, :left])
    b = attention_ref(q, k[left:], v[left:], 0.125, everything[:, left:])
    out, lse = np.empty_like(whole), np.empty_like(whole_lse)
    MERGE_ATTENTION.host(out, lse, *a, *b)
    np.testing.assert_allclose(out, whole, atol=1e-12)
    np.testing.assert_allclose(lse, whole_lse, atol=1e-12)
    MERGE_ATTENTION.host(*a, *a, *b)  # in place
    np.testing.assert_array_equal(a[0], out)
    np.testing.assert_array_equal(a[1], lse)


@settings(max_examples=25, deadline=None)
@given(SEEDS, st.lists(st.integers(0, 140), min_size=1, max_size=9), st.booleans())
def test_a_decode_row_has_the_same_bits_in_any_company(seed: int, lengths: list[int], run: bool) -> None:
    rng = np.random.default_rng(seed)
    page, counts = 32, [-(-n // 32) for n in lengths]
    total = sum(counts) + 1
    pools = rng.standard_normal((2, total, 2, page, 64), dtype=np.float32)
    order = np.arange(total) if run else rng.permutation(total)
    tables = np.zeros((len(lengths), 5), np.int32)
    for row, (at, count) in enumerate(zip(np.cumsum([0, *counts]), counts, strict=False)):
        tables[row, :count] = order[at : at + count]
    q = rng.standard_normal((len(lengths), 4, 64), dtype=np.float32)
    slots, kv_len = np.arange(len(lengths), dtype=np.int32), np.array(lengths, np.int32)
    together = np.full_like(q, np.nan)
    PAGED_ATTENTION_DECODE.host(together, q, *pools, tables, slots, kv_len, 0.125)
    for i in range(len(lengths)):
        alone = np.full_like(q[i : i + 1], np.nan)
        PAGED_ATTENTION_DECODE.host(alone, q[i : i + 1], *pools, tables, slots[i : i + 1], kv_len[i : i + 1], 0.125)
        np.testing.assert_array_equal(alone[0], together[i])


def test_where_pages_lie_does_not_change_a_bit() -> None:
    """A run is read in place, scattered pages are gathered: one arithmetic for both."""
    s = Sequence.random(3, 190, (8, 2, 64), 32)
    in_order = np.arange(6, dtype=np.int32)[None]
    moved = Sequence(s.q, s.k, s.v, tuple(p[s.tables[0]] for p in s.pools), in_order)  # type: ignore[arg-type]
    np.testing.assert_array_equal(moved.decode(190), s.decode(190))
    np.testing.assert_array_equal(moved.prefill(100, 190)[0], s.prefill(100, 190)[0])


def test_a_single_visible_key_returns_its_value() -> None:
    s = Sequence.random(1, 40, (4, 2, 64))
    out, _ = s.prefill(0, 40, window=1)
    np.testing.assert_allclose(out, np.repeat(s.v, 2, axis=1), atol=1e-6)


def test_large_scores_do_not_overflow() -> None:
    s = Sequence.random(5, 70, (2, 2, 64))
    s.q *= 1000
    out, lse = s.prefill(0, 70)
    assert np.isfinite(out).all()
    assert np.isfinite(lse).all()
    np.testing.assert_allclose(s.decode(70), out[-1], atol=1e-5)


@pytest.mark.parametrize("mask", [CAUSAL, FULL])
def test_an_empty_call_does_nothing(mask: int) -> None:
    nothing = np.empty((0, 2, 64), np.float32)
    pools = np.empty((2, 1, 2, 16, 64), np.float32)
    empty = np.zeros(0, np.int32)
    table = np.zeros((1, 1), np.int32)
    PAGED_ATTENTION_PREFILL.host(nothing, None, nothing, *pools, table, empty, np.zeros(1, np.int32), empty, 1.0, mask, 0, None)
    PAGED_ATTENTION_DECODE.host(nothing, nothing, *pools, table, empty, empty, 1.0)
