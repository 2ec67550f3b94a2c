"""Sampling operators: SAMPLE (everything a request may ask for), GREEDY (its fast path), MARK_PROMPT and LOGPROBS.

What they compute is spelled out in `sampling_rules`, as are the parameters' columns. Rows are chosen one by one and a draw uses
its own seed and step only: neighbours change nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sparkrt.ops import sampling_rules as rules
from sparkrt.ops.operator import Array, Operator, Rng, Sizes
from sparkrt.ops.sampling_rules import PROMPT_BIT


def settled(row: Array) -> tuple[Array, float]:
    """A row of logits that softmax can take, and its maximum: NaN counts as -inf, and beside +inf nothing else has a chance.

    The row itself comes back where it is fine, as it nearly always is.
    """
    top = float(row[row.argmax()])  # argmax stops at a NaN
    if top != top:
        row = np.where(np.isnan(row), -np.inf, row)
        top = float(row.max())
    if top == np.inf:
        row, top = np.where(row == np.inf, 0.0, -np.inf), 0.0
    return row, top


def largest(row: Array, n: int, threshold: float) -> Array:
    """Indices, ascending, of the n largest elements, the lowest indices among equals; `threshold` is the n-th largest value."""
    found = np.flatnonzero(row >= threshold)
    if len(found) > n:
        above = row[found] > threshold
        spare = n - np.count_nonzero(above)
        found = found[above | (np.cumsum(~above) <= spare)]
    return found


def kth_largest(row: Array, n: int) -> float:
    return float(np.partition(row, len(row) - n)[len(row) - n])


def sample(
    tokens: Array,
    feed: Array,
    counts: Array,
    logits: Array,
    slots: Array,
    params_f: Array,
    params_i: Array,
    bias_indptr: Array,
    bias_ids: Array,
    bias_values: Array,
    stop_indptr: Array,
    stop_ids: Array,
    allowed_bits: Array | None,
    valid_vocab: int,
) -> None:
    """tokens int32 [R], feed int32 [slots] and counts int32 [slots, V] in/out, logits float32 [R, V], slots int32 [R],
    params_f float32 [R, 8], params_i int32 [R, 8], bias and stop lists by row (indptr [R+1]; the bias ids of a
    row are distinct; ids from valid_vocab on do nothing), allowed_bits uint32 [A, ceil(V/32)], lowest bit first, or None.
    """
    for r, (slot, f, i) in enumerate(zip(slots.tolist(), params_f.tolist(), params_i.tolist(), strict=True)):
        repetition, presence, frequency = f[3:6]
        step, min_tokens, allowed_row = i[3:6]
        raw = row = logits[r, :valid_vocab]
        bias = slice(bias_indptr[r], bias_indptr[r + 1])
        banned = stop_ids[stop_indptr[r] : stop_indptr[r + 1]] if step < min_tokens else stop_ids[:0]
        penalized = repetition != 1 or presence != 0 or frequency != 0
        allowed = allowed_bits[allowed_row] if allowed_bits is not None and allowed_row >= 0 else None
        if allowed is not None or len(banned) or bias.stop > bias.start or penalized:
            row = raw.copy()
            if allowed is not None:
                bits = np.unpackbits(allowed.view(np.uint8), count=valid_vocab, bitorder="little")
                np.copyto(row, -np.inf, where=bits == 0)
            row[banned[banned < valid_vocab]] = -np.inf
            real = bias_ids[bias] < valid_vocab
            row[bias_ids[bias][real]] += bias_values[bias][real]
            if penalized:
                seen = np.flatnonzero(counts[slot, :valid_vocab])
                z, generated = row[seen], counts[slot, seen] & (PROMPT_BIT - 1)
                z = np.where(z > 0, z / repetition, z * repetition)
                row[seen] = z - (frequency * generated + presence * (generated > 0))
        tokens[r] = _choose(row, raw, f, i)
    feed[slots] = tokens
    counts[slots, tokens] += 1


def _choose(row: Array, raw: Array, f: list[float], i: list[int]) -> int:
    """The token of one row of edited logits; `raw` decides where they leave nothing. f and i are the row's parameters."""
    (temperature, top_p, min_p), (top_k, seed_lo, seed_hi, step) = f[:3], i[:4]
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
    target = rules.uniform(seed_lo, seed_hi, step) * cumulative[-1]
    at = int(cumulative.searchsorted(target, side="right"))
    at = min(at, int(cumulative.searchsorted(cumulative[-1])))  # rounding must not lead past the last that has a chance
    return at if ids is None else int(ids[at])


