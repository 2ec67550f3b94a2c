"""The engine core over a fake model: what comes out is what each request gives alone, and everything is given back."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkrt.engine.core import EngineCore
from sparkrt.engine.messages import EngineRequest
from sparkrt.engine.params import SamplingParams, to_requests
from sparkrt.errors import EngineFatal, RequestError
from sparkrt.model.batch import SamplerParams
from sparkrt.runtime.backend import OutOfMemory
from tests.engine.fake_model import EOS, FakeModel, config, expected, info

DEPTHS = pytest.mark.parametrize("ahead", [False, True], ids=["depth0", "depth1"])


def engine(ahead=False, model=None, **changes):
    model = model or FakeModel()
    return EngineCore(model, config(async_scheduling=ahead, **changes)), model


def request(name, prompt=(1, 2, 3), max_tokens=8, **fields):
    return EngineRequest(request_id=name, prompt_ids=list(prompt), max_tokens=max_tokens, **{"temperature": 0.0, **fields})


def alone(r: EngineRequest) -> list[int]:
    params = SamplerParams(temperature=r.temperature, seed=r.seed or 0, stop_ids=tuple(r.stop_token_ids), min_tokens=r.min_tokens)
    return expected(r.prompt_ids, params, r.max_tokens)


def drain(core, tokens=None, ends=None):
    tokens, ends = {} if tokens is None else tokens, {} if ends is None else ends
    while core.has_work:
        gather(core.step(), tokens, ends)
    return tokens, ends


def gather(outputs, tokens, ends):
    for out in outputs:
        assert out.request_id not in ends, "news of a request that ended"
        tokens.setdefault(out.request_id, []).extend(out.token_ids)
        if out.finish_reason is not None:
            ends[out.request_id] = out


def idle(core, model):
    core.check_integrity()
    stats = core.stats()
    assert (stats.running, stats.waiting) == (0, 0)
    assert (stats.free_blocks, stats.free_slots) == (stats.total_blocks, stats.total_slots)
    assert (model.free_blocks + stats.cached_blocks, model.free_slots) == (model.num_blocks, model.options.max_num_seqs)


def traffic(rng, count, longest=400):
    requests = []
    for i in range(count):
        prompt = [rng.randrange(1000) for _ in range(rng.choice([1, 63, 64, 65, rng.randint(1, longest)]))]
        max_tokens = rng.randint(1, 40)
        requests.append(
            request(
                f"r{i}",
                prompt,
                max_tokens,
                temperature=rng.choice([0.0, 1.0]),
                seed=rng.randrange(2**64),
                stop_token_ids=rng.sample(range(1000), rng.choice([0, 40])),
                min_tokens=rng.choice([0, rng.randint(0, max_tokens)]),
            )
        )
    return requests


@DEPTHS
def test_everyone_gets_what_they_get_alone(ahead):
    core, model = engine(ahead)
    requests = traffic(random.Random(1), 60)
    for r in requests:
        core.add(r)
    tokens, ends = drain(core)
    assert tokens == {r.request_id: alone(r) for r in requests}
    for r in requests:
        last, out = alone(r)[-1], ends[r.request_id]
        assert (out.finish_reason, out.stop_token) == (("stop", last) if last in r.stop_token_ids else ("length", None))
    idle(core, model)
    assert any(decode and prefill for decode, prefill in model.batches), "no mixed step"
    assert core.stats().prompt_tokens == sum(len(r.prompt_ids) for r in requests)
    assert core.stats().generation_tokens == sum(map(len, tokens.values()))


@DEPTHS
@pytest.mark.parametrize("budget", [1, 64, 128, 4096])
def test_the_token_budget_changes_no_token(ahead, budget):
    core, model = engine(ahead, FakeModel(budget=budget))
    requests = traffic(random.Random(2), 12)
    for r in requests:
        core.add(r)
    assert drain(core)[0] == {r.request_id: alone(r) for r in requests}
    idle(core, model)


@DEPTHS
@pytest.mark.parametrize("ingests", [1, 4])
def test_a_stream_gets_a_token_every_step_whatever_prompts_come(ahead, ingests):
    # S02: the gap is that of one step, which computes no more than the budget, with four long prompts as with one
    core, model = engine(ahead, FakeModel(slots=8, blocks=300, budget=256))
    core.add(request("stream", max_tokens=200))
    tokens, ends = {}, {}
    gather(core.step(), tokens, ends)
    for i in range(ingests):
        core.add(request(str(i), [i] * 3000, 1))
    steps = len(model.batches)
    drain(core, tokens, ends)
    assert tokens["stream"] == alone(request("stream", max_tokens=200))
    ingesting = [(decode, sum(stop - start for _, start, stop in parts)) for decode, parts in model.batches[steps:] if parts]
    assert len(ingesting) >= ingests * 3000 // 256
    assert all(decode == 1 and prefill <= 255 for decode, prefill in ingesting)
    assert {out.finish_reason for out in ends.values()} == {"length"}
    idle(core, model)


@DEPTHS
def test_short_answers_in_a_hurry(ahead):
    # H12: 500 requests of 1 to 3 tokens; the fake model fails when a slot changes hands under a step
    core, model = engine(ahead, FakeModel(slots=32, blocks=64))
    rng = random.Random(3)
    requests = [
        request(f"r{i}", [rng.randrange(1000)], rng.randint(1, 3), stop_token_ids=rng.sample(range(1000), 300))
        for i in range(500)
    ]
    for r in requests:
        core.add(r)
    assert drain(core)[0] == {r.request_id: alone(r) for r in requests}
    idle(core, model)


@DEPTHS
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_aborts_at_any_moment(ahead, data):
    core, model = engine(ahead)
    rng = random.Random(data.draw(st.integers(0, 10**6)))
    requests = {r.request_id: r for r in traffic(rng, 12)}
    tokens, ends = {}, {}
    coming = list(requests.values())
    aborted = set()
    while coming or core.has_work:
        for _ in range(min(len(coming), rng.randint(0, 3))):
            core.add(coming.pop())
        if rng.random() < 0.2:
            name = rng.choice(sorted(requests))
            if name in core._requests:
                aborted.add(name)
            core.abort([name, "unknown"])
            core.check_integrity()
        gather(core.step(), tokens, ends)
        core.check_integrity()
    for name, r in requests.items():
        if name in aborted:
            assert ends[name].finish_reason == "abort"
            assert tokens[name] == alone(r)[: len(tokens[name])]
        else:
            assert tokens[name] == alone(r)
    idle(core, model)


@DEPTHS
@pytest.mark.parametrize("steps", range(8))
def test_an_abort_ends_it_within_a_step(ahead, steps):
    core, model = engine(ahead)
    core.add(request("a", range(300), 100))
    core.add(request("b", range(10), 6))
    tokens, ends = {}, {}
    for _ in range(steps):
        gather(core.step(), tokens, ends)
    core.abort(["a", "a"])
    gather(core.step(), tokens, ends)
    assert ends["a"].finish_reason == "abort"
    drain(core, tokens, ends)
    assert tokens["b"] == alone(request("b", range(10), 6))
    idle(core, model)


def test_an_abort_in_the_queue():
    core, model = engine(model=FakeModel(slots=1))
    for name in "abc":
        core.add(request(name))
    core.step()
    assert core.stats().waiting == 2
    core.abort(["b"])
    tokens, ends = drain(core)
    assert ends["b"].finish_reason == "abort"
    assert tokens["c"] == alone(request("c"))
    idle(core, model)


@DEPTHS
def test_seeds_do_not_depend_on_neighbours(ahead):
    # A09
    def run(neighbours, place):
        core, _ = engine(ahead, FakeModel(slots=8))
        names = [f"n{i}" for i in range(neighbours)]
        names.insert(place, "mine")
        for name in names:
            core.add(request(name, [5, 6], 20, temperature=1.0, seed=42 if name == "mine" else None))
        return drain(core)[0]

    lone = run(0, 0)["mine"]
    crowd = run(7, 5)
    assert crowd["mine"] == lone
    assert run(7, 0)["mine"] == lone
    assert len({tuple(answer) for answer in crowd.values()}) == 8, "unseeded requests repeat each other"
    assert run(7, 5) == crowd, "the engine's own seed makes a whole run repeatable"


@DEPTHS
def test_n_answers_with_one_seed(ahead):
    core, model = engine(ahead)
    answers = []
    for turn in range(2):
        for r in to_requests([4, 5], SamplingParams(n=4, seed=42, max_tokens=12, ignore_eos=True), info(model), f"t{turn}"):
            core.add(r)
        answers.append(list(drain(core)[0].values()))
    assert answers[0] == answers[1]
    assert len({tuple(a) for a in answers[0]}) == 4


@DEPTHS
def test_a_stop_drops_what_was_in_flight(ahead):
    core, model = engine(ahead)
    full = alone(request("a", max_tokens=30))
    core.add(request("a", max_tokens=30, stop_token_ids=[full[10]]))
    tokens, ends = drain(core)
    assert tokens["a"] == full[: full.index(full[10]) + 1]
    assert (ends["a"].finish_reason, ends["a"].stop_token) == ("stop", full[10])
    assert len(model.batches) == len(tokens["a"]) + ahead
    idle(core, model)


def test_min_tokens_holds_the_stop_back():
    core, _ = engine()
    full = alone(request("a", max_tokens=30))
    core.add(request("a", max_tokens=30, stop_token_ids=[full[2], full[3]], min_tokens=10))
    tokens, _ = drain(core)
    assert len(tokens["a"]) >= 10
    assert not {full[2], full[3]} & set(tokens["a"][:10])


@DEPTHS
def test_prompt_scores_without_an_answer(ahead):
    # A04: echo with max_tokens 0
    core, model = engine(ahead)
    prompt = list(range(1, 201))
    core.add(request("score", prompt, 0, prompt_logprobs=3))
    core.add(request("both", prompt[:65], 4, prompt_logprobs=0, logprobs=2))
    core.add(request("one", [9], 0, prompt_logprobs=1))
    core.add(request("nothing", [9], 0))
    outputs = []
    while core.has_work:
        outputs += core.step()
    news = {out.request_id: out for out in outputs if out.prompt_logprobs}
    score = news["score"]
    assert (score.token_ids, score.finish_reason) == ([], "length")
    assert score.prompt_logprobs[0] is None
    assert [p.token_id for p in score.prompt_logprobs[1:]] == prompt[1:]
    assert all(len(p.top_ids) == len(p.top_logprobs) == 3 for p in score.prompt_logprobs[1:])
    both = [out for out in outputs if out.request_id == "both"]
    assert len(both[0].prompt_logprobs) == 65
    assert all(p.top_ids == [] for p in both[0].prompt_logprobs[1:])
    assert [out.prompt_logprobs for out in both[1:]] == [None] * 3
    assert all(len(out.logprobs) == 1 and len(out.logprobs[0].top_ids) == 2 for out in both)
    assert news["one"].prompt_logprobs == [None]
    assert [out.finish_reason for out in outputs if out.request_id == "nothing"] == ["length"]
    idle(core, model)


def test_requests_that_can_never_run_are_refused_at_once():
    core, model = engine(model=FakeModel(blocks=10, context=4096))
    refused = {
        "no tokens": request("e", []),
        "exceed the context of 4096": request("c", [1] * 4000, 97),
        "KV cache holds 640": request("k", [1] * 600, 41),  # S01
        "out of vocabulary": request("v", [1000]),
    }
    for text, r in refused.items():
        with pytest.raises(RequestError, match=text):
            core.add(r)
    assert not core.has_work
    core.add(request("a"))
    with pytest.raises(RequestError, match="in use"):
        core.add(request("a"))
    assert drain(core)[0]["a"] == alone(request("a"))
    idle(core, model)


@DEPTHS
@pytest.mark.parametrize("where", ["fail_launch", "fail_collect"])
@pytest.mark.parametrize("after", range(5))
def test_a_failure_inside_a_step_fails_only_those_in_it(ahead, where, after):
    core, model = engine(ahead, FakeModel(slots=2))
    for name in "abcd":
        core.add(request(name, range(100), 3))
    tokens, ends = {}, {}
    for _ in range(after):
        gather(core.step(), tokens, ends)
    setattr(model, where, OutOfMemory("no memory for scratch"))
    drain(core, tokens, ends)
    failed = {name for name, out in ends.items() if out.finish_reason == "error"}
    assert failed
    assert len(failed) <= 2
    assert all(ends[name].error == "OutOfMemory: no memory for scratch" for name in failed)
    for name in set("abcd") - failed:
        assert tokens[name] == alone(request(name, range(100), 3))
    idle(core, model)


def test_a_failing_admission_fails_one():
    core, model = engine()
    new_sequence, calls = model.new_sequence, []

    def failing(*about):
        calls.append(about)
        if len(calls) == 2:
            raise OutOfMemory("slot")
        return new_sequence(*about)

    model.new_sequence = failing
    for name in "abc":
        core.add(request(name))
    _, ends = drain(core)
    assert [ends[name].finish_reason for name in "abc"] == ["length", "error", "length"]
    idle(core, model)


@DEPTHS
@pytest.mark.parametrize("where", ["fail_launch", "fail_collect"])
def test_an_interrupt_leaves_the_books_whole(ahead, where):
    core, model = engine(ahead)
    core.add(request("a"))
    core.step()
    setattr(model, where, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        drain(core)
    assert drain(core)[1]["a"].finish_reason == "error"
    idle(core, model)


@DEPTHS
@pytest.mark.parametrize("where", ["fail_launch", "fail_collect"])
def test_a_broken_device_ends_everything(ahead, where):
    core, model = engine(ahead)
    for name in "abcdef":
        core.add(request(name))
    core.step()
    setattr(model, where, EngineFatal("device lost"))
    outputs = core.step()
    if not outputs:  # a step ahead: it is read next time
        outputs = core.step()
    assert {out.request_id: out.finish_reason for out in outputs if out.finish_reason} == dict.fromkeys("abcdef", "error")
    assert core.has_work, "the driver must learn of it"
    for call in (core.step, lambda: core.add(request("x"))):
        with pytest.raises(EngineFatal, match="device lost"):
            call()
    core.close()
    assert not core.has_work


def test_a_leak_is_noticed_when_idle():
    core, model = engine()
    core.add(request("a"))
    model.release = lambda seq: None
    with pytest.raises(EngineFatal, match="leak"):
        drain(core)


@DEPTHS
def test_close_gives_everything_back(ahead):
    core, model = engine(ahead)
    for r in traffic(random.Random(5), 20):
        core.add(r)
    for _ in range(5):
        core.step()
    core.close()
    core.close()
    assert (model.free_blocks, model.free_slots) == (model.num_blocks, model.options.max_num_seqs)
    assert not core.has_work
    with pytest.raises(EngineFatal, match="closed"):
        core.add(request("x"))


@DEPTHS
def test_a_thousand_random_adds_and_aborts(ahead):
    # S04 over the whole core
    core, model = engine(ahead, FakeModel(slots=5, blocks=30, block_size=16))
    rng = random.Random(7)
    waiting = traffic(rng, 1000, longest=150)
    requests = {r.request_id: r for r in waiting}
    tokens, ends, refused = {}, {}, set()
    while waiting or core.has_work:
        while waiting and rng.random() < 0.5:
            r = waiting.pop()
            if core.scheduler.limits.blocks_for(len(r.prompt_ids) + r.max_tokens) > 30:
                refused.add(r.request_id)
            else:
                core.add(r)
        if rng.random() < 0.1 and core._requests:
            core.abort(rng.sample(sorted(core._requests), 1))
        gather(core.step(), tokens, ends)
        core.check_integrity()
    assert set(ends) == set(requests) - refused
    for name, out in ends.items():
        if out.finish_reason != "abort":
            assert tokens[name] == alone(requests[name])
    idle(core, model)


def test_eos_is_in_the_resolved_request():
    _, model = engine()
    (r,) = to_requests([1], SamplingParams(temperature=0), info(model), "r")
    assert EOS in r.stop_token_ids
