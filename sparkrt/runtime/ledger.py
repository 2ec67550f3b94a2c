"""What the host backend writes down: its allocations (`Ledger`: stray pointers and leaks get a name) and its `Traffic`."""

from __future__ import annotations

import ctypes
import mmap
import sys
from bisect import bisect_right, insort
from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import numpy as np

from sparkrt.runtime.backend import DevicePtr, MemoryFault, OutOfMemory, Stream

_ALIGNMENT = 256  # bytes; what cudaMalloc promises
_QUARANTINE = 64, 1 << 16  # blocks and the bytes of the largest


@dataclass(slots=True, eq=False)
class Allocation:
    """One block. `memory` is its uint8 array; it dies with the last view, so a stale view never reads another block."""

    address: int
    nbytes: int
    label: str
    pinned: bool
    memory: np.ndarray
    suspended: bool = False

    def __str__(self) -> str:
        return f"{self.label or 'unlabelled'!r} ({self.nbytes:,} bytes{' pinned' if self.pinned else ''} at {self.address:#x})"


class Ledger:
    """Device and pinned memory of one backend, at real addresses.

    `capacity` bounds the device bytes handed out, `poison` fills freed memory with 0xFF (NaN in every float format), and
    `fail_in` makes the so-many-th allocation from now raise OutOfMemory (1: the next one; 0: none).
    """

    def __init__(self, capacity: int | None, poison: bool) -> None:
        self.capacity, self.poison = capacity, poison
        self.device_bytes = self.fail_in = 0
        self.live: list[Allocation] = []  # by address
        # freed blocks, whose memory malloc cannot yet hand to others: a second free or a late copy would go unnoticed
        self._freed: deque[Allocation] = deque(maxlen=_QUARANTINE[0])

    def take(self, nbytes: int, label: str, pinned: bool) -> DevicePtr:
        """A new block, aligned to 256 bytes, contents undefined. Raises OutOfMemory and changes nothing."""
        if nbytes < 0:
            raise ValueError(f"allocation {label!r}: {nbytes} bytes")
        what = f"allocation {label!r} of {nbytes:,} bytes"
        self._check_room(what, 0 if pinned else nbytes)
        try:
            raw = np.empty(nbytes + _ALIGNMENT, np.uint8)
        except MemoryError as error:
            raise OutOfMemory(f"{what}: the system has no such memory") from error
        skip = -address_of(raw) % _ALIGNMENT
        block = Allocation(address_of(raw) + skip, nbytes, label, pinned, raw[skip : skip + nbytes])
        insort(self.live, block, key=attrgetter("address"))
        self.device_bytes += 0 if pinned else nbytes
        return DevicePtr(block.address)

    def give(self, ptr: DevicePtr, pinned: bool) -> None:
        """Free a block by its first address. Raises MemoryFault."""
        block = self._last_before(ptr.address)
        if block is None or block.address != ptr.address:
            before = next((old for old in reversed(self._freed) if old.address == ptr.address), None)
            raise MemoryFault(f"{before} is freed twice" if before else f"free of {ptr.address:#x}: no allocation starts there")
        if block.pinned != pinned:
            raise MemoryFault(f"{block} must be freed with {'free_pinned' if block.pinned else 'free'}")
        self.live.remove(block)
        self.device_bytes -= 0 if pinned or block.suspended else block.nbytes
        if self.poison:
            block.memory.fill(0xFF)
        if block.nbytes > _QUARANTINE[1]:
            block.memory = block.memory[:0].copy()
        self._freed.append(block)

    def suspend(self, ptr: DevicePtr) -> int:
        """Let the system have the memory of a device block; the bytes given back. Its whole pages, to be exact."""
        block = self._block(ptr)
        if block.suspended or not block.nbytes:
            return 0
        block.suspended = True
        self.device_bytes -= block.nbytes
        _drop_pages(block.memory)
        return block.nbytes

    def resume(self, ptr: DevicePtr) -> None:
        """It may be used again, contents undefined. Raises OutOfMemory and changes nothing."""
        block = self._block(ptr)
        if block.suspended:
            self._check_room(f"resuming {block}", block.nbytes)
            block.suspended = False
            self.device_bytes += block.nbytes
            if self.poison:
                block.memory.fill(0xFF)

    def _block(self, ptr: DevicePtr) -> Allocation:
        block = self._last_before(ptr.address)
        if block is None or block.address != ptr.address or block.pinned:
            raise MemoryFault(f"no device allocation starts at {ptr.address:#x}")
        return block

    def _check_room(self, what: str, device_bytes: int) -> None:
        if self.fail_in:
            self.fail_in -= 1
            if not self.fail_in:
                raise OutOfMemory(f"{what}: failure asked for by fail_allocation")
        if self.capacity is not None and device_bytes and self.device_bytes + device_bytes > self.capacity:
            raise OutOfMemory(f"{what}: {self.capacity - self.device_bytes:,} of {self.capacity:,} are left")

    def resolve(self, ptr: DevicePtr, nbytes: int, what: str, pinned: bool = False) -> np.ndarray:
        """The uint8 view of [ptr, ptr + nbytes). Raises MemoryFault when it is not inside one live block of that class."""
        block = self._last_before(ptr.address)
        if block is None or ptr.address > block.address + block.nbytes:
            freed = (b for b in reversed(self._freed) if b.address <= ptr.address < b.address + max(1, b.nbytes))
            old = next(freed, None)
            raise MemoryFault(f"{what} at {ptr.address:#x}: " + (f"{old} was freed" if old else "not inside any allocation"))
        offset = ptr.address - block.address
        if nbytes < 0 or offset + nbytes > block.nbytes:
            raise MemoryFault(f"{what} of {nbytes:,} bytes at offset {offset:,} leaves {block}")
        if block.suspended:
            raise MemoryFault(f"{what} while {block} is suspended")
        if block.pinned != pinned:
            raise MemoryFault(f"{what} expects {'pinned' if pinned else 'device'} memory, not {block}")
        return block.memory[offset : offset + nbytes]

    def is_pinned(self, array: np.ndarray) -> bool:
        """Whether a host array lies in pinned memory of this ledger."""
        address = address_of(array)
        block = self._last_before(address)
        return block is not None and block.pinned and address + array.nbytes <= block.address + block.nbytes

    def leak_report(self) -> str:
        """One line per label still allocated, largest first; empty when everything was freed."""
        sizes: defaultdict[str, list[int]] = defaultdict(list)
        for block in self.live:
            sizes[f"{block.label or 'unlabelled'}{' (pinned)' if block.pinned else ''}"].append(block.nbytes)
        rows = sorted(sizes.items(), key=lambda row: -sum(row[1]))
        return "\n".join(f"{label}: {sum(parts):,} bytes in {len(parts)}" for label, parts in rows)

    def _last_before(self, address: int) -> Allocation | None:
        """The live block that starts last at or before `address`."""
        i = bisect_right(self.live, address, key=attrgetter("address")) - 1
        return self.live[i] if i >= 0 else None


