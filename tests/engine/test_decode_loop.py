"""Decode loops: the model's tokens with nothing between, beside requests, and always released."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest

from sparkrt.engine.llm import BatchDecodeLoop, DecodeLoop
from sparkrt.errors import CapacityError, EngineFatal, RequestError, SparkrtError
from sparkrt.runtime.backend import OutOfMemory
from tests.engine.fake_model import FakeModel
from tests.engine.test_core import DEPTHS, alone, drain, engine, idle, request


def llm(core):
    return SimpleNamespace(core=core, _loop_request=lambda request, params: request)


def loop_of(core, request):
    return DecodeLoop(llm(core), request)


def loops_of(core, requests):
    return BatchDecodeLoop(llm(core), requests)


@DEPTHS
@pytest.mark.parametrize("length", [1, 64, 65, 1000])
def test_tokens_are_the_model_s(ahead, length):
    core, model = engine(ahead)
    r = request("a", [i % 1000 for i in range(length)], 20)
    assert list(loop_of(core, r)) == alone(r)
    idle(core, model)


@DEPTHS
def test_a_stop_id_comes_last(ahead):
    core, model = engine(ahead)
    full = alone(request("a", max_tokens=30))
    loop = loop_of(core, request("a", max_tokens=30, stop_token_ids=[full[6]]))
    assert list(loop) == full[: full.index(full[6]) + 1]
    assert list(loop) == []
    idle(core, model)


@DEPTHS
def test_a_batch_runs_in_step(ahead):
    core, model = engine(ahead)
    requests = [request(str(i), range(i * 150 + 1), 4 + 3 * i) for i in range(4)]
    columns = zip(*loops_of(core, requests), strict=True)
    for column, r in zip(columns, requests, strict=True):
        answer = alone(r)
        assert list(column) == answer + [None] * (13 - len(answer))
    idle(core, model)


@DEPTHS
def test_rows_that_stop_early_leave_the_step(ahead):
    core, model = engine(ahead)
    first = alone(request("a", max_tokens=12))
    stopping = request("a", max_tokens=12, stop_token_ids=[first[3]])
    other = request("b", [7], 12)
    steps = list(loops_of(core, [stopping, other]))
    assert [step[0] for step in steps] == first[:4] + [None] * 8
    assert [step[1] for step in steps] == alone(other)
    assert [rows for rows, _ in model.batches[-5:]] == [1] * 5
    idle(core, model)


@DEPTHS
@pytest.mark.parametrize("how", ["close", "with", "forget", "error"])
def test_a_loop_gives_back_what_it_holds(ahead, how):
    core, model = engine(ahead)
    loop = loop_of(core, request("a", max_tokens=100))
    next(loop)
    next(loop)
    assert model.free_slots == 3
    core.check_integrity()
    if how == "close":
        loop.close()
        loop.close()
    elif how == "with":
        with loop:
            next(loop)
    elif how == "forget":
        del loop
        gc.collect()
    else:
        model.fail_launch = OutOfMemory("scratch")
        with pytest.raises(OutOfMemory):
            list(loop)
    idle(core, model)


@DEPTHS
def test_loops_and_requests_side_by_side(ahead):
    core, model = engine(ahead)
    a, b, c = request("a", range(70), 30), request("b", [3], 25), request("c", range(200), 20)
    core.add(c)
    loops = loop_of(core, a), loop_of(core, b)
    got = [], []
    outputs = []
    for _ in range(10):
        for loop, mine in zip(loops, got, strict=True):
            mine.append(next(loop))
        outputs += core.step()
        core.check_integrity()
    for loop, mine in zip(loops, got, strict=True):
        mine += loop
    tokens = {"c": [t for out in outputs for t in out.token_ids]}
    drain(core, tokens)
    assert got == (alone(a), alone(b))
    assert tokens["c"] == alone(c)
    idle(core, model)


def test_a_loop_counts_in_admission():
    core, model = engine(model=FakeModel(slots=2, blocks=4))
    loop = loop_of(core, request("loop", [1], 100))
    core.add(request("a", [1], 100))
    core.add(request("b", [1], 100))
    core.step()
    assert core.stats().waiting == 1
    loop.close()
    core.step()
    assert core.stats().waiting == 0
    drain(core)
    idle(core, model)


def test_no_room_takes_nothing():
    core, model = engine(model=FakeModel(slots=2))
    with pytest.raises(CapacityError, match="0 of 2 slots"):
        loops_of(core, [request(str(i)) for i in range(3)])
    idle(core, model)
    with pytest.raises(RequestError):
        loops_of(core, [])


@DEPTHS
def test_closing_the_engine_ends_its_loops(ahead):
    core, model = engine(ahead)
    loop = loop_of(core, request("a", max_tokens=100))
    next(loop)
    next(loop)
    core.close()
    assert model.free_slots == 4
    with pytest.raises(EngineFatal, match="closed"):
        next(loop)


def test_a_failure_met_by_somebody_else_ends_the_loop_with_an_error():
    core, model = engine(ahead=True)
    loop = loop_of(core, request("a", max_tokens=100))
    next(loop)
    core.add(request("b"))
    model.fail_collect = OutOfMemory("scratch")
    with pytest.raises(OutOfMemory):  # reading the step that the loop left in flight
        core.step()
    with pytest.raises(SparkrtError, match="scratch"):
        next(loop)
    assert drain(core)[0]["b"] == alone(request("b"))
    idle(core, model)


def test_a_failure_met_on_closing_keeps_nothing():
    """Of two rows one is in the step that fails, the other's prompt waits for its turn."""
    core, model = engine(ahead=True, model=FakeModel(budget=64))
    loop = loops_of(core, [request("a", range(64), 9), request("b", range(600), 9)])
    core.step(loop._outbox)
    model.fail_collect = OutOfMemory("scratch")
    with pytest.raises(OutOfMemory):
        loop.close()
    idle(core, model)


@DEPTHS
def test_a_loop_collected_as_garbage_during_a_step_waits_for_its_end(ahead):
    core, model = engine(ahead)
    loops, launch = [loop_of(core, request("a", max_tokens=100))], model.launch
    next(loops[0])
    model.launch = lambda *about: (loops.clear(), launch(*about))[1]
    core.add(request("b", max_tokens=3))
    assert drain(core)[0] == {"b": alone(request("b", max_tokens=3))}
    assert not loops
    idle(core, model)
