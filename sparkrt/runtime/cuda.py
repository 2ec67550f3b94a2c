"""`CudaBackend`: the CUDA runtime through `cuda-python`, and the project's own kernel library.

Errors carry CUDA's name for them and the operation that met them: OutOfMemory, CaptureError (a graph cannot hold it; run
eagerly), and for everything else, sticky errors among them, CudaError, which ends the engine.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right, insort
from collections.abc import Sequence
from contextlib import suppress
from math import prod
from typing import Any

import numpy as np

from sparkrt.errors import EngineFatal
from sparkrt.runtime import machine
from sparkrt.runtime.array import DeviceArray
from sparkrt.runtime.backend import (
    CaptureError,
    DeviceProperties,
    DevicePtr,
    Event,
    Graph,
    GraphExec,
    Launchable,
    MemoryFault,
    MemoryInfo,
    OutOfMemory,
    Stream,
)
from sparkrt.runtime.driver import LibCuda, preflight
from sparkrt.runtime.dtypes import DType
from sparkrt.runtime.kernels import KernelLibrary
from sparkrt.runtime.ledger import address_of
from sparkrt.runtime.virtual import VirtualMemory

_OUT_OF_MEMORY = 2
_NOT_READY = 600
_MAX_PITCH = 2**31 - 1  # bytes
_COPIES = ("HostToDevice", "DeviceToHost", "DeviceToDevice")
_CAPTURE = range(900, 909)  # cudaErrorStreamCaptureUnsupported … cudaErrorStreamCaptureWrongThread


class CudaError(EngineFatal):
    """A CUDA call failed: `name` is CUDA's, `operation` ours."""

    def __init__(self, name: str, operation: str) -> None:
        super().__init__(f"{operation}: {name}")
        self.name = name
        self.operation = operation


