"""`Shuttle`: pages and states between the device and a pinned host arena, behind the steps and never waited for.

Outward, a record is gathered into a staging buffer in the order of the steps: memory that is evicted may be written again by the
very next launch. From there it leaves on a stream of its own. Inward everything happens on that stream, after what was launched
before; who uses a record must first see its ticket done. Within the arena the stream keeps the order: what left last is what
comes back. The staging buffers are part of the memory plan; nothing is allocated later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np

from sparkrt.cache.paged import PagedKvCache
from sparkrt.cache.state import StatePool
from sparkrt.errors import EngineFatal
from sparkrt.runtime.backend import DevicePtr, Event, GpuBackend, Stream
from sparkrt.runtime.owner import Owner

_PAGES = 8  # pages that a staging buffer holds at least: an H200 gathers one of 1.3 MB in 2 us, and sends it in 26


class Kind(Enum):
    PAGE = b"p"  # keys and values of a block
    STATE = b"s"  # recurrent and convolution state of a slot


class Piece(NamedTuple):
    """A block or slot of the device, and where in the arena it goes to or comes from."""

    kind: Kind
    place: int
    chunks: Sequence[int]


class Mover(Protocol):
    """What `Spill` needs of a `Shuttle`. The arena has `chunks` units of `chunk_bytes`; a ticket says when copies are done."""

    chunks: int
    chunk_bytes: int

    def nbytes(self, kind: Kind) -> int: ...
    def out(self, pieces: Sequence[Piece]) -> int: ...
    def into(self, pieces: Sequence[Piece]) -> int: ...
    def done(self, ticket: int) -> bool: ...
    def wait(self, ticket: int) -> None: ...
    def views(self, kind: Kind, chunks: Sequence[int]) -> list[np.ndarray]: ...
    def close(self) -> None: ...


_Moves = dict[Kind, Callable[[int, DevicePtr, Stream], None]]


def staging_bytes(page: int, state: int) -> int:
    """Device memory of a shuttle for records of these sizes: two buffers outward, one fills while one leaves, and one inward."""
    return 3 * _stage(page, state)


def _stage(page: int, state: int) -> int:
    return -(-max(_PAGES * page, state) // 256) * 256


class Shuttle:
    """See the module; over the first group of a cache. Used by one thread. Tickets are done in the order they were given."""

    def __init__(self, backend: GpuBackend, kv: PagedKvCache, states: StatePool, budget: int, stream: Stream) -> None:
        """`budget`: bytes of the arena, of which whole units are taken. `stream`: of the steps."""
        group = kv.groups[0]
        self._sizes = {Kind.PAGE: group.block_bytes, Kind.STATE: states.slot_bytes}
        self._pack: _Moves = {Kind.PAGE: partial(kv.pack, 0), Kind.STATE: states.pack}
        self._unpack: _Moves = {Kind.PAGE: partial(kv.unpack, 0), Kind.STATE: states.unpack}
        self._backend, self._steps = backend, stream
        self.chunk_bytes = group.block_bytes or states.slot_bytes  # a state takes as many pages as hold it
        self.chunks = budget // self.chunk_bytes
        self._owner, stage = Owner(backend), _stage(group.block_bytes, states.slot_bytes)
        self._stage_bytes, self._turn, self._ticket = stage, 0, 0
        self._open: dict[int, Event] = {}  # by ticket, in order
        self._spare: list[Event] = []
        try:
            self._outward = [self._owner.alloc(stage, "spill staging") for _ in range(2)]
            self._inward = self._owner.alloc(stage, "spill staging")
            self._arena = self._owner.host(self.chunks * self.chunk_bytes, "spill")
            self._gathered, self._ready, *left = (self._owner.event() for _ in range(4))
            self._left, self._used = left, [False, False]
            self._stream = backend.create_stream("spill")
        except BaseException:
            self._owner.close()
            raise

    def nbytes(self, kind: Kind) -> int:
        """Of a record."""
        return self._sizes[kind]

    def views(self, kind: Kind, chunks: Sequence[int]) -> list[np.ndarray]:
        """The bytes of a record in the arena, in as few pieces as its chunks lie in."""
        return [self._arena[start : start + size] for start, size in self._runs(kind, chunks)]

    def out(self, pieces: Sequence[Piece]) -> int:
        """Copy these to the arena; their blocks and slots may be given to others at once. Returns a ticket.

        Raises OutOfMemory, having done nothing, when there is no event for that; so does `into`.
        """
        backend, event = self._backend, self._take_event()
        for load in self._loads(pieces):
            self._turn ^= 1
            buffer, left = self._outward[self._turn], self._left[self._turn]
            if self._used[self._turn]:
                backend.stream_wait_event(self._steps, left)  # on the device: the buffer's last load has to be gone
            for piece, at in load:
                self._pack[piece.kind](piece.place, buffer.offset(at), self._steps)
            backend.record_event(self._gathered, self._steps)
            backend.stream_wait_event(self._stream, self._gathered)
            for at, view in self._transfers(load):
                backend.copy_d2h(view, buffer.offset(at), self._stream)
            backend.record_event(left, self._stream)
            self._used[self._turn] = True
        return self._give_ticket(event)

    def into(self, pieces: Sequence[Piece]) -> int:
        """Copy these from the arena to blocks and slots that no later launch uses until the ticket is done."""
        backend, event = self._backend, self._take_event()
        backend.record_event(self._ready, self._steps)
        backend.stream_wait_event(self._stream, self._ready)  # whoever had those blocks and slots is done with them
        for load in self._loads(pieces):
            for at, view in self._transfers(load):
                backend.copy_h2d(self._inward.offset(at), view, self._stream)
            for piece, at in load:
                self._unpack[piece.kind](piece.place, self._inward.offset(at), self._stream)
        return self._give_ticket(event)

    def done(self, ticket: int) -> bool:
        """Whether the copies of a ticket, and all before it, are over."""
        if ticket in self._open and self._backend.event_query(self._open[ticket]):
            self._settle(ticket)
        return ticket not in self._open

    def wait(self, ticket: int) -> None:
        """Return when they are."""
        if ticket in self._open:
            self._backend.event_synchronize(self._open[ticket])
            self._settle(ticket)

    def close(self) -> None:
        """Free everything, when what is under way has ended."""
        self._backend.synchronize(self._stream)
        for event in (*self._open.values(), *self._spare):
            self._backend.destroy_event(event)
        self._backend.destroy_stream(self._stream)
        self._owner.close()

    def _settle(self, ticket: int) -> None:
        for earlier in [t for t in self._open if t <= ticket]:
            self._spare.append(self._open.pop(earlier))

    def _take_event(self) -> Event:
        return self._spare.pop() if self._spare else self._backend.create_event()

    def _give_ticket(self, event: Event) -> int:
        self._backend.record_event(event, self._stream)
        self._ticket += 1
        self._open[self._ticket] = event
        return self._ticket

    def _loads(self, pieces: Sequence[Piece]) -> Iterator[list[tuple[Piece, int]]]:
        """Cut them into what a staging buffer holds, each with its offset there, in the order of the arena."""
        load, at = list[tuple[Piece, int]](), 0
        for piece in sorted(pieces, key=lambda piece: [*piece.chunks]):
            if at + self._sizes[piece.kind] > self._stage_bytes:
                yield load
                load, at = [], 0
            load.append((piece, at))
            at += self._sizes[piece.kind]
        if load:
            yield load

    def _transfers(self, load: Sequence[tuple[Piece, int]]) -> Iterator[tuple[int, np.ndarray]]:
        """(offset in the staging buffer, bytes of the arena), in as few pieces as the chunks of a load lie in: a copy is 4 us."""
        first, start, stop = 0, 0, 0
        for piece, offset in load:
            for begin, size in self._runs(piece.kind, piece.chunks):
                if begin != stop and stop > start:
                    yield first, self._arena[start:stop]
                if begin != stop or stop == start:
                    first, start = offset, begin
                stop, offset = begin + size, offset + size
        if stop > start:
            yield first, self._arena[start:stop]

    def _runs(self, kind: Kind, chunks: Sequence[int]) -> Iterator[tuple[int, int]]:
        """(first byte, bytes) in the arena of a record's runs of neighbouring chunks."""
        left, unit, first = self._sizes[kind], self.chunk_bytes, 0
        if len(chunks) * unit < left or not all(0 <= chunk < self.chunks for chunk in chunks):
            raise EngineFatal(f"a {kind.name.lower()} of {left:,} bytes in chunks {list(chunks)} of {self.chunks}")
        for i, chunk in enumerate(chunks, 1):
            if i == len(chunks) or chunks[i] != chunk + 1:
                size = min((i - first) * unit, left)
                yield chunks[first] * unit, size
                left, first = left - size, i
