"""How fast each operator is on its bench shapes, against what the machine can copy and multiply.

    python -m benchmarks.kernels --op linear,rms_norm

Prints a table and keeps the figures in benchmarks/results/kernels-<card>.json. Ceilings are measured in the same run. Inputs
rotate through more memory than the caches of a core hold; figures are medians of single calls, bytes and operations the least
that the shape needs.
"""

from __future__ import annotations

import sparkrt.runtime  # noqa: F401  # isort: skip  # before NumPy: its BLAS reads the number of threads once

import argparse
import json
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from sparkrt.ops.operator import Case, Operator
from sparkrt.ops.registry import OPERATORS
from sparkrt.runtime.machine import usable_cores

ROOT = Path(__file__).resolve().parent.parent
ROTATED = 32 << 20  # bytes of inputs to go through before any is seen again


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What this machine does at best, in bytes and floating-point operations a second."""

    copy: float
    multiply: float


def measure_ceilings() -> Ceilings:
    """A copy of a quarter gigabyte by all cores, and a float32 product of 2048³."""
    cores = usable_cores()
    source = np.ones((cores, (1 << 26) // cores), np.float32)
    target = np.zeros_like(source)
    with ThreadPoolExecutor(cores) as pool:
        copy = median(timed(lambda: list(pool.map(np.copyto, target, source)), 0.5))
    a = np.random.default_rng(0).standard_normal((2048, 2048), dtype=np.float32)
    product = np.empty_like(a)
    return Ceilings(2 * source.nbytes / copy, 2 * 2048**3 / median(timed(lambda: np.matmul(a, a, product), 0.5)))


def timed(call: Callable[[], Any], seconds: float, before: Callable[[], Any] = lambda: None) -> list[float]:
    """Seconds of single calls, at least five, until they add up to `seconds`; `before` each, untimed; the first is dropped."""
    times: list[float] = []
    while len(times) < 6 or (sum(times) < seconds and len(times) < 2000):
        before()
        began = perf_counter()
        call()
        times.append(perf_counter() - began)
    return times[1:]


def measure(op: Operator, case: Case, seconds: float) -> float:
    """Median seconds of one call. What the operator updates in place is put back before each, so that values stay ordinary."""
    args = op.host_args(case.make(np.random.default_rng(0)))
    size = sum(a.nbytes for a in args if isinstance(a, np.ndarray))
    copies = [
        [a.copy() if isinstance(a, np.ndarray) else a for a in args] for _ in range(max(1, min(64, ROTATED // max(size, 1))))
    ]
    outputs = [i for i in case.outputs if isinstance(args[i], np.ndarray)]
    turn = -1

    def put_back() -> None:
        nonlocal turn
        turn = (turn + 1) % len(copies)
        for i in outputs:
            copies[turn][i][...] = args[i]

    return median(timed(lambda: op.host(*copies[turn]), seconds, put_back))


def shape_of(label: str) -> dict[str, Any]:
    """A case's label as fields: "T=1 H=256" by name, free words under "case"."""
    pairs = [word.partition("=") for word in label.split()]
    free = " ".join(name for name, equals, _ in pairs if not equals)
    fields: dict[str, Any] = {"case": free} if free else {}
    return fields | {name: int(value) if value.isdecimal() else value for name, equals, value in pairs if equals}


def figures(op: Operator, case: Case, seconds: float, ceilings: Ceilings) -> dict[str, Any]:
    moved, done = case.bytes / seconds, case.flops / seconds
    return {
        "op": op.name,
        "shape": shape_of(case.label),
        "us": round(seconds * 1e6, 2),
        "tb_s": round(moved / 1e12, 5),
        "tflop_s": round(done / 1e12, 5),
        "pct_ceiling": round(100 * max(moved / ceilings.copy, done / ceilings.multiply), 1),
        "peer": None,
        "peer_us": None,
    }


def keep(file: Path, rows: list[dict[str, Any]]) -> None:
    """Replace the rows of the same operators, keep the others."""
    names = {row["op"] for row in rows}
    old = json.loads(file.read_text()) if file.exists() else []
    file.parent.mkdir(exist_ok=True)
    lines = ",\n".join(json.dumps(row) for row in [*(row for row in old if row["op"] not in names), *rows])
    file.write_text(f"[\n{lines}\n]\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", help="names, comma-separated (default: all)")
    parser.add_argument("--seconds", type=float, default=0.2, help="time to spend on each shape (default: 0.2)")
    parser.add_argument("--no-keep", action="store_true", help="print only")
    args = parser.parse_args()
    known = {op.name: op for op in OPERATORS}
    wanted = args.op.split(",") if args.op else list(known)
    unknown = [name for name in wanted if name not in known]
    if unknown:
        parser.error(f"no operator {', '.join(unknown)}; known: {', '.join(known)}")
    card = f"host-{usable_cores()}c"
    ceilings = measure_ceilings()
    print(f"{card}: the host backend, NumPy on the processor, no GPU")
    print(f"ceilings: copy {ceilings.copy / 1e9:.1f} GB/s, float32 product {ceilings.multiply / 1e9:.0f} GFLOP/s")
    print(f"{'operator':<24} {'shape':<56} {'µs':>10} {'GB/s':>8} {'GFLOP/s':>8} {'% ceiling':>9}")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    stamp = {"commit": commit.stdout.strip(), "date": date.today().isoformat(), "card": card}
    rows = []
    for name in wanted:
        for case in known[name].bench:
            row = figures(known[name], case, measure(known[name], case, args.seconds), ceilings)
            rows.append({**row, **stamp})
            speeds = f"{row['tb_s'] * 1e3:>8.2f} {row['tflop_s'] * 1e3:>8.2f} {row['pct_ceiling']:>9.1f}"
            print(f"{name:<24} {case.label:<56} {row['us']:>10.1f} {speeds}", flush=True)
    if not args.no_keep:
        keep(ROOT / "benchmarks" / "results" / f"kernels-{card}.json", rows)


if __name__ == "__main__":
    main()
