"""How a token is chosen: the sampler's per-row parameters, its generator, and the specification of SAMPLE in plain loops and
full sorts.

In this order: ids beyond the real vocabulary and outside the allowed set drop out; stop ids drop out until min_tokens were
generated; logit bias; repetition penalty (prompt and output), frequency and presence penalties (output); temperature (0: the
best remaining token, lowest id among equals); min-p, relative to the best; top-k; top-p of what is left, keeping the token
that crosses it; then one uniform number through the cumulative distribution in id order. That is vLLM's order. Where nothing
is left, the best raw logit is taken.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sparkrt.ops.operator import Array

PARAMS_F = 8  # float32 columns; those not named are 0
F_TEMPERATURE = 0  # 0: greedy
F_TOP_P = 1  # 1: off
F_MIN_P = 2  # 0: off
F_REPETITION = 3  # 1: off
F_PRESENCE = 4  # 0: off
F_FREQUENCY = 5  # 0: off

PARAMS_I = 8  # int32 columns; those not named are 0
I_TOP_K = 0  # 0 or less: off
I_SEED_LO = 1  # the 64-bit seed's low word, then its high word
I_SEED_HI = 2
I_STEP = 3  # tokens generated so far: with the seed, all that a draw depends on
I_MIN_TOKENS = 4  # the row's stop ids are banned while step is below it
I_ALLOWED_ROW = 5  # row of allowed_bits, or -1: everything is allowed

PROMPT_BIT = 1 << 30  # of a count: the token is in the prompt; the bits below say how often it was generated
_WORD = 0xFFFFFFFF


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 (Salmon et al., SC'11): four random 32-bit words as a pure function of a counter and a key of such words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & _WORD, (a >> 32) ^ c3 ^ k1, a & _WORD
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return c0, c1, c2, c3


def uniform(seed_lo: int, seed_hi: int, step: int) -> float:
    """A number in [0, 1), 53 bits of it random. The seed's words may be signed, as int32 tables hold them."""
    high, low, _, _ = philox4x32((step, 0, 0, 0), (seed_lo & _WORD, seed_hi & _WORD))
    return ((high << 21) | (low >> 11)) * 2.0**-53


def sample_reference(*call: Any) -> tuple[Array, Array, Array]:
    """Returns (tokens [R], feed, counts)."""
    _, feed, counts, logits, slots, params_f, params_i, bias_indptr, bias_ids, bias_values, *rest = call
    stop_indptr, stop_ids, allowed_bits, valid_vocab = rest
    feed, counts = feed.copy(), counts.copy()
    tokens = np.empty(len(slots), np.int32)
    for r, slot in enumerate(slots):
        temperature, top_p, min_p, repetition, presence, frequency = params_f[r, :6]
        top_k, seed_lo, seed_hi, step, min_tokens, allowed_row = params_i[r, :6].tolist()
        raw = np.nan_to_num(logits[r, :valid_vocab], nan=-np.inf, posinf=np.inf, neginf=-np.inf)
        z = raw.copy()
        if allowed_row >= 0 and allowed_bits is not None:
            for token in range(valid_vocab):
                if not allowed_bits[allowed_row, token // 32] >> (token % 32) & 1:
                    z[token] = -np.inf
        for token in stop_ids[stop_indptr[r] : stop_indptr[r + 1]]:
            if token < valid_vocab and step < min_tokens:
                z[token] = -np.inf
        for b in range(bias_indptr[r], bias_indptr[r + 1]):
            if bias_ids[b] < valid_vocab:
                z[bias_ids[b]] += bias_values[b]
        seen, generated = counts[slot, :valid_vocab] != 0, counts[slot, :valid_vocab] & (PROMPT_BIT - 1)
        z[seen] = np.where(z[seen] > 0, z[seen] / repetition, z[seen] * repetition)
        z -= frequency * generated + presence * (generated > 0)
        if z.max() == -np.inf:
            tokens[r] = raw.argmax()
        elif temperature == 0:
            tokens[r] = z.argmax()
        else:
            tokens[r] = _draw(z, temperature, top_k, top_p, min_p, uniform(seed_lo, seed_hi, step))
    feed[slots] = tokens
    counts[slots, tokens] += 1
    return tokens, feed, counts


def _draw(z: Array, temperature: float, top_k: int, top_p: float, min_p: float, draw: float) -> int:
    order = np.argsort(-z, kind="stable")
    p = np.exp((z[order] - z[order[0]]) / temperature)
    p[p < min_p] = 0
    if top_k > 0:
        p[top_k:] = 0
    if top_p < 1:
        before = np.concatenate(([0.0], np.cumsum(p)[:-1]))
        p[(before >= top_p * p.sum()) & (before > 0)] = 0
    by_id = np.zeros_like(p)
    by_id[order] = p
    cumulative = np.cumsum(by_id)
    return int(np.searchsorted(cumulative, draw * cumulative[-1], side="right"))


def greedy_reference(feed: Array, logits: Array, slots: Array, valid_vocab: int) -> tuple[Array, Array]:
    """Returns (tokens [R], feed)."""
    feed = feed.copy()
    feed[slots] = tokens = np.where(np.isnan(logits), -np.inf, logits)[:, :valid_vocab].argmax(1).astype(np.int32)
    return tokens, feed


def mark_prompt_reference(counts: Array, slots: Array, ids: Array, cu: Array, starts: Array) -> Array:
    """Returns counts with bit 30 set for the tokens of each slice; a slice at position 0 clears its slot's row first."""
    counts = counts.copy()
    for s, slot in enumerate(slots):
        if starts[s] == 0:
            counts[slot] = 0
        for token in ids[cu[s] : cu[s + 1]]:
            counts[slot, token] |= PROMPT_BIT
    return counts


def logprobs_reference(
    rank: Array, top_ids: Array, top_logprobs: Array, logits: Array, tokens: Array, valid_vocab: int
) -> tuple[Array, ...]:
    """Of the outputs only top_ids' width is read. Returns (chosen, rank, top_ids, top_logprobs)."""
    top = logits.max(1, keepdims=True)
    scores = logits - top - np.log(np.exp(logits - top).sum(1, keepdims=True))
    order = np.argsort(-logits[:, :valid_vocab], axis=1, kind="stable")
    best, position = order[:, : top_ids.shape[1]], (order == tokens[:, None]).argmax(1)
    chosen = scores[np.arange(len(tokens)), tokens]
    return chosen, (position + 1).astype(np.int32), best.astype(np.int32), np.take_along_axis(scores, best, 1)
