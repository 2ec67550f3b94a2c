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

`LINEAR` runs a lone row as two, and up to 16 rows (fewer above K = 976, so that 64 columns fit) on the small path, cut into
column tiles: there nothing is repacked for each call (576 × 3072 at 2 rows 250 µs instead of 400, 1536 × 576 130 instead of
200) and no second thread is waited for, which beside another busy process costs milliseconds. Its order changes once, at that
row count or where M·N·K passes 1e6.

`LINEAR_INVARIANT` runs fewer rows than take the blocked path as that many: 4 rows for 256 × 1032, 2 for 256 × 6144, 489
(23 µs) for a router of 8 experts.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sparkrt.ops.operator import Case, Operator, Rng

_SMALL_PATH = 1_000_000  # largest M·N·K of OpenBLAS's small-matrix path
_FEW_ROWS = 16  # above, two threads on the blocked path win
_STEP = 64  # columns its kernel does at a time


def pack_kn(w: np.ndarray) -> np.ndarray:
    """[..., N, K] as checkpoints store it → [..., K, N] contiguous, the host's packing."""
    return np.ascontiguousarray(np.swapaxes(w, -1, -2))


def linear_ref(x: np.ndarray, w: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    y: np.ndarray = x @ w.T
    return y if bias is None else y + bias


def linear(out: np.ndarray, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None) -> None:
    _product(out, x, w, bias, 2, _FEW_ROWS)


def linear_invariant(out: np.ndarray, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None) -> None:
    _product(out, x, w, bias, max(2, _SMALL_PATH // w.size + 1), 0)


def _product(out: np.ndarray, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None, least_rows: int, few_rows: int) -> None:
    """out = x · w + bias, run with at least `least_rows` rows (the added ones are zero), and up to `few_rows` in column tiles."""
    rows, columns = len(x), w.shape[1]
    if columns == 1:
        np.vecdot(x, w[:, 0], out[:, 0])
    elif 0 < rows < least_rows:
        padded, product = np.zeros((least_rows, x.shape[1]), x.dtype), np.empty((least_rows, columns), out.dtype)
        padded[:rows] = x
        _tiled(product, padded, w, few_rows)
        out[...] = product[:rows]
    else:
        _tiled(out, x, w, few_rows)
    if bias is not None:
        np.add(out, bias, out)


def _tiled(out: np.ndarray, x: np.ndarray, w: np.ndarray, few_rows: int) -> None:
    columns = w.shape[1]
    width = _SMALL_PATH // x.size // _STEP * _STEP if 0 < len(x) <= few_rows else 0
    if 0 < width < columns:
        for a in range(0, columns, width):
            np.matmul(x, w[:, a : a + width], out[:, a : a + width])
    else:
        np.matmul(x, w, out)


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
        *((1, 1, 256), (5, 1, 256), (3, 1032, 256, True), (1, 576, 576), (7, 2, 3), (16, 1000, 128), (17, 1000, 128)),
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
    parity=_PARITY,
    bench=_BENCH[:2],
    host_kn=(2,),
)

OPERATORS = (LINEAR, LINEAR_INVARIANT)
