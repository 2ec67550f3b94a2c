"""How fast an operator is on a GPU: replays of a CUDA graph between events, over inputs that the cache cannot hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from statistics import median
from typing import Any

import numpy as np
from cuda.bindings import runtime as rt

from benchmarks.cases import Case
from benchmarks.shapes import QuickRng
from sparkrt.ops.operator import Operator
from sparkrt.runtime import dtypes
from sparkrt.runtime.array import DeviceArray
from sparkrt.runtime.backend import DevicePtr, Graph, GraphExec, Stream
from sparkrt.runtime.cuda import CudaBackend
from sparkrt.runtime.dtypes import DType

CACHE_MULTIPLE = 3  # bytes to go through before any is seen again, in sizes of the L2 cache
MOST_COPIES = 128
SHARED = 256 << 20  # bytes from which an input is shared by the copies of a case: it is larger than the cache by itself
REPEATS = 7
SECONDS = 0.01  # a repeat's least length


class DeviceBench:
    """Measures operators on one backend, with activations of one type."""

    def __init__(self, backend: CudaBackend, activation: DType = dtypes.bfloat16) -> None:
        self.backend = backend
        self.activation = activation
        self._stream = backend.default_stream
        self._kept: list[tuple[np.ndarray, DeviceArray]] = []  # large inputs of the last case: the next may have the same

    def copy_ceiling(self) -> float:
        """Bytes a second of a copy within the device, read and written both counted.

        Issued plainly: as the node of a graph the same copy ran at 2.77 instead of 4.3 TB/s.
        """
        nbytes = 1 << 30
        with self._memory() as alloc:
            a, b = alloc(nbytes), alloc(nbytes)
            noise = np.random.default_rng(0).integers(0, 256, nbytes >> 4, dtype=np.uint8)
            for part in range(16):
                self.backend.copy_h2d(a.offset(part * noise.nbytes), noise)
            return 2 * nbytes / self.time(lambda: self.backend.copy_d2d(b, a, nbytes, self._stream), 1, graph=False)

    @staticmethod
    def product_ceiling() -> float | None:
        """Operations a second of a large bf16 product of random numbers by PyTorch, where it is installed: a yardstick."""
        try:
            import torch  # noqa: TID251
        except ImportError:
            return None
        a, b, c = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        times = []
        for _ in range(12):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            torch.matmul(a, b, out=c)
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e-3)
        del a, b, c
        torch.cuda.empty_cache()
        return float(2 * 8192**3 / median(times[2:]))

    def measure(self, op: Operator, case: Case) -> tuple[float, float]:
        """(median seconds of a call, bytes it moves at least): the case's bytes, scaled to the types on the device."""
        first = case.make(QuickRng(0))  # type: ignore[arg-type]
        types = [self._type(kind, value) for kind, value in zip(op.argument_types(), first, strict=True)]
        sizes = [0 if t is None else value.size * t.itemsize for value, t in zip(first, types, strict=True)]
        # a workspace is no traffic that the operator is about
        real = [i for i, v in enumerate(first) if isinstance(v, np.ndarray) and types[i] is not dtypes.uint32]
        moved = case.bytes * sum(sizes[i] for i in real) / max(sum(first[i].nbytes for i in real), 1)
        copies = max(1, min(MOST_COPIES, int(CACHE_MULTIPLE * self.backend.properties.l2_bytes / max(moved, 1)) + 1))
        with self._memory() as alloc:
            self._keep(first, types, sizes)
            calls: list[list[Any]] = []
            payload: list[Any] = []
            for turn in range(copies):
                if not turn or max(sizes) >= SHARED:  # beside a shared input, the small ones choose which parts of it are used
                    values = first if not turn else case.make(QuickRng(turn))  # type: ignore[arg-type]
                    payload = [v if s >= SHARED else _payload(v, t) for v, t, s in zip(values, types, sizes, strict=True)]
                args: list[Any] = []
                for value, host, t, size in zip(first, payload, types, sizes, strict=True):
                    if t is None:
                        args.append(host)
                    elif size >= SHARED:
                        args.append(next(array for kept, array in self._kept if kept is value))
                    else:
                        ptr = alloc(max(size, 16))
                        if size:
                            self.backend.copy_h2d(ptr, host)
                        args.append(DeviceArray(ptr, t, value.shape))
                calls.append(args)

            def issue() -> None:
                for args in calls:
                    self.backend.launch(op, args, self._stream)

            issue()  # loads the kernel
            self.backend.synchronize()
            return self.time(issue, copies), moved

    def _keep(self, args: list[Any], types: list[DType | None], sizes: list[int]) -> None:
        """Bring the large arrays of a case to the device, those of the last case that it does not have away."""
        wanted = [(value, t, size) for value, t, size in zip(args, types, sizes, strict=True) if t and size >= SHARED]
        for value, array in list(self._kept):
            if not any(value is other for other, _, _ in wanted):
                self.backend.free(array.ptr)
                self._kept = [pair for pair in self._kept if pair[0] is not value]
        for value, t, size in wanted:
            if not any(value is kept for kept, _ in self._kept):
                array = DeviceArray(self.backend.alloc(size, "benchmark"), t, value.shape)
                self.backend.copy_h2d(array.ptr, _payload(value, t))
                self._kept.append((value, array))

    def _type(self, kind: str | None, value: Any) -> DType | None:
        if not isinstance(value, np.ndarray):
            return None
        return self.activation if kind == "A" else dtypes.from_numpy(value.dtype)

    def time(self, issue: Callable[[], Any], calls: int, graph: bool = True) -> float:
        """Median seconds of one of the `calls` calls that `issue` makes, in a captured graph unless told otherwise."""
        backend, stream = self.backend, self._stream
        made: list[Graph | GraphExec] = []
        run = issue
        if graph:
            backend.begin_capture(stream)
            issue()
            captured = backend.end_capture(stream)
            replay = backend.instantiate(captured)
            made += [replay, captured]
            run = partial(backend.launch_graph, replay, stream)
        start, end = (_checked(rt.cudaEventCreate()) for _ in range(2))

        def seconds(times: int) -> float:
            _checked(rt.cudaEventRecord(start, stream.handle))
            for _ in range(times):
                run()
            _checked(rt.cudaEventRecord(end, stream.handle))
            _checked(rt.cudaEventSynchronize(end))
            return float(_checked(rt.cudaEventElapsedTime(start, end))) * 1e-3

        try:
            seconds(1)
            times = max(1, int(SECONDS / max(seconds(1), 1e-6)))
            return median(seconds(times) for _ in range(REPEATS)) / (times * calls)
        finally:
            for event in (start, end):
                _checked(rt.cudaEventDestroy(event))
            for each in made:
                backend.destroy_graph(each)

    @contextmanager
    def _memory(self) -> Iterator[Callable[[int], DevicePtr]]:
        taken: list[DevicePtr] = []

        def alloc(nbytes: int) -> DevicePtr:
            taken.append(self.backend.alloc(nbytes, "benchmark"))
            return taken[-1]

        try:
            yield alloc
            self.backend.synchronize()
        finally:
            for ptr in taken:
                self.backend.free(ptr)


