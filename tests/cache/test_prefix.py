"""The prefix cache as a state machine: what it says is cached was computed from those very tokens, and nothing is lost."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sparkrt.cache.paged import BlockPool
from sparkrt.cache.prefix import GRID, Lease, Match, PrefixCache
from sparkrt.cache.radix import RadixTree
from sparkrt.errors import CapacityError, EngineFatal

PAGE = 32


def make(blocks: int = 64, states: int = 3, recurrent: bool = True) -> PrefixCache:
    return PrefixCache(BlockPool(blocks), PAGE, range(100, 100 + states) if recurrent else (), recurrent)


@dataclass
class Sequence:
    """What the engine would hold of a request."""

    ids: list[int]
    lease: Lease
    blocks: list[int]
    shared: int
    done: int  # tokens computed
    prompt: int
    points: list[int] = field(default_factory=list)


class Engine:
    """The engine's half: contents of blocks and of snapshot slots are the tokens that they were computed from."""

    def __init__(self, cache: PrefixCache) -> None:
        self.cache = cache
        self.pages: dict[int, tuple[int, ...]] = {}
        self.states: dict[int, tuple[int, ...]] = {}
        self.live: list[Sequence] = []

    def start(self, ids: list[int]) -> Sequence | None:
        cache = self.cache
        match = cache.match(ids)
        self.check(ids, match)
        need = -(-(len(ids) + GRID) // PAGE) - len(match.nodes)
        lease = cache.open(match, len(ids))
        cache.make_room(need)
        try:
            own = cache.pool.alloc(need)
        except CapacityError:
            cache.close(lease)
            return None
        for block in match.blocks:
            cache.pool.incref(block)
        blocks, points = match.blocks + own, cache.points(match, len(ids))
        seq = Sequence(list(ids), lease, blocks, len(match.nodes), match.resume, len(ids), points)
        self.live.append(seq)
        return seq

    def check(self, ids: list[int], match: Match) -> None:
        """A hit is made of these tokens and leaves at least one to compute."""
        for at, block in enumerate(match.blocks):
            assert self.pages[block] == tuple(ids[: (at + 1) * PAGE])
        assert match.resume < len(ids)
        assert match.resume % GRID == 0
        assert match.resume <= len(match.nodes) * PAGE
        if match.resume and self.cache.recurrent:
            assert match.state is not None
            assert self.states[match.state] == tuple(ids[: match.resume])

    def compute(self, seq: Sequence, stop: int) -> None:
        for point in [p for p in seq.points if seq.done < p <= stop]:
            if (slot := self.cache.reserve(seq.lease, point)) is not None:
                self.states[slot] = tuple(seq.ids[:point])
        if stop < seq.prompt and (slot := self.cache.reserve(seq.lease, stop, spare=True)) is not None:
            self.states[slot] = tuple(seq.ids[:stop])
        seq.done = stop
        for page in range(seq.shared, stop // PAGE):
            self.pages[seq.blocks[page]] = tuple(seq.ids[: (page + 1) * PAGE])
        self.cache.insert(seq.lease, seq.ids, seq.blocks, stop)

    def answer(self, seq: Sequence, token: int) -> None:
        if -(-(len(seq.ids) + 1) // PAGE) > len(seq.blocks) or seq.done < len(seq.ids):
            return
        seq.ids.append(token)
        seq.done += 1
        if seq.done % PAGE == 0:
            self.pages[seq.blocks[seq.done // PAGE - 1]] = tuple(seq.ids)
        if seq.done % GRID == 0 and (slot := self.cache.follow(seq.lease, seq.done)) is not None:
            self.states[slot] = tuple(seq.ids)

    def end(self, seq: Sequence) -> None:
        self.live.remove(seq)
        self.cache.insert(seq.lease, seq.ids, seq.blocks, seq.done)
        self.cache.close(seq.lease, seq.done)
        for block in seq.blocks:
            self.cache.pool.decref(block)

    def check_integrity(self) -> None:
        self.cache.check_integrity()
        self.cache.pool.check_integrity([*self.cache.blocks(), *(b for seq in self.live for b in seq.blocks)])


class Prefixes(RuleBasedStateMachine):
    """Prompts that share beginnings of any length, computed in chunks, answered, ended in any order, under little memory."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = Engine(make(24, 3))
        self.texts: list[list[int]] = [[]]

    def pick(self, data: st.DataObject) -> Sequence:
        return self.engine.live[data.draw(st.integers(0, len(self.engine.live) - 1))]

    @rule(data=st.data(), keep=st.integers(0, 300), more=st.integers(1, 150), letter=st.integers(0, 2))
    def begin(self, data: st.DataObject, keep: int, more: int, letter: int) -> None:
        text = self.texts[data.draw(st.integers(0, len(self.texts) - 1))]
        ids = (text[:keep] + [letter] * more)[:300]
        if self.engine.start(ids) is not None:
            self.texts.append(ids)

    @precondition(lambda self: self.engine.live)
    @rule(data=st.data(), chunks=st.integers(1, 3))
    def compute(self, data: st.DataObject, chunks: int) -> None:
        seq = self.pick(data)
        if seq.done < seq.prompt:
            self.engine.compute(seq, min(seq.done // GRID * GRID + chunks * GRID, seq.prompt))

    @precondition(lambda self: self.engine.live)
    @rule(data=st.data(), tokens=st.integers(1, 80), letter=st.integers(0, 2))
    def answer(self, data: st.DataObject, tokens: int, letter: int) -> None:
        seq = self.pick(data)
        for _ in range(tokens if seq.done >= seq.prompt else 0):
            self.engine.answer(seq, letter)
        self.texts.append(list(seq.ids))

    @precondition(lambda self: self.engine.live)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.engine.end(self.pick(data))

    @rule(blocks=st.integers(0, 24))
    def make_room(self, blocks: int) -> None:
        self.engine.cache.make_room(blocks)
        pool, tree = self.engine.cache.pool, self.engine.cache.tree
        assert pool.free_count >= blocks or tree.unpinned == 0

    @rule()
    def reset(self) -> None:
        self.engine.cache.reset()
        assert not len(self.engine.cache.tree)

    @invariant()
    def nothing_is_lost(self) -> None:
        self.engine.check_integrity()
        for text in self.texts[-3:]:
            if text:
                self.engine.check(text, self.engine.cache.match(text))

    def teardown(self) -> None:
        for seq in list(self.engine.live):
            self.engine.end(seq)
        self.engine.check_integrity()
        self.engine.cache.reset()
        assert self.engine.cache.pool.free_count == 24
        self.engine.check_integrity()


TestPrefixes = Prefixes.TestCase
TestPrefixes.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def run(engine: Engine, ids: list[int], answer: int = 0) -> int:
    """A request from start to end in chunks of 128; returns the tokens that were not computed again."""
    seq = engine.start(ids)
    assert seq is not None
    cached = seq.done
    while seq.done < seq.prompt:
        engine.compute(seq, min(seq.done + 128, seq.prompt))
    for _ in range(answer):
        engine.answer(seq, 9)
    engine.end(seq)
    return cached


@pytest.mark.parametrize("length", [1, 63, 64, 65, 127, 128, 129, 200])
def test_a_repeated_prompt_computes_at_most_its_last_65_tokens(length: int) -> None:
    engine, ids = Engine(make()), [1] * length
    assert run(engine, ids) == 0
    assert run(engine, ids) == (length - 1) // GRID * GRID


@pytest.mark.parametrize("common", range(0, 200, 7))
def test_where_prompts_part_the_third_visitor_resumes(common: int) -> None:
    """The second shows where the tree branches, and leaves a snapshot there."""
    engine = Engine(make())
    cached = [run(engine, [1] * common + [tail] * 150) for tail in (2, 3, 4)]
    assert cached[0] == 0
    assert cached[2] == common // GRID * GRID


def test_a_conversation_computes_each_turn_little_more_than_what_is_new() -> None:
    engine, text = Engine(make(blocks=200)), [0] * 100
    for turn in range(25):
        cached = run(engine, text, answer=50)
        assert turn == 0 or len(text) - cached <= GRID + 20 + 1 + 50
        text = text + [9] * 50 + [turn] * 20


def test_running_requests_keep_their_snapshots_and_pages() -> None:
    engine = Engine(make(blocks=16, states=1))
    first = engine.start([1] * 130)
    assert first is not None
    engine.compute(first, 130)  # its snapshot took the only slot: it is in the tree now, and may go
    second = engine.start([2] * 130)
    assert second is not None
    engine.compute(second, 128)
    assert engine.cache.match([1] * 130).resume == 0
    engine.cache.make_room(16)
    assert engine.cache.tree.pinned == 8  # of both: 4 full pages each
    assert engine.start([3] * 300) is None
    engine.check_integrity()


def test_without_recurrent_layers_pages_are_enough() -> None:
    engine = Engine(make(recurrent=False))
    assert [run(engine, [1] * 100 + [tail] * 100) for tail in (2, 3)] == [0, 64]


def test_adapters_never_share() -> None:
    cache = make()
    lease = cache.open(cache.match([1] * 64), 64, root=1)
    cache.insert(lease, [1] * 64, cache.pool.alloc(2), 64)
    assert not cache.match([1] * 64).nodes
    assert len(cache.match([1] * 65, root=1).nodes) == 2


def test_equal_hashes_are_not_equal_tokens() -> None:
    """Pages are found by their tokens: there is no hash that could collide."""
    pool = BlockPool(4)
    tree, blocks = RadixTree(pool, 32), pool.alloc(1)
    tree.insert([], np.arange(32, dtype=np.int32), blocks)
    assert not tree.walk(np.arange(1, 33, dtype=np.int32))
    assert tree.walk(np.arange(40, dtype=np.int32))[0].block == blocks[0]


def test_faults_of_the_caller_are_named() -> None:
    cache = make()
    lease = cache.open(Match([]), 10)
    cache.close(lease)
    with pytest.raises(EngineFatal, match="closed twice"):
        cache.close(lease)
    with pytest.raises(ValueError, match="do not tile"):
        PrefixCache(BlockPool(4), 48, (), False)
