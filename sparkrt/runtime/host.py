"""`HostBackend`: the device that is NumPy memory. Default where there is no GPU, oracle, and test double.

As a double it is stricter than a device: pointers are checked against a ledger, traffic is counted, allocations can be made
to fail, and what CUDA would refuse during a capture is refused here. One thread at a time uses a backend.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import numpy as np

from sparkrt.errors import EngineFatal
from sparkrt.runtime import machine
from sparkrt.runtime.array import DeviceArray
from sparkrt.runtime.backend import (
    DeviceProperties,
    DevicePtr,
    Event,
    Graph,
    GraphExec,
    Launchable,
    MemoryFault,
    MemoryInfo,
    Stream,
)
from sparkrt.runtime.dtypes import DType
from sparkrt.runtime.ledger import Ledger
from sparkrt.runtime.timeline import DEFAULT_STREAM, Timeline
from sparkrt.runtime.traffic import Sync, Traffic


class HostBackend:
    """`GpuBackend` over NumPy memory.

    capacity: device bytes that may be allocated (None: what the machine gives).
    deferred: asynchronous work waits until something synchronizes with it (see `Timeline`); for tests of hazards.
    debug: poison freed memory and check every launch's arguments; default: SPARKRT_DEBUG.
    """

    def __init__(self, capacity: int | None = None, *, deferred: bool = False, debug: bool | None = None) -> None:
        self._debug = machine.debug_enabled() if debug is None else debug
        self.ledger = Ledger(capacity, poison=self._debug)
        self.traffic = Traffic()
        self._timeline = Timeline(self.traffic, deferred)
        self._streams = self._timeline.streams
        self._launches = self.traffic.launches
        self._properties = DeviceProperties(
            name=platform.processor() or platform.machine(),
            kind="host",
            compute_capability=None,
            multiprocessors=machine.usable_cores(),
            total_memory=machine.total_memory() if capacity is None else capacity,
            l2_bytes=machine.l2_bytes(),
            unified_memory=True,
        )

    @property
    def properties(self) -> DeviceProperties:
        return self._properties

    @property
    def default_stream(self) -> Stream:
        return DEFAULT_STREAM

    def memory_info(self) -> MemoryInfo:
        used = self.ledger.device_bytes
        free = machine.available_memory()
        if self.ledger.capacity is not None:
            free = min(free, self.ledger.capacity - used)
        return MemoryInfo(free, self._properties.total_memory, used)

    # what only the host has: the double's controls
    def fail_allocation(self, n: int) -> None:
        """Make the n-th allocation from now (1: the next) raise OutOfMemory, once. 0 takes it back."""
        self.ledger.fail_allocation(n)

    def leak_report(self) -> str:
        """What is still allocated, a line per label; empty when nothing is."""
        return self.ledger.leak_report()

    @contextmanager
    def count(self) -> Iterator[Traffic]:
        """Count what the block does: `with backend.count() as traffic: step()`, then ask `traffic`."""
        before, counted = self.traffic.snapshot(), Traffic()
        try:
            yield counted
        finally:
            counted.set_difference(self.traffic, before)

    # memory
    def alloc(self, nbytes: int, label: str = "") -> DevicePtr:
        return self._alloc(nbytes, label, pinned=False)

    def free(self, ptr: DevicePtr) -> None:
        self._free(ptr, pinned=False)

    def alloc_pinned(self, nbytes: int, label: str = "") -> DevicePtr:
        return self._alloc(nbytes, label, pinned=True)

    def free_pinned(self, ptr: DevicePtr) -> None:
        self._free(ptr, pinned=True)

    def pinned_view(self, ptr: DevicePtr, nbytes: int) -> np.ndarray:
        return self.ledger.resolve(ptr, nbytes, "pinned view", pinned=True)

    def array(self, ptr: DevicePtr, dtype: DType, shape: Sequence[int]) -> DeviceArray:
        if ptr.address % dtype.itemsize:
            raise MemoryFault(f"array of {dtype} at {ptr.address:#x}: not aligned to {dtype.itemsize} bytes")
        memory = self.ledger.resolve(ptr, prod(shape) * dtype.itemsize, f"array {dtype}{list(shape)}")
        return DeviceArray(ptr, dtype, shape, memory.view(dtype.np).reshape(shape))

    def empty(self, shape: Sequence[int], dtype: DType, label: str = "") -> DeviceArray:
        return self.array(self.alloc(prod(shape) * dtype.itemsize, label), dtype, shape)

    # copies
    def copy_h2d(self, dst: DevicePtr, src: Any, stream: Stream | None = None) -> None:
        source = _host_bytes(src, "copy_h2d source")
        target = self.ledger.resolve(dst, source.nbytes, "copy_h2d")
        pageable = stream is not None and not self.ledger.is_pinned(source)
        self._timeline.copy("h2d", source.nbytes, (np.copyto, (target, source)), stream, pageable)

    def copy_d2h(self, dst: Any, src: DevicePtr, stream: Stream | None = None) -> None:
        target = _host_bytes(dst, "copy_d2h target")
        if not target.flags.writeable:
            raise ValueError("copy_d2h target: the array is read-only")
        source = self.ledger.resolve(src, target.nbytes, "copy_d2h")
        pageable = stream is not None and not self.ledger.is_pinned(target)
        self._timeline.copy("d2h", target.nbytes, (np.copyto, (target, source)), stream, pageable)

    def copy_d2d(self, dst: DevicePtr, src: DevicePtr, nbytes: int, stream: Stream | None = None) -> None:
        source = self.ledger.resolve(src, nbytes, "copy_d2d source")
        target = self.ledger.resolve(dst, nbytes, "copy_d2d target")
        if abs(dst.address - src.address) < nbytes:
            raise MemoryFault(f"copy_d2d of {nbytes:,} bytes from {src.address:#x} to {dst.address:#x} overlaps itself")
        self._timeline.copy("d2d", nbytes, (np.copyto, (target, source)), stream)

    def copy_d2d_2d(
        self, dst: DevicePtr, dst_pitch: int, src: DevicePtr, src_pitch: int, width: int, rows: int, stream: Stream | None = None
    ) -> None:
        if width > min(dst_pitch, src_pitch) or min(width, rows) < 0:
            raise ValueError(f"copy_d2d_2d: {rows} rows of {width} bytes with pitches {dst_pitch} and {src_pitch}")
        source = self._pitched(src, src_pitch, width, rows, "copy_d2d_2d source")
        target = self._pitched(dst, dst_pitch, width, rows, "copy_d2d_2d target")
        if np.shares_memory(target, source):
            raise MemoryFault(f"copy_d2d_2d from {src.address:#x} to {dst.address:#x} overlaps itself")
        self._timeline.copy("2d", width * rows, (np.copyto, (target, source)), stream)

    def memset(self, ptr: DevicePtr, value: int, nbytes: int, stream: Stream | None = None) -> None:
        if not 0 <= value <= 0xFF:
            raise ValueError(f"memset: {value} is not a byte")
        target = self.ledger.resolve(ptr, nbytes, "memset")
        self._timeline.copy("memset", nbytes, (np.copyto, (target, np.uint8(value))), stream)

    # streams and events
    def create_stream(self, name: str = "") -> Stream:
        return self._timeline.create_stream(name)

    def destroy_stream(self, stream: Stream) -> None:
        self._timeline.destroy_stream(stream)

    def create_event(self) -> Event:
        return self._timeline.create_event()

    def destroy_event(self, event: Event) -> None:
        self._timeline.destroy_event(event)

    def record_event(self, event: Event, stream: Stream) -> None:
        self._timeline.record_event(event, stream)

    def stream_wait_event(self, stream: Stream, event: Event) -> None:
        """Raises EngineFatal if `event` was never recorded: CUDA would let it pass, and the order would be a matter of luck."""
        self._timeline.wait_event(stream, event)

    def event_query(self, event: Event) -> bool:
        return self._timeline.query_event(event)

    def event_synchronize(self, event: Event) -> None:
        stream = self._timeline.synchronize_event(event)
        self.traffic.syncs[Sync("event", stream)] += 1

    def synchronize(self, stream: Stream | None = None) -> None:
        """Wait for a stream, or for the device. Deferred work of other streams runs with it: issue order is kept."""
        self._timeline.forbid_capture("waiting on the host")
        if stream is not None:
            self._timeline.check_stream(stream)
        self._timeline.run_pending()
        self.traffic.syncs[Sync("device" if stream is None else "stream", stream)] += 1

    # graphs
    def begin_capture(self, stream: Stream) -> None:
        self._timeline.begin_capture(stream)

    def end_capture(self, stream: Stream) -> Graph:
        return self._timeline.end_capture(stream)

    def is_capturing(self, stream: Stream) -> bool:
        return self._timeline.is_capturing(stream)

    def instantiate(self, graph: Graph) -> GraphExec:
        return self._timeline.instantiate(graph)

    def launch_graph(self, graph: GraphExec, stream: Stream) -> None:
        self._timeline.launch_graph(graph, stream)

    def destroy_graph(self, graph: Graph | GraphExec) -> None:
        self._timeline.destroy_graph(graph)

    # work
    def launch(self, op: Launchable, args: Sequence[Any], stream: Stream) -> None:
        if self._debug:
            self._check_arguments(op, args)
        values = [a.view if type(a) is DeviceArray else a for a in args]
        # The hot path, some sixty times in a decode step of a small model: two lookups and a count.
        if self._timeline.direct and stream.handle in self._streams:
            self._launches[op.name] += 1
            op.host(*values)
        else:
            self._timeline.launch(op.name, (op.host, tuple(values)), stream)

    def close(self) -> None:
        """Finish what was issued and let go of all memory. What was still allocated is in `leak_report()` until then."""
        self._timeline.run_pending()
        self.ledger.clear()

    def _alloc(self, nbytes: int, label: str, pinned: bool) -> DevicePtr:
        self._timeline.forbid_capture(f"allocating {label!r}")
        block = self.ledger.take(nbytes, label, pinned)
        self.traffic.allocations += 1
        return DevicePtr(block.address)

    def _free(self, ptr: DevicePtr, pinned: bool) -> None:
        self._timeline.forbid_capture("freeing memory")
        self._timeline.run_pending()  # cudaFree waits for the device
        self.ledger.give(ptr, pinned)
        self.traffic.frees += 1

    def _pitched(self, ptr: DevicePtr, pitch: int, width: int, rows: int, what: str) -> np.ndarray:
        memory = self.ledger.resolve(ptr, (rows - 1) * pitch + width if rows else 0, what)
        return np.lib.stride_tricks.as_strided(memory, (rows, width), (pitch, 1))

    def _check_arguments(self, op: Launchable, args: Sequence[Any]) -> None:
        """What a C launcher could take, in memory that is still allocated."""
        for i, a in enumerate(args):
            if isinstance(a, DeviceArray):
                self.ledger.resolve(a.ptr, a.nbytes, f"{op.name} argument {i}")
            elif a is not None and not isinstance(a, int | float):
                raise EngineFatal(f"{op.name} argument {i} is {type(a).__name__}, not DeviceArray, int, float, bool or None")


def _host_bytes(array: Any, what: str) -> np.ndarray:
    """The uint8 view of a contiguous host array."""
    if not isinstance(array, np.ndarray) or not array.flags.c_contiguous:
        raise ValueError(f"{what}: expected a C-contiguous NumPy array, got {type(array).__name__}")
    return array.reshape(-1).view(np.uint8)
