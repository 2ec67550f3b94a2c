"""Which tokens run in the next step: a pure state machine over plain data.

Arrivals, aborts and completions go in, plans come out; it knows no model and no arrays. A request waits until a state slot
and the KV blocks of its whole life (prompt + max_tokens) are free, so that nothing admitted can run out of room later;
requests are admitted in order of arrival and none overtakes. Each step carries every decoding request and, with what the
token budget leaves, slices of several prompts.

Counters say what was *planned*. With a step in flight they are one step ahead of what the host has read.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from sparkrt.errors import CapacityError, EngineFatal, RequestError

CHUNK = 64  # prompt slices end on absolute multiples of it, whatever the budget: the same cuts give the same bits


@dataclass(slots=True, eq=False)
class Job:
    """One request as the scheduler sees it; the engine core adds its own fields in a subclass. Counts are tokens."""

    request_id: str
    prompt: int
    max_tokens: int
    scored: bool = False  # every prompt row needs logits (prompt log-probabilities)
    blocks: int = 0  # reserved, set by the scheduler
    prefilled: int = 0  # prompt tokens planned
    generated: int = 0  # sampled tokens planned
    in_flight: int = 0  # steps that carry it and are not read yet: its slot and blocks are in use until 0
    finished: bool = False
    served: int = -1  # the last step that gave it a fair share of prefill


J = TypeVar("J", bound=Job)


class Slice(NamedTuple, Generic[J]):
    """Tokens [start, stop) of a job's prompt. `sample`: the last row yields the first token of the answer."""

    job: J
    start: int
    stop: int
    sample: bool


@dataclass(slots=True)
class Plan(Generic[J]):
    """One step. Sampling rows in order: the decode rows, then the slices with `sample`."""

    decode: list[J] = field(default_factory=list)
    prefill: list[Slice[J]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.decode or self.prefill)

    @property
    def jobs(self) -> list[J]:
        return self.decode + [job for job, _, _, _ in self.prefill]


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


