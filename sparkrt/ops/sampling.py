"""Sampling operators: SAMPLE (everything a request may ask for), GREEDY (its fast path), MARK_PROMPT and LOGPROBS.

What SAMPLE computes and in which order is spelled out in `sampling_reference`; the parameters' columns are in
`sampling_layout`. Rows are chosen one by one and a draw uses its own seed and step only: neighbours change nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from sparkrt.ops.logprobs import kth_largest, largest, logprobs, logprobs_reference, settled
from sparkrt.ops.operator import Case, Operator, Rng
from sparkrt.ops.philox import uniform
from sparkrt.ops.sampling_layout import (
    F_FREQUENCY,
    F_MIN_P,
    F_PRESENCE,
    F_REPETITION,
    F_TEMPERATURE,
    F_TOP_P,
    I_ALLOWED_ROW,
    I_MIN_TOKENS,
    I_SEED_HI,
    I_SEED_LO,
    I_STEP,
    I_TOP_K,
    PARAMS_F,
    PARAMS_I,
    PROMPT_BIT,
)
from sparkrt.ops.sampling_reference import greedy_reference, mark_prompt_reference, sample_reference

__all__ = [
    "F_FREQUENCY",
    "F_MIN_P",
    "F_PRESENCE",
    "F_REPETITION",
    "F_TEMPERATURE",
    "F_TOP_P",
    "GREEDY",
    "I_ALLOWED_ROW",
    "I_MIN_TOKENS",
    "I_SEED_HI",
    "I_SEED_LO",
    "I_STEP",
    "I_TOP_K",
    "LOGPROBS",
    "MARK_PROMPT",
    "OPERATORS",
    "PARAMS_F",
    "PARAMS_I",
    "PROMPT_BIT",
    "SAMPLE",
]


def sample(
    tokens: np.ndarray,
    feed: np.ndarray,
    counts: np.ndarray,
    logits: np.ndarray,
    slots: np.ndarray,
    params_f: np.ndarray,
    params_i: np.ndarray,
    bias_indptr: np.ndarray,
    bias_ids: np.ndarray,
    bias_values: np.ndarray,
    stop_indptr: np.ndarray,
    stop_ids: np.ndarray,
    allowed_bits: np.ndarray | None,
    valid_vocab: int,
) -> None:
    """tokens int32 [R], feed int32 [slots] and counts int32 [slots, V] in/out, logits float32 [R, V], slots int32 [R],
    params_f float32 [R, PARAMS_F], params_i int32 [R, PARAMS_I], bias and stop lists by row (indptr [R+1]; the bias ids of a
    row are distinct; ids from valid_vocab on do nothing), allowed_bits uint32 [A, ceil(V/32)], lowest bit first, or None.
    """
    columns = zip(slots.tolist(), params_f.tolist(), params_i.tolist(), strict=True)
    for r, (slot, f, i) in enumerate(columns):
        raw = row = logits[r, :valid_vocab]
        bias = slice(bias_indptr[r], bias_indptr[r + 1])
        banned = stop_ids[stop_indptr[r] : stop_indptr[r + 1]] if i[I_STEP] < i[I_MIN_TOKENS] else stop_ids[:0]
        penalized = f[F_REPETITION] != 1 or f[F_PRESENCE] != 0 or f[F_FREQUENCY] != 0
        allowed = allowed_bits[i[I_ALLOWED_ROW]] if allowed_bits is not None and i[I_ALLOWED_ROW] >= 0 else None
        if allowed is not None or len(banned) or bias.stop > bias.start or penalized:
            row = raw.copy()
            if allowed is not None:
                bits = np.unpackbits(allowed.view(np.uint8), count=valid_vocab, bitorder="little")
                np.copyto(row, -np.inf, where=bits == 0)
            row[banned[banned < valid_vocab]] = -np.inf
            real = bias_ids[bias] < valid_vocab
            row[bias_ids[bias][real]] += bias_values[bias][real]
            if penalized:
                _penalize(row, counts[slot, :valid_vocab], f[F_REPETITION], f[F_PRESENCE], f[F_FREQUENCY])
        tokens[r] = _choose(row, raw, f, i)
    feed[slots] = tokens
    counts[slots, tokens] += 1


def _penalize(row: np.ndarray, counts: np.ndarray, repetition: float, presence: float, frequency: float) -> None:
    seen = np.flatnonzero(counts)
    z = row[seen]
    z = np.where(z > 0, z / repetition, z * repetition)
    generated = counts[seen] & (PROMPT_BIT - 1)
    row[seen] = z - (frequency * generated + presence * (generated > 0))


def _choose(row: np.ndarray, raw: np.ndarray, f: list[float], i: list[int]) -> int:
    """The token of one row of edited logits; `raw` decides where they leave nothing. f and i are the row's parameters."""
    temperature, top_k, top_p, min_p = f[F_TEMPERATURE], i[I_TOP_K], f[F_TOP_P], f[F_MIN_P]
    row, top = settled(row)
    if top == -np.inf:
        return int(settled(raw)[0].argmax())
    if temperature == 0:
        return int(row.argmax())
    ids = None  # of what is in `row`, ascending; None: all
    if 0 < top_k < len(row):
        ids = largest(row, top_k, kth_largest(row, top_k))
        row = row[ids]
    weights = row.astype(np.float64)  # so that a seed's tokens do not hang on the last bit of some float32 exp
    weights -= top
    weights /= temperature
    np.exp(weights, out=weights)
    if min_p > 0:
        weights[weights < min_p] = 0
    if top_p < 1:
        total = float(weights.sum())
        # Tokens below this cannot hold more than 1 - top_p together, so none of them crosses the line.
        some = np.flatnonzero(weights > (1 - top_p) * total / len(weights))
        kept = some[_nucleus(weights[some], top_p * total)]
        weights, ids = weights[kept], kept if ids is None else ids[kept]
    cumulative = np.cumsum(weights)
    target = uniform(i[I_SEED_LO], i[I_SEED_HI], i[I_STEP]) * cumulative[-1]
    at = int(cumulative.searchsorted(target, side="right"))
    at = min(at, int(cumulative.searchsorted(cumulative[-1])))  # rounding must not lead past the last that has a chance
    return at if ids is None else int(ids[at])