def _nucleus(weights: Array, mass: float) -> Array:
    """The fewest largest weights that reach `mass`, lowest index first among equals; indices ascending."""
    falling = np.sort(weights)[::-1]
    n = int(np.cumsum(falling).searchsorted(mass)) + 1
    return largest(weights, n, float(falling[n - 1])) if n < len(weights) else np.arange(len(weights))


def greedy(tokens: Array, feed: Array, logits: Array, slots: Array, valid_vocab: int) -> None:
    """tokens int32 [R], feed int32 [slots] in/out, logits float32 [R, V], slots int32 [R]. The lowest index among equals."""
    rows = logits[:, :valid_vocab]
    tokens[:] = rows.argmax(1)
    best = rows[np.arange(len(tokens)), tokens]
    for r in np.flatnonzero(best != best):  # argmax stops at a NaN, which counts as -inf
        tokens[r] = settled(rows[r])[0].argmax()
    feed[slots] = tokens


def mark_prompt(counts: Array, slots: Array, ids: Array, cu: Array, starts: Array) -> None:
    """counts int32 [slots, V] in/out, slots/starts int32 [S], ids int32 [T], cu int32 [S+1]: prompt tokens of each slice.

    A slice at position 0 begins a new sequence: its slot's row is cleared first.
    """
    bounds = cu.tolist()
    for slot, start, lo, hi in zip(slots.tolist(), starts.tolist(), bounds[:-1], bounds[1:], strict=True):
        row = counts[slot]
        if start == 0:
            row[:] = 0
        row[ids[lo:hi]] |= PROMPT_BIT


def logprobs(
    chosen: Array, rank: Array, top_ids: Array, top_logprobs: Array, logits: Array, tokens: Array, valid_vocab: int
) -> None:
    """chosen float32 [R], rank int32 [R] (1: most likely), top_ids int32 [R, K], top_logprobs float32 [R, K] in that order,
    logits float32 [R, V], tokens int32 [R]. Ids from `valid_vocab` on are never named (-inf as a token), but their weight
    counts in the sum, as in the reference implementation's softmax; K ≤ valid_vocab.

    Equals rank by id, so a token of rank r ≤ K is top_ids[r - 1]. The sum runs in float64.
    """
    k = top_ids.shape[1]
    for r, token in enumerate(tokens.tolist()):
        whole, top = settled(logits[r])
        row = whole[:valid_vocab]
        value = row[token] if token < valid_vocab else -np.inf
        normalizer = 0.0  # where nothing is possible: all alike
        if top > -np.inf:
            normalizer = top + float(np.log(np.add.reduce(np.exp(whole - np.float32(top)), dtype=np.float64)))
        chosen[r] = float(value) - normalizer
        rank[r] = 1 + np.count_nonzero(row > value) + np.count_nonzero(row[:token] == value)
        if k:
            best = largest(row, k, kth_largest(row, k))
            best = best[np.argsort(-row[best], kind="stable")]
            top_ids[r] = best
            top_logprobs[r] = row[best].astype(np.float64) - normalizer


def _logits(rng: Rng, s: Sizes) -> Array:
    """Multiples of 1/64, and edits below in powers of two: float32 and float64 then agree exactly, ties included."""
    return np.round(rng.standard_normal((s.R, s.V), np.float32) * np.float32(160)) / np.float32(64)


