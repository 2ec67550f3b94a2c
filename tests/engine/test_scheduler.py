"""The scheduler alone: budgets, grid, reservations, order, fairness, and thousands of random requests."""

from __future__ import annotations

import itertools
import random

import pytest

from sparkrt.engine.job import CHUNK, Job, Limits
from sparkrt.engine.scheduler import Scheduler
from sparkrt.errors import CapacityError, EngineFatal, RequestError
from tests.engine.simulate import NEWS, Arrival, job_of, random_arrivals, simulate


def limits(**changes: int) -> Limits:
    return Limits(**{"slots": 8, "blocks": 256, "block_size": 64, "budget": 512, "scored_rows": 64, **changes})


def scheduler_with(lengths: list[tuple[int, int]], **changes: int) -> tuple[Scheduler, list[Job]]:
    scheduler = Scheduler(limits(**changes))
    jobs = [job_of(i, prompt, max_tokens) for i, (prompt, max_tokens) in enumerate(lengths)]
    for job in jobs:
        scheduler.add(job)
    while scheduler.admit():
        pass
    return scheduler, jobs


def slices(scheduler: Scheduler) -> list[tuple[str, int, int]]:
    plan = scheduler.plan(NEWS)
    scheduler.launched(plan)
    scheduler.collected(plan)
    return [(s.job.request_id, s.start, s.stop) for s in plan.prefill]


def test_several_prompts_go_into_one_step():
    scheduler, _ = scheduler_with([(100, 4), (30, 4), (65, 4)])
    assert slices(scheduler) == [("0", 0, 100), ("1", 0, 30), ("2", 0, 65)]


@pytest.mark.parametrize("budget", [1, 7, 63, 64, 65, 128, 200])
def test_slices_end_on_the_grid_whatever_the_budget(budget):
    scheduler, (job,) = scheduler_with([(300, 4)], budget=budget)
    cuts = []
    while job.prefilled < job.target:
        cuts += slices(scheduler)
    assert [start for _, start, _ in cuts] == [0] + [stop for _, _, stop in cuts[:-1]]
    assert all(stop % CHUNK == 0 for _, _, stop in cuts[:-1])
    assert cuts[-1][2] == 300


def test_decode_rows_come_first_and_prefill_still_moves():
    scheduler, jobs = scheduler_with([(10, 50)] * 7 + [(1000, 4)], budget=64)
    for _ in range(3):
        slices(scheduler)
    plan = scheduler.plan(NEWS)
    assert len(plan.decode) == 7
    assert [(s.job, s.stop - s.start) for s in plan.prefill] == [(jobs[7], CHUNK)]


def test_a_first_token_does_not_wait_for_another_whole_prompt():
    # S02: four ingests of 50,000 tokens, then a short request
    arrivals = [Arrival(0, 50_000, 8) for _ in range(4)] + [Arrival(10, 400, 8)]
    report = simulate(limits(blocks=4000, budget=512), arrivals, depth=0)
    assert report.first[4] - 10 <= 3
    ends = [report.first[i] for i in range(4)]
    assert min(ends) > 1.5 * 50_000 / 512  # no ingest ran alone
    assert max(ends) <= 4 * 50_000 / 512 + 10  # and no step was wasted


def test_a_long_prompt_is_not_starved_by_a_stream_of_short_ones():
    arrivals = [Arrival(0, 6400, 1)] + [Arrival(step, 256, 1) for step in range(400)]
    report = simulate(limits(budget=256), arrivals, depth=0)
    assert report.first[0] <= 450  # 8 slots and more work than the budget: an eighth of half of it is 16 tokens a step


@pytest.mark.parametrize("budget", [16, 64, 128])
def test_tiny_budgets_serve_prompts_in_turn(budget):
    report = simulate(limits(budget=budget), [Arrival(0, 640, 1) for _ in range(4)], depth=0)
    assert max(report.first.values()) - min(report.first.values()) <= 20


