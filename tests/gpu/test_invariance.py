"""Same row, same result: a row alone, in front of others and behind them has the same bits."""

from __future__ import annotations

import secrets
from typing import Any

import numpy as np
import pytest

from benchmarks.cases import Case, cases
from sparkrt.ops.operator import Operator
from sparkrt.ops.registry import OPERATORS
from sparkrt.runtime import dtypes
from sparkrt.runtime.cuda import CudaBackend
from tests.gpu.device import call, rounded, types_of

pytestmark = pytest.mark.gpu

# By operator: arguments that have a row per token (or decode row). What is not named is shared by all rows.
ROWS = {
    "rms_norm": (0, 1),
    "gated_rms_norm": (0, 1, 2),
    "swiglu": (0, 1),
    "linear_invariant": (0, 1),
    "add_linear": (0, 1),
    "norm_linear": (0, 1, 2),
    "paged_attention_decode": (0, 1, 5, 6),
    "gdn_gates": (0, 1, 2),
    "gdn_step": (0, 3, 8, 9),
    "router_topk": (0, 1, 2),
    "moe_experts": (0, 1, 4, 5),
    "greedy": (0, 2, 3),
    "logprobs": (0, 1, 2, 3, 4, 5),
}
CASES = [
    pytest.param(op, case, id=f"{op.name}-{case.label.replace(' ', '_')}")
    for op in OPERATORS
    if op.cuda and op.name in ROWS
    for case in cases(op, op.parity)
    if op.name not in ("add_linear", "norm_linear") or "invariant" in case.label
]


@pytest.mark.parametrize(("op", "case"), CASES)
def test_rows_do_not_depend_on_their_company(backend: CudaBackend, op: Operator, case: Case) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    args = case.make(np.random.default_rng(seed))
    total, by_row = len(args[0]), ROWS[op.name]
    if total < 2:
        pytest.skip("one row has no company")
    if op.name == "moe_experts" and total > 256 and not args[7]:
        pytest.skip("more rows than the declared threshold, and not asked to be invariant")
    types = types_of(op, args, dtypes.bfloat16)
    args = rounded(args, types)

    def run(rows: slice) -> list[Any]:
        chosen = [a[rows].copy() if i in by_row else a for i, a in enumerate(args)]
        return call(backend, op, chosen, types)

    together = run(slice(0, total))
    for first, last in ((0, 1), (total - 1, total), (total // 2, total // 2 + 1), (total // 3, total)):
        part = run(slice(first, last))
        for i in case.outputs:
            if i in by_row and part[i] is not None:
                np.testing.assert_array_equal(part[i], together[i][first:last], err_msg=f"output {i}, rows {first}:{last}")
