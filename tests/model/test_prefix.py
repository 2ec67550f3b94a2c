"""Warm equals cold, token for token in float32: prompts that resume behind shared pages and a snapshot of the state."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from sparkrt.model.batch import ForwardBatch, PrefillSlice, SamplerParams
from tests.model.conftest import GREEDY, Bench

TEXT = np.random.default_rng(11).integers(0, 64, 400).tolist()
STEPS = 6


class Warm:
    """A bench that does with the prefix cache what the engine does."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self.model = bench, bench.model
        assert self.model.prefix is not None
        self.cache = self.model.prefix

    def answer(
        self, ids: list[int], steps: int = STEPS, budget: int = 128, params: SamplerParams = GREEDY
    ) -> tuple[list[int], int]:
        """The answer, and how many tokens of the prompt were not computed."""
        cache, model = self.cache, self.model
        match = cache.match(ids)
        points, lease = cache.points(match, len(ids)), cache.open(match, len(ids))
        cache.make_room(-(-(len(ids) + steps) // 64) - len(match.nodes))
        seq = model.new_sequence(params, len(ids) + steps, ids, match=match)
        text, start = list(ids), match.resume
        while start < len(ids):
            stop = min((start + budget) // 64 * 64, len(ids))
            slots = [(p, cache.reserve(lease, p)) for p in points if start < p <= stop]
            if stop < len(ids):
                slots.append((stop, cache.reserve(lease, stop, spare=True)))
            kept = tuple((at, slot) for at, slot in slots if slot is not None)
            tokens = np.array(ids[start:stop], np.int32)
            part = PrefillSlice(seq, tokens, start, stop == len(ids), snapshots=kept)
            result = model.collect(model.launch(ForwardBatch(prefill=[part])))
            cache.insert(lease, ids, seq.blocks.blocks, stop)
            start = stop
        text.append(int(result.tokens[0]))
        for _ in range(steps - 1):
            handle = model.launch(ForwardBatch(decode=[seq]))
            if seq.length % 64 == 0 and (slot := cache.follow(lease, seq.length)) is not None:
                model.snapshot(seq, slot)
            text.append(int(model.collect(handle).tokens[0]))
        cache.insert(lease, text, seq.blocks.blocks, seq.kv_valid_tokens)
        cache.close(lease, seq.kv_valid_tokens)
        model.release(seq)
        model.check_integrity([])
        return text[len(ids) :], match.resume


@pytest.fixture
def warm(open_bench: Callable[..., Bench]) -> Iterator[Warm]:
    bench = open_bench(prefix_caching=True, state_snapshots=6)
    yield Warm(bench)
    assert bench.model.prefix is not None
    bench.model.prefix.reset()
    assert bench.model.free_blocks == bench.model.num_blocks
    bench.model.close()
    assert bench.backend.leak_report() == ""


@pytest.mark.parametrize("length", [1, 63, 64, 65, 128, 129, 200])
def test_a_prompt_again_answers_the_same(bench: Bench, warm: Warm, length: int) -> None:
    ids = TEXT[:length]
    cold = bench.answer(ids, STEPS)
    assert warm.answer(ids) == (cold, 0)
    assert warm.answer(ids) == (cold, (length - 1) // 64 * 64)
    assert warm.answer(ids, budget=64) == (cold, (length - 1) // 64 * 64)


@pytest.mark.parametrize("common", [*range(60, 70), 1, 31, 100, 127, 128, 129, 191, 192, 193])
def test_prompts_that_part_anywhere_answer_as_alone(bench: Bench, warm: Warm, common: int) -> None:
    for visitor in range(3):
        ids = TEXT[:common] + TEXT[300 + 10 * visitor : 300 + 10 * visitor + 90]
        answer, cached = warm.answer(ids)
        assert answer == bench.answer(ids, STEPS)
    assert cached == common // 64 * 64


def test_a_conversation_goes_on_where_it_stopped(bench: Bench, warm: Warm) -> None:
    text, computed = TEXT[:90], 0
    for turn in range(4):
        answer, cached = warm.answer(text, steps=50)
        assert answer == bench.answer(text, 50)
        computed = len(text) - cached
        assert turn == 0 or computed <= 20 + 1 + 69
        text = text + answer + TEXT[200 + 20 * turn : 220 + 20 * turn]


def test_eviction_in_between_changes_nothing(bench: Bench, warm: Warm) -> None:
    for at in (0, 100, 0, 50, 0):
        ids = TEXT[at : at + 250]
        assert warm.answer(ids)[0] == bench.answer(ids, STEPS)
        warm.cache.make_room(warm.model.num_blocks - 3)


def test_a_resumed_prompt_is_penalized_whole(bench: Bench, warm: Warm) -> None:
    """Tokens that were not computed again count as seen."""
    params = SamplerParams(temperature=0.0, repetition_penalty=1.8, frequency_penalty=0.3)
    ids = TEXT[:150]
    cold, _ = warm.answer(ids, params=params)
    assert cold != bench.answer(ids, STEPS)
    assert warm.answer(ids, params=params) == (cold, 128)


def test_snapshots_of_several_prompts_in_one_step(bench: Bench, warm: Warm) -> None:
    """Each at its own offset, in one launch; states and convolutions are those of the prompts computed alone."""
    cache, model = warm.cache, warm.model
    prompts, parts, leases = [TEXT[:150], TEXT[150:350], TEXT[50:115]], [], []
    for ids, point in zip(prompts, (64, 192, 64), strict=True):
        lease = cache.open(cache.match(ids), len(ids))
        seq = model.new_sequence(GREEDY, len(ids) + STEPS, ids)
        slot = cache.reserve(lease, point)
        assert slot is not None
        parts.append(PrefillSlice(seq, np.array(ids, np.int32), 0, True, snapshots=((point, slot),)))
        leases.append(lease)
    model.collect(model.launch(ForwardBatch(prefill=parts)))
    for ids, part, lease in zip(prompts, parts, leases, strict=True):
        cache.insert(lease, ids, part.seq.blocks.blocks, len(ids))
        cache.close(lease)
        model.release(part.seq)
    assert [warm.answer(ids) for ids in prompts] == [
        (bench.answer(ids, STEPS), at) for ids, at in zip(prompts, (64, 192, 64), strict=True)
    ]
