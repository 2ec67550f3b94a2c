"""Pages and states through host memory: the bytes come back, nothing waits, and the arena is within its budget."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkrt.cache.paged import KvGroup, PagedKvCache
from sparkrt.cache.shuttle import Kind, Piece, Shuttle, staging_bytes
from sparkrt.cache.state import StatePool
from sparkrt.errors import EngineFatal
from sparkrt.runtime import HostBackend
from sparkrt.runtime.backend import OutOfMemory
from sparkrt.runtime.dtypes import float32

BLOCKS, SLOTS = 24, 5


class World:
    def __init__(self, deferred: bool = True, chunks: int = 40, layers: tuple[int, ...] = (0, 2, 5)) -> None:
        self.backend = HostBackend(deferred=deferred)
        self.kv = PagedKvCache(self.backend, [KvGroup((1, 3), float32, 2, 4, 16)], BLOCKS)
        self.states = StatePool(self.backend, layers, SLOTS, (2, 3, 4, 10), spare=2)
        self.page, self.state = self.kv.groups[0].block_bytes, self.states.slot_bytes
        self.budget = max(self.page, self.state) * chunks + 13
        self.shuttle = Shuttle(self.backend, self.kv, self.states, self.budget, self.backend.default_stream)
        self.rng = np.random.default_rng(0)

    def fill(self) -> None:
        """New content everywhere."""
        self.backend.synchronize()
        for array in (*(a for layer in (1, 3) for a in (self.kv.k(layer), self.kv.v(layer))), *self.states._arrays.values()):
            array.view[...] = self.rng.random(array.shape)

    def read(self, piece: Piece) -> np.ndarray:
        self.backend.synchronize()
        if piece.kind is Kind.PAGE:
            return np.stack([a.view[piece.place] for layer in (1, 3) for a in (self.kv.k(layer), self.kv.v(layer))]).ravel()
        return np.concatenate([a.view[piece.place].ravel() for a in self.states._arrays.values()])

    def close(self) -> None:
        self.shuttle.close()
        self.kv.close()
        self.states.close()
        assert self.backend.leak_report() == ""


@pytest.fixture(params=[False, True], ids=["direct", "deferred"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    world = World(request.param)
    yield world
    world.close()


def test_pages_and_states_come_back(world: World) -> None:
    world.fill()
    units = -(-world.state // world.shuttle.chunk_bytes)
    chunks = list(range(world.shuttle.chunks - 1, -1, -1))  # backwards: no two in a row
    out = [Piece(Kind.PAGE, block, [chunks.pop()]) for block in range(20)]
    out += [Piece(Kind.STATE, slot, [chunks.pop() for _ in range(units)]) for slot in (0, 3, 6)]
    before = [world.read(piece) for piece in out]
    tickets = [world.shuttle.out(out[:7]), world.shuttle.out(out[7:])]
    world.fill()  # whoever has them now writes to them
    moved = [piece._replace(place=(piece.place + 2) % (BLOCKS if piece.kind is Kind.PAGE else SLOTS)) for piece in out]
    tickets.append(world.shuttle.into(moved))
    world.shuttle.wait(tickets[-1])
    assert all(world.shuttle.done(ticket) for ticket in tickets)
    for piece, content in zip(moved, before, strict=True):
        np.testing.assert_array_equal(world.read(piece), content)


def test_nothing_waits_and_nothing_is_allocated(world: World) -> None:
    with world.backend.count() as traffic:
        for _ in range(5):
            world.shuttle.out([Piece(Kind.PAGE, i, [i]) for i in range(20)])
            world.shuttle.into([Piece(Kind.PAGE, i, [i]) for i in range(20)])
    assert traffic.synchronizations() == traffic.allocations == traffic.copies(blocking=True) == 0
    assert traffic.copies("2d") == 2 * 100
    world.backend.synchronize()


def test_neighbours_in_the_arena_are_one_copy(world: World) -> None:
    units = -(-world.state // world.shuttle.chunk_bytes)
    assert [len(view) for view in world.shuttle.views(Kind.STATE, range(units))] == [world.state]
    assert sum(len(view) for view in world.shuttle.views(Kind.STATE, [9, 3, 4][:units])) == world.state
    loads = -(-20 * world.page // world.shuttle._stage_bytes)
    for chunks, copies in ((list(range(20)), loads), (list(range(19, -1, -1)), loads), (list(range(0, 40, 2)), 20)):
        pieces = [Piece(Kind.PAGE, i, [chunk]) for i, chunk in enumerate(chunks)]
        with world.backend.count() as traffic:
            world.shuttle.out(pieces)
            world.shuttle.into(pieces)
        assert traffic.copies("d2h") == traffic.copies("h2d") == copies
    world.backend.synchronize()


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_pieces_in_any_chunks_come_back(data: st.DataObject) -> None:
    """However records of both kinds lie in the arena, side by side or torn apart, whatever share of a load they take."""
    world = World(chunks=60)
    world.fill()
    units, free = -(-world.state // world.shuttle.chunk_bytes), data.draw(st.permutations(range(world.shuttle.chunks)))
    if data.draw(st.booleans()):
        free = sorted(free, reverse=True)  # taken from the end: neighbours
    places = data.draw(st.lists(st.sampled_from([*range(BLOCKS), *range(-SLOTS, 0)]), unique=True, max_size=BLOCKS + SLOTS))
    kinds = [Kind.PAGE if place >= 0 else Kind.STATE for place in places]
    pieces = [
        Piece(
            kind, place % (BLOCKS if kind is Kind.PAGE else SLOTS), [free.pop() for _ in range(1 if kind is Kind.PAGE else units)]
        )
        for kind, place in zip(kinds, places, strict=True)
    ]
    before = [world.read(piece) for piece in pieces]
    world.shuttle.out(pieces)
    world.fill()
    world.shuttle.into(pieces)
    for piece, content in zip(pieces, before, strict=True):
        np.testing.assert_array_equal(world.read(piece), content)
    world.close()


def test_memory_is_what_was_planned(world: World) -> None:
    labels = dict(line.split(": ") for line in world.backend.leak_report().splitlines())
    pinned = int(labels["spill (pinned)"].split()[0].replace(",", ""))
    assert pinned == world.shuttle.chunks * world.shuttle.chunk_bytes <= world.budget < pinned + world.shuttle.chunk_bytes
    staging = labels["spill staging"].split()[0].replace(",", "")
    assert int(staging) == staging_bytes(world.page, world.state)


def test_chunks_that_are_not_there_are_a_bug(world: World) -> None:
    with pytest.raises(EngineFatal, match="a page of"):
        world.shuttle.out([Piece(Kind.PAGE, 0, [world.shuttle.chunks])])


def test_a_failed_allocation_leaves_nothing() -> None:
    for n in range(1, 5):
        world = World()
        world.shuttle.close()
        world.backend.fail_allocation(n)
        with pytest.raises(OutOfMemory):
            Shuttle(world.backend, world.kv, world.states, world.budget, world.backend.default_stream)
        world.shuttle = Shuttle(world.backend, world.kv, world.states, world.budget, world.backend.default_stream)
        world.close()


def test_a_model_without_states_has_pages_only() -> None:
    world = World(layers=())
    world.fill()
    before = world.read(Piece(Kind.PAGE, 3, []))
    world.shuttle.out([Piece(Kind.PAGE, 3, [0])])
    world.shuttle.wait(world.shuttle.into([Piece(Kind.PAGE, 9, [0])]))
    np.testing.assert_array_equal(world.read(Piece(Kind.PAGE, 9, [])), before)
    world.close()