def _inputs(rng: Rng, s: Sizes) -> dict[str, Any]:
    """Rows at temperature 0.9 with random seeds, with the filters and edits that the case names."""
    f, i = np.zeros((s.R, rules.PARAMS_F), np.float32), np.zeros((s.R, rules.PARAMS_I), np.int32)
    f[:, :4] = 0.9, s.top_p or 1, s.min_p, 1
    i[:, rules.I_TOP_K], i[:, rules.I_STEP], i[:, rules.I_ALLOWED_ROW] = s.top_k, rng.integers(0, 1000, s.R), -1
    i[:, rules.I_SEED_LO : rules.I_SEED_HI + 1] = rng.integers(-(1 << 31), 1 << 31, (s.R, 2))
    seen = rng.random((2, s.slots, s.V), np.float32) < 0.2
    counts = rng.integers(0, 4, (s.slots, s.V), np.int32) * seen[0] | PROMPT_BIT * seen[1]
    given = {"logits": _logits(rng, s), "counts": counts.astype(np.int32), "params_f": f, "params_i": i}
    if s.penalties:
        f[:, rules.F_REPETITION] = rng.choice([0.5, 1, 2], s.R)
        f[:, rules.F_PRESENCE : rules.F_FREQUENCY + 1] = rng.integers(-4, 8, (s.R, 2)) / 4
        f[::2, rules.F_TEMPERATURE] = 0
    if s.restrictions:  # biases and stop ids, which may still be banned; every second row may use half of the ids, the first none
        for name in ("bias", "stop"):
            given[f"{name}_indptr"] = np.arange(0, 5 * s.R + 1, 5, dtype=np.int32)
            given[f"{name}_ids"] = np.concatenate([rng.permutation(s.valid_vocab)[:5] for _ in range(s.R)]).astype(np.int32)
        given["bias_values"] = rng.integers(-64, 64, 5 * s.R).astype(np.float32) / 8
        i[:, rules.I_MIN_TOKENS] = i[:, rules.I_STEP] + rng.integers(0, 2, s.R)
        i[::2, rules.I_ALLOWED_ROW] = np.arange(0, s.R, 2) // 2
        given["allowed_bits"] = bits = rng.integers(0, 1 << 32, (s.R, -(-s.V // 32)), np.uint32)
        bits[0] = 0
    return given


def _mark_inputs(rng: Rng, s: Sizes) -> dict[str, Any]:
    return {"counts": rng.integers(0, 3, (s.slots, s.V), np.int32), "ids": rng.integers(0, s.V, s.T, np.int32)}


SAMPLE = Operator(
    "sample",
    """The next token of each row under its own parameters; see sampling_rules for the order of things.

    tokens i32 [R]; feed i32 [slots], counts i32 [slots, V] in/out ← logits f32 [R, V], slots i32 [R], params_f f32 [R, 8],
    params_i i32 [R, 8], bias_indptr i32 [R+1], bias_ids i32, bias_values f32, stop_indptr i32 [R+1], stop_ids i32,
    allowed_bits u32 [A, ceil(V/32)] or none, valid_vocab
    """,
    rules.sample_reference,
    sample,
    cuda="spark_sample",
    tolerance=None,
    parity="""R=1 V=200 valid_vocab=190; R=40 V=200 valid_vocab=190; R=40 V=200 valid_vocab=190 top_k=7;
    R=40 V=200 valid_vocab=190 top_p=0.8; R=40 V=200 valid_vocab=190 top_k=20 top_p=0.9 min_p=0.02;
    R=40 V=200 valid_vocab=190 penalties; R=40 V=200 valid_vocab=190 restrictions""",
    bench="""R=1 V=6144 valid_vocab=6144; R=16 V=6144 valid_vocab=6144; R=16 V=6144 valid_vocab=6144 top_k=20 top_p=0.8;
    R=16 V=248320 valid_vocab=248077 top_p=0.95""",
    inputs=_inputs,
    work=lambda s: (4 * s.R * s.V, 4 * s.R * s.V),
)
GREEDY = Operator(
    "greedy",
    """The best logit of each row, the lowest index among equals.

    tokens i32 [R]; feed i32 [slots] in/out ← logits f32 [R, V], slots i32 [R], valid_vocab
    """,
    rules.greedy_reference,
    greedy,
    cuda="spark_greedy",
    tolerance=None,
    parity="R=1 V=64 valid_vocab=64; R=33 V=200 valid_vocab=190",
    bench="R=1 V=6144 valid_vocab=6144; R=16 V=6144 valid_vocab=6144; R=16 V=248320 valid_vocab=248077",
    inputs=lambda rng, s: {"logits": _logits(rng, s)},
    work=lambda s: (4 * s.R * s.V, s.R * s.V),
)
MARK_PROMPT = Operator(
    "mark_prompt",
    """Notes which tokens a prompt has, for the repetition penalty.

    counts i32 [slots, V] in/out ← slots i32 [S], ids i32 [T], cu i32 [S+1], starts i32 [S]
    """,
    rules.mark_prompt_reference,
    mark_prompt,
    cuda="spark_mark_prompt",
    tolerance=None,
    parity="T=9+70+0 starts=0+64+0 V=64",
    bench="T=512 V=6144",
    inputs=_mark_inputs,
    work=lambda s: (8 * s.T, 0),
)
LOGPROBS = Operator(
    "logprobs",
    """Log-softmax of the raw logits at chosen tokens, their rank, and the k best.

    chosen f32 [R], rank i32 [R], top_ids i32 [R, K], top_logprobs f32 [R, K] ← logits f32 [R, V], tokens i32 [R], valid_vocab
    """,
    rules.logprobs_reference,
    logprobs,
    cuda="spark_logprobs",
    parity="R=1 V=64 valid_vocab=64 K=5; R=33 V=200 valid_vocab=190 K=20; R=4 V=64 valid_vocab=60 K=0",
    bench="R=16 V=6144 valid_vocab=6144 K=20",
    inputs=lambda rng, s: {"logits": _logits(rng, s), "tokens": rng.integers(0, s.valid_vocab, s.R, np.int32)},
    work=lambda s: (4 * s.R * s.V, 4 * s.R * s.V),
)
OPERATORS = (SAMPLE, GREEDY, MARK_PROMPT, LOGPROBS)
