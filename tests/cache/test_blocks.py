"""BlockPool: counts never go negative, free + owned = total, and pages come in runs."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sparkrt.cache.paged import BlockPool
from sparkrt.errors import CapacityError, EngineFatal


def test_a_request_is_one_ascending_run() -> None:
    pool = BlockPool(10)
    assert pool.alloc(4) == [0, 1, 2, 3]
    assert pool.alloc(0) == []
    assert pool.alloc(3) == [4, 5, 6]
    assert pool.free_count == 3


def test_the_smallest_hole_that_fits_is_filled() -> None:
    pool = BlockPool(20)
    pool.alloc(20)
    for block in (*range(2, 8), *range(10, 13), 15):
        assert pool.decref(block)
    assert pool.alloc(3) == [10, 11, 12]
    assert pool.alloc(1) == [15]
    assert pool.alloc(2) == [2, 3]
    assert pool.alloc(4) == [4, 5, 6, 7]


def test_fragments_are_joined_from_the_front() -> None:
    pool = BlockPool(12)
    pool.alloc(12)
    for block in (0, 2, 3, 4, 7, 8):
        pool.decref(block)
    assert pool.alloc(6) == [0, 2, 3, 4, 7, 8]


def test_growth_continues_the_run_behind_a_block() -> None:
    pool = BlockPool(12)
    pool.alloc(12)
    for block in (*range(3, 8), 10):
        pool.decref(block)
    assert pool.alloc(1, after=2) == [3]  # not the smaller hole at 10
    assert pool.alloc(1, after=0) == [10]  # nothing free behind it: the smallest hole
    assert pool.alloc(2, after=3) == [4, 5]


def test_freed_neighbours_join_whatever_the_order() -> None:
    for order in ((0, 1, 2, 3, 4), (4, 3, 2, 1, 0), (0, 2, 4, 1, 3), (2, 0, 1, 4, 3)):
        pool = BlockPool(5)
        pool.alloc(5)
        for block in order:
            pool.decref(block)
        pool.check_integrity([])
        assert pool.alloc(5) == [0, 1, 2, 3, 4]


def test_short_pool_changes_nothing() -> None:
    pool = BlockPool(4)
    held = pool.alloc(3)
    with pytest.raises(CapacityError, match="2 cache blocks wanted, 1 of 4 are free"):
        pool.alloc(2)
    pool.check_integrity(held)
    with pytest.raises(CapacityError):
        BlockPool(0).alloc(1)
    with pytest.raises(ValueError, match="-1"):
        pool.alloc(-1)


def test_sharing_counts_owners() -> None:
    pool = BlockPool(2)
    (block,) = pool.alloc(1)
    pool.incref(block)
    assert pool.refcount(block) == 2
    pool.check_integrity([block, block])
    assert not pool.decref(block)
    assert pool.free_count == 1
    assert pool.decref(block)
    assert (pool.free_count, pool.refcount(block)) == (2, 0)


def test_misuse_is_fatal() -> None:
    pool = BlockPool(2)
    for call in (lambda: pool.incref(0), lambda: pool.decref(1), lambda: pool.decref(2), lambda: pool.refcount(-1)):
        with pytest.raises(EngineFatal):
            call()
    pool.check_integrity([])


def test_integrity_sees_every_miscount() -> None:
    pool = BlockPool(4)
    a, b = pool.alloc(2)
    pool.check_integrity([b, a])
    for owned, message in (
        ([a], "1: 1 counted, 0 held"),
        ([a, b, b], "1: 1 counted, 2 held"),
        ([a, b, 3], "3: 0 counted, 1 held"),
        ([a, b, 4], r"\[4\] are held, of 4"),
    ):
        with pytest.raises(EngineFatal, match=message):
            pool.check_integrity(owned)
    pool.free_count -= 1  # a block that is neither free nor owned
    with pytest.raises(EngineFatal, match="1 cache blocks free, 2 held of 4"):
        pool.check_integrity([a, b])


class Pool(RuleBasedStateMachine):
    """Owners that take, share and release, in any order."""

    SIZE = 17

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(self.SIZE)
        self.owners: list[list[int]] = []

    def choose(self, data: st.DataObject) -> int:
        return data.draw(st.integers(0, len(self.owners) - 1))

    def held(self) -> list[int]:
        return [block for owner in self.owners for block in owner]

    @rule(n=st.integers(0, SIZE + 1), after=st.none() | st.integers(0, SIZE))
    def take(self, n: int, after: int | None) -> None:
        free = set(range(self.SIZE)) - set(self.held())
        try:
            got = self.pool.alloc(n, after)
        except CapacityError:
            assert n > len(free)
            return
        assert len(set(got)) == len(got) == n
        assert set(got) <= free
        runs = [start for start in free if all(start + i in free for i in range(n))]
        if after is None and n and runs:
            assert got == list(range(got[0], got[0] + n))
        if after is not None and n and after not in free and all(after + i in free for i in range(1, n + 1)):
            assert got[0] == after + 1
        self.owners.append(got)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        owner = self.owners[self.choose(data)]
        for block in owner:
            self.pool.incref(block)
        self.owners.append(list(owner))

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), backwards=st.booleans())
    def release(self, data: st.DataObject, backwards: bool) -> None:
        owner = self.owners.pop(self.choose(data))
        for block in reversed(owner) if backwards else owner:
            assert self.pool.decref(block) is (block not in self.held())

    @rule(block=st.integers(0, SIZE - 1))
    def release_what_nobody_has(self, block: int) -> None:
        if block not in self.held():
            with pytest.raises(EngineFatal):
                self.pool.decref(block)

    @invariant()
    def everything_is_counted(self) -> None:
        held = Counter(self.held())
        self.pool.check_integrity(self.held())
        assert self.pool.free_count + len(held) == self.SIZE
        assert all(self.pool.refcount(block) == held[block] for block in range(self.SIZE))


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
