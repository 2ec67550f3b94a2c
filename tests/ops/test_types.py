"""The docs of operators give every array a type, and it is the type the cases hold: GPU tests and benchmarks rely on it."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.cases import cases
from sparkrt.ops.operator import Operator
from sparkrt.ops.registry import OPERATORS

HOST = {"A": np.float32, "f32": np.float32, "i32": np.int32, "u32": np.uint32}


@pytest.mark.parametrize("op", OPERATORS, ids=lambda op: op.name)
def test_documented_types_are_the_cases_own(op: Operator) -> None:
    types = op.argument_types()
    for case in cases(op, op.parity):
        args = case.make(np.random.default_rng(0))
        assert len(args) == len(types)
        for i, (kind, arg) in enumerate(zip(types, args, strict=True)):
            if isinstance(arg, np.ndarray):
                assert kind, f"argument {i} has no type in the doc"
                assert arg.dtype == HOST[kind], f"argument {i}"
            elif arg is not None:
                assert kind is None, f"argument {i} is a scalar"