@pytest.mark.parametrize("seed", range(5))
def test_64_prompts_of_very_different_lengths(seed):
    """No first token later than 1.5 times what all that came no later take, in steps; who came together ends shortest first."""
    rng = random.Random(seed)
    lengths = [int(2 ** rng.uniform(3, 14)) for _ in range(64)]
    bounds = limits(slots=64, blocks=20_000, budget=512)
    report = simulate(bounds, [Arrival(0, n, 64) for n in lengths], depth=0)
    assert max(report.first.values()) <= 1.5 * sum(lengths) / 512 + 2
    order = sorted(range(64), key=lambda i: lengths[i])
    for shorter, longer in itertools.combinations(order, 2):
        if lengths[longer] > 1.5 * lengths[shorter]:  # of those about as long, who was served evenly may be ahead
            assert report.first[shorter] <= report.first[longer]
    steps = sorted(rng.randrange(200) for _ in lengths)
    report = simulate(bounds, [Arrival(at, n, 64) for at, n in zip(steps, lengths, strict=True)], depth=0)
    for i, at in enumerate(steps):
        before = sum(n for n, came in zip(lengths, steps, strict=True) if came <= at)
        assert report.first[i] - at <= 1.5 * before / 512 + 2, "somebody who came later went first for too long"


def test_equal_prompts_finish_one_after_the_other():
    # even sharing alone would give everybody the last step
    report = simulate(limits(slots=16, budget=2048, blocks=1000), [Arrival(0, 512, 1) for _ in range(16)], depth=0)
    assert report.first[0] < report.first[15] <= 4


def test_scored_prompts_stay_within_the_rows_of_logits():
    scheduler = Scheduler(limits())
    for i in range(3):
        scheduler.add(job_of(i, 200, 0, scored=True))
    scheduler.add(job_of("plain", 200, 1))
    while scheduler.admit():
        pass
    seen = set()
    for _ in range(3):
        cuts = slices(scheduler)
        scored = [(name, stop - start) for name, start, stop in cuts if name != "plain"]
        assert sum(rows for _, rows in scored) <= 64
        seen |= {name for name, _ in scored}
    assert seen == {"0", "1", "2"}


def test_admission_counts_on_a_share_of_the_answer():
    scheduler, jobs = scheduler_with([(64, 640), (64, 640), (64, 640)], blocks=13)
    assert scheduler.admitted == set(jobs[:2])  # each is expected to need 6 blocks, and begins with 2
    assert [job.blocks for job in jobs] == [2, 2, 0]
    assert scheduler.free_blocks == 9
    for job in jobs[:2]:  # they end long before
        job.emitted = 10
        assert scheduler.finish(job)
    assert scheduler.forecast.share < 0.5
    assert scheduler.admit() is jobs[2]
    assert jobs[2].reserved == 5


def test_the_only_request_runs_whatever_the_forecast_says():
    scheduler, (job,) = scheduler_with([(64, 576)], blocks=10)
    scheduler.forecast.share = 1.0
    assert job in scheduler.admitted
    scheduler.claim(job_of("loop", 64, 1))
    scheduler.finish(job)
    scheduler.add(again := job_of("again", 64, 576))
    assert scheduler.admit() is again  # only a decode loop is beside it


def test_nobody_overtakes_the_head_of_the_queue():
    scheduler, jobs = scheduler_with([(64, 64), (200, 100), (1, 1)], blocks=5)
    assert scheduler.admitted == {jobs[0]}
    assert [job.request_id for job in scheduler.waiting] == ["1", "2"]


def test_slots_limit_too():
    scheduler, _ = scheduler_with([(1, 1)] * 5, slots=3)
    assert len(scheduler.admitted) == 3


def test_what_can_never_fit_is_refused_with_numbers():
    # S01
    scheduler = Scheduler(limits(blocks=10))
    with pytest.raises(RequestError, match=r"prompt 600 \+ max_tokens 41.*holds 640") as caught:
        scheduler.add(job_of("big", 600, 41))
    assert caught.value.param == "max_tokens"
    assert not len(scheduler.waiting)
    scheduler.add(job_of("fits", 600, 40))
    assert scheduler.admit()


@pytest.mark.parametrize("moment", ["waiting", "admitted", "prefill in flight", "decoding", "decode in flight", "two in flight"])
def test_finish_at_every_moment(moment):
    scheduler = Scheduler(limits())
    job = job_of("a", 100, 10)
    scheduler.add(job)
    flying = []

    def launch():
        plan = scheduler.plan(NEWS)
        scheduler.launched(plan)
        flying.append(plan)

    if moment != "waiting":
        scheduler.admit()
    if moment not in ("waiting", "admitted"):
        launch()
    if moment in ("decoding", "decode in flight"):
        scheduler.collected(flying.pop(0))
    if moment in ("decode in flight", "two in flight"):
        launch()
    assert scheduler.finish(job) == (moment in ("admitted", "decoding"))
    scheduler.check_integrity()
    assert not scheduler.plan(NEWS)
    released = [done for plan in flying for done in scheduler.collected(plan)]
    assert released == ([job] if flying else [])
    scheduler.check_integrity()
    assert (scheduler.free_slots, scheduler.free_blocks) == (8, 256)


