"""Spilling in the engine: hot through host memory and disk = cold, preempted = never preempted, and everything comes back."""

from __future__ import annotations

import errno
import random

import pytest

from sparkrt.cache.disk import DiskCache
from sparkrt.cache.spill import Costs
from tests.engine.fake_model import FakeModel, failing
from tests.engine.fake_mover import spilling
from tests.engine.test_core import DEPTHS, alone, drain, engine, gather, idle, request
from tests.engine.test_reuse import KINDS, ask


def spill_engine(ahead=False, recurrent=True, blocks=24, snapshots=4, spill=None, **changes):
    model = FakeModel(slots=8, blocks=blocks, snapshots=snapshots, recurrent=recurrent, spill=spill or spilling(256), **changes)
    return engine(ahead, model)


def settled(core):
    """Until nothing is on its way any more."""
    while core.has_work:
        core.step()
    core.check_integrity()


@DEPTHS
@KINDS
@pytest.mark.parametrize("block_size", [16, 64])
def test_what_was_evicted_comes_back(ahead, recurrent, block_size):
    core, model = spill_engine(ahead, recurrent, blocks=1024 // block_size, block_size=block_size)
    prompts = [request(f"a{i}", [*range(i, i + 700)], 20) for i in range(4)]
    for r in prompts:
        ask(core, r)
    before = model.computed
    for i, r in enumerate(prompts):
        again = request(f"b{i}", r.prompt_ids, 20)
        assert ask(core, again) == ([alone(r)], [640])
    assert model.computed - before == 4 * 60
    settled(core)
    assert core.stats().offload.hits >= 3 * 640
    idle(core, model)
    core.close()


@DEPTHS
@KINDS
@pytest.mark.parametrize("seed", range(4))
def test_random_trees_with_host_memory_disk_and_restarts(ahead, recurrent, seed, tmp_path):
    """As without spilling, and with too little room on every tier; the model restarts over its disk, warm."""
    rng = random.Random(seed)
    size = rng.choice([16, 32, 64])
    prompts = [[rng.randrange(1000) for _ in range(rng.randint(1, 300))] for _ in range(4)]
    hits = preemptions = 0
    for life in range(3):
        disk = DiskCache(tmp_path, rng.choice([3_000, 20_000, 1 << 20])) if seed % 2 else None
        spill = spilling(rng.choice([8, 40, 200]), disk, seed=seed)
        core, model = spill_engine(ahead, recurrent, 704 // size, rng.choice([1, 4, 20]), spill, block_size=size)
        requests, tokens, ends, aborted = {}, {}, {}, set()
        for i in range(30):
            base = rng.choice(prompts)
            base = base[: rng.choice([len(base), rng.randint(1, len(base)), (len(base) // 64 * 64) or 1])]
            prompt = [*base, *(rng.randrange(1000) for _ in range(rng.choice([0, 1, rng.randint(0, 100)])))][:600]
            prompts.append(prompt)
            name = f"{life}.{i}"
            requests[name] = request(name, prompt, rng.randint(1, 90), prompt_logprobs=rng.choice([None] * 9 + [1]))
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
            assert disk is None or disk.used <= disk.budget
        for name, r in requests.items():
            whole = alone(r)
            assert tokens.get(name, []) == (whole[: len(tokens.get(name, []))] if name in aborted else whole)
        stats = core.stats()
        hits += stats.offload.hits
        preemptions += stats.preemptions
        assert not stats.offload.corrupt_files
        settled(core)
        core.close()
        assert model.spill.mover.closed
        assert model.spill.pool.free_count + sum(map(len, model.spill._host.values())) == model.spill.pool.num_blocks
    assert hits > 0
    assert preemptions > 0


@DEPTHS
@KINDS
def test_a_preempted_request_goes_on_where_it_was(ahead, recurrent):
    """H05. Nothing of it is computed again: its state comes back, and its pages, wherever they are by then."""
    core, model = spill_engine(ahead, recurrent, blocks=36, snapshots=0, block_size=16)
    core.scheduler.forecast.share = 0.0
    requests = [request(str(i), [i] * 150, 150) for i in range(2)]
    tokens, _ = ask(core, *requests)
    assert tokens == [alone(r) for r in requests]
    stats = core.stats()
    assert (stats.preemptions, stats.offload.swaps) == (1, 1)
    assert model.computed == 300
    idle(core, model)
    core.close()


@DEPTHS
def test_a_preempted_request_whose_pages_are_lost_begins_again(ahead):
    core, model = spill_engine(ahead, blocks=24, snapshots=0, block_size=16, spill=spilling(4))
    core.scheduler.forecast.share = 0.0
    requests = [request(str(i), [i] * 150, 150) for i in range(2)]
    tokens, _ = ask(core, *requests)
    assert tokens == [alone(r) for r in requests]
    assert core.stats().preemptions > 0
    assert model.computed > 300
    idle(core, model)
    core.close()


def test_what_is_dearer_than_computing_is_left_where_it_is():
    cheap = Costs(token=1e-9, bus=1.0)
    core, model = spill_engine(spill=spilling(256, costs=cheap))
    for name in "ab":
        for i in range(4):
            r = request(f"{name}{i}", range(i, i + 700), 20)
            assert ask(core, r)[0] == [alone(r)]
    assert core.stats().offload.hits == 0
    assert model.computed > 7 * 700
    idle(core, model)
    core.close()


@DEPTHS
def test_two_that_each_fit_alone_and_swap_places(ahead):
    """W07: neither waits for the other for ever."""
    core, model = spill_engine(ahead, blocks=11)
    for turn in range(6):
        r = [request(f"{turn}{name}", [ord(name)] * 600, 40) for name in "ab"]
        assert ask(core, *r)[0] == [alone(x) for x in r]
    idle(core, model)
    core.close()


@DEPTHS
def test_a_full_disk_costs_hits_and_no_answer(ahead, tmp_path, monkeypatch, caplog):
    """W03: what host memory has no room for is lost, which is said once."""

    def full(descriptor):
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr("os.fsync", full)
    core, model = spill_engine(ahead, spill=spilling(16, lambda: DiskCache(tmp_path, 1 << 20)))
    prompts = [request(f"{i}", range(i, i + 700), 5) for i in range(4)]
    for turn in range(2):
        for r in prompts:
            again = request(f"{r.request_id} {turn}", r.prompt_ids, 5)
            assert ask(core, again)[0] == [alone(r)]
    settled(core)
    stats = core.stats().offload
    assert stats.disk_failures > 1
    assert (stats.disk_bytes, caplog.text.count("cannot be written")) == (0, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]
    idle(core, model)
    core.close()


@DEPTHS
def test_aborts_while_pages_come_back_leave_nothing(ahead, tmp_path):
    for moment in range(12):
        core, model = spill_engine(ahead, spill=spilling(40, lambda: DiskCache(tmp_path / "disk", 1 << 20), patience=6))
        first = [request(f"{i}", range(i, i + 700), 5) for i in range(3)]
        for r in first:
            ask(core, r)
        settled(core)
        if moment % 2:
            core.add(request("other", [7], 40))  # then nobody waits for the copies
        core.add(request("again", first[0].prompt_ids, 5))
        for _ in range(moment):
            core.step()
            core.check_integrity()
        if moment % 3 == 2:
            core.reset_prefix_cache()
            core.check_integrity()
        core.abort(["again", "other"])
        settled(core)
        idle(core, model)
        core.close()


@DEPTHS
def test_a_reset_forgets_what_was_spilled(ahead, tmp_path):
    core, model = spill_engine(ahead, spill=spilling(40, lambda: DiskCache(tmp_path, 1 << 20)))
    for i in range(4):
        ask(core, request(str(i), range(i, i + 700), 5))
    settled(core)
    assert core.stats().offload.host_bytes > 0
    assert core.stats().offload.disk_bytes > 0
    core.reset_prefix_cache()
    settled(core)
    stats = core.stats().offload
    assert (stats.host_bytes, stats.disk_bytes) == (0, 0)
    assert ask(core, request("x", range(700), 5))[1] == [0]
    core.reset_prefix_cache()
    core.close()
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]
    del model


@DEPTHS
@pytest.mark.parametrize("what", ["new_sequence", "grow", "snapshot", "launch", "collect", "out", "into"])
def test_any_failure_at_any_time_leaves_nothing(ahead, what):
    """Fail the n-th call, for every n: everything comes back, who was not part of it gets the whole answer, and so does who
    goes on behind what is cached by then.
    """
    requests = [request(str(i), [*range(70 + 64 * (i % 4)), i % 4], 70) for i in range(8)]
    n, happened = 0, True
    while happened:
        core, model = spill_engine(ahead, blocks=20, block_size=32)
        core.scheduler.forecast.share = 0.0
        fallible = model.spill.mover if what in ("out", "into") else model
        calls = failing(fallible, what, n)
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
        delattr(fallible, what)
        core.reuse._copy_state = model.snapshot
        for r in requests:
            again = request(f"{r.request_id} again", [*r.prompt_ids, *alone(r)], 2)
            assert ask(core, again)[0] == [alone(again)]
        idle(core, model)
        core.close()
        n += 5 if what in ("launch", "collect") else 1
    assert n > 4


def test_another_model_finds_nothing_and_the_same_one_does(tmp_path):
    def turn(name):
        core, _ = spill_engine(spill=spilling(40, lambda: DiskCache(tmp_path, 1 << 20), model=name))
        cached = [ask(core, request(str(i), range(i, i + 700), 5))[1] for i in range(4)]
        settled(core)
        core.close()
        return cached[0]

    assert turn(b"a") == [0]
    assert turn(b"a") == [640]
    assert turn(b"b") == [0]
    assert turn(b"b") == [640]


@DEPTHS
def test_closing_in_the_middle_gives_everything_back(ahead, tmp_path):
    core, model = spill_engine(ahead, spill=spilling(40, lambda: DiskCache(tmp_path, 1 << 20), patience=9))
    for i in range(3):
        ask(core, request(str(i), range(i, i + 700), 5))
    for i in range(3):
        core.add(request(f"again{i}", range(i, i + 700), 5))
    core.step()
    core.close()
    assert model.spill.mover.closed
    DiskCache(tmp_path, 1).close()  # the lock is free
    drained = drain(engine(False, FakeModel())[0])
    assert drained[0] == {}


def test_another_salt_finds_nothing_on_disk_either(tmp_path):
    for name, salt, cached in (("a", "one", 0), ("b", "two", 0), ("c", "one", 640)):
        core, _ = spill_engine(spill=spilling(40, lambda: DiskCache(tmp_path, 1 << 20)))
        r = request(name, range(700), 5, cache_salt=salt)
        assert ask(core, r) == ([alone(r)], [cached])
        settled(core)
        core.close()