class _Blocks:
    """Live allocations of one kind, by address."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.size: dict[int, int] = {}
        self._starts: list[int] = []

    def add(self, address: int, nbytes: int) -> DevicePtr:
        self.size[address] = nbytes
        insort(self._starts, address)
        return DevicePtr(address)

    def remove(self, address: int) -> None:
        if self.size.pop(address, None) is None:
            raise MemoryFault(f"free of {address:#x}: no {self.kind} allocation starts there")
        del self._starts[bisect_right(self._starts, address) - 1]

    def hold(self, address: int, nbytes: int) -> bool:
        """Whether [address, address + nbytes) lies in one of them."""
        i = bisect_right(self._starts, address) - 1
        return i >= 0 and address + nbytes <= self._starts[i] + self.size[self._starts[i]]


class CudaBackend:
    """`GpuBackend` on one CUDA device, for use by one thread at a time. Raises CudaUnavailable, saying what is missing.

    debug: wait after every launch, so that an error names the operator that made it; default: SPARKRT_DEBUG.
    sleepable: allocations can be suspended, those that fill 2 MiB granules well; without it, none can.
    """

    def __init__(self, device: int = 0, *, debug: bool | None = None, sleepable: bool = False) -> None:
        preflight(device, LibCuda())
        from cuda.bindings import runtime

        self._rt = rt = runtime
        kind = rt.cudaMemcpyKind  # whose members take a while to look up
        self._h2d, self._d2h, self._d2d = (getattr(kind, f"cudaMemcpy{name}") for name in _COPIES)
        self._debug = machine.debug_enabled() if debug is None else debug
        self._check(rt.cudaSetDevice(device), "cudaSetDevice")
        p = self._check(rt.cudaGetDeviceProperties(device), "cudaGetDeviceProperties")
        self._properties = DeviceProperties(
            name=p.name.decode().rstrip("\0"),
            kind="cuda",
            compute_capability=(p.major, p.minor),
            multiprocessors=p.multiProcessorCount,
            total_memory=p.totalGlobalMem,
            l2_bytes=p.l2CacheSize,
            unified_memory=bool(p.integrated),
        )
        self._kernels = KernelLibrary()
        self._default = self.create_stream("default")
        self._device = _Blocks("device")
        self._virtual = VirtualMemory(device, self._check) if sleepable else None
        self._pinned = _Blocks("pinned")
        self._capturing: set[int] = set()
        self._graphs: dict[int, Any] = {}

    @property
    def properties(self) -> DeviceProperties:
        return self._properties

    @property
    def default_stream(self) -> Stream:
        return self._default

    def memory_info(self) -> MemoryInfo:
        free, total = self._check(self._rt.cudaMemGetInfo(), "cudaMemGetInfo")
        unified = self._properties.unified_memory
        if unified:  # CUDA does not count what the page cache would give back
            free = min(total, machine.available_memory())
        suspended = self._virtual.suspended if self._virtual is not None else 0
        return MemoryInfo(free, total, sum(self._device.size.values()) - suspended, unified)

    # memory
    def alloc(self, nbytes: int, label: str = "") -> DevicePtr:
        self._forbid_capture(f"allocating {label!r}")
        what = f"allocation {label!r} of {nbytes:,} bytes"
        if self._virtual is not None and self._virtual.suits(nbytes):
            return self._device.add(self._virtual.alloc(nbytes, what), nbytes)
        address = self._check(self._rt.cudaMalloc(max(nbytes, 1)), what)
        return self._device.add(int(address), nbytes)

    def free(self, ptr: DevicePtr) -> None:
        self._forbid_capture("freeing memory")
        self._device.remove(ptr.address)
        if self._virtual is not None and self._virtual.holds(ptr.address):
            self.synchronize()  # as cudaFree does
            self._virtual.free(ptr.address)
        else:
            self._check(self._rt.cudaFree(ptr.address), "cudaFree")

    def suspend(self, ptr: DevicePtr) -> int:
        self._forbid_capture("suspending memory")
        if self._virtual is None:
            return 0
        self.synchronize()
        return self._virtual.suspend(ptr.address)

    def resume(self, ptr: DevicePtr) -> None:
        self._forbid_capture("resuming memory")
        if self._virtual is not None:
            nbytes = self._device.size[ptr.address]
            self._virtual.resume(ptr.address, f"resuming {nbytes:,} bytes")

    def alloc_pinned(self, nbytes: int, label: str = "") -> DevicePtr:
        self._forbid_capture(f"allocating {label!r}")
        address = self._check(self._rt.cudaMallocHost(max(nbytes, 1)), f"pinned allocation {label!r} of {nbytes:,} bytes")
        return self._pinned.add(int(address), nbytes)

    def free_pinned(self, ptr: DevicePtr) -> None:
        self._forbid_capture("freeing memory")
        self._pinned.remove(ptr.address)
        self._check(self._rt.cudaFreeHost(ptr.address), "cudaFreeHost")

    def pinned_view(self, ptr: DevicePtr, nbytes: int) -> np.ndarray:
        if not self._pinned.hold(ptr.address, nbytes):
            raise MemoryFault(f"pinned view of {nbytes:,} bytes at {ptr.address:#x} is not inside a pinned allocation")
        return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(ptr.address))

    def array(self, ptr: DevicePtr, dtype: DType, shape: Sequence[int]) -> DeviceArray:
        nbytes = prod(shape) * dtype.itemsize
        if ptr.address % dtype.itemsize:
            raise MemoryFault(f"array of {dtype} at {ptr.address:#x}: not aligned to {dtype.itemsize} bytes")
        if not self._device.hold(ptr.address, nbytes):
            raise MemoryFault(f"array {dtype}{list(shape)} at {ptr.address:#x} is not inside an allocation")
        return DeviceArray(ptr, dtype, shape)

    def empty(self, shape: Sequence[int], dtype: DType, label: str = "") -> DeviceArray:
        return DeviceArray(self.alloc(prod(shape) * dtype.itemsize, label), dtype, shape)

    # copies
    def copy_h2d(self, dst: DevicePtr, src: Any, stream: Stream | None = None) -> None:
        address, nbytes = self._host_memory(src, stream, "copy_h2d source")
        self._copy("copy_h2d", stream, self._rt.cudaMemcpyAsync, dst.address, address, nbytes, self._h2d)

    def copy_d2h(self, dst: Any, src: DevicePtr, stream: Stream | None = None) -> None:
        address, nbytes = self._host_memory(dst, stream, "copy_d2h target")
        if not dst.flags.writeable:
            raise ValueError("copy_d2h target: the array is read-only")
        self._copy("copy_d2h", stream, self._rt.cudaMemcpyAsync, address, src.address, nbytes, self._d2h)

    def copy_d2d(self, dst: DevicePtr, src: DevicePtr, nbytes: int, stream: Stream | None = None) -> None:
        self._copy("copy_d2d", stream, self._rt.cudaMemcpyAsync, dst.address, src.address, nbytes, self._d2d)

    def copy_d2d_2d(
        self, dst: DevicePtr, dst_pitch: int, src: DevicePtr, src_pitch: int, width: int, rows: int, stream: Stream | None = None
    ) -> None:
        if width > min(dst_pitch, src_pitch) or min(width, rows) < 0:
            raise ValueError(f"copy_d2d_2d: {rows} rows of {width} bytes with pitches {dst_pitch} and {src_pitch}")
        if (
            max(dst_pitch, src_pitch) > _MAX_PITCH
        ):  # the pages of a block in a large cache lie farther apart than CUDA's copy can go
            for row in range(rows):
                self.copy_d2d(dst.offset(row * dst_pitch), src.offset(row * src_pitch), width, stream)
            return
        shape = dst.address, dst_pitch, src.address, src_pitch, width, rows
        self._copy("copy_d2d_2d", stream, self._rt.cudaMemcpy2DAsync, *shape, self._d2d)

    def memset(self, ptr: DevicePtr, value: int, nbytes: int, stream: Stream | None = None) -> None:
        if not 0 <= value <= 0xFF:
            raise ValueError(f"memset: {value} is not a byte")
        self._copy("memset", stream, self._rt.cudaMemsetAsync, ptr.address, value, nbytes)

    def _copy(self, what: str, stream: Stream | None, function: Any, *args: Any) -> None:
        """Without a stream the copy comes after everything issued so far, on any stream, and the host waits for it."""
        if stream is not None:
            self._check(function(*args, stream.handle), what)
            return
        self._forbid_capture(f"a blocking {what}")
        self._check(self._rt.cudaDeviceSynchronize(), what)
        self._check(function(*args, self._default.handle), what)
        self._check(self._rt.cudaStreamSynchronize(self._default.handle), what)

    def _host_memory(self, array: Any, stream: Stream | None, what: str) -> tuple[int, int]:
        if not isinstance(array, np.ndarray) or not array.flags.c_contiguous:
            raise ValueError(f"{what}: expected a C-contiguous NumPy array, got {type(array).__name__}")
        address = address_of(array)
        if self._capturing and stream is not None and not self._pinned.hold(address, array.nbytes):
            raise CaptureError(f"{what} is not pinned: a graph would read it when it is replayed")
        return address, array.nbytes

    # streams and events
    def create_stream(self, name: str = "") -> Stream:
        created = self._check(self._rt.cudaStreamCreateWithFlags(self._rt.cudaStreamNonBlocking), "cudaStreamCreate")
        return Stream(int(created), name)

    def destroy_stream(self, stream: Stream) -> None:
        self._check(self._rt.cudaStreamDestroy(stream.handle), "cudaStreamDestroy")

    def create_event(self) -> Event:
        created = self._check(self._rt.cudaEventCreateWithFlags(self._rt.cudaEventDisableTiming), "cudaEventCreate")
        return Event(int(created))

    def destroy_event(self, event: Event) -> None:
        self._check(self._rt.cudaEventDestroy(event.handle), "cudaEventDestroy")

    def record_event(self, event: Event, stream: Stream) -> None:
        self._check(self._rt.cudaEventRecord(event.handle, stream.handle), "cudaEventRecord")

    def stream_wait_event(self, stream: Stream, event: Event) -> None:
        self._check(self._rt.cudaStreamWaitEvent(stream.handle, event.handle, 0), "cudaStreamWaitEvent")

    def event_query(self, event: Event) -> bool:
        (error,) = self._rt.cudaEventQuery(event.handle)
        if int(error) == _NOT_READY:
            return False
        self._check((error,), "cudaEventQuery")
        return True

    def event_synchronize(self, event: Event) -> None:
        self._check(self._rt.cudaEventSynchronize(event.handle), "cudaEventSynchronize")

    def synchronize(self, stream: Stream | None = None) -> None:
        self._forbid_capture("waiting on the host")
        if stream is None:
            self._check(self._rt.cudaDeviceSynchronize(), "cudaDeviceSynchronize")
        else:
            self._check(self._rt.cudaStreamSynchronize(stream.handle), "cudaStreamSynchronize")

    # graphs
    def begin_capture(self, stream: Stream) -> None:
        self._forbid_capture("a second capture")
        mode = self._rt.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        self._check(self._rt.cudaStreamBeginCapture(stream.handle, mode), "cudaStreamBeginCapture")
        self._capturing.add(stream.handle)

    def end_capture(self, stream: Stream) -> Graph:
        """Close the capture. A broken one raises CaptureError here too, and leaves nothing behind."""
        if stream.handle not in self._capturing:
            raise CaptureError(f"no capture began on {stream}")
        self._capturing.discard(stream.handle)
        graph = self._check(self._rt.cudaStreamEndCapture(stream.handle), "cudaStreamEndCapture")
        _, nodes = self._check(self._rt.cudaGraphGetNodes(graph, 0), "cudaGraphGetNodes")
        self._graphs[int(graph)] = graph
        return Graph(int(graph), nodes)

    def is_capturing(self, stream: Stream) -> bool:
        return stream.handle in self._capturing

    def instantiate(self, graph: Graph) -> GraphExec:
        executable = self._check(self._rt.cudaGraphInstantiate(self._native(graph), 0), "cudaGraphInstantiate")
        self._graphs[int(executable)] = executable
        return GraphExec(int(executable), graph.nodes)

    def launch_graph(self, graph: GraphExec, stream: Stream) -> None:
        self._check(self._rt.cudaGraphLaunch(self._native(graph), stream.handle), "cudaGraphLaunch")

    def destroy_graph(self, graph: Graph | GraphExec) -> None:
        native = self._native(graph)
        del self._graphs[graph.handle]
        destroy = self._rt.cudaGraphDestroy if isinstance(graph, Graph) else self._rt.cudaGraphExecDestroy
        self._check(destroy(native), "destroying a graph")

    def _native(self, graph: Graph | GraphExec) -> Any:
        native = self._graphs.get(graph.handle)
        if native is None:
            raise EngineFatal(f"{graph} is not a graph of this backend, or was destroyed")
        return native

    # work
    def launch(self, op: Launchable, args: Sequence[Any], stream: Stream) -> None:
        status = self._kernels.launch(op, args, stream.handle)
        if status:
            self._check((self._rt.cudaError_t(status),), f"launch of {op.name}")
        if self._debug and not self._capturing:
            self._check(self._rt.cudaStreamSynchronize(stream.handle), f"operator {op.name}")

    def close(self) -> None:
        """Finish what was issued and free everything. After an error that CUDA calls sticky there is nothing left to free."""
        with suppress(CudaError):
            self.synchronize()
            for handle in list(self._graphs):
                kind = type(self._graphs[handle]).__name__
                self.destroy_graph(GraphExec(handle, 0) if "Exec" in kind else Graph(handle, 0))
            for address in list(self._device.size):
                self.free(DevicePtr(address))
            for address in list(self._pinned.size):
                self.free_pinned(DevicePtr(address))
            self.destroy_stream(self._default)

    def _forbid_capture(self, what: str) -> None:
        if self._capturing:
            raise CaptureError(f"{what} is not possible while a stream is capturing")

    def _check(self, result: tuple[Any, ...], operation: str) -> Any:
        """The values of a call, or its error as an exception."""
        error = result[0]
        if error:
            self._rt.cudaGetLastError()  # told here: the next call must not tell it again
            if int(error) == _OUT_OF_MEMORY:
                raise OutOfMemory(f"{operation}: the device has no memory left")
            if int(error) in _CAPTURE:
                raise CaptureError(f"{operation}: {error.name}")
            raise CudaError(error.name, operation)
        return result[1] if len(result) == 2 else result[1:]
