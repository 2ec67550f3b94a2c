"""What is generated from the registry besides parity: the operator reference and the kernel benchmark."""

from __future__ import annotations

from pathlib import Path

from benchmarks.cases import cases
from benchmarks.kernels import Ceilings, figures, measure, shape_of
from sparkrt.ops.registry import OPERATORS
from tools.operators import operator_table


def test_the_committed_operator_reference_is_current() -> None:
    committed = Path(__file__).parents[2] / "docs" / "operators.md"
    assert committed.read_text(encoding="utf-8") == operator_table(), "run: python -m tools.operators > docs/operators.md"


def test_benchmark_rows_have_the_agreed_fields() -> None:
    op = next(op for op in OPERATORS if op.name == "rms_norm")
    seconds = measure(op, cases(op, op.parity)[0], 0.0)
    case = cases(op, op.bench)[0]
    row = figures(op, case, seconds, case.bytes, Ceilings(copy=1e9, multiply=1e9))
    assert seconds > 0
    assert list(row) == ["op", "shape", "us", "tb_s", "tflop_s", "pct_ceiling", "peer", "peer_us"]
    assert row["shape"] == {"T": 1, "H": 256, "offset": 1}


def test_labels_become_fields() -> None:
    assert shape_of("T=1 q=2+3") == {"T": 1, "q": "2+3"}
    assert shape_of("tiny b16 run=1") == {"case": "tiny b16", "run": 1}


def test_bench_cases_count_their_traffic() -> None:
    for op in OPERATORS:
        labels = [case.label for case in cases(op, op.bench)]
        assert len(set(labels)) == len(labels), f"{op.name} has two bench cases of one label"
        assert all(case.bytes > 0 for case in cases(op, op.bench)), f"{op.name} has a bench case without bytes"
