"""`Ledger`: every allocation of the host backend, so that a stray pointer is an error and a leak has a name."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import Counter, deque
from dataclasses import dataclass

import numpy as np

from sparkrt.runtime.backend import DevicePtr, MemoryFault, OutOfMemory

ALIGNMENT = 256  # bytes; what cudaMalloc promises
_QUARANTINE = 64, 1 << 16  # keep the last 64 freed blocks of up to 64 KiB each


@dataclass(slots=True, eq=False)
class Allocation:
    """One block. `memory` is its uint8 array; it dies with the last view, so a stale view never reads another block."""

    address: int
    nbytes: int
    label: str
    pinned: bool
    memory: np.ndarray | None

    def __str__(self) -> str:
        return f"{self.label or 'unlabelled'!r} ({self.nbytes:,} bytes{' pinned' if self.pinned else ''} at {self.address:#x})"


class Ledger:
    """Device and pinned memory of one backend. Addresses are real; used by one thread at a time.

    `capacity` bounds the device bytes handed out, `poison` fills freed memory with 0xFF (NaN in every float format).
    """

    def __init__(self, capacity: int | None = None, poison: bool = False) -> None:
        self.capacity = capacity
        self.poison = poison
        self.device_bytes = 0
        self.pinned_bytes = 0
        self._starts: list[int] = []  # sorted addresses of the live blocks
        self._live: dict[int, Allocation] = {}
        # Small freed blocks keep their memory for a while: malloc would hand the same address to the next caller, and a
        # second free or a late copy through the old pointer would go unnoticed.
        self._freed: deque[Allocation] = deque(maxlen=_QUARANTINE[0])
        self._fail_in = 0

    @property
    def live(self) -> list[Allocation]:
        """Blocks not freed yet, by address."""
        return [self._live[start] for start in self._starts]

    @property
    def failure_armed(self) -> bool:
        """Whether a failure asked for by `fail_allocation` is still to come."""
        return self._fail_in > 0

    def fail_allocation(self, n: int) -> None:
        """Make the n-th allocation from now raise OutOfMemory (1: the next one), device or pinned, once. 0 takes it back."""
        self._fail_in = n

    def take(self, nbytes: int, label: str, pinned: bool) -> Allocation:
        """A new block, aligned to 256 bytes, contents undefined. Raises OutOfMemory and changes nothing."""
        if nbytes < 0:
            raise ValueError(f"allocation {label!r}: {nbytes} bytes")
        if self._fail_in:
            self._fail_in -= 1
            if not self._fail_in:
                raise OutOfMemory(f"allocation {label!r} of {nbytes:,} bytes: failure asked for by fail_allocation")
        if not pinned and self.capacity is not None and self.device_bytes + nbytes > self.capacity:
            raise OutOfMemory(
                f"allocation {label!r} of {nbytes:,} bytes: {self.capacity - self.device_bytes:,} of {self.capacity:,} are left"
            )
        try:
            raw = np.empty(nbytes + ALIGNMENT, np.uint8)
        except MemoryError as error:
            raise OutOfMemory(f"allocation {label!r} of {nbytes:,} bytes: the system has no such memory") from error
        skip = -address_of(raw) % ALIGNMENT
        block = Allocation(address_of(raw) + skip, nbytes, label, pinned, raw[skip : skip + nbytes])
        insort(self._starts, block.address)
        self._live[block.address] = block
        self._account(block, nbytes)
        return block

    def give(self, ptr: DevicePtr, pinned: bool) -> None:
        """Free a block by its first address. Raises MemoryFault."""
        block = self._live.get(ptr.address)
        if block is None:
            before = next((old for old in reversed(self._freed) if old.address == ptr.address), None)
            raise MemoryFault(f"{before} is freed twice" if before else f"free of {ptr.address:#x}: no allocation starts there")
        if block.pinned != pinned:
            raise MemoryFault(f"{block} must be freed with {'free_pinned' if block.pinned else 'free'}")
        del self._live[ptr.address]
        del self._starts[bisect_right(self._starts, ptr.address) - 1]
        self._account(block, -block.nbytes)
        if self.poison and block.memory is not None:
            block.memory.fill(0xFF)
        if block.nbytes > _QUARANTINE[1]:
            block.memory = None
        self._freed.append(block)

    def resolve(self, ptr: DevicePtr, nbytes: int, what: str, pinned: bool = False) -> np.ndarray:
        """The uint8 view of [ptr, ptr + nbytes). Raises MemoryFault when it is not inside one live block of that class."""
        block = self._containing(ptr.address)
        if block is None or block.memory is None or ptr.address > block.address + block.nbytes:
            freed = (old for old in reversed(self._freed) if old.address <= ptr.address < old.address + max(1, old.nbytes))
            old = next(freed, None)
            raise MemoryFault(f"{what} at {ptr.address:#x}: " + (f"{old} was freed" if old else "not inside any allocation"))
        offset = ptr.address - block.address
        if nbytes < 0 or offset + nbytes > block.nbytes:
            raise MemoryFault(f"{what} of {nbytes:,} bytes at offset {offset:,} leaves {block}")
        if block.pinned != pinned:
            raise MemoryFault(f"{what} expects {'pinned' if pinned else 'device'} memory, not {block}")
        return block.memory[offset : offset + nbytes]

    def is_pinned(self, array: np.ndarray) -> bool:
        """Whether a host array lies in pinned memory of this ledger."""
        address = address_of(array)
        block = self._containing(address)
        return block is not None and block.pinned and address + array.nbytes <= block.address + block.nbytes

    def leak_report(self) -> str:
        """One line per label still allocated, largest first; empty when everything was freed."""
        size: Counter[str] = Counter()
        count: Counter[str] = Counter()
        for block in self._live.values():
            label = f"{block.label or 'unlabelled'}{' (pinned)' if block.pinned else ''}"
            size[label] += block.nbytes
            count[label] += 1
        return "\n".join(f"{label}: {nbytes:,} bytes in {count[label]}" for label, nbytes in size.most_common())

    def clear(self) -> None:
        """Forget every block."""
        self._starts.clear()
        self._live.clear()
        self._freed.clear()
        self.device_bytes = self.pinned_bytes = 0

    def _containing(self, address: int) -> Allocation | None:
        """The live block that starts last at or before `address`."""
        i = bisect_right(self._starts, address) - 1
        return self._live[self._starts[i]] if i >= 0 else None

    def _account(self, block: Allocation, nbytes: int) -> None:
        if block.pinned:
            self.pinned_bytes += nbytes
        else:
            self.device_bytes += nbytes


def address_of(array: np.ndarray) -> int:
    """Where an array's first byte lies (quicker than `array.ctypes.data`)."""
    address: int = array.__array_interface__["data"][0]
    return address
