"""/metrics in the format of Prometheus, under the field's names with the prefix `sparkrt:`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from types import MappingProxyType
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from sparkrt.engine.messages import LARGEST_STEP, EngineStats, ModelInfo, OffloadStats

LABELS = ("model_name", "engine")
_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
_MS = (1, 2, 3, 4, 5, 7.5, 10, 25, 50, 75, 100, 150, 200, 300, 400, 500, 750, 1000, 2500, 5000, 10_000, 80_000)
_NEXT = tuple(ms / 1000 for ms in _MS)
_S = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_WHOLE = (0.001, 0.002, 0.005, 0.01, 0.02, *_S)
_TOKENS = tuple(2**i for i in range(18))

_CACHE_OPTIONS = ("block_size", "enable_prefix_caching", "gpu_memory_utilization", "num_gpu_blocks_override", "state_cache_slots")


class Times(NamedTuple):
    """Of an answer, in seconds after its request came: when it had its slot, its first token and its last; no token: None."""

    queued: float
    first: float | None
    last: float


class Metrics:
    """What happened to requests is counted as it happens; the state of the engine is read when somebody asks."""

    def __init__(self, model: str, stats: Callable[[], EngineStats], refused: Mapping[str, int] = MappingProxyType({})) -> None:
        """`model` is the served name: what requests call it does not become a label. `stats`: after the last step.

        `refused`: how many requests were not taken, by reason.
        """
        self._registry, self._labels = CollectorRegistry(), (model, "0")
        self._registry.register(_Engine(self._labels, stats, refused))
        ProcessCollector(registry=self._registry)

        def histogram(name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"sparkrt:{name}", help, LABELS, buckets=buckets, registry=self._registry).labels(*self._labels)

        self.time_to_first_token = histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token.", _FIRST
        )
        self.inter_token_latency = histogram("inter_token_latency_seconds", "Between the tokens of an answer.", _NEXT)
        self._per_token = histogram("request_time_per_output_token_seconds", "Mean time per token after the first.", _NEXT)
        self._latency = histogram("e2e_request_latency_seconds", "From a request's arrival to its end.", _WHOLE)
        self._queue = histogram("request_queue_time_seconds", "Until an answer has a slot.", _WHOLE)
        self._prefill = histogram("request_prefill_time_seconds", "From there to its first token.", _WHOLE)
        self._decode = histogram("request_decode_time_seconds", "From its first token to its last.", _WHOLE)
        self._inference = histogram("request_inference_time_seconds", "From the slot to the last token.", _WHOLE)
        self._prompt = histogram("request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self._generated = histogram("request_generation_tokens", "Tokens of an answer.", _TOKENS)
        text = "Answers by the reason they ended for."
        ended = Counter("sparkrt:request_success", text, (*LABELS, "finished_reason"), registry=self._registry)
        self._ended = {reason: ended.labels(*self._labels, reason) for reason in ("stop", "length", "abort", "error")}
        cached = Counter("sparkrt:prompt_tokens_cached", "Prompt tokens that came from a cache.", LABELS, registry=self._registry)
        self._cached = cached.labels(*self._labels)

    def started(self, phases: Mapping[str, float], info: ModelInfo) -> None:
        """What start-up took, in seconds by phase, and what there is since."""
        text = "What start-up took, by phase; total: from the start of the process to its being ready."
        gauge = Gauge("sparkrt:startup_seconds", text, (*LABELS, "phase"), registry=self._registry)
        for phase, seconds in phases.items():
            gauge.labels(*self._labels, phase).set(seconds)
        options = {name: value for name, value in info.lines if name in _CACHE_OPTIONS}
        options["num_gpu_blocks"] = str(info.kv_tokens // int(options.get("block_size", 1)))
        text = "How the cache is set up: see the labels."
        Gauge("sparkrt:cache_config_info", text, (*LABELS, *options), registry=self._registry).labels(
            *self._labels, *options.values()
        ).set(1)

    def ended(self, reason: str, seconds: float, times: Times, prompt: int, cached: int, generated: int) -> None:
        """An answer ended, `seconds` after its request came."""
        self._ended[reason].inc()
        self._latency.observe(seconds)
        self._prompt.observe(prompt)
        self._generated.observe(generated)
        self._cached.inc(cached)
        if times.first is not None:
            self._queue.observe(times.queued)
            self._prefill.observe(max(times.first - times.queued, 0.0))
            self._decode.observe(times.last - times.first)
            self._inference.observe(max(times.last - times.queued, 0.0))
            if generated > 1:
                self._per_token.observe((seconds - times.first) / (generated - 1))

    def text(self) -> bytes:
        return generate_latest(self._registry)


class _Engine(Collector):
    """Gauges, counters and one histogram of the engine."""

    def __init__(self, labels: tuple[str, ...], stats: Callable[[], EngineStats], refused: Mapping[str, int]) -> None:
        self._labels, self._stats, self._refused = labels, stats, refused

    def collect(self) -> Iterator[Metric]:
        s = self._stats()
        offload = s.offload or OffloadStats()
        for name, value, text in (
            ("num_requests_running", s.running, "Sequences that hold a slot."),
            ("num_requests_waiting", s.waiting, "Sequences that wait for one."),
            ("kv_cache_usage_perc", 1 - s.free_blocks / max(s.total_blocks, 1), "Share of KV blocks in use, 0 to 1."),
            ("state_slot_usage_perc", 1 - s.free_slots / max(s.total_slots, 1), "Share of state slots in use, 0 to 1."),
            (
                "state_cache_usage_perc",
                1 - s.free_state_cache_slots / max(s.state_cache_slots, 1),
                "Share of the snapshots of recurrent state that are taken, 0 to 1.",
            ),
            ("kv_offload_host_bytes", offload.host_bytes, "Host memory that holds what the prefix cache evicted."),
            ("kv_offload_disk_bytes", offload.disk_bytes, "Disk that holds such."),
            ("engine_sleep_state", s.asleep, "The level of the model's sleep; 0: awake."),
        ):
            gauge = GaugeMetricFamily(f"sparkrt:{name}", text, labels=LABELS)
            gauge.add_metric(self._labels, value)
            yield gauge
        for name, total, text in (
            ("external_prefix_cache_hits", offload.hits, "Tokens of prompts that came from host memory or disk."),
            ("kv_offload_spilled_bytes", offload.spilled_bytes, "Copied from the device to host memory."),
            ("kv_offload_restored_bytes", offload.restored_bytes, "Copied back."),
            ("kv_offload_loaded_bytes", offload.loaded_bytes, "Read from disk."),
            ("kv_offload_lost", offload.lost, "Pages and states that there was no room for."),
            ("kv_offload_corrupt_files", offload.corrupt_files, "Files that were not what was written, and removed."),
            ("kv_offload_disk_failures", offload.disk_failures, "Files that could not be written."),
            ("num_swaps", offload.swaps, "Preempted requests whose state was kept in host memory."),
            ("prompt_tokens", s.prompt_tokens, "Tokens of prompts, cached ones included."),
            ("generation_tokens", s.generation_tokens, "Tokens that were sampled."),
            ("num_preemptions", s.preemptions, "Requests that had to give up their KV blocks and wait again."),
            ("prefix_cache_queries", s.prefix_cache_queries, "Tokens that were looked up in the prefix cache."),
            ("prefix_cache_hits", s.prefix_cache_hits, "Of these, tokens that were not computed again."),
            ("steps", s.steps, "Steps of the model."),
            ("step_seconds", s.step_seconds, "Time in steps."),
            ("step_gap_seconds", s.gap_seconds, "Time between steps that had work to do: news told and read."),
            ("step_host_seconds", s.host_seconds, "Time in steps that did not wait for the device."),
            ("gpu_idle_seconds", s.idle_seconds, "Time with requests at hand in which nothing was launched that was not read."),
        ):
            counter = CounterMetricFamily(f"sparkrt:{name}", text, labels=LABELS)
            counter.add_metric(self._labels, total)
            yield counter
        text = "Requests that were not taken (503), by reason."
        rejections = CounterMetricFamily("sparkrt:admission_rejections", text, labels=(*LABELS, "reason"))
        for reason, count in self._refused.items():
            rejections.add_metric((*self._labels, reason), count)
        yield rejections
        sizes = HistogramMetricFamily("sparkrt:iteration_tokens_total", "Tokens of a step.", labels=LABELS)
        names = [*(str(float(2**i)) for i in range(LARGEST_STEP + 1)), "+Inf"]
        sizes.add_metric(self._labels, [*zip(names, accumulate(s.steps_by_tokens), strict=True)], s.step_tokens)
        yield sizes
