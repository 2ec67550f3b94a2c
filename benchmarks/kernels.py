"""How fast each operator is on its bench shapes, against what the machine can copy and multiply.

    python -m benchmarks.kernels --op linear,rms_norm

Prints a table and keeps the figures in benchmarks/results/kernels-<card>.json. Ceilings are measured in the same run. Inputs
rotate through more memory than the caches hold; figures are medians, bytes and operations the least that the shape needs. On a
GPU the shapes are those of released models and the peers' figures stand beside ours (peers-h200.json); on the host they are the
operators' own.
"""

from __future__ import annotations

import sparkrt.runtime  # noqa: F401  # isort: skip  # before NumPy: its BLAS reads the number of threads once

import argparse
import json
import re
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import date
from functools import cache
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks.cases import Case, cases
from sparkrt.ops.operator import Operator
from sparkrt.ops.registry import OPERATORS
from sparkrt.runtime import open_backend
from sparkrt.runtime.cuda import CudaBackend
from sparkrt.runtime.kernels import UnsupportedCall
from sparkrt.runtime.machine import usable_cores

ROOT = Path(__file__).resolve().parent.parent
Measure = Callable[[Operator, Case], tuple[float, float]]  # seconds of a call, bytes it moves at least
ROTATED = 32 << 20  # bytes of inputs to go through before any is seen again


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What this machine does at best, in bytes and floating-point operations a second."""

    copy: float
    multiply: float | None  # None: there was nothing to measure it with

    def __str__(self) -> str:
        product = "not measured" if self.multiply is None else f"{self.multiply / 1e12:.4g} TFLOP/s"
        return f"copy {self.copy / 1e12:.4g} TB/s, product {product}"


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


def figures(op: Operator, case: Case, seconds: float, moved: float, ceilings: Ceilings) -> dict[str, Any]:
    shape = shape_of(case.label)
    share = max(moved / seconds / ceilings.copy, case.flops / seconds / ceilings.multiply if ceilings.multiply else 0)
    best = min(
        (row for row in peers() if row["op"] == op.name and row["shape"].items() <= shape.items()),
        key=lambda r: r["us"],
        default={},
    )
    return {
        "op": op.name,
        "shape": shape,
        "us": round(seconds * 1e6, 2),
        "tb_s": round(moved / seconds / 1e12, 5),
        "tflop_s": round(case.flops / seconds / 1e12, 5),
        "pct_ceiling": round(100 * share, 1),
        "peer": best.get("peer"),
        "peer_us": best.get("us"),
    }


@cache
def peers() -> list[dict[str, Any]]:
    """What peers reached on an H200; each row's shape names a part of a case's."""
    found: list[dict[str, Any]] = json.loads((ROOT / "benchmarks" / "peers-h200.json").read_text())["kernels"]
    return found


def keep(file: Path, rows: list[dict[str, Any]]) -> None:
    """Replace the rows of the same operators, keep the others."""
    names = {row["op"] for row in rows}
    old = json.loads(file.read_text()) if file.exists() else []
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(row) for row in [*(row for row in old if row["op"] not in names), *rows])
    file.write_text(f"[\n{lines}\n]\n")


def open_bench(device: str, seconds: float) -> tuple[str, Ceilings, Callable[[Operator], Sequence[Case]], Measure]:
    """(card, ceilings, an operator's cases, how to measure one) of a device."""
    backend = open_backend(device)
    if not isinstance(backend, CudaBackend):
        print("this is the host backend: NumPy on the processor, no GPU")
        return (
            f"host-{usable_cores()}c",
            measure_ceilings(),
            lambda op: cases(op, op.bench),
            lambda op, case: (measure(op, case, seconds), case.bytes),
        )
    from benchmarks.device import DeviceBench  # needs cuda-python
    from benchmarks.shapes import model_cases

    bench, models = DeviceBench(backend), model_cases()
    card = re.sub(r"\W+", "-", backend.properties.name.lower())
    ceilings = Ceilings(bench.copy_ceiling(), bench.product_ceiling())
    return card, ceilings, lambda op: models.get(op.name, []) if op.cuda else [], bench.measure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", help="names, comma-separated (default: all)")
    parser.add_argument("--device", default="auto", help="auto, host or cuda")
    parser.add_argument("--seconds", type=float, default=0.2, help="time to spend on each shape on the host (default: 0.2)")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the JSON file")
    parser.add_argument("--commit", help="what was measured, where git cannot say it")
    parser.add_argument("--no-keep", action="store_true", help="print only")
    args = parser.parse_args()
    known = {op.name: op for op in OPERATORS}
    wanted = args.op.split(",") if args.op else list(known)
    unknown = [name for name in wanted if name not in known]
    if unknown:
        parser.error(f"no operator {', '.join(unknown)}; known: {', '.join(known)}")
    card, ceilings, shapes, run = open_bench(args.device, args.seconds)
    print(f"{card}: {ceilings}")
    print(f"{'operator':<24} {'shape':<56} {'µs':>10} {'GB/s':>8} {'GFLOP/s':>9} {'% ceiling':>9}  peer")
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    stamp = {"commit": args.commit or git.stdout.strip(), "date": date.today().isoformat(), "card": card}
    rows = []
    for name in wanted:
        for case in shapes(known[name]):
            try:
                seconds, moved = run(known[name], case)
            except UnsupportedCall:
                print(f"{name:<24} {case.label:<56} no kernel", flush=True)
                continue
            row = figures(known[name], case, seconds, moved, ceilings)
            rows.append({**row, **stamp})
            speeds = f"{row['tb_s'] * 1e3:>8.2f} {row['tflop_s'] * 1e3:>9.2f} {row['pct_ceiling']:>9.1f}"
            peer = f"  {row['peer']} {row['peer_us']:.1f}" if row["peer"] else ""
            print(f"{name:<24} {case.label:<56} {row['us']:>10.1f} {speeds}{peer}", flush=True)
    if not args.no_keep:
        keep(args.results / f"kernels-{card}.json", rows)


if __name__ == "__main__":
    main()
