"""`Stepper`: the steps of the engine, from who may run to who gets which token.

A step plans, launches, and reads back. With `async_scheduling` step N+1 is launched before step N is read, so the device
never waits for Python; what the host knows is then one step old, and what a stopped request did meanwhile is dropped.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Callable, Iterable
from time import perf_counter
from typing import Any

from sparkrt.engine.config import EngineConfig
from sparkrt.engine.job import Job, Limits, Plan
from sparkrt.engine.messages import LARGEST_STEP, EngineOutput, EngineStats
from sparkrt.engine.reuse import Reuse
from sparkrt.engine.rows import logprob, sampler_params, targets
from sparkrt.engine.scheduler import Scheduler
from sparkrt.errors import EngineFatal
from sparkrt.model.batch import ForwardBatch, MixedBatchResult, PrefillSlice, TokenLogprobs
from sparkrt.model.model import Model
from sparkrt.model.sequence import SequenceState
from sparkrt.model.sleeper import Sleeper
from sparkrt.text.grammar import Grammars

log = logging.getLogger("sparkrt.engine")


class Stepper:
    """Runs what is queued, row by row of one model. A request at fault in a step ends with "error", nobody else."""

    def __init__(
        self,
        model: Model,
        config: EngineConfig,
        on_close: Callable[[], None] = lambda: None,
        grammars: Grammars | None = None,
        sleeper: Sleeper | None = None,
    ) -> None:
        """`config` is resolved. `on_close` runs after the model was closed: the backend's end."""
        self.grammars = grammars
        o = model.options
        limits = Limits(o.max_num_seqs, model.num_blocks, o.page_size, o.max_num_batched_tokens, o.prompt_logit_rows)
        self.model, self.config, self.reuse = model, config, Reuse(model.prefix, model.snapshot)
        lookup = None if model.prefix is None else self.reuse.lookup
        self.scheduler = Scheduler(limits, config.scheduling_policy == "priority", lookup)
        self._on_close, self._sleeper = on_close, sleeper
        self._requests: dict[str, Job] = {}
        self._deadlines: deque[Job] = deque()  # in order
        self._outbox: list[EngineOutput] = []
        self._rows: tuple[list[Job], list[SequenceState]] = [], []  # who decodes: mostly those of the last step
        self._loading: list[Job] = []  # their blocks and slots are being filled with what was spilled
        self._in_flight: tuple[int, Plan] | None = None
        self._seeds = random.Random(config.seed)
        self._stats = EngineStats(total_blocks=model.num_blocks, total_slots=o.max_num_seqs)
        self._waited = 0.0  # s
        self._idle_since = 0.0  # when the device's last step was read, or there was work for it again
        self._stepping = False
        self._resting = False  # the last step had nothing to run and nothing to read
        self._forgotten: list[Job] = []  # of decode loops that were collected as garbage during a step
        self._guided = False  # whether any request was: 256 rows are not asked at every step for what nobody wants
        self._closed = False
        self._fatal: EngineFatal | None = None

    def step(self, outbox: list[EngineOutput] | None = None) -> list[EngineOutput]:
        """Run one step, of requests or of the decode loop with this `outbox`; returns their news. EngineFatal once broken."""
        self._check_alive()
        outbox, began, waited = self._outbox if outbox is None else outbox, perf_counter(), self._waited
        forgotten, self._forgotten = self._forgotten, []
        self.close_loop(forgotten)
        self._stepping = True
        while self._deadlines and (self._deadlines[0].finished or self._deadlines[0].deadline <= began):
            if not (job := self._deadlines.popleft()).finished:
                self._end(job, "timeout", error=f"the request was not done within {self.config.request_timeout:g} s")
        try:
            if self._in_flight is not None and self._in_flight[1].jobs[0].outbox is not outbox:
                self.settle()  # at most one step runs ahead
            launched = self._launch(outbox)
            self._resting = launched is None and self._in_flight is None and not self._await_copies()
            if self.config.async_scheduling:  # from here until the next step, the host is one step behind
                launched, self._in_flight = self._in_flight, launched
            if launched is not None:
                self._collect(*launched)
            if self.config.debug and not self._requests and self._in_flight is None:
                self.check_integrity()
        except EngineFatal as error:
            self._die(error)
        finally:
            self._stepping = False
        outputs = outbox[:]
        outbox.clear()
        self._stats.step_seconds += (total := perf_counter() - began)
        self._stats.host_seconds += total - (self._waited - waited)
        return outputs

    def _launch(self, outbox: list[EngineOutput]) -> tuple[int, Plan] | None:
        """Admit, plan and enqueue the next step. A failure ends the requests of that step and nothing else."""
        if outbox is self._outbox:
            self._take_copies()
            self._make_room()
            self._admit()
        if not (plan := self.scheduler.plan(outbox)):
            return None
        if plan.prefill and outbox is not self._outbox:
            plan.decode = []  # the rows of a loop wait for each other
        launched = False
        try:
            if plan.decode is not self._rows[0]:
                self._rows = plan.decode, [job.seq for job in plan.decode if job.seq is not None]
            batch = ForwardBatch(self._rows[1])
            for part in plan.prefill:
                assert part.job.seq is not None
                tokens, kept = part.job.ids[part.start : part.stop], self.reuse.snapshots(part)
                batch.prefill.append(PrefillSlice(part.job.seq, tokens, part.start, part.sample, targets(part), kept))
            hangs = self._guided and any(job.hangs for job in plan.decode)
            self.scheduler.launched(plan)
            launched = True
            began = perf_counter()
            if self._in_flight is None and outbox is self._outbox:
                self._stats.idle_seconds += began - self._idle_since
            handle = self.model.launch(batch, self.settle if hangs else None)
            self._waited += perf_counter() - began if self.config.device == "host" else 0.0  # the launch is the computation
        except BaseException as error:
            for job in self.scheduler.withdrawn(plan) if launched else ():
                self._release(job)
            self._fail(plan.jobs, error)
            return None
        self._stats.steps += 1
        self._stats.step_tokens += (size := len(plan.decode) + sum(stop - start for _, start, stop, _ in plan.prefill))
        self._stats.steps_by_tokens[min((size - 1).bit_length(), LARGEST_STEP + 1)] += 1
        for job, _, stop, _ in plan.prefill:  # what is computed again after a preemption does not count again
            self._stats.prompt_tokens += max(min(stop, job.prompt) - job.counted, 0)
            job.counted = max(job.counted, stop)
        return handle, plan

    def _make_room(self) -> None:
        """Give blocks to rows that need one, and let go of those that were preempted for it."""
        preempted = None
        while preempted is None or preempted:
            self._recount()
            preempted, grown = self.scheduler.make_room()
            for i, job in enumerate(grown):
                try:
                    assert job.seq is not None
                    self.reuse.make_room(len(grown) - i)  # for all at once: what is spilled together costs less
                    self.reuse.grown(job, (job.blocks - 1) * self.model.options.page_size)
                    self.model.grow(job.seq, self._capacity(job))
                except BaseException as error:
                    self.scheduler.not_grown(job)
                    self._fail([job], error)
            for job in preempted:
                self._release(job)
        self._recount()

    def _admit(self) -> None:
        while (job := self.scheduler.admit()) is not None:
            try:
                job.queued = perf_counter() - job.since if job.queued is None else job.queued
                job.params = job.params or sampler_params(job.message, self._seeds)  # after a preemption, with the seed it had
                self.reuse.begin(job, job.blocks)
                job.seq = self.model.new_sequence(job.params, self._capacity(job), job.ids, job.emitted, job.match)
                if self.reuse.restore(job):
                    self._loading.append(job)
                if job.guide is not None:
                    job.guide.stale = True  # its mask is the slot's
                self._guide([job])
            except BaseException as error:
                self._fail([job], error)
            self._recount()

    def _take_copies(self) -> None:
        """Those whose spilled pages and state are back can run."""
        self.reuse.poll()
        if self._loading:
            there = [job for job in self._loading if self.reuse.restored(job)]
            self._loading = [job for job in self._loading if job not in there]
            for job in there:
                if self.scheduler.loaded(job):
                    self._release(job)
                else:
                    self.reuse.read(job)

    def _await_copies(self) -> bool:
        """Nothing can run. Whether that is because of copies or reads; then one of them has ended now."""
        reading = any(job.fetch is not None and job.fetch.reads for job in self.scheduler.waiting)
        if self._loading or reading or (self.reuse.busy and not self._requests):
            self.reuse.wait()
        return bool(self._loading or reading)

    def _recount(self) -> None:
        """Pages are shared: how many can be had is known to who holds them."""
        if self.reuse.cache is not None:
            self.scheduler.free_blocks = self.model.free_blocks + self.reuse.evictable

    def _capacity(self, job: Job) -> int:
        return min(job.blocks * self.model.options.page_size, job.life)

    def _collect(self, handle: int, plan: Plan) -> None:
        """Read a step and tell its news, and let go of what nothing in flight uses any more."""
        began = perf_counter()
        try:
            try:
                result = self.model.collect(handle)
            finally:  # those that ended before this step was read; from here on, who ends is let go at once
                self._idle_since = perf_counter()  # unless another step is on its way
                self._waited += self._idle_since - began
                for job in self.scheduler.collected(plan):
                    self._release(job)
            for part in plan.prefill:
                self.reuse.read(part.job)
            if plan.prefill:
                scored = [part.job for part in plan.prefill if targets(part) is not None]
                for job, rows in zip(scored, result.prompt_logprobs, strict=True):
                    job.prompt_logprobs += [logprob(row, job.message.prompt_logprobs or 0) for row in rows]
            self._emit(plan.rows, result)
            if self._guided:
                self._guide(plan.rows)
            for job, _, stop, _ in plan.prefill:
                if stop == job.target and job.max_tokens == 0 and not job.finished:
                    self._end(job, "length", prompt_logprobs=job.prompt_logprobs)
        except BaseException as error:
            self._fail(plan.jobs, error)

    def _emit(self, jobs: list[Job], result: MixedBatchResult) -> None:
        """Tell each its token. Most are in the middle of an answer, and take half the time of one that is looked at closely."""
        for job, token, row in zip(jobs, result.tokens.tolist(), result.logprobs, strict=True):
            if job.finished:  # it may have stopped, or been aborted, while this step was in flight
                self._stats.generation_tokens -= 1
            elif row is None and 0 < job.emitted < job.max_tokens - 1 and token not in job.stop_ids and job.guide is None:
                job.emitted += 1
                job.answer.append(token)
                job.outbox.append(EngineOutput(request_id=job.request_id, token_ids=[token]))
            else:
                self._emit_closely(job, token, row)
        self._stats.generation_tokens += len(jobs)

    def _emit_closely(self, job: Job, token: int, row: TokenLogprobs | None) -> None:
        job.emitted = emitted = job.emitted + 1
        job.answer.append(token)
        output = EngineOutput(request_id=job.request_id, token_ids=[token])
        if emitted == 1:
            output.cached_tokens, output.queued_seconds = job.skipped or 0, job.queued or 0.0
            output.prompt_logprobs = job.prompt_logprobs if job.scored else None
        if row is not None:
            output.logprobs = [logprob(row, job.message.logprobs or 0)]
        if token in job.stop_ids and emitted > job.min_tokens:
            output.finish_reason, output.stop_token = "stop", token
        elif emitted == job.max_tokens:
            output.finish_reason = "length"
        if job.guide is not None and output.finish_reason is None:
            job.guide.advance(token)
            if (end := job.guide.stopped) is not None:
                output.finish_reason, output.error = end
        self._tell(job, output)

    def _guide(self, jobs: Iterable[Job]) -> None:
        """Write what may come next, for steps whose samplers were not launched yet. Where nothing may, that is the end."""
        guided = [(job, job.guide, job.seq) for job in jobs if job.guide is not None and job.guide.stale and not job.finished]
        rows = [(job, guide, seq) for job, guide, seq in guided if seq is not None]  # others were just preempted
        if rows and self.grammars is not None:
            self.grammars.fill([(guide, seq.mask) for _, guide, seq in rows if seq.mask is not None])
            for job, guide, seq in rows:
                seq.refilled = True
                if guide.stopped is not None:
                    self._end(job, guide.stopped[0], error=guide.stopped[1])

    def _tell(self, job: Job, output: EngineOutput) -> None:
        job.outbox.append(output)
        if output.finish_reason is not None:
            self._forget(job)

    def _forget(self, job: Job) -> None:
        """After its last output, slot and blocks go back: now, or when the last step in flight is collected."""
        if job.outbox is self._outbox:
            del self._requests[job.request_id]
        self.reuse.forget(job)
        if self.scheduler.finish(job):
            self._release(job)

    def _release(self, job: Job) -> None:
        self.reuse.end(job)
        if not job.finished:
            self.reuse.swap(job)
        if job.seq is not None:
            self.model.release(job.seq)
            job.seq = None

    def _end(self, job: Job, reason: str, **news: Any) -> None:
        self._tell(job, EngineOutput(request_id=job.request_id, finish_reason=reason, **news))

    def _fail(self, jobs: list[Job], error: BaseException) -> None:
        """Whatever goes wrong ends these requests and nothing else. Interrupts, and errors of decode loops, go on from here."""
        if isinstance(error, EngineFatal):
            raise error
        for job in jobs:
            if not job.finished:
                self._end(job, "error", error=f"{type(error).__name__}: {error}")
        if not isinstance(error, Exception) or jobs[0].outbox is not self._outbox:
            raise error
        log.error("a step failed", exc_info=error)

    def _die(self, error: EngineFatal) -> None:
        """The device or an invariant is broken: every request gets its error, the next call raises. Nothing is given back."""
        log.critical("the engine is broken", exc_info=error)
        self._fatal, self._in_flight = error, None
        self._outbox += [EngineOutput(request_id=name, finish_reason="error", error=str(error)) for name in self._requests]
        self._requests.clear()

    def _check_alive(self) -> None:
        if self._fatal is not None:
            raise self._fatal
        if self._closed:
            raise EngineFatal("the engine is closed")

    def settle(self) -> None:
        """Read what is in flight and keep its news for later."""
        if self._in_flight is not None:
            due, self._in_flight = self._in_flight, None
            self._collect(*due)

    def close_loop(self, jobs: Iterable[Job]) -> None:
        """Take back what a decode loop still holds; again is fine."""
        if self._stepping:
            self._forgotten += jobs
        elif held := [job for job in jobs if job in self.scheduler.admitted]:
            try:
                self.settle()
            finally:  # whatever that brings
                for job in held:
                    if not job.finished:
                        self._end(job, "abort")

    def check_integrity(self) -> None:
        """free + owned = total in the scheduler's books and in the model's, and both agree. Raises EngineFatal."""
        scheduler, model = self.scheduler, self.model
        self._recount()
        scheduler.check_integrity()
        model.check_integrity([job.seq for job in scheduler.admitted if job.seq is not None])
        books = scheduler.free_blocks, scheduler.free_slots
        real = model.free_blocks + self.reuse.evictable, model.free_slots
        if books != real:
            raise EngineFatal(f"free blocks and slots: the scheduler counts {books}, the model {real}")