def test_slot_is_kept_while_a_step_in_flight_uses_it():
    # H12: a step launched ahead still writes to the slot of a request that just stopped
    scheduler, (first, second) = scheduler_with([(10, 10), (10, 10)], slots=1)
    step = scheduler.plan(NEWS)
    scheduler.launched(step)
    ahead = scheduler.plan(NEWS)
    scheduler.launched(ahead)
    assert not scheduler.finish(first)
    assert scheduler.collected(step) == []
    assert scheduler.admit() is None
    assert scheduler.collected(ahead) == [first]
    assert scheduler.admit() is second


def test_claims_are_counted():
    scheduler = Scheduler(limits(slots=2, blocks=10))
    claimed = job_of("a", 200, 56)
    scheduler.claim(claimed)
    scheduler.check_integrity()
    assert (scheduler.free_slots, scheduler.free_blocks) == (1, 6)
    with pytest.raises(CapacityError, match="6 of 10"):
        scheduler.claim(job_of("b", 385, 1))
    assert scheduler.finish(claimed)
    scheduler.check_integrity()
    assert (scheduler.free_slots, scheduler.free_blocks) == (2, 10)


def test_integrity_notices_a_leak():
    scheduler, (job,) = scheduler_with([(10, 10)])
    scheduler.free_blocks += 1
    with pytest.raises(EngineFatal, match="blocks"):
        scheduler.check_integrity()
    scheduler.free_blocks -= 1
    job.finished = True
    with pytest.raises(EngineFatal, match="still owns"):
        scheduler.check_integrity()


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("seed", range(4))
def test_thousands_of_random_requests(seed, depth):
    # S04, with integrity checked after every step
    rng = random.Random(seed)
    bounds = limits(
        slots=rng.choice([1, 3, 16]),
        blocks=rng.choice([40, 200]),
        block_size=rng.choice([16, 64]),
        budget=rng.choice([32, 64, 300, 2048]),
    )
    arrivals = random_arrivals(rng, 1500)
    report = simulate(bounds, arrivals, depth)
    check_report(report, arrivals, bounds)


@pytest.mark.parametrize("seed", range(20))
def test_any_traffic_ends_in_order_and_whole(seed):
    """500 small worlds a seed: they meet at every edge."""
    rng = random.Random(seed)
    preemptions = 0
    for _ in range(500):
        bounds = limits(
            slots=rng.randint(1, 6),
            blocks=rng.randint(2, 24),
            block_size=rng.choice([16, 32, 64]),
            budget=rng.choice([1, 64, rng.randint(65, 400)]),
        )
        arrivals = [
            Arrival(
                step=rng.randint(0, 12),
                prompt=rng.choice([1, 63, 64, 65, rng.randint(1, 200)]),
                max_tokens=rng.choice([0, 1, rng.randint(2, 60)]),
                stops=rng.choice([None, rng.randint(1, 60)]),
                aborted=rng.choice([None, None, rng.randint(0, 60)]),
                scored=rng.random() < 0.2,
                priority=rng.randint(-1, 1),
            )
            for _ in range(rng.randint(1, 9))
        ]
        by_priority = rng.random() < 0.3
        report = simulate(bounds, arrivals, rng.randint(0, 1), by_priority)
        check_report(report, arrivals, bounds, by_priority)
        preemptions += report.preemptions
    assert preemptions > 20


def check_report(report, arrivals, bounds, by_priority=False):
    """Everyone ended, with the tokens they were due; first admissions came in the order of arrival."""
    assert set(report.end) == set(range(len(arrivals)))
    if not by_priority:
        order = sorted(range(len(arrivals)), key=lambda i: arrivals[i].step)
        rank = {index: place for place, index in enumerate(order)}
        assert [rank[i] for i in report.admitted] == sorted(rank[i] for i in report.admitted)
    for index, (_, reason) in report.end.items():
        a, count = arrivals[index], report.tokens.get(index, 0)
        fits = bounds.blocks_for(a.prompt + a.max_tokens) <= bounds.blocks
        assert (reason == "refused") == (not fits)
        if reason == "stop":
            assert count == a.stops
        elif reason == "length":
            assert count == a.max_tokens
        elif reason == "abort":
            assert count < (a.stops or a.max_tokens) or a.max_tokens == 0 or count < a.max_tokens
