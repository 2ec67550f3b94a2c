"""`Spill`: what the prefix cache had to evict, in host memory and behind it on disk, until somebody asks for it again.

A record is a page of keys and values or the state behind one; its key is a chained hash, keyed by the model, of all tokens up to
there. Pages and states are spilled apart but evicted in one order: a branch loses its end first, so what is left can be reached.
Host memory is an arena of equal chunks. A record has a share in its chunks, and so has everything that copies from or to them:
whatever is evicted, forgotten or aborted meanwhile, chunks are given out again when nobody touches them any more.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from pathlib import Path

from sparkrt.cache.disk import DiskCache
from sparkrt.cache.paged import BlockPool
from sparkrt.cache.shuttle import Kind, Mover, Piece
from sparkrt.runtime.backend import OutOfMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class SpillOptions:
    """Bytes of host memory and, in `folder`, of disk. `model` is a fingerprint of all that decides what a page holds."""

    host_bytes: int
    model: bytes
    costs: Costs
    folder: Path | None = None
    disk_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds, to weigh what a copy takes against computing the same again: of a token of prefill, and of a byte moved.

    An H200's bus moves 50 GB/s, a drive reads 3. Its prefill runs at 300 TFLOP/s or better (0.6B: 3.0 us a token, whose keys
    and values take 2.3 to move): where it is close, copying wins, because it leaves the processor to others.
    """

    token: float
    bus: float = 1 / 50e9
    disk: float = 1 / 3e9


@dataclass(slots=True)
class SpillStats:
    """Counters, in bytes but for the last two."""

    spilled: int = 0
    restored: int = 0
    loaded: int = 0  # from disk
    swaps: int = 0  # preempted sequences
    lost: int = 0  # records that there was no room for


@dataclass(slots=True, eq=False)
class Hold:
    """A share in the chunks of some records, in their order, whatever becomes of those; `reads` from disk still have to end.

    Of a swapped sequence it is the only share: the state after exactly `length` tokens, and its last page if that is not full.
    """

    kinds: list[Kind] = field(default_factory=list)
    chunks: list[list[int]] = field(default_factory=list)
    reads: int = 0
    length: int = 0
    failed: bool = False  # a read did not bring what was written


