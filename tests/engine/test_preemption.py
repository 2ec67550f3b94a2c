"""When KV blocks run out: growth, preemption, priority, and that all of it costs time only."""

from __future__ import annotations

import random

import pytest

from sparkrt.engine.job import Job, Limits
from sparkrt.engine.preemption import IMMUNITY, victim_for
from sparkrt.engine.scheduler import Scheduler
from tests.engine.simulate import NEWS, Arrival, job_of, simulate


def limits(**changes: int) -> Limits:
    return Limits(**{"slots": 8, "blocks": 256, "block_size": 16, "budget": 512, "scored_rows": 64, **changes})


def admitted(lengths: list[tuple[int, int]], **changes: int) -> tuple[Scheduler, list[Job]]:
    """A scheduler that has let all of these in: it believes in short answers."""
    scheduler = Scheduler(limits(**changes))
    scheduler.forecast.share = 0.0
    jobs = [job_of(i, prompt, max_tokens) for i, (prompt, max_tokens) in enumerate(lengths)]
    for job in jobs:
        scheduler.add(job)
        assert scheduler.admit() is job
    return scheduler, jobs


def step(scheduler: Scheduler) -> tuple[list[Job], list[Job]]:
    """One step that is read at once. Returns who decoded, and who was let go."""
    released = []
    while gone := scheduler.make_room()[0]:
        released += gone
    plan = scheduler.plan(NEWS)
    scheduler.launched(plan)
    for job in plan.rows:
        job.emitted += 1
        job.answer.append(0)
    released += scheduler.collected(plan)
    scheduler.check_integrity()
    return plan.decode, released


def test_blocks_come_one_by_one_as_an_answer_grows():
    scheduler, (job,) = admitted([(16, 40)])
    taken = []
    while job.generated < 40:
        step(scheduler)
        taken.append(job.blocks)
    # the first token comes with the prompt; the 17th is the first that has to be written into a third block
    assert taken == [2] * 17 + [3] * 16 + [4] * 7


def test_a_later_request_gives_way_and_keeps_its_place():
    scheduler, (first, second) = admitted([(16, 60), (16, 60)], blocks=5)
    scheduler.add(third := job_of("third", 1, 1))
    while not scheduler.preemptions:
        step(scheduler)
    assert second not in scheduler.admitted
    assert list(scheduler.waiting) == [second, third]
    assert scheduler.admit() is None  # the third would fit, and does not overtake
    while first.emitted < 60:
        step(scheduler)
    scheduler.finish(first)
    assert scheduler.admit() is second
    assert (second.target, second.prefilled, second.generated) == (16 + second.emitted, 0, second.emitted)


def test_the_first_never_gives_way_and_the_cheapest_of_the_others_does():
    first, _, short, fresh = jobs = [job_of(i, 16, 60) for i in range(4)]
    for place, (job, computed) in enumerate(zip(jobs, (16, 300, 30, 100), strict=True)):
        job.order, job.prefilled = (0, place), computed
    assert victim_for(first, jobs) is short
    short.immune = short.generated + IMMUNITY  # it has given way before
    assert victim_for(first, jobs) is fresh
    for job in jobs:
        job.immune = 1
    assert victim_for(first, jobs) is short  # all are immune: so none is
    assert victim_for(fresh, jobs) is None


def test_a_row_without_a_later_one_waits_in_its_place():
    scheduler, (first, second) = admitted([(16, 100), (16, 60)], blocks=8)
    scheduler.claim(loop := Job(job_of("loop", 30, 30).message, []))
    for _ in range(17):
        step(scheduler)
    assert (first.blocks, second.blocks, scheduler.free_blocks) == (2, 2, 0)
    assert step(scheduler)[0] == [first]  # it took the blocks of the second
    assert scheduler.preemptions == 1
    while first.blocks < 4:
        step(scheduler)
    for _ in range(16):
        decoding, _ = step(scheduler)
    assert decoding == []  # a decode loop has the rest, and there is nobody to take a block from
    scheduler.finish(loop)
    assert step(scheduler)[0] == [first]


