"""`HostBackend`: the device that is NumPy memory. Default where there is no GPU, oracle, and test double.

As a double it is stricter than a device: pointers are checked against a ledger, traffic is counted, allocations can be made
to fail, and what CUDA would refuse during a capture is refused here. One thread at a time uses a backend.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import fields
from math import prod
from typing import Any

import numpy as np

from sparkrt.errors import EngineFatal
from sparkrt.runtime import machine
from sparkrt.runtime.array import DeviceArray
from sparkrt.runtime.backend import DeviceProperties, DevicePtr, Launchable, MemoryFault, MemoryInfo, Stream
from sparkrt.runtime.dtypes import DType
from sparkrt.runtime.ledger import Ledger, Traffic
from sparkrt.runtime.timeline import DEFAULT_STREAM, Timeline, Work


class HostBackend(Timeline):
    """`GpuBackend` over NumPy memory, of which `capacity` device bytes may be allocated (None: what the machine gives).

    `deferred`: see `Timeline`. `debug`: poison freed memory and check every launch's arguments; default: SPARKRT_DEBUG.
    """

    def __init__(self, capacity: int | None = None, *, deferred: bool = False, debug: bool | None = None) -> None:
        super().__init__(deferred)
        self._debug = machine.debug_enabled() if debug is None else debug
        self.ledger = Ledger(capacity, self._debug)
        self.default_stream = DEFAULT_STREAM
        name, memory = platform.processor() or platform.machine(), machine.total_memory() if capacity is None else capacity
        cores, l2 = machine.usable_cores(), machine.l2_bytes()
        self.properties = DeviceProperties(name, "host", None, cores, memory, l2, unified_memory=True)

    def memory_info(self) -> MemoryInfo:
        used, free = self.ledger.device_bytes, machine.available_memory()
        if self.ledger.capacity is not None:
            free = min(free, self.ledger.capacity - used)
        return MemoryInfo(free, self.properties.total_memory, used)

    def fail_allocation(self, n: int) -> None:
        """Make the n-th allocation from now (1: the next) raise OutOfMemory, once. 0 takes it back."""
        self.ledger.fail_in = n

    def leak_report(self) -> str:
        """What is still allocated, a line per label; empty when nothing is."""
        return self.ledger.leak_report()

    @contextmanager
    def count(self) -> Iterator[Traffic]:
        """Count what the block does: `with backend.count() as traffic: step()`, then ask `traffic`."""
        before, counted = deepcopy(self.traffic), Traffic()
        try:
            yield counted
        finally:
            for kind in fields(Traffic):
                setattr(counted, kind.name, getattr(self.traffic, kind.name) - getattr(before, kind.name))

    def alloc(self, nbytes: int, label: str = "") -> DevicePtr:
        return self._alloc(nbytes, label, pinned=False)

    def free(self, ptr: DevicePtr) -> None:
        self._free(ptr, pinned=False)

    def suspend(self, ptr: DevicePtr) -> int:
        self._forbid_capture("suspending memory")
        self._run_waiting()
        return self.ledger.suspend(ptr)

    def resume(self, ptr: DevicePtr) -> None:
        self._forbid_capture("resuming memory")
        self.ledger.resume(ptr)

    def alloc_pinned(self, nbytes: int, label: str = "") -> DevicePtr:
        return self._alloc(nbytes, label, pinned=True)

    def free_pinned(self, ptr: DevicePtr) -> None:
        self._free(ptr, pinned=True)

    def _alloc(self, nbytes: int, label: str, pinned: bool) -> DevicePtr:
        self._forbid_capture(f"allocating {label!r}")
        ptr = self.ledger.take(nbytes, label, pinned)
        self.traffic.allocations += 1
        return ptr

    def _free(self, ptr: DevicePtr, pinned: bool) -> None:
        self._forbid_capture("freeing memory")
        self._run_waiting()  # cudaFree waits for the device
        self.ledger.give(ptr, pinned)
        self.traffic.frees += 1

    def pinned_view(self, ptr: DevicePtr, nbytes: int) -> np.ndarray:
        return self.ledger.resolve(ptr, nbytes, "pinned view", pinned=True)

    def array(self, ptr: DevicePtr, dtype: DType, shape: Sequence[int]) -> DeviceArray:
        if ptr.address % dtype.itemsize:
            raise MemoryFault(f"array of {dtype} at {ptr.address:#x}: not aligned to {dtype.itemsize} bytes")
        memory = self.ledger.resolve(ptr, prod(shape) * dtype.itemsize, f"array {dtype}{list(shape)}")
        return DeviceArray(ptr, dtype, shape, memory.view(dtype.np).reshape(shape))

    def empty(self, shape: Sequence[int], dtype: DType, label: str = "") -> DeviceArray:
        return self.array(self.alloc(prod(shape) * dtype.itemsize, label), dtype, shape)

    def copy_h2d(self, dst: DevicePtr, src: Any, stream: Stream | None = None) -> None:
        source = _host_bytes(src, "copy_h2d source")
        self._copy("h2d", self.ledger.resolve(dst, source.nbytes, "copy_h2d"), source, stream, source)

    def copy_d2h(self, dst: Any, src: DevicePtr, stream: Stream | None = None) -> None:
        target = _host_bytes(dst, "copy_d2h target")
        if not target.flags.writeable:
            raise ValueError("copy_d2h target: the array is read-only")
        self._copy("d2h", target, self.ledger.resolve(src, target.nbytes, "copy_d2h"), stream, target)

    def copy_d2d(self, dst: DevicePtr, src: DevicePtr, nbytes: int, stream: Stream | None = None) -> None:
        source = self.ledger.resolve(src, nbytes, "copy_d2d source")
        target = self.ledger.resolve(dst, nbytes, "copy_d2d target")
        if abs(dst.address - src.address) < nbytes:
            raise MemoryFault(f"copy_d2d of {nbytes:,} bytes from {src.address:#x} to {dst.address:#x} overlaps itself")
        self._copy("d2d", target, source, stream)

    def copy_d2d_2d(
        self, dst: DevicePtr, dst_pitch: int, src: DevicePtr, src_pitch: int, width: int, rows: int, stream: Stream | None = None
    ) -> None:
        if width > min(dst_pitch, src_pitch) or min(width, rows) < 0:
            raise ValueError(f"copy_d2d_2d: {rows} rows of {width} bytes with pitches {dst_pitch} and {src_pitch}")
        source = self._pitched(src, src_pitch, width, rows, "copy_d2d_2d source")
        target = self._pitched(dst, dst_pitch, width, rows, "copy_d2d_2d target")
        if np.shares_memory(target, source):
            raise MemoryFault(f"copy_d2d_2d from {src.address:#x} to {dst.address:#x} overlaps itself")
        self._copy("2d", target, source, stream)

    def memset(self, ptr: DevicePtr, value: int, nbytes: int, stream: Stream | None = None) -> None:
        if not 0 <= value <= 0xFF:
            raise ValueError(f"memset: {value} is not a byte")
        self._copy("memset", self.ledger.resolve(ptr, nbytes, "memset"), np.uint8(value), stream)

    def _pitched(self, ptr: DevicePtr, pitch: int, width: int, rows: int, what: str) -> np.ndarray:
        memory = self.ledger.resolve(ptr, (rows - 1) * pitch + width if rows else 0, what)
        return np.lib.stride_tricks.as_strided(memory, (rows, width), (pitch, 1))

    def _copy(self, kind: str, target: np.ndarray, source: Any, stream: Stream | None, host: np.ndarray | None = None) -> None:
        """Issue a copy. Without a stream, or with `host` memory that is not pinned, the caller waits for it."""
        pageable = stream is not None and host is not None and not self.ledger.is_pinned(host)
        if stream is not None and not pageable:
            self._issue([Work(np.copyto, (target, source), kind, target.size)], stream)
            return
        self._forbid_capture(f"a blocking {kind} copy" + (" (its host memory is not pinned)" if pageable else ""))
        self._run_waiting()
        self.traffic.transfer(kind, target.size, None)
        np.copyto(target, source)

    def launch(self, op: Launchable, args: Sequence[Any], stream: Stream) -> None:
        if self._debug:
            self._check_arguments(op, args)
        values = [a.view if type(a) is DeviceArray else a for a in args]
        # The hot path, some sixty times in a decode step of a small model: two lookups and a count.
        if self._direct and stream.handle in self._known:
            self.traffic.launches[op.name] += 1
            op.host(*values)
        else:
            self._issue([Work(op.host, tuple(values), op.name)], stream)

    def _check_arguments(self, op: Launchable, args: Sequence[Any]) -> None:
        """What a C launcher could take, in memory that is still allocated."""
        for i, a in enumerate(args):
            if isinstance(a, DeviceArray):
                self.ledger.resolve(a.ptr, a.nbytes, f"{op.name} argument {i}")
            elif a is not None and not isinstance(a, int | float):
                raise EngineFatal(f"{op.name} argument {i} is {type(a).__name__}, not DeviceArray, int, float, bool or None")

    def close(self) -> None:
        """Finish what was issued and let go of all memory. What was still allocated is in `leak_report()` until then."""
        self._run_waiting()
        self.ledger = Ledger(self.ledger.capacity, self.ledger.poison)


def _host_bytes(array: Any, what: str) -> np.ndarray:
    """The uint8 view of a contiguous host array."""
    if not isinstance(array, np.ndarray) or not array.flags.c_contiguous:
        raise ValueError(f"{what}: expected a C-contiguous NumPy array, got {type(array).__name__}")
    return array.reshape(-1).view(np.uint8)
