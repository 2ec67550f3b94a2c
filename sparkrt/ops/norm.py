"""RMS norms: plain and zero-centred (weight offset 1), and gated; and the residual add."""

from __future__ import annotations

import numpy as np

from sparkrt.ops.activation import silu
from sparkrt.ops.operator import Array, Operator


def rms_norm(out: Array, x: Array, w: Array, eps: float, offset: float) -> None:
    """Root-mean-square norm over the last axis; offset 1 for weights stored around zero.

    out A [T, H] ← x A [T, H], w f32 [H], eps, offset
    out = x / sqrt(mean(x²) + eps) · (offset + w)
    parity: T=1 H=256 offset=1; T=65 H=64; T=0 H=16 offset=1; T=3 H=576 x=1e-4; T=2 H=100 offset=1 x=10000
    bench: T=1 H=256 offset=1; T=512 H=256 offset=1; T=4096 H=2048 offset=1
    """
    rms_scale(out, x, eps)
    np.multiply(out, w + offset if offset else w, out)


def rms_norm_ref(x: Array, w: Array, eps: float, offset: float) -> Array:
    y: Array = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * (offset + w)
    return y


def rms_scale(out: Array, x: Array, eps: float) -> None:
    """The norm without its weight; `out` may be `x`. A row's sum is its own dot product: its bits depend on nothing else."""
    square = np.vecdot(x, x)
    square /= x.shape[-1]
    square += eps
    np.sqrt(square, square)
    np.divide(x, square[..., None], out)


def add(residual: Array, delta: Array) -> None:
    """Adds a layer's delta to the residual.

    residual A [T, H] in/out ← delta A [T, H]
    parity: T=1 H=256; T=63 H=33; T=0 H=8
    bench: T=512 H=256
    """
    np.add(residual, delta, residual)


def gated_rms_norm(out: Array, x: Array, proj: Array, w: Array, z_col: int, eps: float) -> None:
    """Norm of every value head, then the SiLU gate (norm before gate, weight around one, no rounding in between).

    out A [T, HV·DV] ← x A [T, HV, DV], proj A [T, N], w f32 [DV], z_col, eps
    z = proj[:, z_col : z_col + HV·DV]; out = rms_norm(x, w, eps) · z · sigmoid(z)
    parity: T=1 HV=4 DV=128 z_col=1024 N=1539; T=63 HV=3 DV=32 z_col=5 N=104; T=0 HV=2 DV=8 N=19; T=4 HV=2 DV=16 N=35 proj=200
    bench: T=1 HV=4 DV=128 z_col=1024 N=1539; T=512 HV=4 DV=128 z_col=1024 N=1539; T=1024 HV=32 DV=128 z_col=8192 N=12291
    """
    y = out.reshape(x.shape)
    rms_norm(y, x, w, eps, 0.0)
    np.multiply(y, silu(proj[:, z_col : z_col + out.shape[1]].reshape(x.shape)), y)


def gated_rms_norm_ref(x: Array, proj: Array, w: Array, z_col: int, eps: float) -> Array:
    tokens, heads, dim = x.shape
    y: Array = rms_norm_ref(x, w, eps, 0.0).reshape(tokens, heads * dim) * silu(proj[:, z_col : z_col + heads * dim])
    return y


RMS_NORM = Operator(rms_norm, rms_norm_ref, "spark_rms_norm", lambda s: (8 * s.T * s.H, 0))
ADD = Operator(add, lambda residual, delta: residual + delta, "spark_add", lambda s: (12 * s.T * s.H, 0))
GATED_RMS_NORM = Operator(gated_rms_norm, gated_rms_norm_ref, "spark_gated_rms_norm", lambda s: (12 * s.T * s.HV * s.DV, 0))
OPERATORS = (RMS_NORM, ADD, GATED_RMS_NORM)
