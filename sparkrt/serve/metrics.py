"""/metrics in the format of Prometheus, under the field's names with the prefix `sparkrt:`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from sparkrt.engine.messages import EngineStats

LABELS = ("model_name", "engine")
_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
_NEXT = (
    0.001,
    0.002,
    0.003,
    0.004,
    0.005,
    0.0075,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1,
    2.5,
    5,
    10,
    80,
)
_WHOLE = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_TOKENS = tuple(2**i for i in range(18))


class Metrics:
    """What happened to requests is counted as it happens; the state of the engine is read when somebody asks."""

    def __init__(self, model: str, stats: Callable[[], EngineStats]) -> None:
        """`model` is the served name: what requests call it does not become a label. `stats`: after the last step."""
        self._registry, labels = CollectorRegistry(), (model, "0")
        self._registry.register(_Engine(labels, stats))

        def histogram(name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"sparkrt:{name}", help, LABELS, buckets=buckets, registry=self._registry).labels(*labels)

        self.time_to_first_token = histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token.", _FIRST
        )
        self.inter_token_latency = histogram("inter_token_latency_seconds", "Between the tokens of an answer.", _NEXT)
        self._per_token = histogram("request_time_per_output_token_seconds", "Mean time per token after the first.", _NEXT)
        self._latency = histogram("e2e_request_latency_seconds", "From a request's arrival to its end.", _WHOLE)
        self._prompt = histogram("request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self._generated = histogram("request_generation_tokens", "Tokens of an answer.", _TOKENS)
        text = "Answers by the reason they ended for."
        ended = Counter("sparkrt:request_success", text, (*LABELS, "finished_reason"), registry=self._registry)
        self._ended = {reason: ended.labels(*labels, reason) for reason in ("stop", "length", "abort", "error")}
        cached = Counter("sparkrt:prompt_tokens_cached", "Prompt tokens that came from a cache.", LABELS, registry=self._registry)
        self._cached = cached.labels(*labels)
        text = "From the start of the process to its being ready."
        self.startup = Gauge("sparkrt:startup_seconds", text, LABELS, registry=self._registry).labels(*labels)

    def ended(self, reason: str, seconds: float, first: float | None, prompt: int, cached: int, generated: int) -> None:
        """An answer ended, `seconds` after its request came and, if it has tokens, `first` seconds after it for the first one."""
        self._ended[reason].inc()
        self._latency.observe(seconds)
        self._prompt.observe(prompt)
        self._generated.observe(generated)
        self._cached.inc(cached)
        if first is not None and generated > 1:
            self._per_token.observe((seconds - first) / (generated - 1))

    def text(self) -> bytes:
        return generate_latest(self._registry)


class _Engine(Collector):
    """Gauges and counters of the engine."""

    def __init__(self, labels: tuple[str, ...], stats: Callable[[], EngineStats]) -> None:
        self._labels, self._stats = labels, stats

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        s = self._stats()
        for name, value, text in (
            ("num_requests_running", s.running, "Sequences that hold a slot."),
            ("num_requests_waiting", s.waiting, "Sequences that wait for one."),
            ("kv_cache_usage_perc", 1 - s.free_blocks / max(s.total_blocks, 1), "Share of KV blocks in use, 0 to 1."),
            (
                "engine_sleep_state",
                s.asleep,
                "The level of the model's sleep; 0: awake.",
            ),
            ("state_slot_usage_perc", 1 - s.free_slots / max(s.total_slots, 1), "Share of state slots in use, 0 to 1."),
            (
                "state_cache_usage_perc",
                1 - s.free_state_cache_slots / max(s.state_cache_slots, 1),
                "Share of the snapshots of recurrent state that are taken, 0 to 1.",
            ),
        ):
            gauge = GaugeMetricFamily(f"sparkrt:{name}", text, labels=LABELS)
            gauge.add_metric(self._labels, value)
            yield gauge
        for name, total, text in (
            ("prompt_tokens", s.prompt_tokens, "Tokens of prompts, cached ones included."),
            ("generation_tokens", s.generation_tokens, "Tokens that were sampled."),
            ("num_preemptions", s.preemptions, "Requests that had to give up their KV blocks and wait again."),
            ("prefix_cache_queries", s.prefix_cache_queries, "Tokens that were looked up in the prefix cache."),
            ("prefix_cache_hits", s.prefix_cache_hits, "Of these, tokens that were not computed again."),
            ("steps", s.steps, "Steps of the model."),
            ("step_seconds", s.step_seconds, "Time in steps."),
            ("step_gap_seconds", s.gap_seconds, "Time between steps that had work to do: news told and read."),
            ("step_host_seconds", s.host_seconds, "Time in steps that did not wait for the device."),
        ):
            counter = CounterMetricFamily(f"sparkrt:{name}", text, labels=LABELS)
            counter.add_metric(self._labels, total)
            yield counter
