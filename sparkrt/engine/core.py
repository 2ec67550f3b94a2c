"""`EngineCore`: requests in, tokens out. One thread owns it and the model.

A step plans, launches, and reads back. With `pipeline depth 1` step N+1 is launched before step N is read, so the device
never waits for Python; what the host knows is then one step old, and what a stopped request did meanwhile is dropped.
"""

from __future__ import annotations

import logging
import random
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Protocol

import numpy as np

from sparkrt.engine.messages import EngineOutput, EngineRequest, EngineStats, Logprob
from sparkrt.engine.scheduler import Job, Limits, Plan, Scheduler
from sparkrt.errors import EngineFatal, RequestError
from sparkrt.model.batch import ForwardBatch, PrefillSlice, SamplerParams, TokenLogprobs

if TYPE_CHECKING:
    from sparkrt.engine.config import EngineConfig
    from sparkrt.model.batch import MixedBatchResult
    from sparkrt.model.model import Model
    from sparkrt.model.sequence import SequenceState

log = logging.getLogger("sparkrt.engine")


@dataclass(slots=True, eq=False, kw_only=True)
class Request(Job):
    """A request in the engine: the scheduler's job, what it owns on the device, and what stops it."""

    message: EngineRequest
    tokens: np.ndarray  # int32, the prompt
    stop_ids: frozenset[int]
    seq: SequenceState | None = None
    emitted: int = 0  # tokens read and sent: lags `generated` by the steps in flight
    prompt_logprobs: list[Logprob | None] | None = None

    def targets(self, start: int, stop: int) -> np.ndarray | None:
        """What followed each token of a slice, if that is to be scored; the prompt's last token has no follower."""
        return self.tokens[start + 1 : stop + 1] if self.scored and start + 1 < self.prompt else None


class Turn(Protocol):
    """Whoever may leave a step in flight: the engine's own loop, or a decode loop beside it."""

    def settle(self) -> None:
        """Read what is in flight and keep it for later."""
        ...