class Spill:
    """See the module. Used by one thread; nothing here waits but `wait`, `flush` and `close`."""

    def __init__(self, mover: Mover, model: bytes, costs: Costs, disk: DiskCache | None = None) -> None:
        """`model`: a fingerprint of all that decides what a page holds. Takes over `mover` and `disk`."""
        self.mover, self.disk, self.costs, self.stats = mover, disk, costs, SpillStats()
        self.pool = BlockPool(mover.chunks)
        self._model = model
        self._host: dict[bytes, list[int]] = {}  # chunks by key, the least recently used first
        self._holds: set[Hold] = set()
        self._copies: deque[tuple[int, Hold, Callable[[], None]]] = deque()  # ticket, and what follows
        self._files: dict[Future[bool], Callable[[bool], None]] = {}
        self._age = 0  # how often everything was forgotten

    @property
    def used(self) -> int:
        """Bytes of host memory that hold something."""
        return (self.pool.num_blocks - self.pool.free_count) * self.mover.chunk_bytes

    # --- keys -------------------------------------------------------------------------------------------------------------
    def chain(self, before: bytes, tokens: bytes) -> bytes:
        """The name of a page, after that of the page before it (b"" and the root's number at the beginning)."""
        return blake2b(before + tokens, digest_size=32, key=self._model).digest()

    def has(self, kind: Kind, name: bytes) -> bool:
        key = kind.value + name
        return key in self._host or (self.disk is not None and key in self.disk)

    def at_hand(self, wanted: Sequence[tuple[Kind, bytes]]) -> bool:
        """Whether all of these are in host memory."""
        return all(kind.value + name in self._host for kind, name in wanted)

    def worth(self, tokens: int, wanted: Sequence[tuple[Kind, bytes]]) -> bool:
        """Whether to bring these back is quicker than to compute so many tokens, and possible."""
        size, c = {kind: self.mover.nbytes(kind) for kind in Kind}, self.costs
        host = sum(size[kind] for kind, _ in wanted)
        disk = sum(size[kind] for kind, name in wanted if kind.value + name not in self._host)
        fits = sum(self._units(kind) for kind, _ in wanted) <= self.pool.num_blocks
        return fits and host * c.bus + disk * c.disk < tokens * c.token

    def worth_swapping(self, tokens: int) -> bool:
        """Whether to take a state out and bring it back is quicker than to compute so many tokens again."""
        return 2 * self.mover.nbytes(Kind.STATE) * self.costs.bus < tokens * self.costs.token

    # --- outward ----------------------------------------------------------------------------------------------------------
    def keep(self, evicted: Iterable[tuple[Kind, bytes, int]]) -> None:
        """Spill (kind, name of the page, block or slot), to be given to others from now on. First comes what may go first."""
        taken = list[tuple[bytes, Kind, list[int], int]]()
        for kind, name, place in evicted:
            if self._touch(key := kind.value + name) or (self.disk is not None and key in self.disk):
                continue
            if (chunks := self._room(kind)) is None:
                self.stats.lost += 1
                continue
            self._host[key] = chunks
            taken.append((key, kind, chunks, place))
        taken = [record for record in taken if self._host.get(record[0]) is record[2]]  # not evicted for those after it
        if taken:
            keys, kinds, room, places = (list(part) for part in zip(*taken, strict=True))
            fresh = Hold(kinds, room)
            try:
                self.stats.spilled += self._copy(self.mover.out, fresh, places, lambda: self._store(keys, fresh))
            except OutOfMemory:  # whoever evicts wants room, not an error
                for key in keys:
                    self._free(self._host.pop(key))
                self.stats.lost += len(keys)

    def swap(self, length: int, slot: int, tail: int | None) -> Hold | None:
        """Keep the state of a sequence after `length` tokens, and block `tail` if its last page is not full; None without room.

        Whoever gets the hold has to `release` it.
        """
        places = [(Kind.STATE, slot)] if self.mover.nbytes(Kind.STATE) else []
        places += [(Kind.PAGE, tail)] if tail is not None else []
        if (hold := self._make([kind for kind, _ in places])) is None:
            return None
        hold.length = length
        try:
            self.stats.spilled += self._copy(self.mover.out, hold, [place for _, place in places])
        except OutOfMemory:
            self.stats.lost += len(places)
            self.release(hold)
            return None
        self.stats.swaps += 1
        return hold

    # --- inward -----------------------------------------------------------------------------------------------------------
    def fetch(self, wanted: Sequence[tuple[Kind, bytes]]) -> Hold | None:
        """Hold these records, to be released. Those on disk are read into host memory, until `reads` is 0. None without room."""
        keys = [kind.value + name for kind, name in wanted]
        hold = Hold([kind for kind, _ in wanted], [self._host.get(key, []) for key in keys])
        self._share(hold)  # or making room for some evicts others
        absent = [i for i, key in enumerate(keys) if key not in self._host]
        there = all(self.disk is not None and keys[i] in self.disk for i in absent)
        if (rooms := self._make([hold.kinds[i] for i in absent]) if there else None) is None:
            self.release(hold)
            return None
        self._holds.discard(rooms)  # its shares become those of `hold`
        for i, chunks in zip(absent, rooms.chunks, strict=True):
            hold.chunks[i] = chunks
            self._read(hold.kinds[i], keys[i], chunks, hold)
        for key in reversed(keys):  # the beginning counts as used last
            self._touch(key)
        return hold

    def restore(self, *parts: tuple[Hold, Sequence[int]]) -> int:
        """Copy what is held, all of it in host memory, to these blocks and slots, or fail with OutOfMemory having done nothing.

        Returns a ticket: until that is `done` nothing may use them, nor give them back.
        """
        whole, places = Hold(), list[int]()
        for hold, where in parts:
            whole.kinds += hold.kinds
            whole.chunks += hold.chunks
            places += where
        self.stats.restored += self._copy(self.mover.into, whole, places)
        return self._copies[-1][0]

    def release(self, hold: Hold) -> None:
        """Once for every hold. Its reads go on, for the next who asks."""
        self._holds.remove(hold)
        for chunks in hold.chunks:
            self._free(chunks)

    # --- what is under way ------------------------------------------------------------------------------------------------
    def done(self, ticket: int) -> bool:
        return self.mover.done(ticket)

    @property
    def busy(self) -> bool:
        return bool(self._copies or self._files)

    def poll(self) -> None:
        """Take note of what ended; between steps."""
        while self._copies and self.mover.done(self._copies[0][0]):
            _, hold, then = self._copies.popleft()
            then()
            self.release(hold)
        if self._files:
            for future in [future for future in self._files if future.done()]:
                self._files.pop(future)(future.result())

    def wait(self) -> None:
        """Return when something ended that was under way, or in 2 ms: somebody may come who need not wait for a disk."""
        if self._copies:
            self.mover.wait(self._copies[0][0])
        elif self._files:
            wait(self._files, 0.002, "FIRST_COMPLETED")
        self.poll()

    def flush(self) -> None:
        """Return when nothing is under way."""
        while self.busy:
            self.wait()

    def save(self, records: Sequence[tuple[Kind, bytes, int]]) -> None:
        """`keep` these and wait until they are on disk, so many at a time as there is room for; the last first, in case that the
        time for it is short.
        """
        units = 0
        for record in reversed(records):
            units += self._units(record[0])
            if units > self.pool.num_blocks // 2:
                self.flush()
                units = self._units(record[0])
            self.keep([record])
        self.flush()
        if self.disk is not None:
            for kind, name, _ in records:
                self.disk.touch(kind.value + name)

    def clear(self) -> None:
        """Forget all records; what is being copied to or from a sequence stays until it is done."""
        for chunks in self._host.values():
            self._free(chunks)
        self._host.clear()
        self._age += 1
        if self.disk is not None:
            self.disk.clear()

    def disown(self) -> None:
        """From here on names are those of no model that will ever be asked for again. Nothing may be cached now."""
        self._model = os.urandom(32)

    def close(self) -> None:
        """Finish what is under way; what is on disk stays for the next start."""
        self.flush()
        if self.disk is not None:
            self.disk.close()
        self.mover.close()

    def check_integrity(self) -> None:
        """Raises EngineFatal unless every chunk is free or has as many shares as there are records and holds."""
        owned = [*self._host.values(), *(chunks for hold in self._holds for chunks in hold.chunks)]
        self.pool.check_integrity([chunk for chunks in owned for chunk in chunks])

    # --- private ----------------------------------------------------------------------------------------------------------
    def _copy(
        self, move: Callable[[Sequence[Piece]], int], what: Hold, places: Sequence[int], then: Callable[[], None] = lambda: None
    ) -> int:
        """Issue copies, which hold their chunks until they are done; returns their bytes."""
        pieces = [Piece(*piece) for piece in zip(what.kinds, places, what.chunks, strict=True)]
        ticket = move(pieces)
        copying = Hold(what.kinds, what.chunks)
        self._share(copying)
        self._copies.append((ticket, copying, then))
        return sum(self.mover.nbytes(kind) for kind in what.kinds)

    def _store(self, keys: Sequence[bytes], what: Hold) -> None:
        """These arrived in host memory: write to disk what still counts."""
        if self.disk is None:
            return
        for key, kind, chunks in zip(keys, what.kinds, what.chunks, strict=True):
            if self._host.get(key) is not chunks:
                continue
            if (future := self.disk.put(key, self.mover.views(kind, chunks))) is not None:
                self._share(hold := Hold([kind], [chunks]))
                self._files[future] = partial(self._wrote, key, hold)

    def _wrote(self, key: bytes, hold: Hold, there: bool) -> None:
        assert self.disk is not None
        self.disk.wrote(key, there)
        self.release(hold)

    def _read(self, kind: Kind, key: bytes, chunks: list[int], hold: Hold) -> None:
        assert self.disk is not None
        self._share(own := Hold([kind], [chunks]))
        hold.reads += 1
        self._files[self.disk.get(key, self.mover.views(kind, chunks))] = partial(self._was_read, key, own, hold, self._age)

    def _was_read(self, key: bytes, own: Hold, hold: Hold, age: int, right: bool) -> None:
        assert self.disk is not None
        hold.reads -= 1
        hold.failed = hold.failed or not right
        if right and age == self._age and key not in self._host:  # nobody reset the cache, nor read it twice
            self._host[key] = own.chunks[0]
            self._share_chunks(own.chunks[0])
            self.stats.loaded += self.mover.nbytes(own.kinds[0])
        elif not right and age == self._age:
            self.disk.read(key, right)
        self.release(own)

    def _touch(self, key: bytes) -> bool:
        """Whether it is in host memory; it counts as used then."""
        if (chunks := self._host.pop(key, None)) is not None:
            self._host[key] = chunks
        return chunks is not None

    def _make(self, kinds: Sequence[Kind]) -> Hold | None:
        """Room for new records of these kinds, or none at all."""
        hold = Hold()
        self._holds.add(hold)
        for kind in kinds:
            if (chunks := self._room(kind)) is None:
                self.stats.lost += 1
                self.release(hold)
                return None
            hold.kinds.append(kind)
            hold.chunks.append(chunks)
        return hold

    def _room(self, kind: Kind) -> list[int] | None:
        """Chunks for a record, the least recently used records that nobody copies evicted for it; None if that is not enough."""
        n = self._units(kind)
        if n > self.pool.free_count:
            idle, free = list[bytes](), self.pool.free_count
            for key, chunks in self._host.items():
                if self.pool.refcount(chunks[0]) == 1:
                    idle.append(key)
                    free += len(chunks)
                    if free >= n:
                        break
            else:
                return None
            for key in idle:
                self._free(self._host.pop(key))
        return self.pool.alloc(n)

    def _units(self, kind: Kind) -> int:
        return -(-self.mover.nbytes(kind) // self.mover.chunk_bytes)

    def _share(self, hold: Hold) -> None:
        self._holds.add(hold)
        for chunks in hold.chunks:
            self._share_chunks(chunks)

    def _share_chunks(self, chunks: Sequence[int]) -> None:
        for chunk in chunks:
            self.pool.incref(chunk)

    def _free(self, chunks: Sequence[int]) -> None:
        for chunk in chunks:
            self.pool.decref(chunk)
