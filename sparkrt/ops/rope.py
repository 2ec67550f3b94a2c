"""Rotary embeddings: inverse frequencies under every scaling rule, and the cos/sin table kernels read.

Plain functions of numbers. Multimodal RoPE gives each frequency the time, height or width position of its token; a text token
has the same value in all three, so its table is this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log, pi

import numpy as np

from sparkrt.errors import LoadError
from sparkrt.ops.operator import Array

KINDS = ("default", "linear", "llama3", "yarn")


def inverse_frequencies(
    theta: float,
    rotary_dim: int,
    kind: str = "default",
    factor: float = 1.0,
    original_max_position: int = 0,
    low_freq_factor: float = 1.0,
    high_freq_factor: float = 4.0,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
    freq_divisors: Sequence[float] = (),
) -> Array:
    """Radians per position of each rotated pair, float64 [rotary_dim / 2].

    `factor` is how many times longer the context gets, `original_max_position` what it was (llama3, yarn). `freq_divisors`
    divide the result (GGUF's rope_freqs). Raises LoadError on an unknown kind, an odd dimension or missing numbers.
    """
    if kind not in KINDS:
        raise LoadError(f"rope type {kind!r} is not supported; known: {', '.join(KINDS)}")
    if rotary_dim <= 0 or rotary_dim % 2:
        raise LoadError(f"rotary dimension {rotary_dim} is not a positive even number")
    if kind in ("llama3", "yarn") and (original_max_position <= 0 or factor <= 0):
        found = f"factor {factor}, original_max_position_embeddings {original_max_position}"
        raise LoadError(f"rope type {kind!r} needs both numbers above 0: {found}")
    pairs = np.arange(rotary_dim // 2, dtype=np.float64)
    w = theta ** (-2.0 * pairs / rotary_dim)
    if kind == "linear":
        w = w / factor
    elif kind == "llama3":
        turns = original_max_position * w / (2 * pi)  # full turns within the original context
        keep = np.clip((turns - low_freq_factor) / (high_freq_factor - low_freq_factor), 0.0, 1.0)
        w = w * keep + w / factor * (1.0 - keep)
    elif kind == "yarn":
        # The (fractional) pairs that make beta_fast and beta_slow full turns within the original context.
        low, high = (rotary_dim * log(original_max_position / (2 * pi * n)) / (2 * log(theta)) for n in (beta_fast, beta_slow))
        if truncate:
            low, high = float(np.floor(low)), float(np.ceil(high))
        low, high = max(low, 0.0), min(high, rotary_dim - 1.0)
        ramp = np.clip((pairs - low) / (high - low if high != low else 0.001), 0.0, 1.0)
        w = w * (1.0 - ramp) + w / factor * ramp
    if len(freq_divisors):
        if len(freq_divisors) != len(w):
            raise LoadError(f"{len(freq_divisors)} rope frequency divisors for {len(w)} rotated pairs")
        w = w / np.asarray(freq_divisors, np.float64)
    return w


def attention_factor(
    kind: str = "default",
    factor: float = 1.0,
    attention_factor: float | None = None,
    mscale: float | None = None,
    mscale_all_dim: float | None = None,
) -> float:
    """What cos and sin are multiplied by: 1 except for yarn, whose longer contexts need sharper attention."""
    if kind != "yarn":
        return 1.0
    if attention_factor is not None:
        return attention_factor
    if mscale and mscale_all_dim:
        return _yarn_mscale(factor, mscale) / _yarn_mscale(factor, mscale_all_dim)
    return _yarn_mscale(factor, 1.0)


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * log(factor) + 1.0 if factor > 1.0 else 1.0


def rope_table(frequencies: Array, scale: float, max_position: int) -> Array:
    """float32 [max_position, 2 · pairs]: cosines of all pairs, then sines, times `scale` (the attention factor)."""
    angle = np.arange(max_position, dtype=np.float64)[:, None] * frequencies
    return (np.concatenate([np.cos(angle), np.sin(angle)], axis=1) * scale).astype(np.float32)


def rope_ref(x: Array, positions: Array, cos_sin: Array) -> Array:
    """Rotate the first R channels of every head of x [T, heads, D]: pair i is channels i and i + R/2."""
    half = cos_sin.shape[1] // 2
    cos, sin = np.split(cos_sin[positions][:, None, :], 2, axis=-1)
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)


def rope_inplace(x: Array, positions: Array, cos_sin: Array) -> None:
    """`rope_ref` on x itself."""
    half = cos_sin.shape[1] // 2
    table = cos_sin.take(positions, 0, None, "clip")[:, None, None, :]
    pairs = x[..., : 2 * half].reshape(*x.shape[:2], 2, half)  # a view: the last axis is contiguous
    by_sin = pairs * table[..., half:]
    pairs *= table[..., :half]
    pairs[:, :, 0] -= by_sin[:, :, 1]
    pairs[:, :, 1] += by_sin[:, :, 0]
