"""Traffic against the real scheduler and prefix cache, over a model that computes nothing and a clock that is only counted.

    python -m sparkrt.engine.simulate --synthetic chat --requests 2000 --rate 20
    python -m sparkrt.engine.simulate --synthetic shared --requests 1000000 --rate 20000 --replicas 1000

With one replica the engine itself runs, step by step. With more, `fleet` estimates them request by request.
"""

from __future__ import annotations

import argparse
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import numpy as np

from sparkrt.cache.paged import BlockPool
from sparkrt.cache.prefix import Match, PrefixCache
from sparkrt.engine import fleet, traces
from sparkrt.engine.config import EngineConfig
from sparkrt.engine.core import EngineCore
from sparkrt.engine.fleet import Cost, Report
from sparkrt.engine.messages import EngineRequest
from sparkrt.errors import SparkrtError
from sparkrt.model.batch import ForwardBatch, MixedBatchResult, SamplerParams


@dataclass(frozen=True, slots=True)
class Replica:
    """What one engine has: rows a step, tokens a step, KV blocks of `page` tokens, slots for snapshots."""

    rows: int = 128
    budget: int = 2048
    blocks: int = 8192
    page: int = 64
    snapshots: int = 512
    caching: bool = True


class NullModel:
    """The books of a model and no arithmetic; every token is `traces.ANSWER`. `seconds` is what its steps cost so far."""

    def __init__(self, replica: Replica, max_model_len: int, cost: Cost | None = None) -> None:
        self.options: Any = SimpleNamespace(
            max_num_seqs=replica.rows,
            max_num_batched_tokens=replica.budget,
            max_model_len=max_model_len,
            page_size=replica.page,
            num_blocks=replica.blocks,
            valid_vocab=traces.VOCAB,
            prompt_logit_rows=64,
        )
        self.pool, self.num_blocks, self.free_slots = BlockPool(replica.blocks), replica.blocks, replica.rows
        slots = range(replica.rows, replica.rows + replica.snapshots)
        self.prefix = PrefixCache(self.pool, replica.page, slots, recurrent=True) if replica.caching else None
        self.seconds, self._cost, self._page = 0.0, cost, replica.page
        self._flying: deque[tuple[MixedBatchResult, ForwardBatch]] = deque()

    @property
    def free_blocks(self) -> int:
        return self.pool.free_count

    def new_sequence(self, params: SamplerParams, tokens: int, history: Any, generated: int, match: Match | None) -> Any:
        self.free_slots -= 1
        shared = [] if match is None else match.blocks
        for block in shared:
            self.pool.incref(block)
        blocks = shared + self.pool.alloc(-(-tokens // self._page) - len(shared))
        done = 0 if match is None else match.resume
        return SimpleNamespace(blocks=SimpleNamespace(blocks=blocks), kv_valid_tokens=done, length=done)

    def grow(self, seq: Any, tokens: int) -> None:
        seq.blocks.blocks += self.pool.alloc(-(-tokens // self._page) - len(seq.blocks.blocks))

    def snapshot(self, seq: Any, slot: int) -> None:
        pass

    def release(self, seq: Any) -> None:
        self.free_slots += 1
        for block in seq.blocks.blocks:
            self.pool.decref(block)

    def launch(self, batch: ForwardBatch, before_sampling: Callable[[], None] | None = None) -> int:
        rows = len(batch.decode) + sum(part.sample for part in batch.prefill)
        if self._cost is not None:
            self.seconds += self._cost.step(len(batch.decode), sum(len(part.tokens) for part in batch.prefill))
        self._flying.append((MixedBatchResult(np.full(rows, traces.ANSWER, np.int32), [None] * rows, []), batch))
        return 0

    def collect(self, handle: int) -> MixedBatchResult:
        result, batch = self._flying.popleft()
        for seq in batch.decode:
            seq.kv_valid_tokens += 1
        for part in batch.prefill:
            part.seq.kv_valid_tokens = part.start + len(part.tokens)
        return result

    def check_integrity(self, sequences: Any) -> None:
        pass

    def close(self) -> None:
        pass


def replay(arrivals: list[traces.Arrival], replica: Replica, cost: Cost) -> Report:
    """Run a trace through one engine. What does not fit it at all is refused, as the server would."""
    longest = min(max((a.tokens + a.answer for a in arrivals), default=1), replica.blocks * replica.page)
    model: Any = NullModel(replica, longest, cost)
    core = EngineCore(model, EngineConfig(async_scheduling=False, device="cuda", debug=False))
    report, coming, last = Report(), deque(enumerate(arrivals)), dict[str, float]()
    while coming or core.has_work:
        if coming and not core.has_work:
            model.seconds = max(model.seconds, coming[0][1].at)
        while coming and coming[0][1].at <= model.seconds:
            i, arrival = coming.popleft()
            try:
                ids = arrival.ids().tolist()
                core.add(EngineRequest(request_id=str(i), prompt_ids=ids, max_tokens=arrival.answer, temperature=0.0))
                report.count(arrival.at, "prompt", len(ids))
            except SparkrtError:
                report.refused += 1
        before = core.scheduler.preemptions
        news = core.step()
        report.count(model.seconds, "preemptions", core.scheduler.preemptions - before)
        for output in news:
            i, now = int(output.request_id), model.seconds
            if output.token_ids:
                if output.request_id in last:
                    report.itl.append(now - last[output.request_id])
                else:
                    report.ttft.append(now - arrivals[i].at)
                    report.count(arrivals[i].at, "cached", output.cached_tokens)
                last[output.request_id] = now
                report.count(now, "answer", len(output.token_ids))
            if output.finish_reason is not None:
                report.ended[output.finish_reason] += 1
                last.pop(output.request_id, None)
    report.seconds = model.seconds
    core.check_integrity()
    core.close()
    return report


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m sparkrt.engine.simulate", description="Traffic without a model: for planning."
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--trace", metavar="FILE", help="arrivals, one JSON object a line")
    source.add_argument("--synthetic", choices=traces.SYNTHETIC)
    parser.add_argument("--requests", type=int, default=1000, help="of a synthetic trace")
    parser.add_argument("--rate", type=float, default=5.0, help="requests a second of a synthetic trace")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument(
        "--costs", metavar="FILE", help="results of benchmarks.engine; default: a 35B mixture of experts on an H200"
    )
    parser.add_argument("--model", default="35b", help="which of its models")
    parser.add_argument("--plot", metavar="FILE", help="draw it all (.svg, .png); needs matplotlib")
    for name, value in asdict(Replica()).items():
        if name != "caching":
            parser.add_argument(f"--{name}", type=int, default=value, help=f"of a replica; default {value}")
    parser.add_argument("--no-caching", dest="caching", action="store_false", help="without the prefix cache")
    a = parser.parse_args(argv)
    for name in ("requests", "rate", "replicas", "rows", "budget", "blocks", "page"):
        if getattr(a, name) <= 0:
            parser.error(f"--{name}: expected more than 0")
    try:
        cost = Cost() if a.costs is None else Cost.from_results(a.costs, a.model)
        arrivals = traces.read(a.trace) if a.trace else traces.SYNTHETIC[a.synthetic](a.requests, a.rate, a.seed)
        replica = Replica(a.rows, a.budget, a.blocks, a.page, a.snapshots, a.caching)
        began = perf_counter()
        if a.replicas == 1:
            report = replay(arrivals, replica, cost)
        else:
            tokens = replica.blocks * replica.page if replica.caching else 0
            report = fleet.estimate(arrivals, a.replicas, replica.rows, tokens, cost)
        took = perf_counter() - began
        print(report.text(), f"simulated in  {took:.1f} s, {len(arrivals) / max(took, 1e-9):,.0f} requests/s", sep="\n")
        if a.plot:
            plot(report, a.plot)
    except (OSError, SparkrtError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def plot(report: Report, path: str | Path) -> None:
    """Draw what share of requests, and of tokens, came within which time; and throughput, hit rate and preemptions over time."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise SparkrtError("--plot needs matplotlib: pip install matplotlib") from None
    figure = Figure(figsize=(7, 5.5), layout="constrained")
    (first, between), (pace, hits) = figure.subplots(2, 2)
    for axes, name, values in ((first, "time to first token", report.ttft), (between, "time between tokens", report.itl)):
        ordered = 1e3 * np.quantile(values or [0.0], np.linspace(0, 1, 101))
        axes.plot(ordered, np.linspace(0, 100, 101))
        axes.set(xlabel=f"{name}, ms", ylabel="% within", xlim=(0, max(1.05 * ordered[99], 1e-3)))
    width = max(int(report.seconds) // 60, 1)  # seconds a bar: some 60 bars
    bars = np.arange(0, int(report.seconds) + 1, width)
    of = {what: np.zeros(len(bars)) for what in ("answer", "prompt", "cached", "preemptions")}
    for second, counts in report.by_second.items():
        for what, n in counts.items():
            of[what][min(second // width, len(bars) - 1)] += n
    pace.step(bars, of["answer"] / width, where="post")
    pace.set(xlabel="time, s", ylabel="answer tokens/s", ylim=(0, None))
    hits.step(bars, 100 * of["cached"] / np.maximum(of["prompt"], 1), where="post")
    hits.set(xlabel=f"time, s; {report.total('preemptions'):,} preemptions (ticks)", ylabel="% of prompts cached", ylim=(0, 105))
    hits.plot(bars[of["preemptions"] > 0], np.zeros((of["preemptions"] > 0).sum()), "k|")
    for axes in (first, between, pace, hits):
        axes.grid(alpha=0.3)
    bare = dict.fromkeys(("Creator", "Date", "Format", "Type")) if str(path).endswith(".svg") else None
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "sparkrt"}):  # text stays text; the same report, the same file
        figure.savefig(path, metadata=bare)


if __name__ == "__main__":
    raise SystemExit(main())