def test_a_victim_in_flight_is_let_go_when_its_step_is_read():
    scheduler, (first, second) = admitted([(16, 60), (16, 60)], blocks=5)
    scheduler.claim(Job(job_of("loop", 1, 1).message, []))
    flying = []
    for _ in range(30):
        released, _ = scheduler.make_room()
        if scheduler.preemptions:
            break
        plan = scheduler.plan(NEWS)
        scheduler.launched(plan)
        flying.append(plan)
        if len(flying) > 1:
            assert scheduler.collected(flying.pop(0)) == []
    assert released == []  # a step in flight still writes into its blocks
    assert scheduler.admit() is None
    assert [job for plan in flying for job in scheduler.collected(plan)] == [second]
    scheduler.check_integrity()
    assert step(scheduler)[0] == [first]


def test_a_scored_prompt_begins_again_and_a_finished_one_is_not_scored_twice():
    job = Job(job_of("a", 100, 8, scored=True).message, NEWS)
    job.prompt_logprobs += [None] * 30
    job.restart()
    assert (job.scored, job.prompt_logprobs, job.target) == (True, [None], 100)
    job.prompt_logprobs, job.emitted, job.answer = [None] * 100, 2, [5, 6]
    job.restart()
    assert (job.scored, len(job.prompt_logprobs), job.ids[-2:].tolist(), job.target) == (False, 100, [5, 6], 102)


def test_a_third_of_the_memory_is_enough():
    rng = random.Random(3)
    arrivals = []
    for i in range(200):  # short answers come first, so that the forecast is wrong
        max_tokens = rng.randint(100, 400)
        stops = rng.randint(1, 20) if i < 50 else None
        arrivals.append(Arrival(0, rng.randint(1, 300), max_tokens, stops, priority=rng.randint(0, 2)))
    demand = sum(limits().blocks_for(a.prompt + a.max_tokens) for a in arrivals)
    bounds = limits(slots=256, blocks=demand // 3, budget=2048)
    for depth, by_priority in ((0, False), (1, False), (1, True)):
        report = simulate(bounds, arrivals, depth, by_priority)
        assert report.preemptions > 0
        assert [report.end[i][1] for i in range(200)] == ["stop"] * 50 + ["length"] * 150
        assert [report.tokens[i] for i in range(200)] == [a.stops or a.max_tokens for a in arrivals]
        # work done twice stays small beside the work
        assert report.computed < 1.5 * sum(a.prompt + a.max_tokens for a in arrivals)


def test_swapped_needs_do_not_block_each_other():
    # W07: each fits alone, both do not
    report = simulate(limits(slots=2, blocks=6), [Arrival(0, 32, 60), Arrival(0, 60, 32)], depth=1)
    assert [report.end[i][1] for i in range(2)] == ["length"] * 2


def test_priority_orders_the_queue():
    arrivals = [Arrival(0, 64, 30), *(Arrival(1, 64, 30, priority=p) for p in (2, 1, 0, 1))]
    report = simulate(limits(slots=1), arrivals, by_priority=True)
    assert report.admitted == [0, 3, 2, 4, 1]
    assert simulate(limits(slots=1), arrivals).admitted == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("scarce", ["slots", "blocks"])
def test_an_urgent_request_takes_the_place_of_others(scarce):
    bounds = limits(slots=2) if scarce == "slots" else limits(blocks=16)
    arrivals = [Arrival(0, 16, 200, priority=5), Arrival(0, 16, 200, priority=5), Arrival(20, 64, 20)]
    report = simulate(bounds, arrivals, by_priority=True)
    assert report.end[2][0] < 50
    assert report.preemptions >= 1
    assert {reason for _, reason in report.end.values()} == {"length"}
    assert simulate(bounds, arrivals).end[2][0] > 100


def test_nobody_is_displaced_in_vain():
    scheduler = Scheduler(limits(blocks=10), by_priority=True)
    scheduler.add(small := job_of("small", 16, 16, priority=1))
    scheduler.add(peer := job_of("peer", 60, 20))
    assert {scheduler.admit(), scheduler.admit()} == {small, peer}
    scheduler.add(job_of("huge", 120, 16))
    assert scheduler.make_room() == ([], [])  # without the small one there would still be no room
    assert scheduler.admit() is None


def test_who_is_displaced_in_the_step_in_which_it_would_grow_does_not_grow():
    scheduler = Scheduler(limits(blocks=4), by_priority=True)
    scheduler.forecast.share = 0.0
    scheduler.add(job := job_of("job", 16, 40, priority=1))
    assert scheduler.admit() is job
    for _ in range(17):
        step(scheduler)
    scheduler.add(urgent := job_of("urgent", 60, 4))
    assert scheduler.make_room() == ([job], [])
    assert scheduler.admit() is urgent
    scheduler.check_integrity()
