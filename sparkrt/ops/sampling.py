"""Sampling operators: SAMPLE (everything a request may ask for), GREEDY (its fast path), MARK_PROMPT and LOGPROBS.

What they compute is spelled out in `sampling_rules`, as are the parameters' columns. Rows are chosen one by one and a draw uses
its own seed and step only: neighbours change nothing.
"""

from __future__ import annotations

import numpy as np

from sparkrt.ops import sampling_rules as rules
from sparkrt.ops.operator import Array, Operator
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


def largest(row: Array, n: int, threshold: float | None = None) -> Array:
    """Indices, ascending, of the n largest elements, the lowest indices among equals; `threshold`: the n-th largest, if known."""
    if threshold is None:
        threshold = float(np.partition(row, len(row) - n)[len(row) - n])
    found = np.flatnonzero(row >= threshold)
    if len(found) > n:
        above = row[found] > threshold
        spare = n - np.count_nonzero(above)
        found = found[above | (np.cumsum(~above) <= spare)]
    return found


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
    """The next token of each row under its own parameters; see sampling_rules for the order of things.

    tokens i32 [R]; feed i32 [slots], counts i32 [slots, V] in/out ← logits f32 [R, V], slots i32 [R], params_f f32 [R, 8],
    params_i i32 [R, 8], bias_indptr i32 [R+1], bias_ids i32, bias_values f32, stop_indptr i32 [R+1], stop_ids i32,
    allowed_bits u32 [A, ceil(V/32)] or none (lowest bit first), valid_vocab
    Bias and stop lists are by row; a row's bias ids are distinct, ids from valid_vocab on do nothing.
    parity: R=1 V=200 valid_vocab=190; R=40 V=200 valid_vocab=190; R=40 V=200 valid_vocab=190 top_k=7;
    R=40 V=200 valid_vocab=190 top_p=0.8; R=40 V=200 valid_vocab=190 top_k=20 top_p=0.9 min_p=0.02;
    R=40 V=200 valid_vocab=190 penalties; R=40 V=200 valid_vocab=190 restrictions;
    R=4 V=12000 valid_vocab=11990 ties top_p=0.5; R=4 V=12000 valid_vocab=11990 ties top_k=6000 top_p=0.9;
    R=4 V=70000 valid_vocab=69990 top_k=20 top_p=0.8; R=4 V=70000 valid_vocab=69990 top_p=0.95
    bench: R=1 V=6144 valid_vocab=6144; R=16 V=6144 valid_vocab=6144; R=16 V=6144 valid_vocab=6144 top_k=20 top_p=0.8;
    R=16 V=248320 valid_vocab=248077 top_p=0.95
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
        ids = largest(row, top_k)
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
    """The best logit of each row, the lowest index among equals.

    tokens i32 [R]; feed i32 [slots] in/out ← logits f32 [R, V], slots i32 [R], valid_vocab
    parity: R=1 V=64 valid_vocab=64; R=33 V=200 valid_vocab=190
    bench: R=1 V=6144 valid_vocab=6144; R=16 V=6144 valid_vocab=6144; R=16 V=248320 valid_vocab=248077
    """
    rows = logits[:, :valid_vocab]
    tokens[:] = rows.argmax(1)
    best = rows[np.arange(len(tokens)), tokens]
    for r in np.flatnonzero(best != best):  # argmax stops at a NaN, which counts as -inf
        tokens[r] = settled(rows[r])[0].argmax()
    feed[slots] = tokens


def mark_prompt(counts: Array, slots: Array, ids: Array, cu: Array, starts: Array) -> None:
    """Notes which tokens a prompt has, for the repetition penalty. A slice at position 0 clears its slot's row first.

    counts i32 [slots, V] in/out ← slots i32 [S], ids i32 [T], cu i32 [S+1], starts i32 [S]
    parity: T=9+70+0 starts=0+64+0 V=64
    bench: T=512 V=6144
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
    """Log-softmax of the raw logits at chosen tokens, their rank (1: most likely), and the k best, most likely first.

    chosen f32 [R], rank i32 [R], top_ids i32 [R, K], top_logprobs f32 [R, K] ← logits f32 [R, V], tokens i32 [R], valid_vocab
    Ids from valid_vocab on are never named (-inf as a token), but their weight counts in the sum, as in the reference
    implementation's softmax; K ≤ valid_vocab. Equals rank by id, so a token of rank r ≤ K is top_ids[r - 1].
    parity: R=1 V=64 valid_vocab=64 K=5; R=33 V=200 valid_vocab=190 K=20; R=4 V=64 valid_vocab=60 K=0;
    R=3 V=12000 valid_vocab=11990 K=20 ties; R=3 V=70000 valid_vocab=69990 K=20
    bench: R=16 V=6144 valid_vocab=6144 K=20
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
            best = largest(row, k)
            best = best[np.argsort(-row[best], kind="stable")]
            top_ids[r] = best
            top_logprobs[r] = row[best].astype(np.float64) - normalizer


SAMPLE = Operator(sample, rules.sample_reference, "spark_sample", lambda s: (4 * s.R * s.V, 4 * s.R * s.V), tolerance=None)
GREEDY = Operator(greedy, rules.greedy_reference, "spark_greedy", lambda s: (4 * s.R * s.V, s.R * s.V), tolerance=None)
MARK_PROMPT = Operator(mark_prompt, rules.mark_prompt_reference, "spark_mark_prompt", lambda s: (8 * s.T, 0), tolerance=None)
LOGPROBS = Operator(logprobs, rules.logprobs_reference, "spark_logprobs", lambda s: (4 * s.R * s.V, 4 * s.R * s.V))
OPERATORS = (SAMPLE, GREEDY, MARK_PROMPT, LOGPROBS)
