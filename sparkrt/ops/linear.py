"""Linear projections, and what it takes for a BLAS to give a row the same result in any company.

Host weights are packed [K, N] (`pack_kn`): at two rows OpenBLAS runs them 1.5 to 3 times faster than [N, K] transposed.

Which row counts sum in the same order was measured (OpenBLAS 0.3.31, AVX-512, 1 and 2 threads, K 64 to 4096, N 1 to 49152,
every M up to 520, float32, bits compared):

- one row goes to gemv, which sums in another order than gemm, always;
- up to M·N·K = 1e6 gemm takes a small-matrix path. It differs from the blocked path where N is no multiple of 64 or K exceeds
  one block of the latter (256 does not, 512 does): K 256 × N 264 to M = 14, 256 × 1032 to 3, 512 × 256 to 7, 576 × 576 to 3,
  256 × 8 to 488. Beyond 1e6 no difference was found at any M, thread count or row offset. Within the small path rows agree,
  also when N is cut at multiples of 64;
- one column (the shared expert's gate) goes to gemv over all rows, where two rows of three differ from their result in other
  company; a dot product per row does not.

`LINEAR` leaves a lone row to gemv, which reads the weights once at the memory's speed (576 × 3072 390 µs, as two rows 550;
576 × 49152 6.7 ms, as two rows 10.6: docs/adr/0006), and runs inputs of up to 4096 elements (16 rows at K = 256, 7 at 576, 2 at
2048) on the small path, cut into column tiles. There nothing is repacked for each call (576 × 3072 at 2 rows 250 µs instead of 400, at 4 rows 275
instead of 420; 256 × 1544 at 4 rows 45 instead of 74) and no second thread is waited for. On two idle cores that thread would
win at 16 rows (256 × 1544 108 µs against 155), but beside another busy process the wait costs milliseconds in every call. The
order of a row's sum changes after the first row, and once more where the input passes 4096 elements or M·N·K passes 1e6, whichever is later.

`LINEAR_INVARIANT` runs fewer rows than take the blocked path as that many: 4 rows for 256 × 1032, 2 for 256 × 6144, 489
(23 µs) for a router of 8 experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from sparkrt.ops.operator import Case, Operator, Rng

_SMALL_PATH = 1_000_000  # largest M·N·K of OpenBLAS's small-matrix path
_FEW = 4096  # elements of an input that counts as few rows
_STEP = 64  # columns its kernel does at a time


def pack_kn(w: np.ndarray) -> np.ndarray:
    """[..., N, K] as checkpoints store it → [..., K, N] contiguous, the host's packing."""
    return np.ascontiguousarray(np.swapaxes(w, -1, -2))


def linear_ref(x: np.ndarray, w: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    y: np.ndarray = x @ w.T
    return y if bias is None else y + bias


def linear(out: np.ndarray, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None) -> None:
    _padded(_tiled, 1, out, x, w, bias)


def linear_invariant(out: np.ndarray, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None) -> None:
    _padded(_whole, max(2, _SMALL_PATH // w.size + 1), out, x, w, bias)


def _padded(
    product: Callable[[np.ndarray, np.ndarray, np.ndarray], None],
    least_rows: int,
    out: np.ndarray,
    x: np.ndarray,
    w: np.ndarray,
    bias: np.ndarray | None,
) -> None:
    """out = x · w + bias by a `product` of at least `least_rows` rows, the added ones zero; one column by dot products."""
    rows, columns = len(x), w.shape[1]
    if columns == 1:
        np.vecdot(x, w[:, 0], out[:, 0])
    elif 0 < rows < least_rows:
        more, result = np.zeros((least_rows, x.shape[1]), x.dtype), np.empty((least_rows, columns), out.dtype)
        more[:rows] = x
        product(result, more, w)
        out[...] = result[:rows]
    else:
        product(out, x, w)
    if bias is not None:
        np.add(out, bias, out)


def _whole(out: np.ndarray, x: np.ndarray, w: np.ndarray) -> None:
    np.matmul(x, w, out)


def _tiled(out: np.ndarray, x: np.ndarray, w: np.ndarray) -> None:
    """Few rows in tiles of columns that fit the small path; one, and many, at once."""
    columns = w.shape[1]
    width = _SMALL_PATH // x.size // _STEP * _STEP if len(x) > 1 and x.size <= _FEW else columns
    if width >= columns:
        np.matmul(x, w, out)
        return
    for a in range(0, columns, width):
        np.matmul(x, w[:, a : a + width], out[:, a : a + width])


def _case(tokens: int, outputs: int, inputs: int, bias: bool = False) -> Case:
    def make(rng: Rng) -> list[Any]:
        x = rng.standard_normal((tokens, inputs), dtype=np.float32)
        w = rng.standard_normal((outputs, inputs), dtype=np.float32) * np.float32(inputs**-0.5)
        b = rng.standard_normal(outputs, dtype=np.float32) if bias else None
        return [np.empty((tokens, outputs), np.float32), x, w, b]

    return Case(
        f"T={tokens} N={outputs} K={inputs}" + (" bias=1" if bias else ""),
        make,
        bytes=4 * (outputs * inputs + tokens * (inputs + outputs)),
        flops=2 * tokens * outputs * inputs,
    )


_DOC = """out A [T, N] ← x A [T, K], w A [N, K] (host: [K, N]), bias A [N] or none
    out = x · wᵀ + bias
    """
_PARITY = tuple(
    _case(*s)
    for s in (
        *((1, 256, 64), (2, 8, 256), (63, 96, 100), (64, 64, 64), (65, 33, 256, True), (0, 16, 8)),
        *((1, 1, 256), (5, 1, 256), (3, 1032, 256, True), (1, 576, 576), (7, 2, 3), (32, 500, 128), (33, 500, 128)),
        # the kernels' paths at their edges: rows 8/9, 32/33, 128/129, uneven parts of k, k past a block
        *((9, 200, 584), (33, 72, 2048, True), (34, 136, 5128), (128, 264, 520), (130, 136, 640, True), (150, 264, 3080)),
    )
)
_BENCH = tuple(
    _case(*s)
    for s in (
        *((1, 1544, 256), (16, 1544, 256), (512, 1544, 256), (1, 6144, 256), (16, 6144, 256)),
        *((1, 576, 1536), (1, 3072, 576), (512, 3072, 576), (1, 12352, 2048), (1, 2048, 4096)),
    )
)

LINEAR = Operator(
    "linear",
    f"""Projection; rows may sum in another order above a row count fixed by the weight's shape.

    {_DOC}""",
    linear_ref,
    linear,
    cuda="spark_linear",
    parity=_PARITY,
    bench=_BENCH,
    host_kn=(2,),
)

LINEAR_INVARIANT = Operator(
    "linear_invariant",
    f"""Projection whose rows have the same bits at every row count.

    {_DOC}""",
    linear_ref,
    linear_invariant,
    cuda="spark_linear_invariant",
    parity=_PARITY,
    bench=_BENCH[:2],
    host_kn=(2,),
)

OPERATORS = (LINEAR, LINEAR_INVARIANT)
