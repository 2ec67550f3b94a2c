"""What came of a load, under the names that `vllm bench serve` prints and saves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np

_METRICS = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
    "client_queue_time": ("Client Queue Time", "Client-side Queueing"),
}
_LABELS = {  # of the first part: those of figures that there are, in this order
    "completed": "Successful requests:",
    "failed": "Failed requests:",
    "max_concurrency": "Maximum request concurrency:",
    "request_rate": "Request rate configured (RPS):",
    "duration": "Benchmark duration (s):",
    "total_input_tokens": "Total input tokens:",
    "total_output_tokens": "Total generated tokens:",
    "request_throughput": "Request throughput (req/s):",
    "request_goodput": "Request goodput (req/s):",
    "output_throughput": "Output token throughput (tok/s):",
    "max_output_tokens_per_s": "Peak output token throughput (tok/s):",
    "max_concurrent_requests": "Peak concurrent requests:",
    "total_token_throughput": "Total token throughput (tok/s):",
}
DETAILS = ("input_lens", "output_lens", "start_times", "ttfts", "itls", "latencies", "queue_times", "generated_texts", "errors")


@dataclass(slots=True)
class Outcome:
    """One request; times are seconds, `start` and those of `chunks` on one clock. A failed one has an `error`."""

    start: float
    waited: float = 0.0  # before it was sent, for others to end
    input_tokens: int = 0
    output_tokens: int = 0
    chunks: list[float] = field(default_factory=list)  # when each piece of the answer that has tokens came
    text: str = ""
    error: str = ""

    @property
    def ttft(self) -> float:
        return self.chunks[0] - self.start if self.chunks else 0.0

    @property
    def e2el(self) -> float:
        return self.chunks[-1] - self.start if self.chunks else 0.0

    @property
    def tpot(self) -> float:
        return (self.e2el - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0

    @property
    def itl(self) -> list[float]:
        return np.diff(self.chunks).tolist()


def figures(outcomes: Sequence[Outcome], duration: float, goals: dict[str, float]) -> dict[str, Any]:
    """Counts, rates and, request by request, the `DETAILS`. `goals`: the most ms that a good request takes, by metric."""
    done = [o for o in outcomes if not o.error]
    tokens_in, tokens_out = sum(o.input_tokens for o in done), sum(o.output_tokens for o in done)
    good = sum(all(1e3 * getattr(o, name) <= most for name, most in goals.items()) for o in done)
    changes = sorted([(o.start, 1) for o in done] + [(o.chunks[-1], -1) for o in done])  # who ends makes room for who begins
    seconds = [int(at - changes[0][0]) for o in done for at in o.chunks]
    return {
        "duration": duration,
        "completed": len(done),
        "failed": len(outcomes) - len(done),
        "total_input_tokens": tokens_in,
        "total_output_tokens": tokens_out,
        "request_throughput": len(done) / duration,
        "request_goodput": good / duration if goals else None,
        "output_throughput": tokens_out / duration,
        "total_token_throughput": (tokens_in + tokens_out) / duration,
        "max_output_tokens_per_s": float(max(Counter(seconds).values(), default=0)),
        "max_concurrent_requests": max(accumulate(change for _, change in changes), default=0),
        "input_lens": [o.input_tokens for o in outcomes],
        "output_lens": [o.output_tokens for o in outcomes],
        "start_times": [o.start for o in outcomes],
        "ttfts": [o.ttft for o in outcomes],
        "itls": [o.itl for o in outcomes],
        "latencies": [o.e2el for o in outcomes],
        "queue_times": [o.waited for o in outcomes],
        "generated_texts": [o.text for o in outcomes],
        "errors": [o.error for o in outcomes],
    }


def spread(outcomes: Sequence[Outcome], metrics: Sequence[str], percentiles: Sequence[float]) -> dict[str, float]:
    """mean, median, std and percentiles of each metric, ms, as `mean_ttft_ms` and `p99_ttft_ms`; zeros where nothing was done."""
    done, found = [o for o in outcomes if not o.error], dict[str, float]()
    values = {
        "ttft": [o.ttft for o in done],
        "tpot": [o.tpot for o in done if o.output_tokens > 1],
        "itl": [gap for o in done for gap in o.itl],
        "e2el": [o.e2el for o in done],
        "client_queue_time": [o.waited for o in done],
    }
    for name in metrics:
        ms = 1e3 * np.array(values[name] or [0.0])
        shape = {"mean": ms.mean(), "median": np.median(ms), "std": ms.std()}
        found |= {f"{kind}_{name}_ms": float(value) for kind, value in shape.items()}
        found |= {f"p{q:g}_{name}_ms": float(np.percentile(ms, q)) for q in percentiles}
    return found


def block(result: dict[str, Any], metrics: Sequence[str], percentiles: Sequence[float]) -> str:
    """The text of a result: of `figures` and `spread`, with the `max_concurrency` and `request_rate` of the load."""
    lines = [f"{' Serving Benchmark Result ':=^50}"]
    for name, label in _LABELS.items():
        if (value := result.get(name)) is not None and value != "inf":
            lines.append(_line(label, value))
    for name in metrics:
        short, title = _METRICS[name]
        lines.append(f"{title:-^50}")
        kinds = {"Mean": "mean", "Median": "median"} | {f"P{q:g}": f"p{q:g}" for q in percentiles}
        lines += [_line(f"{kind} {short} (ms):", float(result[f"{key}_{name}_ms"])) for kind, key in kinds.items()]
    return "\n".join([*lines, "=" * 50])


def _line(label: str, value: float) -> str:
    return f"{label:<40} {value:<10.2f}" if isinstance(value, float) else f"{label:<40} {value:<10}"