class EngineCore:
    """Continuous batching over one model. Not thread-safe.

    `add` raises RequestError for what can never run and EngineFatal once the engine is broken; `step` never raises for one
    request's fault: that request ends with finish_reason "error".
    """

    def __init__(self, model: Model, config: EngineConfig, on_close: Callable[[], None] = lambda: None) -> None:
        """`config` is resolved. `on_close` runs after the model was closed: the backend's end."""
        options = model.options
        self._on_close = on_close
        self.model = model
        self.config = config
        self.scheduler = Scheduler[Request](
            Limits(
                slots=options.max_num_seqs,
                blocks=model.num_blocks,
                block_size=options.page_size,
                budget=options.max_num_batched_tokens,
                scored_rows=options.prompt_logit_rows,
            )
        )
        self._context = options.max_model_len
        self._vocab = options.valid_vocab
        self._requests: dict[str, Request] = {}
        self._loops: dict[SequenceState, int] = {}  # sequences of decode loops and their blocks
        self._outbox: list[EngineOutput] = []
        self._in_flight: tuple[int, Plan[Request]] | None = None
        self._turn: weakref.ref[Turn] = weakref.ref(self)  # weak: a forgotten decode loop must be collected
        self._seeds = random.Random(config.seed)
        self._stats = EngineStats(total_blocks=model.num_blocks, total_slots=options.max_num_seqs)
        self._wait_seconds = 0.0
        self._closed = False
        self._fatal: EngineFatal | None = None

    # requests

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Raises RequestError (nothing changed) if it can never run."""
        self._check_alive()
        if request.request_id in self._requests:
            raise RequestError(f"request id {request.request_id!r} is in use", param="request_id")
        count = len(request.prompt_ids)
        if count == 0:
            raise RequestError("the prompt has no tokens", param="prompt")
        if count + request.max_tokens > self._context:
            raise RequestError(
                f"prompt ({count} tokens) + max_tokens ({request.max_tokens}) exceed the context of {self._context}",
                param="max_tokens",
                code="context_length_exceeded",
            )
        if min(request.prompt_ids) < 0 or max(request.prompt_ids) >= self._vocab:  # it would fail its neighbours' step too
            raise RequestError(f"the prompt has token ids out of vocabulary (0 to {self._vocab - 1})", param="prompt")
        job = Request(
            request_id=request.request_id,
            prompt=count,
            max_tokens=request.max_tokens,
            scored=request.prompt_logprobs is not None,
            message=request,
            tokens=np.array(request.prompt_ids, np.int32),
            stop_ids=frozenset(request.stop_token_ids),
            prompt_logprobs=None if request.prompt_logprobs is None else [None],  # nothing precedes the first token
        )
        if request.max_tokens == 0 and not job.scored:  # nothing is asked of the model
            self._outbox.append(EngineOutput(request_id=job.request_id, finish_reason="length"))
            return
        self.scheduler.add(job)
        self._requests[job.request_id] = job

    def abort(self, request_ids: Iterable[str]) -> None:
        """Stop these requests now; unknown ids are ignored. Their "abort" outputs come with the next step."""
        for request_id in request_ids:
            if (job := self._requests.get(request_id)) is not None:
                self._end(job, EngineOutput(request_id=request_id, finish_reason="abort"))

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do or to tell."""
        return bool(self._requests or self._outbox or self._in_flight) or (self._fatal is not None and not self._closed)

    @property
    def stalled(self) -> bool:
        """Whether requests wait and nothing of the engine's own will make room: decode loops hold it."""
        return bool(self.scheduler.waiting) and not self.scheduler.admitted and self._in_flight is None

    # steps

    def step(self) -> list[EngineOutput]:
        """Run one step; returns the news of requests, in the order of rows. Raises EngineFatal when the engine is broken
        (every request got its "error" output from the step before).
        """
        self._check_alive()
        began, waited = perf_counter(), self._wait_seconds
        try:
            self.take_turn(self)
            launched = self._launch()
            due, self._in_flight = self._in_flight, None
            if self.config.async_scheduling:
                self._in_flight = launched  # from here until the next step, the host is one step behind
            else:
                due = launched
            if due is not None:
                self._collect(*due)
            if self.config.debug and not self._requests and self._in_flight is None:
                self.check_integrity()
        except EngineFatal as error:
            self._die(error)
        outputs, self._outbox = self._outbox, []
        total = perf_counter() - began
        self._stats.step_seconds += total
        self._stats.host_seconds += total - (self._wait_seconds - waited)
        return outputs

    def _launch(self) -> tuple[int, Plan[Request]] | None:
        """Admit, plan and enqueue the next step. A failure ends the requests of that step and nothing else."""
        while (job := self.scheduler.admit()) is not None:
            try:
                job.seq = self.model.new_sequence(self._sampler_params(job.message), job.prompt + job.max_tokens)
            except EngineFatal:
                raise
            except BaseException as error:
                self._fail([job], error)
                if not isinstance(error, Exception):
                    raise
        plan = self.scheduler.plan()
        if not plan:
            return None
        batch = ForwardBatch(decode=[seq for job in plan.decode if (seq := job.seq) is not None])
        for job, start, stop, sample in plan.prefill:
            assert job.seq is not None
            batch.prefill.append(PrefillSlice(job.seq, job.tokens[start:stop], start, sample, job.targets(start, stop)))
        try:
            handle = self.launch(batch)
        except EngineFatal:
            raise
        except BaseException as error:  # an interrupt too must not leave half a step in the books
            self._fail(plan.jobs, error)
            if not isinstance(error, Exception):
                raise
            return None
        self.scheduler.launched(plan)
        self._stats.steps += 1
        self._stats.prompt_tokens += sum(stop - start for _, start, stop, _ in plan.prefill)
        return handle, plan

    def launch(self, batch: ForwardBatch) -> int:
        """`model.launch`, with the time it takes counted as waiting where the launch itself is the computation (host)."""
        began = perf_counter()
        try:
            return self.model.launch(batch)
        finally:
            if self.config.device == "host":
                self._wait_seconds += perf_counter() - began

    def collect(self, handle: int) -> MixedBatchResult:
        """`model.collect`, timed as waiting."""
        began = perf_counter()
        try:
            return self.model.collect(handle)
        finally:
            self._wait_seconds += perf_counter() - began

    def _collect(self, handle: int, plan: Plan[Request]) -> None:
        """Read a step and tell its news, then let go of what nothing in flight uses any more."""
        failure: BaseException | None = None
        try:
            result = self.collect(handle)
            rows = plan.decode + [s.job for s in plan.prefill if s.sample] if plan.prefill else plan.decode
            if plan.prefill:
                self._read_prompt_logprobs(plan, result)
            for job, token, logprobs in zip(rows, result.tokens.tolist(), result.logprobs, strict=True):
                if not job.finished:  # it may have stopped, or been aborted, while this step was in flight
                    self._emit(job, token, logprobs)
            for job, _, stop, _ in plan.prefill:
                if stop == job.prompt and job.max_tokens == 0 and not job.finished:
                    scores = job.prompt_logprobs
                    self._end(job, EngineOutput(request_id=job.request_id, prompt_logprobs=scores, finish_reason="length"))
        except EngineFatal:
            raise
        except BaseException as error:
            failure = error
        for job in self.scheduler.collected(plan):
            self._release(job)
        if failure is not None:
            self._fail([job for job in plan.jobs if not job.finished], failure)
            if not isinstance(failure, Exception):
                raise failure

    def _emit(self, job: Request, token: int, logprobs: TokenLogprobs | None) -> None:
        job.emitted += 1
        output = EngineOutput(request_id=job.request_id, token_ids=[token])
        if job.emitted == 1:
            output.prompt_logprobs = job.prompt_logprobs
        if logprobs is not None:
            output.logprobs = [_logprob(logprobs, job.message.logprobs or 0)]
        if token in job.stop_ids and job.emitted > job.message.min_tokens:
            output.finish_reason, output.stop_token = "stop", token
        elif job.emitted == job.max_tokens:
            output.finish_reason = "length"
        if output.finish_reason is None:
            self._outbox.append(output)
        else:
            self._end(job, output)
        self._stats.generation_tokens += 1

    def _read_prompt_logprobs(self, plan: Plan[Request], result: MixedBatchResult) -> None:
        scored = [s.job for s in plan.prefill if s.job.targets(s.start, s.stop) is not None]
        for job, rows in zip(scored, result.prompt_logprobs, strict=True):
            if job.prompt_logprobs is not None:
                job.prompt_logprobs += [_logprob(row, job.message.prompt_logprobs or 0) for row in rows]

    def _sampler_params(self, request: EngineRequest) -> SamplerParams:
        return SamplerParams(
            temperature=request.temperature,
            top_k=request.top_k,
            top_p=request.top_p,
            min_p=request.min_p,
            repetition_penalty=request.repetition_penalty,
            presence_penalty=request.presence_penalty,
            frequency_penalty=request.frequency_penalty,
            seed=self._seeds.getrandbits(64) if request.seed is None else request.seed,
            bias=(tuple(request.logit_bias), tuple(request.logit_bias.values())),
            allowed=None if request.allowed_token_ids is None else tuple(request.allowed_token_ids),
            stop_ids=tuple(request.stop_token_ids),
            min_tokens=request.min_tokens,
            logprobs=-1 if request.logprobs is None else request.logprobs,
        )

    # ends

    def _end(self, job: Request, output: EngineOutput) -> None:
        """The last output of a request; its slot and blocks go back now, or when the last step in flight is collected."""
        self._outbox.append(output)
        del self._requests[job.request_id]
        if self.scheduler.finish(job):
            self._release(job)

    def _release(self, job: Request) -> None:
        if job.seq is not None:
            self.model.release(job.seq)
            job.seq = None

    def _fail(self, jobs: Iterable[Request], error: BaseException) -> None:
        """These requests end with an error; the engine goes on."""
        log.error("a step failed", exc_info=error)
        text = f"{type(error).__name__}: {error}"
        for job in jobs:
            if not job.finished:
                self._end(job, EngineOutput(request_id=job.request_id, finish_reason="error", error=text))

    def _die(self, error: EngineFatal) -> None:
        """The device or an invariant is broken: every request gets its error, the next call raises. Nothing is given back."""
        log.critical("the engine is broken", exc_info=error)
        self._fatal = error
        self._in_flight = None
        for request_id in self._requests:
            self._outbox.append(EngineOutput(request_id=request_id, finish_reason="error", error=str(error)))
        self._requests.clear()

    def _check_alive(self) -> None:
        if self._fatal is not None:
            raise self._fatal
        if self._closed:
            raise EngineFatal("the engine is closed")

    # decode loops

    def take_turn(self, who: Turn) -> None:
        """`who` is about to launch: whoever else left a step in flight reads it first, so at most one step runs ahead."""
        self._check_alive()
        turn = self._turn()
        if turn is not who:
            if turn is not None:
                turn.settle()
            self._turn = weakref.ref(who)

    def settle(self) -> None:
        if self._in_flight is not None:
            due, self._in_flight = self._in_flight, None
            self._collect(*due)

    def claim(self, request: EngineRequest) -> SequenceState:
        """A sequence for a decode loop, out of the same books as requests. Raises CapacityError when there is no room now."""
        self._check_alive()
        tokens = len(request.prompt_ids) + request.max_tokens
        blocks = self.scheduler.limits.blocks_for(tokens)
        self.scheduler.claim(blocks)
        try:
            seq = self.model.new_sequence(self._sampler_params(request), tokens)
        except BaseException:
            self.scheduler.unclaim(blocks)
            raise
        self._loops[seq] = blocks
        return seq

    def unclaim(self, seq: SequenceState) -> None:
        """Give a decode loop's sequence back; again is fine."""
        if (blocks := self._loops.pop(seq, None)) is not None:
            self.model.release(seq)
            self.scheduler.unclaim(blocks)

    # questions

    def stats(self) -> EngineStats:
        stats, scheduler = self._stats, self.scheduler
        stats.running = len(self._requests) - len(scheduler.waiting)
        stats.waiting = len(scheduler.waiting)
        stats.free_blocks, stats.free_slots = scheduler.free_blocks, scheduler.free_slots
        return stats

    def check_integrity(self) -> None:
        """free + owned = total in the scheduler's books and in the model's, and both agree. Raises EngineFatal."""
        scheduler, model = self.scheduler, self.model
        scheduler.check_integrity(len(self._loops), sum(self._loops.values()))
        model.check_integrity([*(job.seq for job in scheduler.admitted.values() if job.seq is not None), *self._loops])
        if (scheduler.free_blocks, scheduler.free_slots) != (model.free_blocks, model.free_slots):
            raise EngineFatal(
                f"the scheduler counts {scheduler.free_blocks} free blocks and {scheduler.free_slots} slots, "
                f"the model {model.free_blocks} and {model.free_slots}"
            )

    def close(self) -> None:
        """End everything and give all back, the model too; again is fine. Requests still running get no more outputs."""
        if self._closed:
            return
        try:
            if self._fatal is None:
                self.take_turn(self)
                self.settle()
                self.abort(list(self._requests))
                for seq in list(self._loops):
                    self.unclaim(seq)
                if self.config.debug:
                    self.check_integrity()
        finally:
            self._closed = True
            self._outbox.clear()
            if self._fatal is None:
                self.model.close()
            self._on_close()


def _logprob(row: TokenLogprobs, alternatives: int) -> Logprob:
    return Logprob(
        token_id=row.token,
        logprob=row.logprob,
        rank=row.rank,
        top_ids=row.top_ids[:alternatives].tolist(),
        top_logprobs=row.top_logprobs[:alternatives].tolist(),
    )