def _nucleus(weights: np.ndarray, mass: float) -> np.ndarray:
    """The fewest largest weights that reach `mass`, lowest index first among equals; indices ascending."""
    falling = np.sort(weights)[::-1]
    n = int(np.cumsum(falling).searchsorted(mass)) + 1
    return largest(weights, n, float(falling[n - 1])) if n < len(weights) else np.arange(len(weights))


def greedy(tokens: np.ndarray, feed: np.ndarray, logits: np.ndarray, slots: np.ndarray, valid_vocab: int) -> None:
    """tokens int32 [R], feed int32 [slots] in/out, logits float32 [R, V], slots int32 [R]. The lowest index among equals."""
    rows = logits[:, :valid_vocab]
    tokens[:] = rows.argmax(1)
    best = rows[np.arange(len(tokens)), tokens]
    for r in np.flatnonzero(best != best):  # argmax stops at a NaN, which counts as -inf
        tokens[r] = settled(rows[r])[0].argmax()
    feed[slots] = tokens


def mark_prompt(counts: np.ndarray, slots: np.ndarray, ids: np.ndarray, cu: np.ndarray, starts: np.ndarray) -> None:
    """counts int32 [slots, V] in/out, slots/starts int32 [S], ids int32 [T], cu int32 [S+1]: prompt tokens of each slice.

    A slice at position 0 begins a new sequence: its slot's row is cleared first.
    """
    bounds = cu.tolist()
    for slot, start, lo, hi in zip(slots.tolist(), starts.tolist(), bounds[:-1], bounds[1:], strict=True):
        row = counts[slot]
        if start == 0:
            row[:] = 0
        row[ids[lo:hi]] |= PROMPT_BIT


def _logits(rng: Rng, rows: int, vocab: int) -> np.ndarray:
    """Multiples of 1/64, and edits below in powers of two: float32 and float64 then agree exactly, ties included."""
    return np.round(rng.standard_normal((rows, vocab), np.float32) * np.float32(160)) / np.float32(64)


