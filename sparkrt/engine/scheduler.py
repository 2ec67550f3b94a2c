"""Which tokens run in the next step: a pure state machine over plain data, which asks nothing of the model.

A request waits until a state slot and the KV blocks of its whole life (prompt + max_tokens) are free, so that nothing admitted
can run out of room later; requests are admitted in order of arrival and none overtakes. Each step carries every decoding
request and, with what the token budget leaves, slices of several prompts. Counters say what was *planned*: with a step in
flight they are one step ahead of what the host has read.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

from sparkrt.engine.messages import EngineOutput, EngineRequest, Logprob
from sparkrt.errors import CapacityError, EngineFatal, RequestError
from sparkrt.model.sequence import SequenceState
from sparkrt.text.grammar import Matcher

CHUNK = 64  # prompt slices end on absolute multiples of it, whatever the budget: the same cuts give the same bits


class Job:
    """One request: how far it is, and what it owns. Counts are tokens."""

    blocks = 0  # reserved
    prefilled = 0  # prompt tokens planned
    generated = 0  # sampled tokens planned
    emitted = 0  # tokens read and told: lags `generated` by the steps in flight
    in_flight = 0  # steps that carry it and are not read yet: its slot and blocks are in use until 0
    finished = False
    served = -1  # the last step that gave it a fair share of prefill
    seq: SequenceState | None = None  # from admission to the end
    matcher: Matcher | None = None  # of the grammar that the answer must follow

    def __init__(self, message: EngineRequest, outbox: list[EngineOutput]) -> None:
        """Jobs that share an `outbox`, for their news, share steps."""
        self.outbox, self.message, self.request_id = outbox, message, message.request_id
        self.prompt, self.max_tokens = len(message.prompt_ids), message.max_tokens
        self.scored = message.prompt_logprobs is not None  # every prompt row needs logits
        self.stop_ids = frozenset(message.stop_token_ids)
        self.prompt_logprobs: list[Logprob | None] = [None]  # nothing precedes the first token

    @property
    def lags(self) -> bool:
        """Whether its next step must wait until its last token was read: a grammar decides what may follow."""
        return self.matcher is not None and self.emitted < self.generated


class Slice(NamedTuple):
    """Tokens [start, stop) of a job's prompt. `sample`: the last row yields the first token of the answer."""

    job: Job
    start: int
    stop: int
    sample: bool


@dataclass(slots=True)
class Plan:
    """One step: jobs that decode, slices of prompts."""

    decode: list[Job] = field(default_factory=list)
    prefill: list[Slice] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.decode or self.prefill)

    @property
    def jobs(self) -> list[Job]:
        return self.decode + [part.job for part in self.prefill]

    @property
    def rows(self) -> list[Job]:
        """Who gets a token, in order."""
        return self.decode + [part.job for part in self.prefill if part.sample]


@dataclass(frozen=True, slots=True)
class Limits:
    """What there is: state slots, KV blocks of `block_size` tokens, tokens a step, prompt rows with logits a step."""

    slots: int
    blocks: int
    block_size: int
    budget: int
    scored_rows: int

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)


