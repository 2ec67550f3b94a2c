"""How a token is chosen, spelled out: the specification of SAMPLE. Plain loops and full sorts; see `sampling` for the layout.

In this order: ids beyond the real vocabulary and outside the allowed set drop out; stop ids drop out until min_tokens were
generated; logit bias; repetition penalty (prompt and output), frequency and presence penalties (output); temperature (0: the
best remaining token, lowest id among equals); min-p, relative to the best; top-k; top-p of what is left, keeping the token
that crosses it; then one uniform number through the cumulative distribution in id order. That is vLLM's order. Where nothing
is left, the best raw logit is taken.
"""

from __future__ import annotations

import numpy as np

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
    PROMPT_BIT,
)


def sample_reference(
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
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns (tokens [R], feed, counts)."""
    feed, counts = feed.copy(), counts.copy()
    tokens = np.empty(len(slots), np.int32)
    for r, slot in enumerate(slots):
        f, i = params_f[r], params_i[r]
        raw = np.nan_to_num(logits[r, :valid_vocab], nan=-np.inf, posinf=np.inf, neginf=-np.inf)
        z = raw.copy()
        if i[I_ALLOWED_ROW] >= 0 and allowed_bits is not None:
            words = allowed_bits[i[I_ALLOWED_ROW]]
            for token in range(valid_vocab):
                if not words[token // 32] >> (token % 32) & 1:
                    z[token] = -np.inf
        for token in stop_ids[stop_indptr[r] : stop_indptr[r + 1]]:
            if token < valid_vocab and i[I_STEP] < i[I_MIN_TOKENS]:
                z[token] = -np.inf
        for b in range(bias_indptr[r], bias_indptr[r + 1]):
            if bias_ids[b] < valid_vocab:
                z[bias_ids[b]] += bias_values[b]
        seen, generated = counts[slot, :valid_vocab] != 0, counts[slot, :valid_vocab] & (PROMPT_BIT - 1)
        z[seen] = np.where(z[seen] > 0, z[seen] / f[F_REPETITION], z[seen] * f[F_REPETITION])
        z -= f[F_FREQUENCY] * generated + f[F_PRESENCE] * (generated > 0)
        draw = uniform(int(i[I_SEED_LO]), int(i[I_SEED_HI]), int(i[I_STEP]))
        tokens[r] = _draw(z, raw, f, int(i[I_TOP_K]), draw)
    feed[slots] = tokens
    counts[slots, tokens] += 1
    return tokens, feed, counts


def _draw(z: np.ndarray, raw: np.ndarray, f: np.ndarray, top_k: int, draw: float) -> int:
    if z.max() == -np.inf:
        return int(raw.argmax())
    if f[F_TEMPERATURE] == 0:
        return int(z.argmax())
    order = np.argsort(-z, kind="stable")
    p = np.exp((z[order] - z[order[0]]) / f[F_TEMPERATURE])
    p[p < f[F_MIN_P]] = 0
    if top_k > 0:
        p[top_k:] = 0
    if f[F_TOP_P] < 1:
        before = np.concatenate(([0.0], np.cumsum(p)[:-1]))
        p[(before >= f[F_TOP_P] * p.sum()) & (before > 0)] = 0
    by_id = np.zeros_like(p)
    by_id[order] = p
    cumulative = np.cumsum(by_id)
    return int(np.searchsorted(cumulative, draw * cumulative[-1], side="right"))


def mark_prompt_reference(
    counts: np.ndarray, slots: np.ndarray, ids: np.ndarray, cu: np.ndarray, starts: np.ndarray
) -> np.ndarray:
    """Returns counts with bit 30 set for the tokens of each slice; a slice at position 0 clears its slot's row first."""
    counts = counts.copy()
    for s, slot in enumerate(slots):
        if starts[s] == 0:
            counts[slot] = 0
        for token in ids[cu[s] : cu[s + 1]]:
            counts[slot, token] |= PROMPT_BIT
    return counts


def greedy_reference(feed: np.ndarray, logits: np.ndarray, slots: np.ndarray, valid_vocab: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns (tokens [R], feed)."""
    feed = feed.copy()
    tokens = np.where(np.isnan(logits), -np.inf, logits)[:, :valid_vocab].argmax(1).astype(np.int32)
    feed[slots] = tokens
    return tokens, feed
