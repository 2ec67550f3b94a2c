"""Many replicas behind a router that knows their prefixes: an estimate, request by request, without steps.

A replica prefills one prompt after another and decodes up to `rows` answers at the pace of a step with as many rows as run when
an answer begins. What it has computed stays, part by part, in a least-recently-used store. A request goes where waiting and
computing end first, of two: the replica that has most of its prompt, and the one with the least to do of a few drawn at random.
"""

from __future__ import annotations

import json
import random
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from heapq import heappop, heappush, heapreplace
from pathlib import Path

import numpy as np

from sparkrt.engine.traces import Arrival
from sparkrt.errors import LoadError

_DRAWN = 4  # replicas the router looks at besides the one that has the prefix


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of a step: between measured batches linear, beyond the last in proportion; a prompt token adds its share.

    The defaults are those of a 35B mixture of experts on one H200 (benchmarks/results/engine-nvidia-h200.json).
    """

    batches: tuple[int, ...] = (1, 8, 32, 128)
    seconds: tuple[float, ...] = (0.002725, 0.006102, 0.013628, 0.024079)
    prefill: float = 0.02293  # of a step with any prompt in it, at least
    token: float = 1.578e-5

    @classmethod
    def from_results(cls, path: str | Path, model: str) -> Cost:
        """From the rows `decode` and `prefill` of benchmarks.engine. Raises LoadError if the file has none of `model`."""
        rows = [row for row in json.loads(Path(path).read_text()) if row.get("model") == model]
        decode = sorted((row["batch"], row["step_ms"] / 1e3) for row in rows if row["what"] == "decode")
        prompts = sorted((row["context"], row["step_ms"] / 1e3) for row in rows if row["what"] == "prefill")
        if not decode or not prompts:
            raise LoadError(f"{path}: no rows of decode and prefill for the model {model!r}")
        (few, quick), (many, slow) = prompts[0], prompts[-1]
        token = (slow - quick) / (many - few) if many > few else slow / many
        batches, seconds = zip(*decode, strict=True)
        return cls(batches, seconds, max(quick - few * token, 0.0), token)

    def step(self, rows: int, tokens: int) -> float:
        """A step of `rows` decoding rows and `tokens` prompt tokens."""
        base = 0.0 if rows == 0 else float(np.interp(rows, self.batches, self.seconds)) * max(1.0, rows / self.batches[-1])
        return base if tokens == 0 else max(base, self.prefill) + tokens * self.token


@dataclass(slots=True)
class Report:
    """What happened, times in seconds. `ended` counts finish reasons; with `refused` it makes up all requests.

    `by_second` counts, for every second of the clock that has any: "prompt", "cached" and "answer" tokens, and "preemptions".
    """

    ttft: list[float] = field(default_factory=list)
    itl: list[float] = field(default_factory=list)
    ended: Counter[str] = field(default_factory=Counter)
    by_second: dict[int, Counter[str]] = field(default_factory=dict)
    refused: int = 0
    seconds: float = 0.0

    def count(self, at: float, what: str, n: int) -> None:
        """So many of them, at that time."""
        self.by_second.setdefault(int(at), Counter())[what] += n

    def total(self, what: str) -> int:
        return sum(second[what] for second in self.by_second.values())

    @property
    def prompt_tokens(self) -> int:
        return self.total("prompt")

    @property
    def cached_tokens(self) -> int:
        return self.total("cached")

    @property
    def answer_tokens(self) -> int:
        return self.total("answer")

    def text(self) -> str:
        """A line per figure."""
        ended, time = self.ended.total(), max(self.seconds, 1e-9)
        lines = [
            f"requests      {ended:,} ended, {self.refused:,} refused, {self.total('preemptions'):,} preemptions",
            f"throughput    {ended / time:,.1f} requests/s, {self.answer_tokens / time:,.0f} answer tokens/s",
            f"hit rate      {self.cached_tokens / max(self.prompt_tokens, 1):.1%} of {self.prompt_tokens:,} prompt tokens",
        ]
        for name, values in (("first token", self.ttft), ("between", self.itl)):
            p50, p90, p99 = 1e3 * np.percentile(values or [0.0], (50, 90, 99))
            lines.append(f"{name:13} {p50:,.1f} ms median, {p90:,.1f} p90, {p99:,.1f} p99")
        return "\n".join(lines)


class _Replica:
    def __init__(self) -> None:
        self.ready = 0.0  # when its prompts so far are computed
        self.ends: list[float] = []  # of the answers under way
        self.held = 0  # tokens of `store`
        self.store: OrderedDict[int, int] = OrderedDict()  # by hash of a chain, tokens of its last part


def estimate(arrivals: list[Arrival], replicas: int, rows: int, capacity: int, cost: Cost, seed: int = 0) -> Report:
    """Send a trace to `replicas`, each with `rows` rows and room for `capacity` tokens in its cache."""
    rng, fleet, report = random.Random(seed), [_Replica() for _ in range(replicas)], Report()
    home: dict[int, _Replica] = {}  # by hash of a chain: who computed it last
    pace = [cost.step(n, 0) for n in range(rows + 1)]
    for at, prompt, answer in arrivals:
        chain, h = [], 0
        for part in prompt:
            h = hash((h, part))
            chain.append((h, part[1]))
        tokens = sum(n for _, n in chain)
        idle = min((fleet[int(rng.random() * replicas)] for _ in range(_DRAWN)), key=lambda one: one.ready)
        owner = next((home[h] for h, _ in reversed(chain) if h in home), idle)
        offers = [
            (max(at, one.ready) + cost.token * (tokens - hit), hit, one) for one in (owner, idle) for hit in (_hit(one, chain),)
        ]
        _, hit, one = min(offers, key=lambda offer: offer[0])
        hit = min(hit, tokens - 1)
        while one.ends and one.ends[0] <= at:
            heappop(one.ends)
        full = len(one.ends) >= rows
        start = max(at, one.ready, one.ends[0] if full else 0.0)
        one.ready = start + cost.token * (tokens - hit)
        first = start + cost.step(0, tokens - hit)
        between = pace[min(len(one.ends) + 1, rows)]
        (heapreplace if full else heappush)(one.ends, end := first + (answer - 1) * between)
        _keep(one, chain, capacity)
        for h, _ in chain:
            home[h] = one
        report.ttft.append(first - at)
        report.itl.append(between)
        report.ended["length"] += 1
        report.count(at, "prompt", tokens)
        report.count(at, "cached", hit)
        report.count(end, "answer", answer)
        report.seconds = max(report.seconds, end)
    return report


def _hit(one: _Replica, chain: list[tuple[int, int]]) -> int:
    """Tokens of the chain's beginning that a replica has."""
    tokens = 0
    for h, n in chain:
        if h not in one.store:
            break
        tokens += n
    return tokens


def _keep(one: _Replica, chain: list[tuple[int, int]], capacity: int) -> None:
    for h, n in reversed(chain):  # so that ends of chains go before what they rest on
        if h not in one.store:
            one.store[h] = n
            one.held += n
        one.store.move_to_end(h)
    while one.held > capacity:
        one.held -= one.store.popitem(last=False)[1]
