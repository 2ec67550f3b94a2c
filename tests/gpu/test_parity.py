"""Every operator's kernel against its float64 reference, on fresh random inputs and in every activation type.

Generated from the registry. The reference sees the values the device sees: inputs rounded to the activation type.
"""

from __future__ import annotations

import inspect
import secrets

import numpy as np
import pytest

from benchmarks.cases import Case, cases
from sparkrt.ops.operator import Operator
from sparkrt.ops.registry import OPERATORS
from sparkrt.runtime import dtypes
from sparkrt.runtime.cuda import CudaBackend
from sparkrt.runtime.dtypes import DType
from sparkrt.runtime.kernels import UnsupportedCall
from tests.gpu.device import call, rounded, types_of
from tests.ops.test_parity import SENTINEL, expected, poisoned

pytestmark = pytest.mark.gpu

NARROW_TOLERANCE = 1e-2  # of results in bf16 or f16
PRODUCT_TOLERANCE = 5e-3  # of float32 results of tensor-core products
PRODUCTS = {"linear", "linear_invariant", "paged_attention_prefill", "paged_attention_decode", "moe_experts", "gdn_prefill"}
WIDE_OUTPUT = {"linear", "linear_invariant"}  # float32 results of narrower inputs: logits
LARGEST_BENCH = 2e10, 5e8  # operations and bytes of a bench case that its reference can do here, too


def variants(op: Operator) -> list[tuple[DType, bool]]:
    """(activation type, whether the output is float32 all the same)."""
    if "A" not in op.argument_types():
        return [(dtypes.float32, False)]
    wide = [(dtypes.bfloat16, True)] if op.name in WIDE_OUTPUT else []
    return [(dtypes.float32, False), (dtypes.bfloat16, False), (dtypes.float16, False), *wide]


def params(bench: bool) -> list[object]:
    found = []
    for op in OPERATORS:
        if op.cuda is None:
            continue
        small = [c for c in cases(op, op.bench) if c.flops <= LARGEST_BENCH[0] and c.bytes <= LARGEST_BENCH[1]]
        for case in small if bench else cases(op, op.parity):
            for dtype, wide in variants(op)[:2] if bench else variants(op):
                if not bench or dtype != dtypes.float32 or "A" not in op.argument_types():
                    label = f"{op.name}-{case.label.replace(' ', '_')}-{dtype.name}" + ("-f32out" if wide else "")
                    found.append(pytest.param(op, case, dtype, wide, id=label))
    return found


def tolerance(op: Operator, activation: DType, output: DType) -> float:
    assert op.tolerance is not None, "a float output needs a tolerance"
    if output != dtypes.float32:
        return NARROW_TOLERANCE
    if activation != dtypes.float32 or op.name in PRODUCTS:
        return max(op.tolerance, PRODUCT_TOLERANCE)
    return op.tolerance


def check(backend: CudaBackend, op: Operator, case: Case, activation: DType, wide_output: bool) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")  # shown on failure: paste it here to repeat
    args = case.make(np.random.default_rng(seed))
    types = types_of(op, args, activation)
    if wide_output:
        types[0] = dtypes.float32
    args = rounded(args, types)
    want = expected(op, args)
    for i, ref in zip(case.outputs, want, strict=True):
        if types[i] == dtypes.float16 and np.abs(ref[np.isfinite(ref)]).max(initial=0) > np.finfo(np.float16).max:
            pytest.skip("the result does not fit float16")
    written_only = poisoned(op, case, args, want)
    try:
        back = call(backend, op, args, types)
    except UnsupportedCall as error:
        if activation == dtypes.float32 and "A" in op.argument_types():
            pytest.skip(f"no float32 kernel: {error}")
        raise
    for i, ref in zip(case.outputs, want, strict=True):
        out, kind = back[i], types[i]
        if out is None or kind is None:
            assert ref is None
            continue
        assert out.shape == ref.shape
        if not kind.is_float:
            assert i not in written_only or not (out == SENTINEL).any(), f"output {i} was not written everywhere"
            wrong = np.argwhere(out != ref)
            assert not len(wrong), f"output {i}: {len(wrong)} of {out.size} differ, the first at {wrong[0]}"
            continue
        if i in written_only:
            assert not np.isnan(out).any(), f"output {i} has NaN or was not written everywhere"
        finite = np.isfinite(ref)
        assert np.array_equal(out[~finite], ref[~finite].astype(out.dtype), equal_nan=True), f"output {i}: infinities differ"
        error, scale = np.linalg.norm(out[finite] - ref[finite]), np.linalg.norm(ref[finite])
        limit = tolerance(op, activation, kind)
        assert error <= limit * scale, f"output {i}: relative error {error / scale:.2e}, allowed {limit:g}"
    names = list(inspect.signature(op.host).parameters)
    for i, (old, new) in enumerate(zip(args, back, strict=True)):
        if isinstance(old, np.ndarray) and i not in case.outputs and names[i] != "workspace":
            assert np.array_equal(old, new, equal_nan=old.dtype.kind == "f"), f"input {i} was modified"


@pytest.mark.parametrize(("op", "case", "activation", "wide_output"), params(bench=False))
def test_kernel_agrees_with_the_reference(
    backend: CudaBackend, op: Operator, case: Case, activation: DType, wide_output: bool
) -> None:
    check(backend, op, case, activation, wide_output)


@pytest.mark.parametrize(("op", "case", "activation", "wide_output"), params(bench=True))
def test_kernel_agrees_at_sizes_that_are_measured(
    backend: CudaBackend, op: Operator, case: Case, activation: DType, wide_output: bool
) -> None:
    check(backend, op, case, activation, wide_output)
