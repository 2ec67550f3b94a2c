"""The sampler: what each parameter does, what a row may depend on, and that nothing in the logits can break it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkrt.ops import sampling_rules as sampling
from sparkrt.ops.sampling import greedy, logprobs, mark_prompt, sample
from sparkrt.ops.sampling_rules import philox4x32, uniform

NAN, INF = float("nan"), float("inf")


@dataclass
class Row:
    """One row's request; `draw_all` builds the operator's arguments."""

    logits: Any
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    seed: int = 1
    step: int = 0
    min_tokens: int = 0
    bias: dict[int, float] = field(default_factory=dict)
    stop: tuple[int, ...] = ()
    allowed: tuple[int, ...] | None = None
    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()


def draw_all(rows: list[Row], valid: int | None = None, slots: list[int] | None = None) -> np.ndarray:
    """Sample every row in one call; checks the feed and the counts on the way."""
    n, vocab = len(rows), len(rows[0].logits)
    where = np.array(slots or range(n), np.int32)
    logits = np.array([r.logits for r in rows], np.float32)
    f, i = np.zeros((n, sampling.PARAMS_F), np.float32), np.zeros((n, sampling.PARAMS_I), np.int32)
    counts = np.zeros((int(where.max()) + 2, vocab), np.int32)
    bits = np.zeros((n, -(-vocab // 32) * 32), np.uint8)
    for r, row in enumerate(rows):
        f[r, sampling.F_TEMPERATURE], f[r, sampling.F_TOP_P], f[r, sampling.F_MIN_P] = row.temperature, row.top_p, row.min_p
        f[r, sampling.F_REPETITION] = row.repetition
        f[r, sampling.F_PRESENCE], f[r, sampling.F_FREQUENCY] = row.presence, row.frequency
        i[r, sampling.I_TOP_K], i[r, sampling.I_STEP], i[r, sampling.I_MIN_TOKENS] = row.top_k, row.step, row.min_tokens
        i[r, sampling.I_SEED_LO : sampling.I_SEED_HI + 1] = np.array([row.seed], np.uint64).view(np.int32)
        i[r, sampling.I_ALLOWED_ROW] = -1 if row.allowed is None else r
        bits[r, list(row.allowed or ())] = 1
        ids = np.array(row.prompt, np.int32)
        mark_prompt(counts, where[r : r + 1], ids, np.array([0, len(ids)], np.int32), np.zeros(1, np.int32))
        np.add.at(counts[where[r]], list(row.output), 1)
    bias_ids = np.array([t for row in rows for t in row.bias] or [0], np.int32)
    bias_values = np.array([v for row in rows for v in row.bias.values()] or [0], np.float32)
    bias_indptr = np.cumsum([0, *(len(row.bias) for row in rows)]).astype(np.int32)
    stop_ids = np.array([t for row in rows for t in row.stop] or [0], np.int32)
    stop_indptr = np.cumsum([0, *(len(row.stop) for row in rows)]).astype(np.int32)
    allowed = np.packbits(bits, axis=1, bitorder="little").view(np.uint32)
    tokens, feed, before = np.full(n, -1, np.int32), np.full(len(counts), -7, np.int32), counts.copy()
    lists = (bias_indptr, bias_ids, bias_values, stop_indptr, stop_ids)
    with np.errstate(invalid="raise"):
        sample(tokens, feed, counts, logits, where, f, i, *lists, allowed, vocab if valid is None else valid)
    assert np.array_equal(feed[where], tokens)
    assert feed[-1] == -7
    before[where, tokens] += 1
    assert np.array_equal(counts, before)
    return tokens


def draw(row: Row, valid: int | None = None) -> int:
    return int(draw_all([row], valid)[0])


def support(row: Row, draws: int = 300) -> set[int]:
    """The tokens that come up."""
    rows = [Row(**{**vars(row), "seed": s}) for s in range(draws)]
    return set(draw_all(rows).tolist())


def random_logits(seed: int, vocab: int = 300) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(vocab).astype(np.float32) * 2


# --- the generator ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter: tuple[int, ...], key: tuple[int, ...], words: tuple[int, ...]) -> None:
    assert philox4x32(counter, key) == words  # type: ignore[arg-type]


def test_uniforms_fill_the_unit_interval() -> None:
    draws = np.array([uniform(seed, -1, step) for seed in range(20) for step in range(500)])
    assert ((draws >= 0) & (draws < 1)).all()
    assert len(set(draws.tolist())) == len(draws)
    observed = np.histogram(draws, 50, (0, 1))[0]
    assert chi_square(observed, np.full(50, len(draws) / 50)) < bound(49)


def chi_square(observed: np.ndarray, expected: np.ndarray) -> float:
    return float(((observed - expected) ** 2 / expected).sum())


def bound(freedom: int) -> float:
    """About the 1e-5 quantile of chi-square (Wilson–Hilferty)."""
    a = 2 / (9 * freedom)
    return float(freedom * (1 - a + 4.26 * a**0.5) ** 3)


# --- distributions ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_softmax(temperature: float) -> None:
    logits = np.array([0.0, 1, 2, 0.5, -1, 1.5, -INF, 0.25])
    rows = [Row(logits, temperature, seed=s % 50, step=s // 50) for s in range(5000)]
    p = np.exp(logits / temperature)
    possible = p > 0
    observed = np.bincount(draw_all(rows), minlength=len(p))
    assert observed[~possible].sum() == 0
    assert chi_square(observed[possible], (p / p.sum() * len(rows))[possible]) < bound(possible.sum() - 1)


def test_frequencies_within_filters() -> None:
    logits = np.log(np.array([0.05, 0.3, 0.02, 0.25, 0.2, 0.18]))
    rows = [Row(logits, top_k=5, top_p=0.8, min_p=0.1, seed=s) for s in range(5000)]
    observed = np.bincount(draw_all(rows), minlength=6)
    p = np.array([0, 0.3, 0, 0.25, 0.2, 0.18])  # .3 + .25 + .2 < .8 of .98: the token that crosses stays
    assert observed[p == 0].sum() == 0
    assert chi_square(observed[p > 0], (p / p.sum() * len(rows))[p > 0]) < bound(3)


def test_which_tokens_the_filters_keep() -> None:
    logits = np.log(np.array([0.1, 0.4, 0.3, 0.2]))
    assert support(Row(logits)) == {0, 1, 2, 3}
    assert support(Row(logits, top_k=2)) == {1, 2}
    assert support(Row(logits, top_k=9)) == {0, 1, 2, 3}
    assert support(Row(logits, top_p=0.6)) == {1, 2}
    assert support(Row(logits, top_p=0.71)) == {1, 2, 3}
    assert support(Row(logits, top_p=1e-6)) == {1}
    assert support(Row(logits, min_p=0.4)) == {1, 2, 3}
    assert support(Row(logits, top_k=3, top_p=0.75)) == {1, 2}  # of what top-k left: .4 and .3 are .78 of it
    assert support(Row(np.zeros(6), top_k=3)) == {0, 1, 2}  # the lowest ids among equals
    assert support(Row(np.zeros(6), top_p=0.5)) == {0, 1, 2}


# --- greedy -------------------------------------------------------------------------------------------------------------------
@given(st.integers(0, 2**32), st.booleans())
@settings(max_examples=30, deadline=None)
def test_top_k_1_and_temperature_0_and_greedy_agree(seed: int, ties: bool) -> None:
    logits = random_logits(seed)
    if ties:
        logits = np.round(logits)
    tokens, feed = np.empty(1, np.int32), np.zeros(3, np.int32)
    greedy(tokens, feed, logits[None], np.array([2], np.int32), 290)
    assert tokens[0] == feed[2] == logits[:290].argmax()
    assert draw(Row(logits, top_k=1, seed=seed), 290) == tokens[0]
    assert draw(Row(logits, temperature=0, top_p=0.3, min_p=0.1), 290) == tokens[0]
    if not ties:
        assert draw(Row(logits, temperature=1e-6), 290) == tokens[0]


# --- what a draw depends on ---------------------------------------------------------------------------------------------------
def test_a_seed_gives_its_tokens_whatever_the_neighbours_and_the_slot() -> None:
    """A09, on uniform logits, where any slip shows."""
    flat = np.zeros(512)
    alone = [draw(Row(flat, seed=42, step=s)) for s in range(20)]
    assert len(set(alone)) > 15
    for s, token in enumerate(alone):
        others = [Row(random_logits(o, 512), seed=o, step=o, top_k=o, top_p=0.9, bias={3: 1.0}) for o in range(7)]
        for place in (0, 3, 7):
            rows = [*others[:place], Row(flat, seed=42, step=s), *others[place:]]
            slots = np.random.default_rng(s).permutation(9)[:8].tolist()
            assert draw_all(rows, slots=slots)[place] == token
    twins = draw_all([Row(flat, seed=42, step=5), Row(flat, seed=42, step=5)])
    assert twins[0] == twins[1] == alone[5]


def test_different_seeds_differ_in_every_word() -> None:
    flat = np.zeros(4096)
    tokens = [draw(Row(flat, seed=s)) for s in (0, 1, 1 << 31, 1 << 32, 1 << 63, (1 << 64) - 1)]
    assert len(set(tokens)) == len(tokens)


# --- edits --------------------------------------------------------------------------------------------------------------------
def test_a_bias_of_100_forces_and_forbids() -> None:
    logits = np.full(64, -11.3)
    logits[7] = 0
    for temperature in (0.0, 1.0):
        assert draw(Row(logits, temperature, bias={7: -100.0})) != 7
        assert draw(Row(logits, temperature, bias={9: 100.0})) == 9
        assert draw(Row(logits, temperature, bias={9: 100.0, 7: 0.5})) == 9
    assert support(Row(logits, bias={7: -100.0}, top_k=3)) == {0, 1, 2}


def test_stop_tokens_wait_for_min_tokens() -> None:
    logits = [0.0, 5, 1, 4]
    for step in range(3):
        assert draw(Row(logits, temperature=0, stop=(1, 3), step=step, min_tokens=3)) == 2
    assert draw(Row(logits, temperature=0, stop=(1, 3), step=3, min_tokens=3)) == 1


def test_only_allowed_tokens() -> None:
    logits = random_logits(1, 100)
    assert support(Row(logits, temperature=5, allowed=(3, 31, 32, 64, 99))) == {3, 31, 32, 64, 99}
    assert draw(Row(logits, allowed=(99, 3)), valid=99) == 3


def test_where_nothing_is_left_the_best_raw_logit_is_taken() -> None:
    logits = [1.0, 3, 2]
    for temperature in (0.0, 1.0):
        assert draw(Row(logits, temperature, allowed=())) == 1
        assert draw(Row(logits, temperature, allowed=(2,), stop=(2,), min_tokens=1, bias={0: 1.0}, repetition=1.3)) == 1


def test_penalties() -> None:
    """Repetition sees prompt and output; frequency and presence the output only."""
    logits = [2.0, 1.5, -1.0, -1.5]
    greedy_row: dict[str, Any] = {"temperature": 0}
    assert draw(Row(logits, **greedy_row, repetition=1.5, prompt=(0,))) == 1
    assert draw(Row(logits, **greedy_row, repetition=1.5, output=(0,))) == 1
    assert draw(Row([-1.0, -1.2], **greedy_row, repetition=1.5, prompt=(0,))) == 1  # a negative logit is multiplied
    assert draw(Row(logits, **greedy_row, repetition=1.5, prompt=(0, 1))) == 0
    assert draw(Row(logits, **greedy_row, presence=1.0, prompt=(0,))) == 0
    assert draw(Row(logits, **greedy_row, presence=1.0, output=(0, 0, 0))) == 1
    assert draw(Row(logits, **greedy_row, frequency=0.2, output=(0, 0))) == 0
    assert draw(Row(logits, **greedy_row, frequency=0.2, output=(0, 0, 0))) == 1
    assert draw(Row(logits, **greedy_row, presence=-9.0, output=(3,))) == 3


def test_a_new_prompt_clears_its_slots_counts() -> None:
    counts = np.full((2, 8), 5, np.int32)
    mark_prompt(
        counts, np.array([1], np.int32), np.array([2, 2, 7], np.int32), np.array([0, 3], np.int32), np.array([0], np.int32)
    )
    assert counts[0].tolist() == [5] * 8
    assert np.flatnonzero(counts[1]).tolist() == [2, 7]
    mark_prompt(counts, np.array([1], np.int32), np.array([3], np.int32), np.array([0, 1], np.int32), np.array([64], np.int32))
    assert (counts[1] == sampling.PROMPT_BIT).nonzero()[0].tolist() == [2, 3, 7]


def test_ids_beyond_the_vocabulary_are_never_sampled() -> None:
    logits = np.zeros(40)
    logits[30:] = 50
    assert max(support(Row(logits, top_k=0))) > 29  # they would be
    rows = [
        Row(logits, seed=s, temperature=t, top_k=k, top_p=p) for s in range(30) for t, k, p in ((1, 0, 1), (0, 0, 1), (2, 5, 0.9))
    ]
    assert draw_all(rows, valid=30).max() < 30


# --- logits that are no numbers -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("temperature", [0.0, 1.0, 1e-30, 1e30])
def test_nan_and_infinities(temperature: float) -> None:
    assert draw(Row([NAN, 1.0, -INF], temperature)) == 1
    assert draw(Row([-INF, INF, 3.0, NAN], temperature)) == 1
    assert draw(Row([-INF, -INF, -INF], temperature)) == 0
    assert draw(Row([NAN, NAN], temperature)) == 0
    assert draw(Row([-INF, 2.0, -INF], temperature, top_k=2, top_p=0.9, min_p=0.1, repetition=1.2, prompt=(0, 1))) == 1
    tokens, feed = np.empty(2, np.int32), np.zeros(2, np.int32)
    greedy(tokens, feed, np.array([[NAN, 1, 2], [-INF, NAN, -INF]], np.float32), np.array([0, 1], np.int32), 3)
    assert tokens.tolist() == [2, 0]


# --- log-probabilities --------------------------------------------------------------------------------------------------------
def score(logits: Any, tokens: list[int], k: int, valid: int | None = None) -> tuple[np.ndarray, ...]:
    logits = np.array(logits, np.float32)
    n = len(tokens)
    out = np.empty(n, np.float32), np.empty(n, np.int32), np.empty((n, k), np.int32), np.empty((n, k), np.float32)
    with np.errstate(invalid="raise"):
        logprobs(*out, logits, np.array(tokens, np.int32), logits.shape[1] if valid is None else valid)
    return out


def test_logprobs_are_the_log_softmax_of_the_raw_logits() -> None:
    logits = np.stack([random_logits(s) for s in range(4)])
    exact = logits.astype(np.float64)
    exact -= np.log(np.exp(exact).sum(1, keepdims=True))  # padded ids have weight, but are never named
    exact = exact[:, :280]
    chosen, rank, ids, top = score(logits, [0, 5, 279, 7], 280, valid=280)
    np.testing.assert_allclose(chosen, exact[range(4), [0, 5, 279, 7]], atol=2e-6)
    np.testing.assert_allclose(np.exp(top.astype(np.float64)).sum(1), np.exp(exact).sum(1), atol=1e-6)
    np.testing.assert_allclose(top, np.take_along_axis(exact, ids, 1), atol=2e-6)
    assert (np.diff(top) <= 0).all()
    assert ids[range(4), rank - 1].tolist() == [0, 5, 279, 7]


def test_the_rig_r1() -> None:
    """Known values: V = 512, the scripted logit is alpha·sqrt(512), all others 0."""
    logits = np.zeros((1, 512))
    logits[0, 9] = 0.5 * 512**0.5
    chosen, rank, ids, _ = score(np.concatenate([logits, logits]), [9, 10], 3)
    np.testing.assert_allclose(chosen, [-0.006217, -11.319926], atol=1e-5)
    assert rank.tolist() == [1, 11]
    assert ids.tolist() == [[9, 0, 1]] * 2  # equals by id


def test_impossible_tokens_have_minus_infinity_and_nothing_is_nan() -> None:
    chosen, rank, ids, top = score([[0.0, -INF, 0.0], [-INF, -INF, -INF], [NAN, 0, -INF], [INF, 0, 0]], [1, 1, 1, 0], 2)
    np.testing.assert_allclose(chosen, [-INF, -INF, 0, 0])
    assert rank.tolist() == [3, 2, 1, 1]
    np.testing.assert_allclose(top, [[np.log(0.5)] * 2, [-INF, -INF], [0, -INF], [0, -INF]], rtol=1e-6)
    assert ids.tolist() == [[0, 2], [0, 1], [1, 0], [0, 1]]


def test_ids_beyond_the_vocabulary_are_impossible_and_harmless() -> None:
    """A padded id may be in a prompt that is scored, or in a request's stop ids and biases."""
    chosen, rank, *_ = score([[0.0, 1, 9]], [2], 1, valid=2)
    assert chosen.tolist() == [-INF]
    assert rank.tolist() == [3]
    assert draw(Row([0.0, 1, 9], temperature=0, stop=(2, 1), min_tokens=1, bias={2: 5.0, 0: 1.0}), valid=2) == 0


def test_large_logits_keep_their_differences() -> None:
    chosen, *_ = score([[1e4, 1e4 - 1, -1e4]], [1], 0)
    np.testing.assert_allclose(chosen, [-1.3132617], rtol=1e-6)
