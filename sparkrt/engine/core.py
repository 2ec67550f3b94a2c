"""`EngineCore`: requests in, tokens out. One thread owns it and the model."""

from __future__ import annotations

from collections.abc import Iterable
from time import perf_counter

from sparkrt.engine.config import Progress
from sparkrt.engine.job import Job
from sparkrt.engine.messages import EngineOutput, EngineRequest, EngineStats
from sparkrt.engine.params import check_prompt_ids
from sparkrt.engine.reuse import offload_stats
from sparkrt.engine.rows import sampler_params
from sparkrt.engine.stepper import Stepper
from sparkrt.errors import CapacityError, RequestError


class EngineCore(Stepper):
    """Continuous batching over one model; not thread-safe. What may be asked of it, and its beginning and end; see `Stepper`."""

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Raises RequestError if it can never run, CapacityError if too many wait; nothing is changed then."""
        self._check_awake()
        if request.request_id in self._requests:
            raise RequestError(f"request id {request.request_id!r} is in use", param="request_id")
        ids, context = check_prompt_ids(request.prompt_ids, self.model.options.valid_vocab), self.model.options.max_model_len
        if len(ids) + request.max_tokens > context:
            text = f"prompt ({len(ids)} tokens) + max_tokens ({request.max_tokens}) exceed the context of {context}"
            raise RequestError(text, param="max_tokens", code="context_length_exceeded")
        if request.priority and self.config.scheduling_policy != "priority":
            raise RequestError('priority needs the scheduling policy "priority"', param="priority")
        job = self._job(request, self._outbox)
        if request.max_tokens == 0 and not job.scored:  # nothing is asked of the model
            self._outbox.append(EngineOutput(request_id=job.request_id, finish_reason="length"))
            return
        self.scheduler.add(job)
        job.since = perf_counter()
        if not self._requests:
            self._idle_since = job.since
        self._requests[job.request_id] = job
        if (limit := self.config.max_num_queued_reqs) is not None:
            self._admit()
            if len(self.scheduler.waiting) > limit and job.seq is None and not job.finished:
                self._forget(job)
                raise CapacityError(f"the queue is full: {limit} requests may wait")
        if (timeout := self.config.request_timeout) is not None:
            job.deadline = job.since + timeout
            self._deadlines.append(job)

    def _job(self, request: EngineRequest, outbox: list[EngineOutput]) -> Job:
        job = Job(request, outbox)
        if request.grammar is not None or request.thinking is not None:
            if self.grammars is None:
                raise RequestError("this engine has neither grammars nor budgets of thinking", param="structured_outputs")
            job.guide = self.grammars.guide(request.grammar, request.thinking)  # at hand, if somebody compiled it beforehand
            self._guided = True
        return job

    def abort(self, request_ids: Iterable[str]) -> None:
        """Stop these requests now; unknown ids are ignored. Their "abort" outputs come with the next step."""
        for request_id in request_ids:
            if (job := self._requests.get(request_id)) is not None:
                self._end(job, "abort")

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do or to tell."""
        work = self._requests or self._outbox or self._in_flight or self._loading or self.reuse.busy
        return bool(work) or (self._fatal is not None and not self._closed)

    @property
    def stalled(self) -> bool:
        """Whether requests wait and nothing of the engine's own will make room: decode loops hold it."""
        return bool(self._requests) and self._resting

    def _check_awake(self) -> None:
        self._check_alive()
        if self._stats.asleep:
            raise CapacityError("the model is asleep: wake it up first")

    def sleep(self, level: int = 1) -> int:
        """Give the memory of KV and states back, and of the weights: level 1 keeps those in host memory, level 2 discards them.

        How many bytes of the device that were. What is cached of prompts is forgotten. Raises RequestError for a wrong level or
        without `enable_sleep_mode`; CapacityError, changing nothing, while anything runs or waits, or without room on the host.
        """
        self._check_alive()
        if level not in (1, 2) or isinstance(level, bool):
            raise RequestError(
                f"level must be 1 (weights are kept in host memory) or 2 (discarded), got {level!r}", param="level"
            )
        if self._sleeper is None:
            raise RequestError("sleeping was not prepared for: start with enable_sleep_mode (--enable-sleep-mode)")
        if self._stats.asleep:
            return 0
        self.settle()
        if self._requests or self.scheduler.admitted:
            raise CapacityError("requests or decode loops are running")
        self.reset_prefix_cache()
        self.reuse.flush()
        given, self._stats.asleep = self._sleeper.sleep(keep_weights=level == 1), level
        return given

    def wake_up(self, progress: Progress = lambda stage, done, total: None) -> None:
        """Take the memory again and fill it; nothing if awake. Raises what fails (OutOfMemory, LoadError), and sleeps on then."""
        self._check_alive()
        if self._stats.asleep and self._sleeper is not None:
            self._sleeper.wake_up(progress)
            self.reuse.woken(other_weights=self._stats.asleep == 2)
            self._stats.asleep = 0

    def open_loop(self, requests: Iterable[EngineRequest], outbox: list[EngineOutput]) -> list[Job]:
        """Admit the rows of a decode loop past the queue. Raises CapacityError when there is no room for all of them now."""
        self._check_awake()
        jobs = [self._job(request, outbox) for request in requests]
        try:
            for job in jobs:
                self._recount()
                self.scheduler.claim(job)
                self.reuse.make_room(job.blocks)
                job.seq = self.model.new_sequence(sampler_params(job.message, self._seeds), job.life)
                self._guide([job])
        except BaseException:
            self.close_loop(jobs)
            raise
        return jobs

    def stats(self) -> EngineStats:
        self._recount()
        stats, waiting = self._stats, len(self.scheduler.waiting)
        stats.running, stats.waiting = len(self._requests) - waiting, waiting
        stats.preemptions = self.scheduler.preemptions
        stats.cached_blocks = self.reuse.evictable
        if (cache := self.reuse.cache) is not None:
            stats.prefix_cache_queries, stats.prefix_cache_hits = cache.stats.queries, cache.stats.hits
            stats.state_cache_slots, stats.free_state_cache_slots = cache.slots, cache.free_slots
            if cache.spill is not None:
                stats.offload = offload_stats(cache.spill, cache.stats.restored)
        stats.free_blocks, stats.free_slots = self.scheduler.free_blocks, self.scheduler.free_slots
        return stats

    def reset_prefix_cache(self) -> None:
        """Forget what is cached; running requests keep what they use."""
        self._check_alive()
        self.reuse.reset()
        self._recount()

    def close(self) -> None:
        """End everything and give all back, the model too; again is fine. Requests still running get no more outputs."""
        if self._closed:
            return
        try:
            if self._fatal is None:
                self.settle()
                self.abort(list(self._requests))
                self.close_loop(self.scheduler.admitted)
                while self._loading:
                    self.reuse.wait()
                    self._take_copies()
                if self.config.debug:
                    self.check_integrity()
                self.reuse.save()
        finally:
            self._closed = True
            self._outbox.clear()
            if self._fatal is None:
                self.model.close()
            self._on_close()
