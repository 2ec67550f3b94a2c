"""Device memory whose addresses outlive it, by CUDA's virtual memory management.

A range of addresses is reserved for good; physical memory is created, mapped behind it, and taken away again at will. Graphs hold
addresses, so those captured before memory went replay after it came back.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from sparkrt.errors import SparkrtError

WASTE = 8  # a block may leave this part of its granules empty: of smaller ones, a thousand norms would take 2 MiB each


@dataclass(slots=True)
class _Block:
    nbytes: int  # asked for
    size: int  # of the granules that hold them
    handle: Any = None  # of the physical memory; None: there is none


class VirtualMemory:
    """Blocks on one device. `check` turns a driver call's result into values, or an exception (`CudaBackend._check`)."""

    def __init__(self, device: int, check: Callable[[Any, str], Any]) -> None:
        from cuda.bindings import driver

        self._driver, self._check = driver, check
        self._kind = driver.CUmemAllocationProp()
        self._kind.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._kind.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._kind.location.id = device
        self._access = driver.CUmemAccessDesc()
        self._access.location = self._kind.location
        self._access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        best = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        self._granule = int(check(driver.cuMemGetAllocationGranularity(self._kind, best), "cuMemGetAllocationGranularity"))
        self._blocks: dict[int, _Block] = {}

    def suits(self, nbytes: int) -> bool:
        """Whether a block of this size fills its granules (2 MiB) well enough."""
        return nbytes > 0 and -nbytes % self._granule * WASTE <= nbytes

    def alloc(self, nbytes: int, what: str) -> int:
        """The address of a new block. Raises OutOfMemory, leaving nothing behind."""
        size = nbytes + -nbytes % self._granule
        address = int(self._check(self._driver.cuMemAddressReserve(size, 0, 0, 0), what))
        self._blocks[address] = _Block(nbytes, size)
        try:
            self.resume(address, what)
        except BaseException:
            self.free(address)
            raise
        return address

    def suspend(self, address: int) -> int:
        """Give a block's memory back; how many bytes that were (0: no such block, or it has none). Nothing may be using it."""
        block = self._blocks.get(address)
        if block is None or block.handle is None:
            return 0
        self._check(self._driver.cuMemUnmap(address, block.size), "cuMemUnmap")
        self._release(block)
        return block.size

    def resume(self, address: int, what: str) -> None:
        """Put memory behind it again, contents undefined. Raises OutOfMemory, changing nothing."""
        block = self._blocks.get(address)
        if block is None or block.handle is not None:
            return
        block.handle = self._check(self._driver.cuMemCreate(block.size, self._kind, 0), what)
        mapped = False
        try:
            self._check(self._driver.cuMemMap(address, block.size, 0, block.handle, 0), what)
            mapped = True
            self._check(self._driver.cuMemSetAccess(address, block.size, [self._access], 1), what)
        except BaseException:
            with suppress(SparkrtError):  # the first error is the one to tell
                if mapped:
                    self._check(self._driver.cuMemUnmap(address, block.size), what)
                self._release(block)
            raise

    def free(self, address: int) -> None:
        """Give back memory and address."""
        self.suspend(address)
        self._check(self._driver.cuMemAddressFree(address, self._blocks.pop(address).size), "cuMemAddressFree")

    def holds(self, address: int) -> bool:
        """Whether a block begins there."""
        return address in self._blocks

    @property
    def suspended(self) -> int:
        """Bytes that were asked for and have no memory now."""
        return sum(block.nbytes for block in self._blocks.values() if block.handle is None)

    def _release(self, block: _Block) -> None:
        handle, block.handle = block.handle, None
        self._check(self._driver.cuMemRelease(handle), "cuMemRelease")
