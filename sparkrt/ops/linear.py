"""Linear projections, and what it takes for a BLAS to give a row the same result in any company (measured in docs/adr/0006).

Host weights are packed [K, N]: at two rows OpenBLAS runs them 1.5 to 3 times faster than [N, K] transposed. One row goes to gemv,
up to M·N·K = 1e6 gemm takes a small-matrix path, beyond it the blocked one: three orders of summation. Within a path rows agree,
also when N is cut at multiples of 64. One column goes to gemv over all rows, where rows differ; a dot product per row does not.

`LINEAR` leaves a lone row to gemv, and runs inputs of up to 4096 elements on the small path, cut into column tiles: nothing is
repacked for each call and no second thread is waited for. `LINEAR_INVARIANT` runs fewer rows than take the blocked path as that
many: 4 rows for 256 × 1032, 2 for 256 × 6144, 489 (23 µs) for a router of 8 experts.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sparkrt.ops.norm import rms_norm, rms_norm_ref
from sparkrt.ops.operator import Array, Operator

_SMALL_PATH = 1_000_000  # largest M·N·K of OpenBLAS's small-matrix path
_FEW = 4096  # elements of an input that counts as few rows
_STEP = 64  # columns its kernel does at a time


def linear_ref(x: Array, w: Array, bias: Array | None) -> Array:
    y: Array = x @ w.T
    return y if bias is None else y + bias


def linear(out: Array, x: Array, w: Array, bias: Array | None) -> None:
    """Projection; rows may sum in another order above a row count fixed by the weight's shape.

    out A [T, N] ← x A [T, K], w A [N, K] (host: [K, N]), bias A [N] or none
    out = x · wᵀ + bias
    parity: T=1 N=256 K=64; T=2 N=8 K=256; T=63 N=96 K=100; T=64 N=64 K=64; T=65 N=33 K=256 bias; T=0 N=16 K=8;
    T=1 N=1 K=256; T=5 N=1 K=256; T=3 N=1032 K=256 bias; T=1 N=576 K=576; T=7 N=2 K=3; T=32 N=500 K=128; T=33 N=500 K=128;
    T=9 N=200 K=584; T=33 N=72 K=2048 bias; T=34 N=136 K=5128; T=128 N=264 K=520; T=130 N=136 K=640 bias;
    T=150 N=264 K=3080; T=300 N=257 K=520; T=1100 N=33 K=264
    bench: T=1 N=1544 K=256; T=16 N=1544 K=256; T=512 N=1544 K=256; T=1 N=6144 K=256; T=16 N=6144 K=256; T=1 N=576 K=1536;
    T=1 N=3072 K=576; T=512 N=3072 K=576; T=1 N=12352 K=2048; T=1 N=2048 K=4096
    """
    few = len(x) > 1 and x.size <= _FEW
    _product(out, x, w, bias, _SMALL_PATH // x.size // _STEP * _STEP if few else w.shape[1])


def linear_invariant(out: Array, x: Array, w: Array, bias: Array | None) -> None:
    """Projection whose rows have the same bits at every row count.

    out A [T, N] ← x A [T, K], w A [N, K] (host: [K, N]), bias A [N] or none
    out = x · wᵀ + bias
    parity: T=1 N=256 K=64; T=2 N=8 K=256; T=63 N=96 K=100; T=64 N=64 K=64; T=65 N=33 K=256 bias; T=0 N=16 K=8;
    T=1 N=1 K=256; T=5 N=1 K=256; T=3 N=1032 K=256 bias; T=1 N=576 K=576; T=7 N=2 K=3; T=32 N=500 K=128; T=33 N=500 K=128;
    T=9 N=200 K=584; T=33 N=72 K=2048 bias; T=34 N=136 K=5128; T=128 N=264 K=520; T=130 N=136 K=640 bias;
    T=150 N=264 K=3080
    bench: T=1 N=1544 K=256; T=16 N=1544 K=256
    """
    rows, least, columns = len(x), max(2, _SMALL_PATH // w.size + 1), w.shape[1]
    if columns == 1 or rows == 0 or rows >= least:
        _product(out, x, w, bias, columns)
        return
    more, result = np.zeros((least, x.shape[1]), x.dtype), np.empty((least, columns), out.dtype)
    more[:rows] = x
    _product(result, more, w, bias, columns)
    out[...] = result[:rows]


def add_linear_ref(residual: Array, x: Array, w: Array, bias: Array | None, invariant: int) -> Array:
    y: Array = residual + linear_ref(x, w, bias)
    return y


def add_linear(residual: Array, x: Array, w: Array, bias: Array | None, invariant: int) -> None:
    """Projection added to the residual, with one rounding.

    residual A [T, N] in/out ← x A [T, K], w A [N, K] (host: [K, N]), bias A [N] or none, invariant
    residual += x · wᵀ + bias, as LINEAR or (if invariant) as LINEAR_INVARIANT
    parity: T=1 N=256 K=64; T=2 N=8 K=256 bias; T=8 N=96 K=584; T=0 N=16 K=8; T=3 N=33 K=100; T=32 N=500 K=128; T=33 N=72 K=2048;
    T=33 N=500 K=128 bias; T=150 N=264 K=520; T=7 N=40 K=256 invariant; T=65 N=136 K=640 invariant; T=150 N=264 K=520 invariant
    bench: T=1 N=256 K=512; T=16 N=256 K=512; T=512 N=256 K=512
    """
    delta = np.empty(residual.shape, residual.dtype)
    (linear_invariant if invariant else linear)(delta, x, w, bias)
    np.add(residual, delta, residual)


def norm_linear_ref(
    x: Array, norm: Array, w: Array, bias: Array | None, eps: float, offset: float, invariant: int
) -> tuple[Array, Array]:
    normed = rms_norm_ref(x, norm, eps, offset)
    return linear_ref(normed, w, bias), normed


def norm_linear(
    out: Array, normed: Array, x: Array, norm: Array, w: Array, bias: Array | None, eps: float, offset: float, invariant: int
) -> None:
    """Projection of the residual's norm, which is kept, too.

    out A [T, N], normed A [T, K] ← x A [T, K], norm f32 [K], w A [N, K] (host: [K, N]), bias A [N] or none, eps, offset,
    invariant
    normed = rms_norm(x, norm, eps, offset); out = normed · wᵀ + bias, as LINEAR or (if invariant) as LINEAR_INVARIANT
    parity: T=1 N=256 K=64 offset=1; T=2 N=8 K=256 bias; T=8 N=1032 K=584 offset=1; T=0 N=16 K=8; T=3 N=33 K=100;
    T=5 N=257 K=2048; T=9 N=200 K=256 offset=1; T=33 N=72 K=2048; T=7 N=40 K=2048 invariant; T=65 N=136 K=640 invariant offset=1;
    T=4 N=24 K=2568; T=1 N=40 K=2048 offset=1; T=4 N=136 K=4096 invariant
    bench: T=1 N=1544 K=256 offset=1; T=16 N=1544 K=256 offset=1; T=512 N=1544 K=256 offset=1
    """
    rms_norm(normed, x, norm, eps, offset)
    (linear_invariant if invariant else linear)(out, normed, w, bias)


def _product(out: Array, x: Array, w: Array, bias: Array | None, width: int) -> None:
    """out = x · w + bias, `width` columns at a time; a single column by dot products."""
    if w.shape[1] == 1:
        np.vecdot(x, w[:, 0], out[:, 0])
    else:
        for a in range(0, w.shape[1], width):
            np.matmul(x, w[:, a : a + width], out[:, a : a + width])
    if bias is not None:
        np.add(out, bias, out)


def _work(s: Any) -> tuple[float, float]:
    return 4 * (s.N * s.K + s.T * (s.K + s.N)), 2 * s.T * s.N * s.K


LINEAR = Operator(linear, linear_ref, "spark_linear", _work, host_kn=(2,))
LINEAR_INVARIANT = Operator(linear_invariant, linear_ref, "spark_linear_invariant", _work, host_kn=(2,))
ADD_LINEAR = Operator(
    add_linear,
    add_linear_ref,
    "spark_add_linear",
    lambda s: (4 * (s.N * s.K + s.T * (s.K + 2 * s.N)), 2 * s.T * s.N * s.K),
    host_kn=(2,),
)
NORM_LINEAR = Operator(
    norm_linear,
    norm_linear_ref,
    "spark_norm_linear",
    lambda s: (4 * (s.N * s.K + s.K + s.T * (2 * s.K + s.N)), 2 * s.T * s.N * s.K),
    host_kn=(4,),
)
OPERATORS = (LINEAR, LINEAR_INVARIANT, ADD_LINEAR, NORM_LINEAR)
