"""The prefix cache in the engine: hot = cold = batched = alone, nothing is computed twice, everything comes back.

The fake model knows which tokens every block and every snapshot stands for, and fails where a sequence is given others.
"""

from __future__ import annotations

import random

import pytest

from sparkrt.engine.scheduler import Scheduler
from tests.engine.fake_model import FakeModel, failing
from tests.engine.test_core import DEPTHS, alone, drain, engine, gather, idle, request

KINDS = pytest.mark.parametrize("recurrent", [False, True], ids=["attention", "hybrid"])


def warm_engine(ahead=False, snapshots=12, recurrent=True, **changes):
    return engine(ahead, FakeModel(**{"snapshots": snapshots, "recurrent": recurrent, "slots": 8, "blocks": 128, **changes}))


def ask(core, *requests):
    """Run these together; their tokens and how many of each prompt were cached."""
    for r in requests:
        core.add(r)
    tokens, cached = {}, {}
    while core.has_work:
        for out in core.step():
            tokens.setdefault(out.request_id, []).extend(out.token_ids)
            cached[out.request_id] = max(cached.get(out.request_id, 0), out.cached_tokens)
        core.check_integrity()
    return [tokens[r.request_id] for r in requests], [cached[r.request_id] for r in requests]


@DEPTHS
@KINDS
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 127, 128, 129, 320, 700])
def test_the_same_prompt_again(ahead, recurrent, block_size, length):
    # H10 among them: exactly k blocks, and one token is computed all the same
    core, model = warm_engine(ahead, recurrent=recurrent, block_size=block_size, blocks=1024)
    r = [request(str(i), range(length), 20) for i in range(3)]
    for i in range(3):
        before = model.computed
        tokens, cached = ask(core, r[i])
        assert tokens == [alone(r[0])]
        assert cached == [0 if i == 0 else (length - 1) // 64 * 64]
        assert model.computed - before == length - cached[0]
    idle(core, model)


@DEPTHS
@KINDS
def test_equal_prompts_that_arrive_together_are_computed_once(ahead, recurrent):
    core, model = warm_engine(ahead, recurrent=recurrent, slots=16)
    requests = [request(str(i), [*range(500), *([7] * i)], 10) for i in range(8)]
    tokens, cached = ask(core, *requests)
    assert tokens == [alone(r) for r in requests]
    assert sorted(cached)[1:] == [448] * 7
    assert model.computed <= 500 + 7 * (500 - 448 + 7)
    idle(core, model)


@DEPTHS
def test_who_waits_goes_on_when_the_other_is_aborted(ahead):
    core, model = warm_engine(ahead)
    requests = [request(str(i), range(900), 10) for i in range(3)]
    for r in requests:
        core.add(r)
    core.step()
    assert core.stats().running == 1
    core.abort(["0"])
    tokens, _ = drain(core)
    assert [tokens[str(i)] for i in (1, 2)] == [alone(requests[0])] * 2
    assert model.computed < 1800
    idle(core, model)


def test_a_short_request_passes_those_who_wait_and_takes_nothing_from_them():
    core, model = warm_engine(slots=3)
    for i in range(2):
        core.add(request(str(i), range(900), 10))
    core.add(request("other", [5] * 70, 3))
    core.add(request("late", [6] * 70, 3))
    core.step()
    stats = core.stats()
    assert (stats.running, stats.waiting) == (2, 2)  # the third slot is kept for the one that waits
    drain(core)
    idle(core, model)


@DEPTHS
@KINDS
def test_a_conversation_computes_little_more_than_what_is_new(ahead, recurrent):
    """25 turns: each prompt is the last one, its answer, and 30 new tokens."""
    rng = random.Random(2)
    core, model = warm_engine(ahead, recurrent=recurrent)
    prompt = [rng.randrange(1000) for _ in range(300)]
    for turn in range(25):
        before, r = model.computed, request(f"t{turn}", prompt, rng.randint(20, 90))
        (answer,), (cached,) = ask(core, r)
        assert answer == alone(r)
        if turn:
            assert model.computed - before <= 30 + 70
            assert cached == len(prompt) - (model.computed - before)
        prompt = [*prompt, *answer, *(rng.randrange(1000) for _ in range(30))]
    idle(core, model)


@DEPTHS
@KINDS
@pytest.mark.parametrize("seed", range(4))
def test_random_trees_of_prompts_under_pressure(ahead, recurrent, seed):
    """Shared prefixes of every length, repeats, prompt = prefix and prefix + 1, evictions, preemptions, aborts, resets."""
    rng = random.Random(seed)
    size = rng.choice([16, 32, 64])
    core, model = warm_engine(ahead, recurrent=recurrent, block_size=size, blocks=704 // size, snapshots=rng.choice([1, 4, 20]))
    prompts = [[rng.randrange(1000) for _ in range(rng.randint(1, 300))] for _ in range(4)]
    requests, tokens, ends, aborted = {}, {}, {}, set()
    for i in range(120):
        base = rng.choice(prompts)
        base = base[: rng.choice([len(base), rng.randint(1, len(base)), (len(base) // 64 * 64) or 1])]
        prompt = [*base, *(rng.randrange(1000) for _ in range(rng.choice([0, 1, rng.randint(0, 100)])))][:600]
        prompts.append(prompt)
        requests[f"r{i}"] = request(f"r{i}", prompt, rng.randint(1, 90), prompt_logprobs=rng.choice([None] * 9 + [1]))
    coming = list(requests.values())
    while coming or core.has_work:
        core.scheduler.forecast.share = 0.0
        for _ in range(min(len(coming), rng.choice([0, 0, 1, 3]))):
            core.add(coming.pop())
        if rng.random() < 0.05 and core._requests:
            aborted |= {name := rng.choice(sorted(core._requests))}
            core.abort([name])
        if rng.random() < 0.01:
            core.reset_prefix_cache()
        gather(core.step(), tokens, ends)
        core.check_integrity()
    for name, r in requests.items():
        whole = alone(r)
        assert tokens[name] == (whole[: len(tokens[name])] if name in aborted else whole)
    stats = core.stats()
    assert stats.prefix_cache_hits > 0
    assert stats.preemptions > 0
    idle(core, model)


@DEPTHS
def test_a_preempted_request_finds_its_pages_again(ahead):
    core, model = warm_engine(ahead, block_size=16, blocks=36)
    core.scheduler.forecast.share = 0.0
    requests = [request(str(i), [i] * 150, 150) for i in range(2)]
    tokens, _ = ask(core, *requests)
    assert tokens == [alone(r) for r in requests]
    assert core.stats().preemptions == 1
    assert model.computed < 300 + 250  # without the cache it would be all of the second once more
    idle(core, model)


@DEPTHS
def test_scored_prompts_and_loops_bypass_the_cache(ahead):
    core, model = warm_engine(ahead)
    ask(core, request("a", range(300), 5))
    _, cached = ask(core, request("b", range(300), 5, prompt_logprobs=1))
    assert cached == [0]
    assert core.stats().prefix_cache_queries == 300
    idle(core, model)


@DEPTHS
def test_a_reset_forgets(ahead):
    core, _ = warm_engine(ahead)
    ask(core, request("a", range(300), 5))
    core.reset_prefix_cache()
    core.check_integrity()
    assert core.stats().cached_blocks == 0
    core.add(request("b", range(300), 50))
    core.step()
    core.reset_prefix_cache()
    core.check_integrity()
    tokens, _ = drain(core)
    assert tokens["b"] == alone(request("b", range(300), 50))
    core.check_integrity()


@DEPTHS
@pytest.mark.parametrize("what", ["new_sequence", "grow", "snapshot", "launch", "collect"])
def test_any_failure_at_any_time_leaves_nothing(ahead, what):
    """Fail the n-th call, for every n: everything comes back, who was not part of it gets the whole answer, and so does who
    goes on behind what is cached by then.
    """
    requests = [request(str(i), [*range(70 + 64 * i), i], 70) for i in range(4)]
    n, happened = 0, True
    while happened:
        core, model = warm_engine(ahead, block_size=32, blocks=20)
        core.scheduler.forecast.share = 0.0
        calls = failing(model, what, n)
        core.reuse._copy_state = model.snapshot
        for r in requests:
            core.add(r)
        tokens, ends = {}, {}
        while core.has_work:
            gather(core.step(), tokens, ends)
            core.check_integrity()
        happened = len(calls) > n
        for r in requests:
            assert ends[r.request_id].finish_reason == "error" or tokens[r.request_id] == alone(r)
        delattr(model, what)
        core.reuse._copy_state = model.snapshot
        for r in requests:
            again = request(f"{r.request_id} again", [*r.prompt_ids, *alone(r)], 2)
            assert ask(core, again)[0] == [alone(again)]
        idle(core, model)
        n += 1
    assert n > 4


def test_a_blocked_head_is_looked_up_when_there_is_more_room():
    core, model = warm_engine(blocks=10)
    core.add(request("a", range(400), 200))
    core.step()
    core.add(request("b", range(400, 900), 5))
    looked, match = [], model.prefix.match
    model.prefix.match = lambda *what: (looked.append(1), match(*what))[1]
    tokens, _ = drain(core)
    assert tokens["b"] == alone(request("b", range(400, 900), 5))
    assert len(looked) < 8
    idle(core, model)


def test_without_a_cache_blocks_are_counted_too():
    core, _ = engine()
    assert isinstance(core.scheduler, Scheduler)
    assert core.stats().prefix_cache_queries == core.stats().cached_blocks == 0


@DEPTHS
@KINDS
def test_a_prompt_is_found_under_its_salt_only(ahead, recurrent):
    # X10
    core, model = warm_engine(ahead, recurrent=recurrent)
    for salt, known in ((None, 0), ("a", 0), ("b", 0), ("a", 128), (None, 128), ("b", 128)):
        tokens, cached = ask(core, request("r", range(150), 5, cache_salt=salt))
        assert (tokens, cached) == ([alone(request("r", range(150), 5))], [known])
    together = [request(str(i), range(500, 650), 5, cache_salt=str(i // 2)) for i in range(4)]
    assert sorted(ask(core, *together)[1]) == [0, 0, 128, 128]
    idle(core, model)


def test_roots_of_salts_go_with_their_last_page():
    core, model = warm_engine()
    for i in range(100):
        ask(core, request("r", range(640), 1, cache_salt=str(i)))
    assert len(core.reuse.cache.tree._roots) <= 13  # of 128 pages, 10 each
    core.reset_prefix_cache()
    assert not core.reuse.cache.tree._roots
    idle(core, model)