def _drop_pages(memory: np.ndarray) -> None:
    """Give the whole pages of a block back to the system, which puts empty ones there when they are touched again."""
    if sys.platform != "linux":  # elsewhere the advice does not empty them
        return
    page = mmap.PAGESIZE
    first, last = -(-address_of(memory) // page) * page, (address_of(memory) + memory.nbytes) // page * page
    if last > first:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), ctypes.c_int(mmap.MADV_DONTNEED))


def address_of(array: np.ndarray) -> int:
    """Where an array's first byte lies (quicker than `array.ctypes.data`)."""
    address: int = array.__array_interface__["data"][0]
    return address


@dataclass(slots=True)
class Traffic:
    """Counts since a backend was made, or of one `with backend.count() as traffic:` block (filled when it ends).

    Kinds of copies are h2d, d2h, d2d, 2d and memset, of waits stream, device and event (with the stream it was recorded on).
    A blocking copy belongs to no stream, and one of host memory that is not pinned is blocking, as on a device. A replayed
    graph counts in `graph_launches`, and what its nodes do is counted, too.
    """

    launches: Counter[str] = field(default_factory=Counter)
    transfers: Counter[tuple[str, bool, Stream | None]] = field(default_factory=Counter)  # by kind, blocking, stream
    transferred: Counter[tuple[str, bool, Stream | None]] = field(default_factory=Counter)  # bytes
    syncs: Counter[tuple[str, Stream | None]] = field(default_factory=Counter)
    allocations: int = 0
    frees: int = 0
    graph_launches: int = 0

    def copies(self, kind: str | None = None, *, blocking: bool | None = None, stream: Stream | None = None) -> int:
        """How many copies match; an argument left out matches everything."""
        return _matching(self.transfers, kind, blocking, stream)

    def nbytes(self, kind: str | None = None, *, blocking: bool | None = None, stream: Stream | None = None) -> int:
        """How many bytes the matching copies moved."""
        return _matching(self.transferred, kind, blocking, stream)

    def synchronizations(self, kind: str | None = None, *, stream: Stream | None = None) -> int:
        """How often the host waited."""
        return _matching(self.syncs, kind, stream)

    def launched(self, name: str | None = None) -> int:
        """How many operators ran, or how often the one called `name` did."""
        return self.launches.total() if name is None else self.launches[name]

    def transfer(self, kind: str, nbytes: int, stream: Stream | None) -> None:
        self.transfers[kind, stream is None, stream] += 1
        self.transferred[kind, stream is None, stream] += nbytes


def _matching(counts: Mapping[Any, int], *wanted: object) -> int:
    """The sum under the keys whose parts are as wanted; None is any."""
    return sum(n for key, n in counts.items() if all(w in (None, part) for w, part in zip(wanted, key, strict=True)))
