"""`GpuBackend`: the one door to a device. Shaped for CUDA; `HostBackend` (NumPy memory) and `CudaBackend` implement it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from sparkrt.errors import EngineFatal, SparkrtError

if TYPE_CHECKING:
    from sparkrt.runtime.array import DeviceArray
    from sparkrt.runtime.dtypes import DType


class OutOfMemory(SparkrtError):
    """An allocation failed; nothing was changed."""


class MemoryFault(EngineFatal):
    """A copy or free outside an allocation, or a second free: a bug in sparkrt, never the user's."""


class CaptureError(SparkrtError):
    """Something that a graph cannot hold was asked for during a capture. The capture is lost, the device is not: run eagerly."""


@dataclass(frozen=True, slots=True, order=True)
class DevicePtr:
    """An address on the device (or, on the host backend, of NumPy memory). Knows nothing of types."""

    address: int

    def offset(self, nbytes: int) -> DevicePtr:
        return DevicePtr(self.address + nbytes)


@dataclass(frozen=True, slots=True)
class Stream:
    """An ordered queue of device work. `handle` is the backend's own (a cudaStream_t); 0 is the default stream."""

    handle: int
    name: str = ""


@dataclass(frozen=True, slots=True)
class Event:
    handle: int


@dataclass(frozen=True, slots=True)
class Graph:
    """A captured sequence of launches and copies, not yet runnable."""

    handle: int
    nodes: int


@dataclass(frozen=True, slots=True)
class GraphExec:
    """An instantiated graph: `launch_graph` replays it with the addresses it was captured with."""

    handle: int
    nodes: int


@dataclass(frozen=True, slots=True)
class DeviceProperties:
    name: str
    kind: str  # "host" or "cuda"
    compute_capability: tuple[int, int] | None
    multiprocessors: int
    total_memory: int  # bytes
    l2_bytes: int
    unified_memory: bool


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """Bytes. `free` is what the device says now; `allocated` what this backend handed out.

    `unified`: the GPU's memory is the system's, and what one takes the other lacks.
    """

    free: int
    total: int
    allocated: int
    unified: bool = False


class Launchable(Protocol):
    """What `launch` needs of an operator: its name, the host function and the symbol of its C launcher."""

    @property
    def name(self) -> str: ...
    @property
    def host(self) -> Callable[..., None]: ...
    @property
    def cuda(self) -> str | None: ...


@runtime_checkable
class GpuBackend(Protocol):
    """Everything the rooms above may ask of a device. Copies come blocking and, with a stream, asynchronous."""

    @property
    def properties(self) -> DeviceProperties: ...
    @property
    def default_stream(self) -> Stream: ...
    def memory_info(self) -> MemoryInfo: ...
    # memory: `pinned_view` is a writable NumPy uint8 view of pinned host memory, `array` a typed view of device memory,
    # bounds-checked against its allocation, and `empty` allocates and views in one call
    def alloc(self, nbytes: int, label: str = "") -> DevicePtr: ...
    def free(self, ptr: DevicePtr) -> None: ...
    def alloc_pinned(self, nbytes: int, label: str = "") -> DevicePtr: ...
    def free_pinned(self, ptr: DevicePtr) -> None: ...
    def pinned_view(self, ptr: DevicePtr, nbytes: int) -> Any: ...
    def array(self, ptr: DevicePtr, dtype: DType, shape: Sequence[int]) -> DeviceArray: ...
    def empty(self, shape: Sequence[int], dtype: DType, label: str = "") -> DeviceArray: ...
    # `suspend` gives the memory of an allocation back while its address stays taken, and says how many bytes that were (0: this
    # backend cannot, or not for one so small); `resume` puts memory behind it again, contents undefined, or raises OutOfMemory
    def suspend(self, ptr: DevicePtr) -> int: ...
    def resume(self, ptr: DevicePtr) -> None: ...
    # copies; `stream=None` blocks until done. Byte counts always.
    def copy_h2d(self, dst: DevicePtr, src: Any, stream: Stream | None = None) -> None: ...
    def copy_d2h(self, dst: Any, src: DevicePtr, stream: Stream | None = None) -> None: ...
    def copy_d2d(self, dst: DevicePtr, src: DevicePtr, nbytes: int, stream: Stream | None = None) -> None: ...
    def copy_d2d_2d(
        self, dst: DevicePtr, dst_pitch: int, src: DevicePtr, src_pitch: int, width: int, rows: int, stream: Stream | None = None
    ) -> None: ...
    def memset(self, ptr: DevicePtr, value: int, nbytes: int, stream: Stream | None = None) -> None: ...
    # streams and events
    def create_stream(self, name: str = "") -> Stream: ...
    def destroy_stream(self, stream: Stream) -> None: ...
    def create_event(self) -> Event: ...
    def destroy_event(self, event: Event) -> None: ...
    def record_event(self, event: Event, stream: Stream) -> None: ...
    def stream_wait_event(self, stream: Stream, event: Event) -> None: ...
    def event_query(self, event: Event) -> bool: ...
    def event_synchronize(self, event: Event) -> None: ...
    def synchronize(self, stream: Stream | None = None) -> None: ...
    # graphs
    def begin_capture(self, stream: Stream) -> None: ...
    def end_capture(self, stream: Stream) -> Graph: ...
    def is_capturing(self, stream: Stream) -> bool: ...
    def instantiate(self, graph: Graph) -> GraphExec: ...
    def launch_graph(self, graph: GraphExec, stream: Stream) -> None: ...
    def destroy_graph(self, graph: Graph | GraphExec) -> None: ...
    # work: run `op` with `args` (DeviceArray, int, float, bool or None), in stream order
    def launch(self, op: Launchable, args: Sequence[Any], stream: Stream) -> None: ...
    def close(self) -> None: ...