class Scheduler(Generic[J]):
    """See the module. Order of calls in a step: `admit` until None, `plan`, `launched(plan)`, later `collected(plan)`."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.free_slots = limits.slots
        self.free_blocks = limits.blocks
        self.waiting: OrderedDict[str, J] = OrderedDict()
        self.admitted: dict[str, J] = {}  # holds a slot and blocks, finished ones still in flight included
        self._prefilling: dict[str, J] = {}
        self._decoding: dict[str, J] = {}
        self._step = 0

    # arrivals

    def add(self, job: J) -> None:
        """Queue a request. Raises RequestError at once when it could never run."""
        blocks = self.limits.blocks_for(job.prompt + job.max_tokens)
        if blocks > self.limits.blocks:
            room = self.limits.blocks * self.limits.block_size
            raise RequestError(
                f"the request needs room for {job.prompt + job.max_tokens} tokens "
                f"(prompt {job.prompt} + max_tokens {job.max_tokens}); the KV cache holds {room}",
                param="max_tokens",
                code="context_length_exceeded",
            )
        job.blocks = blocks
        self.waiting[job.request_id] = job

    def admit(self) -> J | None:
        """The longest waiting request, its slot and blocks now reserved; None when there is none or no room for it."""
        if not self.waiting:
            return None
        job = next(iter(self.waiting.values()))
        if self.free_slots < 1 or job.blocks > self.free_blocks:
            return None
        del self.waiting[job.request_id]
        self.claim(job.blocks)
        self.admitted[job.request_id] = self._prefilling[job.request_id] = job
        return job

    def claim(self, blocks: int) -> None:
        """Take a slot and `blocks` blocks out of the books: an admission, or a decode loop beside the requests."""
        if self.free_slots < 1 or blocks > self.free_blocks:
            raise CapacityError(
                f"no room now: {self.free_slots} of {self.limits.slots} slots and {self.free_blocks} of {self.limits.blocks} "
                f"KV blocks are free, 1 and {blocks} are needed"
            )
        self.free_slots -= 1
        self.free_blocks -= blocks

    def unclaim(self, blocks: int) -> None:
        self.free_slots += 1
        self.free_blocks += blocks

    # steps

    def plan(self) -> Plan[J]:
        """What the next step should run; changes nothing but which job is served next, so a failed launch needs no undoing."""
        plan = Plan[J](decode=list(self._decoding.values()))
        if self._prefilling:
            self._plan_prefill(plan)
        return plan

    def _plan_prefill(self, plan: Plan[J]) -> None:
        """Share what decode leaves of the budget: half to the prompts nearest to their end, so that short ones overtake long
        ones, half evenly to those served least recently, so that none starves; what remains, again to the nearest.

        At least one chunk runs in every step, even under a budget smaller than that.
        """
        budget = max(self.limits.budget - len(plan.decode), CHUNK)
        scored_rows = self.limits.scored_rows
        nearest = sorted(self._prefilling.values(), key=lambda job: job.prompt - job.prefilled)
        stops: dict[str, int] = {}
        self._step += 1

        def grant(job: J, tokens: int) -> int:
            nonlocal scored_rows
            start = stops.get(job.request_id, job.prefilled)
            stop = min(start + (min(tokens, scored_rows) if job.scored else tokens), job.prompt)
            if stop < job.prompt:
                stop -= stop % CHUNK
            if stop <= start:
                return 0
            if job.scored:
                scored_rows -= stop - start
            stops[job.request_id] = stop
            return stop - start

        left = budget
        for job in nearest:
            if not job.scored:  # rows of logits are scarce: only the even half hands them out fairly
                left -= grant(job, left - budget // 2)
        share = max(left // len(nearest), CHUNK)
        for job in sorted(self._prefilling.values(), key=lambda job: job.served):
            if granted := grant(job, min(share, left)):
                left -= granted
                job.served = self._step
        for job in nearest:
            left -= grant(job, left)
        for job in self._prefilling.values():
            if stop := stops.get(job.request_id):
                plan.prefill.append(Slice(job, job.prefilled, stop, stop == job.prompt and job.max_tokens > 0))

    def launched(self, plan: Plan[J]) -> None:
        """The step is on its way: advance the cursors. From here until `collected` they are one step ahead of the host."""
        for job in plan.decode:
            job.in_flight += 1
            job.generated += 1
            if job.generated == job.max_tokens:
                del self._decoding[job.request_id]
        for job, _, stop, sample in plan.prefill:
            job.in_flight += 1
            job.prefilled = stop
            job.generated += sample
            if stop == job.prompt:
                del self._prefilling[job.request_id]
                # Its first token is not read yet; the device feeds it to the decode row of the next step.
                if job.generated < job.max_tokens:
                    self._decoding[job.request_id] = job

    def collected(self, plan: Plan[J]) -> list[J]:
        """The step was read. Returns the finished jobs that no step carries any more: their resources are free now."""
        released = []
        for job in plan.jobs:
            job.in_flight -= 1
            if job.finished and not job.in_flight:
                self._release(job)
                released.append(job)
        return released

    def finish(self, job: J) -> bool:
        """The request ended, for whatever reason and at any moment. True if its resources were held and are free now; a job
        in flight keeps them until the last step that carries it is collected.
        """
        job.finished = True
        self._prefilling.pop(job.request_id, None)
        self._decoding.pop(job.request_id, None)
        if self.waiting.pop(job.request_id, None) is not None or job.in_flight:
            return False
        self._release(job)
        return True

    def _release(self, job: J) -> None:
        del self.admitted[job.request_id]
        self.unclaim(job.blocks)

    # questions

    @property
    def has_plan(self) -> bool:
        """Whether `plan` would give something, new admissions aside."""
        return bool(self._decoding or self._prefilling)

    def check_integrity(self, claimed: int = 0, claimed_blocks: int = 0) -> None:
        """free + owned = total, for slots and blocks; cursors in range. `claimed` are those of decode loops."""
        owned = sum(job.blocks for job in self.admitted.values())
        slots = (self.free_slots, len(self.admitted) + claimed, self.limits.slots)
        blocks = (self.free_blocks, owned + claimed_blocks, self.limits.blocks)
        for what, (free, taken, total) in (("slots", slots), ("blocks", blocks)):
            if free < 0 or free + taken != total:
                raise EngineFatal(f"scheduler: {free} free + {taken} owned {what}, {total} in all")
        for job in self.admitted.values():
            tokens = job.prefilled + job.generated
            if not 0 <= tokens <= job.blocks * self.limits.block_size or job.in_flight < 0:
                raise EngineFatal(f"scheduler: {job.request_id} is at token {tokens} of {job.blocks} blocks")
            if job.finished and not job.in_flight:
                raise EngineFatal(f"scheduler: {job.request_id} finished and still owns a slot")
        for job in self.waiting.values():
            if job.finished or job.request_id in self.admitted:
                raise EngineFatal(f"scheduler: {job.request_id} waits although it was admitted or ended")