class Scheduler:
    """See the module. Order of calls in a step: `admit` until None, `plan`, `launched(plan)`, later `collected(plan)`."""

    def __init__(self, limits: Limits) -> None:
        self.limits, self.free_slots, self.free_blocks = limits, limits.slots, limits.blocks
        self.waiting: OrderedDict[str, Job] = OrderedDict()
        self.admitted: set[Job] = set()  # holds a slot and blocks, finished ones still in flight included
        self._prefilling: dict[Job, None] = {}  # in order of admission
        self._decoding: dict[Job, None] = {}
        self._step = 0

    def add(self, job: Job) -> None:
        """Queue a request. Raises RequestError at once when it could never run."""
        job.blocks, room = self.limits.blocks_for(job.prompt + job.max_tokens), self.limits.blocks * self.limits.block_size
        if job.blocks > self.limits.blocks:
            numbers = f"prompt {job.prompt} + max_tokens {job.max_tokens}"
            text = f"the request needs room for {job.prompt + job.max_tokens} tokens ({numbers}); the KV cache holds {room}"
            raise RequestError(text, param="max_tokens", code="context_length_exceeded")
        self.waiting[job.request_id] = job

    def admit(self) -> Job | None:
        """The longest waiting request, its slot and blocks now reserved; None when there is none or no room for it."""
        job = next(iter(self.waiting.values()), None)
        if job is None or self.free_slots < 1 or job.blocks > self.free_blocks:
            return None
        self.claim(self.waiting.pop(job.request_id))
        return job

    def claim(self, job: Job) -> None:
        """Admit past the queue, where decode loops do not wait. Raises CapacityError when there is no room now."""
        job.blocks = self.limits.blocks_for(job.prompt + job.max_tokens)
        if self.free_slots < 1 or job.blocks > self.free_blocks:
            free = f"{self.free_slots} of {self.limits.slots} slots and {self.free_blocks} of {self.limits.blocks} KV blocks"
            raise CapacityError(f"no room now: {free} are free, 1 and {job.blocks} are needed")
        self.free_slots -= 1
        self.free_blocks -= job.blocks
        self.admitted.add(job)
        self._prefilling[job] = None

    def plan(self, outbox: list[EngineOutput]) -> Plan:
        """What the next step of these jobs should run; only which is served next changes, so a failed launch needs no undoing.

        Prompts share what decode leaves of the budget: half goes to those nearest to their end, so that short ones overtake
        long ones, half evenly to those served least recently, so that none starves; what remains, again to the nearest. At
        least one chunk runs in every step, even under a budget smaller than that.
        """
        plan = Plan([job for job in self._decoding if job.outbox is outbox and not job.lags])
        prompts = [job for job in self._prefilling if job.outbox is outbox]
        if not prompts:
            return plan
        budget, scored_rows = max(self.limits.budget - len(plan.decode), CHUNK), self.limits.scored_rows
        nearest = sorted(prompts, key=lambda job: job.prompt - job.prefilled)
        stops: dict[Job, int] = {}
        self._step += 1

        def grant(job: Job, tokens: int) -> int:
            nonlocal scored_rows
            start = stops.get(job, job.prefilled)
            stop = min(start + (min(tokens, scored_rows) if job.scored else tokens), job.prompt)
            if stop < job.prompt:
                stop -= stop % CHUNK
            if stop <= start:
                return 0
            scored_rows -= stop - start if job.scored else 0
            stops[job] = stop
            return stop - start

        left = budget
        for job in nearest:
            if not job.scored:  # rows of logits are scarce: only the even half hands them out fairly
                left -= grant(job, left - budget // 2)
        share = max(left // len(nearest), CHUNK)
        for job in sorted(prompts, key=lambda job: job.served):
            if granted := grant(job, min(share, left)):
                left -= granted
                job.served = self._step
        for job in nearest:
            left -= grant(job, left)
        for job in prompts:
            if stop := stops.get(job):
                plan.prefill.append(Slice(job, job.prefilled, stop, stop == job.prompt and job.max_tokens > 0))
        return plan

    def launched(self, plan: Plan) -> None:
        """The step is on its way: advance the cursors. From here until `collected` they are one step ahead of the host."""
        for job in plan.decode:
            job.in_flight += 1
            job.generated += 1
            if job.generated == job.max_tokens:
                del self._decoding[job]
        for job, _, stop, sample in plan.prefill:
            job.in_flight += 1
            job.prefilled = stop
            job.generated += sample
            if stop == job.prompt:
                del self._prefilling[job]
                # Its first token is not read yet; the device feeds it to the decode row of the next step.
                if job.generated < job.max_tokens:
                    self._decoding[job] = None

    def collected(self, plan: Plan) -> list[Job]:
        """The step was read. Returns the finished jobs that no step carries any more: their resources are free now."""
        for job in (jobs := plan.jobs):
            job.in_flight -= 1
        return [job for job in jobs if job.finished and self._released(job)]

    def finish(self, job: Job) -> bool:
        """The request ended. True if its resources were held and are free now; in flight, they will be `collected`."""
        job.finished = True
        self._prefilling.pop(job, None)
        self._decoding.pop(job, None)
        if job in self.admitted:
            return self._released(job)
        del self.waiting[job.request_id]
        return False

    def _released(self, job: Job) -> bool:
        if job.in_flight:
            return False
        self.admitted.remove(job)
        self.free_slots += 1
        self.free_blocks += job.blocks
        return True

    def check_integrity(self) -> None:
        """free + owned = total, for slots and blocks; cursors in range."""
        slots = ("slots", self.free_slots, len(self.admitted), self.limits.slots)
        blocks = ("blocks", self.free_blocks, sum(job.blocks for job in self.admitted), self.limits.blocks)
        for what, free, owned, total in (slots, blocks):
            if free < 0 or free + owned != total:
                raise EngineFatal(f"scheduler: {free} free + {owned} owned {what}, {total} in all")
        for job in self.admitted:
            tokens = job.prefilled + job.generated
            if not 0 <= tokens <= job.blocks * self.limits.block_size or job.in_flight < 0:
                raise EngineFatal(f"scheduler: {job.request_id} is at token {tokens} of {job.blocks} blocks")
            if job.finished and not job.in_flight:
                raise EngineFatal(f"scheduler: {job.request_id} finished and still owns a slot")
        if any(job.finished or job in self.admitted for job in self.waiting.values()):
            raise EngineFatal("scheduler: a request waits although it was admitted or ended")