def _sample_case(
    label: str, rows: int, vocab: int = 200, valid: int = 190, change: Callable[[Rng, list[Any]], None] | None = None
) -> Case:
    """Rows at temperature 0.9 with random seeds; `change` edits the argument list."""

    def make(rng: Rng) -> list[Any]:
        params_f = np.zeros((rows, PARAMS_F), np.float32)
        params_f[:, [F_TEMPERATURE, F_TOP_P, F_REPETITION]] = 0.9, 1, 1
        params_i = np.zeros((rows, PARAMS_I), np.int32)
        params_i[:, I_SEED_LO : I_SEED_HI + 1] = rng.integers(-(1 << 31), 1 << 31, (rows, 2))
        params_i[:, I_STEP] = rng.integers(0, 1000, rows)
        params_i[:, I_ALLOWED_ROW] = -1
        counts = rng.integers(0, 4, (rows + 1, vocab)).astype(np.int32) * (rng.random((rows + 1, vocab)) < 0.3)
        counts |= PROMPT_BIT * (rng.random((rows + 1, vocab)) < 0.2)
        none = [np.zeros(rows + 1, np.int32), np.zeros(1, np.int32)]
        args: list[Any] = [
            np.empty(rows, np.int32),
            np.zeros(rows + 1, np.int32),
            counts.astype(np.int32),
            _logits(rng, rows, vocab),
        ]
        args += [rng.permutation(rows + 1)[:rows].astype(np.int32), params_f, params_i]
        args += [none[0], none[1], np.zeros(1, np.float32), none[0].copy(), none[1].copy(), None, valid]
        if change:
            change(rng, args)
        return args

    return Case(label, make, (0, 1, 2), bytes=4 * rows * vocab, flops=4 * rows * vocab)


def _filters(top_k: int = 0, top_p: float = 1, min_p: float = 0) -> Callable[[Rng, list[Any]], None]:
    def change(rng: Rng, args: list[Any]) -> None:
        args[6][:, I_TOP_K] = top_k
        args[5][:, [F_TOP_P, F_MIN_P]] = top_p, min_p

    return change


def _penalties(rng: Rng, args: list[Any]) -> None:
    args[5][:, F_REPETITION] = rng.choice([0.5, 1, 2], len(args[0]))
    args[5][:, [F_PRESENCE, F_FREQUENCY]] = rng.integers(-4, 8, (len(args[0]), 2)) / 4
    args[5][::2, F_TEMPERATURE] = 0


