"""Which tokens run in the next step: a pure state machine over plain data, which asks nothing of the model.

Requests are admitted in order and none overtakes. One gets the blocks of its prompt at once and those of its answer one by one;
what it will probably need is counted on beforehand, and where that was too little, a later one is preempted. Each step carries
every decoding request that has room and, with what the token budget leaves, slices of several prompts. Counters say what was
*planned*: with a step in flight they are one step ahead of what the host has read.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, count, groupby

from sparkrt.engine.admission import Forecast, Queue
from sparkrt.engine.job import CHUNK, Hit, Job, Limits, Plan, Slice
from sparkrt.engine.messages import EngineOutput
from sparkrt.engine.preemption import IMMUNITY, victim_for, victims_of_rank
from sparkrt.errors import CapacityError, EngineFatal, RequestError

_LOOP = -(2**63)  # the priority of decode loops: before every request, so never preempted for one


class Scheduler:
    """See the module. Calls in a step: `make_room` until it lets go of nobody, `admit` until None, `plan`, `launched(plan)`,
    later `collected(plan)`. Where blocks are shared, who gives them out sets `free_blocks` to what can be had, before each call.
    """

    def __init__(self, limits: Limits, by_priority: bool = False, lookup: Callable[[Job], Hit] | None = None) -> None:
        """`lookup` says what a waiting job has in a prefix cache."""
        self.limits, self.free_slots, self.free_blocks = limits, limits.slots, limits.blocks
        self.waiting, self.forecast = Queue(), Forecast(limits)
        self.admitted: set[Job] = set()  # holds a slot and blocks, finished ones still in flight included
        self.preemptions = 0
        self._by_priority, self._lookup = by_priority, lookup
        self._prefilling: dict[Job, None] = {}  # in order of admission
        self._decoding: dict[Job, None] = {}
        self._short: dict[Job, None] = {}  # decoding, and without a block for the next token
        self._rows: tuple[list[EngineOutput], list[Job]] | None = None  # an outbox and who decodes for it, until that changes
        self._going: dict[Job, None] = {}  # ended or preempted, and carried by a step that is not read
        self._leaving: set[Job] = set()  # preempted and still in flight: they have to be in the queue before it moves on
        self._refused: tuple[Job | None, int] = (None, 0)  # the head of the queue, and the blocks that were too few for it
        self._promised = 0  # blocks reserved and not taken yet
        self._arrivals, self._step = count(), 0
        self._launched = self._collected = 0  # numbers of steps

    def add(self, job: Job) -> None:
        """Queue a request. Raises RequestError at once when it could never run."""
        if self.limits.blocks_for(job.life) > self.limits.blocks:
            numbers = f"prompt {job.prompt} + max_tokens {job.max_tokens}"
            room = self.limits.blocks * self.limits.block_size
            text = f"the request needs room for {job.life} tokens ({numbers}); the KV cache holds {room}"
            raise RequestError(text, param="max_tokens", code="context_length_exceeded")
        job.order, job.arrived = (job.message.priority if self._by_priority else 0, next(self._arrivals)), self._step
        self.waiting.add(job)

    def make_room(self) -> tuple[list[Job], list[Job]]:
        """Find a block for every row that is out of room and, by priority, room for the head of the queue.

        Returns preempted jobs whose slot and blocks are free now, and jobs that got another block.
        """
        released, grown, coming = list[Job](), list[Job](), None
        for job in sorted(self._short, key=lambda job: job.order):
            if job.preempted:
                continue
            if not self.free_blocks:
                coming = self._coming()[0] if coming is None else coming
                if not coming and (victim := victim_for(job, chain(self._decoding, self._prefilling))) is not None:
                    self.forecast.missed()
                    if gone := self._preempt(victim):
                        return gone, grown
                    coming = victim.blocks
                if not self.free_blocks:
                    coming = max(coming - 1, 0)  # the row sits this step out
                    continue
            self._take(job, 1)
            del self._short[job]
            self._rows = None
            grown.append(job)
        if self._by_priority and (head := self.waiting.head) is not None and not self._leaving and head.leader is None:
            reserve, (blocks, slots) = self._demand(head)[1], self._coming()
            missing = reserve - (self.free_blocks - self._promised) - blocks
            for victim in victims_of_rank(head, chain(self._decoding, self._prefilling), missing, 1 - self.free_slots - slots):
                released += self._preempt(victim)
        return released, [job for job in grown if job.blocks]  # unless it was displaced at once

    def not_grown(self, job: Job) -> None:
        """It could not be given the block that `make_room` found, and is about to end."""
        self.free_blocks += 1
        job.blocks -= 1
        job.reserved -= 1

    def admit(self) -> Job | None:
        """The first waiting request, its slot and the blocks of its prompt now taken; None when there is none or no room for it.

        It must fit beside what the others will need, unless it is the only one: something always runs. One that waits for pages
        which another is computing lets others pass, and keeps room for itself.
        """
        slots, free = self.free_slots, self.free_blocks - self._promised
        same = self.waiting.head is self._refused[0] and free <= self._refused[1]
        if self._leaving or (same and (self._decoding or self._prefilling)):
            return None  # to look up a long prompt takes longer than a step may: not again before there is more room
        for job in self.waiting:
            if slots < 1:
                return None
            need, reserve = self._demand(job)
            hit = Hit() if self._lookup is None else self._lookup(job)
            if hit.wait:
                slots, free = slots - 1, free - reserve
                continue
            shared = hit.pages - hit.idle
            alone = need - shared <= self.free_blocks and all(other.order[0] == _LOOP for other in self.admitted)
            if reserve - shared > free and not alone:
                self._refused = (job if job is self.waiting.head else None), free
                return None
            self.waiting.remove(job)
            self._enter(job, need, reserve)
            self.free_blocks += shared
            job.prefilled = hit.resume
            return job
        return None

    def claim(self, job: Job) -> None:
        """Admit past the queue with room for its whole life: decode loops do not wait. CapacityError if there is none now."""
        blocks, free = self.limits.blocks_for(job.life), self.free_blocks - self._promised
        if self.free_slots < 1 or blocks > free:
            text = f"{self.free_slots} of {self.limits.slots} slots and {max(free, 0)} of {self.limits.blocks} KV blocks"
            raise CapacityError(f"no room now: {text} are free, 1 and {blocks} are needed")
        job.order = (_LOOP, next(self._arrivals))
        self._enter(job, blocks, blocks)

    def plan(self, outbox: list[EngineOutput]) -> Plan:
        """What the next step of these jobs should run; only which is served next changes, so a failed launch needs no undoing.

        Prompts share what decode leaves of the budget. A third goes to those nearest to their end, so that short ones overtake
        long ones. The rest goes to those that came first, evenly where they came together: so no first token is later than 1.5
        times what it takes to compute everything that came no later. At least one chunk runs in every step, even under a budget
        smaller than that.
        """
        if self._rows is None or self._rows[0] is not outbox:
            self._rows = outbox, [job for job in self._decoding if job.outbox is outbox and job not in self._short]
        plan = Plan(self._rows[1])
        prompts = [job for job in self._prefilling if job.outbox is outbox and job.loading is None]
        if not prompts:
            return plan
        budget, scored_rows = max(self.limits.budget - len(plan.decode), CHUNK), self.limits.scored_rows
        nearest = sorted(prompts, key=lambda job: (job.order[0], job.left))
        stops: dict[Job, int] = {}
        self._step += 1

        def grant(job: Job, tokens: int) -> int:
            nonlocal scored_rows
            start = stops.get(job, job.prefilled)
            stop = min(start + (min(tokens, scored_rows) if job.scored else tokens), job.target)
            if stop < job.target:
                stop -= stop % CHUNK
            if stop <= start:
                return 0
            scored_rows -= stop - start if job.scored else 0
            stops[job] = stop
            return stop - start

        quick = budget // 3
        for job in nearest:  # without the scored: rows of logits are scarce, only the even part hands them out fairly
            if not job.scored and quick >= min(job.left, CHUNK):
                quick -= grant(job, quick)
        left = budget - (budget // 3 - quick)
        for _, group in groupby(sorted(prompts, key=_turn), key=_together):
            together = list(group)
            share = max(left // len(together), CHUNK)
            for job in together:
                if left and (granted := grant(job, min(share, left))):
                    left -= granted
                    job.served = self._step
            for job in sorted(together, key=lambda job: job.left) if left else ():
                left -= grant(job, left)
        for job in prompts:
            if stop := stops.get(job):
                plan.prefill.append(Slice(job, job.prefilled, stop, stop == job.target and job.max_tokens > 0))
        return plan

    def launched(self, plan: Plan) -> None:
        """The step is on its way: advance the cursors. From here until `collected` they are one step ahead of the host."""
        self._launched = plan.step = step = self._launched + 1
        for job in plan.decode:
            job.step = step
            job.generated += 1
            if job.generated >= job.room:
                self._at_edge(job)
        for job, _, stop, sample in plan.prefill:
            job.step = step
            job.prefilled = stop
            job.generated += sample
            if stop == job.target:  # its first token is not read yet; the device feeds it to the decode row of the next step
                self._begin_decoding(job)

    def loaded(self, job: Job) -> bool:
        """What was `loading` into its blocks and slot is there: it runs.

        True if it ended or was preempted meanwhile, and what it had is free now.
        """
        job.loading = None
        if job.finished or job.preempted:
            return self._released(job)
        if job.prefilled == job.target:
            self._begin_decoding(job)
        return False

    def collected(self, plan: Plan) -> list[Job]:
        """The step was read. Returns the ended and preempted jobs that no step carries any more: what they had is free now."""
        self._collected = plan.step
        return [job for job in list(self._going) if self._released(job)]

    def withdrawn(self, plan: Plan) -> list[Job]:
        """The step that was last `launched` never ran; its jobs are about to end. Returns as `collected` does."""
        self._launched -= 1
        for job in plan.jobs:
            job.step -= 1
        return [job for job in list(self._going) if self._released(job)]

    def finish(self, job: Job) -> bool:
        """The request ended. True if its resources were held and are free now; in flight, they will be `collected`."""
        job.finished = True
        if job.emitted:
            self.forecast.learn(job)
        self._retire(job)
        if job in self.admitted:
            return self._released(job)
        self.waiting.remove(job)
        return False

    def check_integrity(self) -> None:
        """free + owned = total, for slots and blocks; cursors in range."""
        books = [("slots", self.free_slots, len(self.admitted), self.limits.slots)]
        if self._lookup is None:
            books.append(("blocks", self.free_blocks, sum(job.blocks for job in self.admitted), self.limits.blocks))
        for what, free, owned, total in books:
            if free < 0 or free + owned != total:
                raise EngineFatal(f"scheduler: {free} free + {owned} owned {what}, {total} in all")
        if (promised := sum(job.reserved - job.blocks for job in self.admitted)) != self._promised:
            raise EngineFatal(f"scheduler: {promised} blocks are promised, {self._promised} counted")
        for job in self.admitted:
            tokens = max(job.prefilled, job.prompt + job.generated - 1 if job.prefilled == job.target else 0)
            if not 0 <= tokens <= job.blocks * self.limits.block_size:
                raise EngineFatal(f"scheduler: {job.request_id} is at token {tokens} of {job.blocks} blocks")
            going = job.finished or job.preempted
            if going and not self._carried(job):
                raise EngineFatal(f"scheduler: {job.request_id} has to go and still owns a slot")
            if going != (job in self._going):
                raise EngineFatal(f"scheduler: {job.request_id} {'has' if going else 'has not'} to go, and that is not noted")
        if any(job.finished or job.blocks or job in self.admitted for job in self.waiting):
            raise EngineFatal("scheduler: a request waits although it was admitted or ended")

    def _demand(self, job: Job) -> tuple[int, int]:
        """Blocks that a waiting job needs to begin, and those to count on for it."""
        if job.preempted:
            job.restart()
        need = self.limits.blocks_for(min(job.target + 1, job.life))
        return need, max(need, self.forecast.blocks(job))

    def _enter(self, job: Job, blocks: int, reserved: int) -> None:
        self.free_slots -= 1
        self.admitted.add(job)
        self._prefilling[job] = None
        job.reserved = reserved
        self._promised += reserved
        self._take(job, blocks)

    def _take(self, job: Job, blocks: int) -> None:
        self.free_blocks -= blocks
        job.blocks += blocks
        beyond = max(job.blocks - job.reserved, 0)
        job.reserved += beyond
        self._promised -= blocks - beyond
        job.room = min(job.max_tokens, job.blocks * self.limits.block_size - job.prompt + 1)

    def _begin_decoding(self, job: Job) -> None:
        del self._prefilling[job]
        self._decoding[job], self._rows = None, None
        if job.generated >= job.room:
            self._at_edge(job)

    def _at_edge(self, job: Job) -> None:
        self._rows = None
        if job.generated == job.max_tokens:
            del self._decoding[job]
        else:
            self._short[job] = None

    def _coming(self) -> tuple[int, int]:
        """Blocks and slots that come back when the steps in flight are read."""
        gone = [job for job in self.admitted if job not in self._decoding and job not in self._prefilling]
        return sum(job.blocks for job in gone), len(gone)

    def _preempt(self, job: Job) -> list[Job]:
        """Take a job out of the running; it is returned if its slot and blocks are free at once."""
        self.preemptions += 1
        job.preempted, job.immune = True, job.generated + IMMUNITY
        self._leaving.add(job)
        self._retire(job)
        return [job] if self._released(job) else []

    def _retire(self, job: Job) -> None:
        self._rows = None
        for jobs in (self._prefilling, self._decoding, self._short):
            jobs.pop(job, None)

    def _carried(self, job: Job) -> bool:
        """Whether a step that is not read uses its slot and blocks, or a copy."""
        return job.step > self._collected or job.loading is not None

    def _released(self, job: Job) -> bool:
        if self._carried(job):
            self._going[job] = None
            return False
        self._going.pop(job, None)
        self.admitted.remove(job)
        self._leaving.discard(job)
        self.free_slots += 1
        self.free_blocks += job.blocks
        self._promised -= job.reserved - job.blocks
        job.blocks = job.reserved = 0
        if not job.finished:
            self.waiting.add(job)
        return True


def _together(job: Job) -> tuple[int, int]:
    """Equal for jobs of one priority between whose arrivals no prompt was computed."""
    return job.order[0], job.arrived


def _turn(job: Job) -> tuple[int, int, int, int]:
    return job.order[0], job.arrived, job.served, job.left
