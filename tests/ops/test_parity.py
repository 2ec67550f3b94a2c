"""Every operator's host function against its float64 reference, on fresh random inputs. Generated from the registry."""

from __future__ import annotations

import secrets
from typing import Any

import numpy as np
import pytest

from benchmarks.cases import Case, cases
from sparkrt.ops.operator import Operator
from sparkrt.ops.registry import OPERATORS

SENTINEL = -1_234_567  # no operator computes it


def poison(array: np.ndarray) -> None:
    array.fill(np.nan if array.dtype.kind == "f" else SENTINEL)


def wide(value: Any) -> Any:
    """The argument as the reference takes it: floats in float64."""
    if not isinstance(value, np.ndarray) or value.dtype.kind != "f":
        return value
    with np.errstate(invalid="ignore"):  # an output not written yet may hold any bits
        return value.astype(np.float64)


def expected(op: Operator, args: list[Any]) -> tuple[Any, ...]:
    result = op.reference(*(wide(a) for a in op.reference_args(args)))
    return result if isinstance(result, tuple) else (result,)


def same(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    return all(x is y if x is None or y is None else np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def poisoned(op: Operator, case: Case, args: list[Any], want: tuple[Any, ...]) -> set[int]:
    """Poison the outputs that are only written: those the reference is not given, and those whose content it ignores."""
    taken = len(args) - len(op.reference_args(args))
    done = set()
    for i in case.outputs:
        if not isinstance(args[i], np.ndarray):
            continue
        kept = args[i].copy()
        poison(args[i])
        if i < taken or same(expected(op, args), want):
            done.add(i)
        else:
            args[i][...] = kept
    return done


CASES = [
    pytest.param(op, case, id=f"{op.name}-{case.label.replace(' ', '_')}") for op in OPERATORS for case in cases(op, op.parity)
]


@pytest.mark.parametrize(("op", "case"), CASES)
def test_host_agrees_with_the_reference(op: Operator, case: Case) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")  # shown on failure: paste it here to repeat
    canonical = case.make(np.random.default_rng(seed))
    want = expected(op, canonical)
    written_only = poisoned(op, case, canonical, want)
    args = op.host_args(canonical)
    before = [a.copy() if isinstance(a, np.ndarray) else a for a in args]
    with np.errstate(invalid="raise"):
        op.host(*args)

    assert len(want) == len(case.outputs)
    for i, ref in zip(case.outputs, want, strict=True):
        out = args[i]
        if out is None:
            assert ref is None
            continue
        assert out.shape == ref.shape
        if out.dtype.kind != "f":
            assert np.array_equal(out, ref), f"output {i}"
            assert i not in written_only or not (out == SENTINEL).any(), f"output {i} was not written everywhere"
            continue
        if i in written_only:
            assert not np.isnan(out).any(), f"output {i} was not written everywhere"
        assert op.tolerance is not None, "a float output needs a tolerance"
        finite = np.isfinite(ref)
        assert np.array_equal(out[~finite], ref[~finite].astype(out.dtype), equal_nan=True), f"output {i}: infinities differ"
        scale = np.linalg.norm(ref[finite])
        assert np.linalg.norm(out[finite] - ref[finite]) <= op.tolerance * scale, f"output {i}"
    for i, old in enumerate(before):
        if isinstance(old, np.ndarray) and i not in case.outputs:
            assert np.array_equal(old, args[i], equal_nan=old.dtype.kind == "f"), f"input {i} was modified"


def test_names_are_unique_and_every_operator_is_covered() -> None:
    names = [op.name for op in OPERATORS]
    assert len(set(names)) == len(names)
    for op in OPERATORS:
        assert op.parity, f"{op.name} has no parity cases"
        assert op.bench, f"{op.name} has no bench cases"
        assert op.doc.strip()
        labels = [case.label for case in cases(op, op.parity)]
        assert len(set(labels)) == len(labels), f"{op.name} has two parity cases of one label"