class GraphClock:
    """While entered, times the graphs that a model launches; `busy` is their share of the time from first to last."""

    def __init__(self, model: Any) -> None:
        self._backend = model._backend
        self._pairs: list[tuple[Any, Any]] = []
        self.busy = 0.0

    def __enter__(self) -> GraphClock:
        launch = self._backend.launch_graph

        def timed(graph: GraphExec, stream: Stream) -> None:
            pair = tuple(_checked(rt.cudaEventCreate()) for _ in range(2))
            _checked(rt.cudaEventRecord(pair[0], stream.handle))
            launch(graph, stream)
            _checked(rt.cudaEventRecord(pair[1], stream.handle))
            self._pairs.append(pair)

        self._backend.launch_graph = timed
        return self

    def __exit__(self, *_: object) -> None:
        del self._backend.launch_graph  # the class's own again
        self._backend.synchronize()
        spent = sum(_checked(rt.cudaEventElapsedTime(*pair)) for pair in self._pairs)
        self.busy = spent / _checked(rt.cudaEventElapsedTime(self._pairs[0][0], self._pairs[-1][1]))
        for event in chain.from_iterable(self._pairs):
            _checked(rt.cudaEventDestroy(event))


def _payload(value: Any, dtype: DType | None) -> Any:
    """What is copied to the device for a host array of a case."""
    if dtype is None or value.dtype == dtype.np:
        return value
    if dtype == dtypes.bfloat16:  # truncated: rounding gigabytes takes longer than all measurements
        return np.ascontiguousarray(value.reshape(-1).view(np.uint16)[1::2])
    return value.astype(dtype.np)


def _checked(result: tuple[Any, ...]) -> Any:
    error, *values = result
    if int(error):
        raise RuntimeError(error.name)
    return values[0] if values else None
