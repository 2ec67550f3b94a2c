"""The scheduler alone against random traffic: no model, no clock. Integrity is checked after every step.

Tests run it with thousands of requests; it also answers "how many steps until the first token" for a mix of prompts.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

from sparkrt.engine.job import CHUNK, Job, Limits, Plan
from sparkrt.engine.messages import EngineOutput, EngineRequest
from sparkrt.engine.scheduler import Scheduler
from sparkrt.errors import RequestError

NEWS: list[EngineOutput] = []  # nobody tells any


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that comes before step `step`, stops by itself after `stops` tokens and is aborted before step `aborted`."""

    step: int
    prompt: int
    max_tokens: int
    stops: int | None = None
    aborted: int | None = None
    scored: bool = False
    priority: int = 0


@dataclass(slots=True)
class Report:
    """What happened: by arrival index, the step that read the first token, the step and reason of the end, tokens given."""

    first: dict[int, int] = field(default_factory=dict)
    end: dict[int, tuple[int, str]] = field(default_factory=dict)
    tokens: dict[int, int] = field(default_factory=dict)
    admitted: list[int] = field(default_factory=list)  # for the first time
    steps: int = 0
    computed: int = 0  # prompt tokens, those of resumed requests included
    preemptions: int = 0


def job_of(name: object, prompt: int, max_tokens: int, scored: bool = False, priority: int = 0) -> Job:
    """A request of these many tokens, whatever they say."""
    counts = {"prompt_ids": [0] * prompt, "max_tokens": max_tokens, "prompt_logprobs": 0 if scored else None}
    return Job(EngineRequest(request_id=str(name), priority=priority, **counts), NEWS)


def simulate(limits: Limits, arrivals: list[Arrival], depth: int = 1, by_priority: bool = False) -> Report:
    """Run until everything ended. `depth` 1 reads a step after the next one is launched. Raises EngineFatal on a broken book
    and AssertionError on a plan that breaks a promise, or when nothing moves any more.
    """
    scheduler, report = Scheduler(limits, by_priority), Report()
    coming = deque(sorted(enumerate(arrivals), key=lambda pair: pair[1].step))
    aborts = sorted((a.aborted, i) for i, a in enumerate(arrivals) if a.aborted is not None)
    live: dict[int, Job] = {}
    in_flight: deque[Plan] = deque()

    def end(index: int, reason: str) -> None:
        scheduler.finish(live.pop(index))
        report.end[index] = (report.steps, reason)

    while coming or live or in_flight:
        while coming and coming[0][1].step <= report.steps:
            index, arrival = coming.popleft()
            live[index] = job_of(index, arrival.prompt, arrival.max_tokens, arrival.scored, arrival.priority)
            try:
                scheduler.add(live[index])
            except RequestError:
                del live[index]
                report.end[index] = (report.steps, "refused")
        while aborts and aborts[0][0] <= report.steps:
            _, index = aborts.pop(0)
            if index in live:
                end(index, "abort")
        while scheduler.make_room()[0]:
            pass
        while (job := scheduler.admit()) is not None:
            assert job.generated == job.emitted == report.tokens.get(int(job.request_id), 0)
            if int(job.request_id) not in report.admitted:
                report.admitted.append(int(job.request_id))
        plan = scheduler.plan(NEWS)
        assert plan or in_flight or not live, "everybody waits and nothing runs"
        if plan:
            _check(plan, limits)
            report.computed += sum(s.stop - s.start for s in plan.prefill)
            scheduler.launched(plan)
            in_flight.append(plan)
        if len(in_flight) > (depth if plan else 0):
            read = in_flight.popleft()
            scheduler.collected(read)
            for job in [*read.decode, *(s.job for s in read.prefill if s.sample or s.stop == s.job.target)]:
                index = int(job.request_id)
                if index not in live:
                    continue  # ended while this step was in flight
                if job.max_tokens:
                    report.first.setdefault(index, report.steps)
                    report.tokens[index] = report.tokens.get(index, 0) + 1
                    job.emitted += 1
                    job.answer.append(0)
                count, stops = report.tokens.get(index, 0), arrivals[index].stops
                if count == stops or count == job.max_tokens:
                    end(index, "stop" if count == stops else "length")
        scheduler.check_integrity()
        report.steps += 1
    report.preemptions = scheduler.preemptions
    assert (scheduler.free_slots, scheduler.free_blocks) == (limits.slots, limits.blocks), "something was kept"
    return report


def _check(plan: Plan, limits: Limits) -> None:
    jobs = plan.jobs
    assert len({job.request_id for job in jobs}) == len(jobs) <= limits.slots
    prompt_tokens = sum(s.stop - s.start for s in plan.prefill)
    assert prompt_tokens <= max(limits.budget - len(plan.decode), CHUNK)
    assert sum(s.stop - s.start for s in plan.prefill if s.job.scored) <= limits.scored_rows
    for job, start, stop, sample in plan.prefill:
        assert start == job.prefilled < stop <= job.target
        assert start % CHUNK == 0
        assert sample == (stop == job.target and job.max_tokens > 0)
    for job in jobs:
        assert max(job.target, job.prompt + job.generated) <= job.blocks * limits.block_size, "a token without a block"


def random_arrivals(rng: random.Random, count: int, per_step: float = 0.5, longest: int = 2000) -> list[Arrival]:
    """Traffic of all kinds: lengths on and beside block and chunk edges, early stops, aborts at any moment."""
    arrivals, step = [], 0.0
    for _ in range(count):
        step += rng.expovariate(per_step)
        prompt = rng.choice([1, 63, 64, 65, 128, rng.randint(1, 200), rng.randint(1, longest)])
        max_tokens = rng.choice([0, 1, 2, rng.randint(1, 40), rng.randint(1, 200)])
        arrivals.append(
            Arrival(
                step=int(step),
                prompt=prompt,
                max_tokens=max_tokens,
                stops=rng.randint(1, max_tokens) if max_tokens and rng.random() < 0.5 else None,
                aborted=int(step) + rng.randint(0, 30) if rng.random() < 0.3 else None,
                scored=max_tokens == 0 or rng.random() < 0.1,
                priority=rng.randint(-1, 1),
            )
        )
    return arrivals
