"""Log-probabilities of chosen tokens under the raw logits, and the best alternatives."""

from __future__ import annotations

import numpy as np


def settled(row: np.ndarray) -> tuple[np.ndarray, float]:
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


def largest(row: np.ndarray, n: int, threshold: float) -> np.ndarray:
    """Indices, ascending, of the n largest elements, the lowest indices among equals; `threshold` is the n-th largest value."""
    found = np.flatnonzero(row >= threshold)
    if len(found) > n:
        above = row[found] > threshold
        spare = n - np.count_nonzero(above)
        found = found[above | (np.cumsum(~above) <= spare)]
    return found


def kth_largest(row: np.ndarray, n: int) -> float:
    return float(np.partition(row, len(row) - n)[len(row) - n])


def logprobs(
    chosen: np.ndarray,
    rank: np.ndarray,
    top_ids: np.ndarray,
    top_logprobs: np.ndarray,
    logits: np.ndarray,
    tokens: np.ndarray,
    valid_vocab: int,
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
        if top == -np.inf:  # nothing is possible: all alike
            normalizer = 0.0
        else:
            normalizer = top + float(np.log(np.add.reduce(np.exp(whole - np.float32(top)), dtype=np.float64)))
        chosen[r] = float(value) - normalizer
        rank[r] = 1 + np.count_nonzero(row > value) + np.count_nonzero(row[:token] == value)
        if k:
            best = largest(row, k, kth_largest(row, k))
            best = best[np.argsort(-row[best], kind="stable")]
            top_ids[r] = best
            top_logprobs[r] = row[best].astype(np.float64) - normalizer


def logprobs_reference(
    rank: np.ndarray, top_ids: np.ndarray, top_logprobs: np.ndarray, logits: np.ndarray, tokens: np.ndarray, valid_vocab: int
) -> tuple[np.ndarray, ...]:
    """See `logprobs`. Of the outputs only top_ids' width is read. Returns (chosen, rank, top_ids, top_logprobs)."""
    top = logits.max(1, keepdims=True)
    scores = logits - top - np.log(np.exp(logits - top).sum(1, keepdims=True))
    order = np.argsort(-logits[:, :valid_vocab], axis=1, kind="stable")
    rows = np.arange(len(tokens))
    best = order[:, : top_ids.shape[1]]
    position = (order == tokens[:, None]).argmax(1)
    return scores[rows, tokens], (position + 1).astype(np.int32), best.astype(np.int32), np.take_along_axis(scores, best, 1)
