"""The engine core when there is not enough: preemption, full queues, deadlines, failed allocations."""

from __future__ import annotations

import random

import pytest

from sparkrt.errors import CapacityError, RequestError
from tests.engine.fake_model import FakeModel, failing
from tests.engine.test_core import DEPTHS, alone, drain, engine, gather, idle, request, traffic


def tight_engine(blocks, ahead, **options):
    return engine(ahead, FakeModel(slots=8, blocks=blocks, block_size=16), **options)


@DEPTHS
def test_preempted_requests_go_on_as_if_nothing_had_been(ahead):
    # H05, S01: a pool for 1.5 requests, and seeds, min_tokens and stops that must not notice
    rng = random.Random(11)
    core, model = tight_engine(12, ahead)
    requests = [r for r in traffic(rng, 60, longest=80) if len(r.prompt_ids) + r.max_tokens <= 12 * 16]
    for r in requests:
        core.add(r)
    tokens, ends = {}, {}
    while core.has_work:
        core.scheduler.forecast.share = 0.0  # never learns that answers are long
        gather(core.step(), tokens, ends)
    assert tokens == {r.request_id: alone(r) for r in requests}
    assert {out.finish_reason for out in ends.values()} <= {"stop", "length"}
    assert core.stats().preemptions > 5
    assert core.stats().prompt_tokens == sum(len(r.prompt_ids) for r in requests)
    idle(core, model)


@DEPTHS
def test_log_probabilities_survive_a_preemption(ahead):
    core, model = tight_engine(8, ahead)
    core.scheduler.forecast.share = 0.0
    for i in range(4):
        core.add(request(str(i), range(40), 60, prompt_logprobs=1, logprobs=1))
    seen, scores = {}, {}
    while core.has_work:
        for out in core.step():
            seen.setdefault(out.request_id, []).extend(out.logprobs or [])
            if out.prompt_logprobs is not None:
                assert out.request_id not in scores
                scores[out.request_id] = out.prompt_logprobs
    assert core.stats().preemptions > 0
    assert [len(seen[str(i)]) for i in range(4)] == [60] * 4
    assert [[p and p.token_id for p in scores[str(i)]] for i in range(4)] == [[None, *range(1, 40)]] * 4
    idle(core, model)


@DEPTHS
def test_aborts_between_preemptions_leave_nothing(ahead):
    rng = random.Random(5)
    core, model = tight_engine(10, ahead)
    requests = {r.request_id: r for r in traffic(rng, 150, longest=60) if len(r.prompt_ids) + r.max_tokens <= 160}
    coming, tokens, ends = list(requests.values()), {}, {}
    while coming or core.has_work:
        core.scheduler.forecast.share = 0.0
        for _ in range(min(len(coming), rng.randint(0, 3))):
            core.add(coming.pop())
        if rng.random() < 0.2 and core._requests:
            core.abort(rng.sample(sorted(core._requests), 1))
        gather(core.step(), tokens, ends)
        core.check_integrity()
    assert core.stats().preemptions > 10
    for name, r in requests.items():
        whole = alone(r)
        assert tokens[name] == (whole[: len(tokens[name])] if ends[name].finish_reason == "abort" else whole)
    idle(core, model)


@DEPTHS
def test_a_full_queue_refuses_and_changes_nothing(ahead):
    core, model = engine(ahead, FakeModel(slots=2), max_num_queued_reqs=1)
    for name in "abc":
        core.add(request(name))
    for _ in range(3):
        with pytest.raises(CapacityError, match="1 requests may wait"):
            core.add(request("d"))
    assert core.stats().waiting == 1
    tokens, _ = drain(core)
    assert sorted(tokens) == list("abc")
    core.add(request("d"))
    drain(core)
    idle(core, model)


@DEPTHS
def test_a_deadline_ends_who_runs_and_who_waits(ahead):
    core, model = engine(ahead, FakeModel(slots=1), request_timeout=1000.0)
    core.add(request("runs", max_tokens=100))
    core.add(request("waits"))
    core.add(request("later"))
    assert {out.request_id for out in core.step()} <= {"runs"}
    for name in ("runs", "waits"):
        core._requests[name].deadline = 0.0
    outputs = core.step()
    ends = {out.request_id: out for out in outputs if out.finish_reason}
    assert {name: out.finish_reason for name, out in ends.items()} == {"runs": "timeout", "waits": "timeout"}
    assert "not done within 1000 s" in ends["runs"].error
    tokens = {}
    gather(outputs, tokens, {})
    assert drain(core, tokens)[0]["later"] == alone(request("later"))
    idle(core, model)


def test_priority_needs_its_policy():
    core, _ = engine()
    with pytest.raises(RequestError, match="scheduling policy") as caught:
        core.add(request("a", priority=1))
    assert caught.value.param == "priority"
    core, model = engine(model=FakeModel(slots=1), scheduling_policy="priority")
    for name, priority in (("low", 5), ("high", -1)):
        core.add(request(name, priority=priority))
    assert list(drain(core)[0]) == ["high", "low"]
    idle(core, model)


@DEPTHS
@pytest.mark.parametrize("what", ["new_sequence", "grow"])
def test_any_failed_allocation_fails_one_and_leaves_nothing(ahead, what):
    """Fail the n-th call that takes blocks, for every n: that request gets an error, the others their whole answers."""
    requests = traffic(random.Random(8), 8, longest=60)
    n = failed = 0
    while failed is not None:
        core, model = tight_engine(24, ahead)
        core.scheduler.forecast.share = 0.0
        calls = failing(model, what, n)
        for r in requests:
            core.add(r)
        tokens, ends = {}, {}
        while core.has_work:
            gather(core.step(), tokens, ends)
            core.check_integrity()
        wrong = [name for name, out in ends.items() if out.finish_reason == "error"]
        failed = wrong[0] if len(calls) > n else None
        assert len(wrong) == (failed is not None)
        for r in requests:
            assert r.request_id == failed or tokens[r.request_id] == alone(r)
        idle(core, model)
        n += 1
    assert n > 5


@DEPTHS
@pytest.mark.parametrize("snapshots", [None, 8], ids=["without a cache", "hybrid"])
def test_with_pages_for_a_third_of_the_demand_all_get_their_whole_answers(ahead, snapshots):
    rng = random.Random(6)
    shared = [[rng.randrange(1000) for _ in range(rng.randint(1, 200))] for _ in range(5)]
    requests = [
        request(str(i), [*rng.choice(shared)[: rng.randint(1, 200)], i], rng.randint(60, 160), stop_token_ids=[i] * (i % 2))
        for i in range(200)
    ]
    demand = sum(-(-(len(r.prompt_ids) + r.max_tokens) // 16) for r in requests)
    core, model = engine(ahead, FakeModel(slots=200, blocks=demand // 3, block_size=16, budget=1024, snapshots=snapshots))
    for r in requests:
        core.add(r)
    tokens, ends = {}, {}
    while core.has_work:
        core.scheduler.forecast.share = 0.0
        gather(core.step(), tokens, ends)
    assert tokens == {r.request_id: alone(r) for r in requests}
    assert core.stats().preemptions > 10
    idle(core, model)