def _restrictions(rng: Rng, args: list[Any]) -> None:
    """Every row has biases and stop ids, and may still ban those; every second row may use half of the ids, the first none."""
    rows, vocab, valid = len(args[0]), args[3].shape[1], args[13]
    per_row = np.arange(0, 5 * rows + 1, 5, dtype=np.int32)
    picks = [np.concatenate([rng.permutation(valid)[:5] for _ in range(rows)]).astype(np.int32) for _ in range(2)]
    args[7:12] = [per_row, picks[0], rng.integers(-64, 64, 5 * rows).astype(np.float32) / 8, per_row, picks[1]]
    args[6][:, I_MIN_TOKENS] = args[6][:, I_STEP] + rng.integers(0, 2, rows)
    args[6][::2, I_ALLOWED_ROW] = np.arange(0, rows, 2) // 2
    args[12] = rng.integers(0, 1 << 32, (rows, -(-vocab // 32)), dtype=np.uint32)
    args[12][0] = 0


def _greedy_case(label: str, rows: int, vocab: int, valid: int) -> Case:
    def make(rng: Rng) -> list[Any]:
        logits = _logits(rng, rows, vocab)
        slots = rng.permutation(rows + 1)[:rows].astype(np.int32)
        feed = np.zeros(rows + 1, np.int32)
        return [np.empty(rows, np.int32), feed, logits, slots, valid]

    return Case(label, make, (0, 1), bytes=4 * rows * vocab, flops=rows * vocab)


def _mark_case(label: str, lengths: tuple[int, ...], starts: tuple[int, ...], vocab: int = 64) -> Case:
    def make(rng: Rng) -> list[Any]:
        n = len(lengths)
        counts = rng.integers(0, 3, (n + 1, vocab)).astype(np.int32)
        slots = rng.permutation(n + 1)[:n].astype(np.int32)
        ids = rng.integers(0, vocab, sum(lengths)).astype(np.int32)
        return [counts, slots, ids, np.cumsum((0, *lengths)).astype(np.int32), np.array(starts, np.int32)]

    return Case(label, make, bytes=8 * sum(lengths))


def _logprobs_case(label: str, rows: int, vocab: int, valid: int, k: int) -> Case:
    def make(rng: Rng) -> list[Any]:
        logits = _logits(rng, rows, vocab)
        outputs = [
            np.empty(rows, np.float32),
            np.empty(rows, np.int32),
            np.empty((rows, k), np.int32),
            np.empty((rows, k), np.float32),
        ]
        return [*outputs, logits, rng.integers(0, valid, rows).astype(np.int32), valid]

    return Case(label, make, (0, 1, 2, 3), bytes=4 * rows * vocab, flops=4 * rows * vocab)


SAMPLE = Operator(
    name="sample",
    doc="""The next token of each row under its own parameters; see sampling_reference for the order of things.

    tokens i32 [R]; feed i32 [slots], counts i32 [slots, V] in/out ← logits f32 [R, V], slots i32 [R], params_f f32 [R, 8],
    params_i i32 [R, 8], bias_indptr i32 [R+1], bias_ids i32, bias_values f32, stop_indptr i32 [R+1], stop_ids i32,
    allowed_bits u32 [A, ceil(V/32)] or none, valid_vocab
    """,
    reference=sample_reference,
    host=sample,
    cuda="spark_sample",
    tolerance=None,
    parity=(
        _sample_case("one row", 1),
        _sample_case("temperature", 40),
        _sample_case("top-k", 40, change=_filters(top_k=7)),
        _sample_case("top-p", 40, change=_filters(top_p=0.8)),
        _sample_case("all filters", 40, change=_filters(top_k=20, top_p=0.9, min_p=0.02)),
        _sample_case("penalties", 40, change=_penalties),
        _sample_case("restrictions", 40, change=_restrictions),
    ),
    bench=(
        _sample_case("tiny r1", 1, 6144, 6144),
        _sample_case("tiny r16", 16, 6144, 6144),
        _sample_case("tiny r16 top-k 20 top-p 0.8", 16, 6144, 6144, change=_filters(top_k=20, top_p=0.8)),
        _sample_case("35b r16 top-p 0.95", 16, 248320, 248077, change=_filters(top_p=0.95)),
    ),
)
GREEDY = Operator(
    name="greedy",
    doc="""The best logit of each row, the lowest index among equals.

    tokens i32 [R]; feed i32 [slots] in/out ← logits f32 [R, V], slots i32 [R], valid_vocab
    """,
    reference=greedy_reference,
    host=greedy,
    cuda="spark_greedy",
    tolerance=None,
    parity=(_greedy_case("one row", 1, 64, 64), _greedy_case("padded vocabulary, ties", 33, 200, 190)),
    bench=(
        _greedy_case("tiny r1", 1, 6144, 6144),
        _greedy_case("tiny r16", 16, 6144, 6144),
        _greedy_case("35b r16", 16, 248320, 248077),
    ),
)
MARK_PROMPT = Operator(
    name="mark_prompt",
    doc="""Notes which tokens a prompt has, for the repetition penalty.

    counts i32 [slots, V] in/out ← slots i32 [S], ids i32 [T], cu i32 [S+1], starts i32 [S]
    """,
    reference=mark_prompt_reference,
    host=mark_prompt,
    cuda="spark_mark_prompt",
    tolerance=None,
    parity=(_mark_case("new, continued, empty", (9, 70, 0), (0, 64, 0)),),
    bench=(_mark_case("t512", (512,), (0,), 6144),),
)
LOGPROBS = Operator(
    name="logprobs",
    doc="""Log-softmax of the raw logits at chosen tokens, their rank, and the k best.

    chosen f32 [R], rank i32 [R], top_ids i32 [R, K], top_logprobs f32 [R, K] ← logits f32 [R, V], tokens i32 [R], valid_vocab
    """,
    reference=logprobs_reference,
    host=logprobs,
    cuda="spark_logprobs",
    parity=(
        _logprobs_case("one row", 1, 64, 64, 5),
        _logprobs_case("padded vocabulary, ties", 33, 200, 190, 20),
        _logprobs_case("no alternatives", 4, 64, 60, 0),
    ),
    bench=(_logprobs_case("tiny r16 k20", 16, 6144, 6144, 20),),
)
OPERATORS = (SAMPLE, GREEDY, MARK_PROMPT, LOGPROBS)
