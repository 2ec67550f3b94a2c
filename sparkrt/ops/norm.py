"""RMS norms: plain and zero-centred (weight offset 1), fused with the residual add, and gated."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from sparkrt.ops.elementwise import silu
from sparkrt.ops.operator import Case, Operator, Rng


def rms_norm_ref(x: np.ndarray, w: np.ndarray, eps: float, offset: float) -> np.ndarray:
    y: np.ndarray = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * (offset + w)
    return y


def rms_norm(out: np.ndarray, x: np.ndarray, w: np.ndarray, eps: float, offset: float) -> None:
    """Over the last axis, whatever the leading ones; `out` may be `x`."""
    rms_scale(out, x, eps)
    np.multiply(out, w + offset if offset else w, out)


def rms_scale(out: np.ndarray, x: np.ndarray, eps: float) -> None:
    """The norm without its weight. Each row's sum is its own dot product, so its bits depend on nothing else."""
    square = np.vecdot(x, x)
    square /= x.shape[-1]
    square += eps
    np.sqrt(square, square)
    np.divide(x, square[..., None], out)


def add_rms_norm_ref(
    residual: np.ndarray, delta: np.ndarray, w: np.ndarray, eps: float, offset: float
) -> tuple[np.ndarray, np.ndarray]:
    total = residual + delta
    return rms_norm_ref(total, w, eps, offset), total


def add_rms_norm(out: np.ndarray, residual: np.ndarray, delta: np.ndarray, w: np.ndarray, eps: float, offset: float) -> None:
    np.add(residual, delta, residual)
    rms_norm(out, residual, w, eps, offset)


def add_ref(residual: np.ndarray, delta: np.ndarray) -> np.ndarray:
    total: np.ndarray = residual + delta
    return total


def add(residual: np.ndarray, delta: np.ndarray) -> None:
    np.add(residual, delta, residual)


def gated_rms_norm_ref(x: np.ndarray, proj: np.ndarray, w: np.ndarray, z_col: int, eps: float) -> np.ndarray:
    z = proj[:, z_col : z_col + prod(x.shape[1:])].reshape(x.shape)
    y: np.ndarray = rms_norm_ref(x, w, eps, 0.0) * silu(z)
    return y.reshape(len(x), prod(x.shape[1:]))


def gated_rms_norm(out: np.ndarray, x: np.ndarray, proj: np.ndarray, w: np.ndarray, z_col: int, eps: float) -> None:
    y = out.reshape(x.shape)
    z = proj[:, z_col : z_col + out.shape[1]].reshape(x.shape)
    rms_norm(y, x, w, eps, 0.0)
    np.multiply(y, silu(z), y)


EPS = 1e-6


def _weight(rng: Rng, width: int, offset: float) -> np.ndarray:
    return (rng.standard_normal(width, dtype=np.float32) * np.float32(0.2) + np.float32(1.0 - offset)).astype(np.float32)


def _rms_case(tokens: int, hidden: int, offset: float, scale: float = 1.0) -> Case:
    def make(rng: Rng) -> list[Any]:
        x = rng.standard_normal((tokens, hidden), dtype=np.float32) * np.float32(scale)
        return [np.empty_like(x), x, _weight(rng, hidden, offset), EPS, offset]

    return Case(f"T={tokens} H={hidden} offset={offset:g} scale={scale:g}", make, bytes=8 * tokens * hidden)


def _add_rms_case(tokens: int, hidden: int, offset: float) -> Case:
    def make(rng: Rng) -> list[Any]:
        residual, delta = (rng.standard_normal((tokens, hidden), dtype=np.float32) for _ in range(2))
        return [np.empty_like(residual), residual, delta, _weight(rng, hidden, offset), EPS, offset]

    return Case(f"T={tokens} H={hidden} offset={offset:g}", make, outputs=(0, 1), bytes=16 * tokens * hidden)


def _add_case(tokens: int, hidden: int) -> Case:
    def make(rng: Rng) -> list[Any]:
        return [rng.standard_normal((tokens, hidden), dtype=np.float32) for _ in range(2)]

    return Case(f"T={tokens} H={hidden}", make, bytes=12 * tokens * hidden)


def _gated_case(tokens: int, heads: int, dim: int, z_col: int, scale: float = 1.0) -> Case:
    def make(rng: Rng) -> list[Any]:
        x = rng.standard_normal((tokens, heads, dim), dtype=np.float32)
        proj = rng.standard_normal((tokens, z_col + heads * dim + 3), dtype=np.float32) * np.float32(scale)
        return [np.empty((tokens, heads * dim), np.float32), x, proj, _weight(rng, dim, 0.0), z_col, EPS]

    return Case(f"T={tokens} HV={heads} DV={dim} z_col={z_col} scale={scale:g}", make, bytes=12 * tokens * heads * dim)


RMS_NORM = Operator(
    "rms_norm",
    """Root-mean-square norm; offset 1 for weights stored around zero.

    out A [T, H] ← x A [T, H], w f32 [H], eps, offset
    out = x / sqrt(mean(x²) + eps) · (offset + w)
    """,
    rms_norm_ref,
    rms_norm,
    cuda="spark_rms_norm",
    parity=tuple(_rms_case(*s) for s in ((1, 256, 1.0), (65, 64, 0.0), (0, 16, 1.0), (3, 576, 0.0, 1e-4), (2, 100, 1.0, 1e4))),
    bench=(_rms_case(1, 256, 1.0), _rms_case(512, 256, 1.0), _rms_case(4096, 2048, 1.0)),
)

ADD_RMS_NORM = Operator(
    "add_rms_norm",
    """Adds a layer's delta to the residual and norms the sum.

    out A [T, H], residual A [T, H] in/out ← delta A [T, H], w f32 [H], eps, offset
    residual += delta; out = rms_norm(residual, w, eps, offset)
    """,
    add_rms_norm_ref,
    add_rms_norm,
    cuda="spark_add_rms_norm",
    parity=tuple(_add_rms_case(*s) for s in ((1, 256, 1.0), (64, 96, 0.0), (0, 16, 1.0))),
    bench=(_add_rms_case(1, 256, 1.0), _add_rms_case(512, 256, 1.0), _add_rms_case(4096, 2048, 1.0)),
)

ADD = Operator(
    "add",
    """Adds a layer's delta to the residual.

    residual A [T, H] in/out ← delta A [T, H]
    """,
    add_ref,
    add,
    cuda="spark_add",
    parity=tuple(_add_case(*s) for s in ((1, 256), (63, 33), (0, 8))),
    bench=(_add_case(512, 256),),
)

GATED_RMS_NORM = Operator(
    "gated_rms_norm",
    """Norm of every value head, then the SiLU gate (norm before gate, weight around one, no rounding in between).

    out A [T, HV·DV] ← x A [T, HV, DV], proj A [T, N], w f32 [DV], z_col, eps
    z = proj[:, z_col : z_col + HV·DV]; out = rms_norm(x, w, eps) · z · sigmoid(z)
    """,
    gated_rms_norm_ref,
    gated_rms_norm,
    cuda="spark_gated_rms_norm",
    parity=tuple(_gated_case(*s) for s in ((1, 4, 128, 1024), (63, 3, 32, 5), (0, 2, 8, 0), (4, 2, 16, 0, 200.0))),
    bench=(_gated_case(1, 4, 128, 1024), _gated_case(512, 4, 128, 1024), _gated_case(1024, 32, 128, 8192)),
)

OPERATORS = (RMS_NORM, ADD_RMS_NORM, ADD, GATED_RMS_NORM)
