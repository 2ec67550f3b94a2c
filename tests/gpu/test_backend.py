"""The CUDA backend on a device: memory, copies, order, graphs, and errors with names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from sparkrt.errors import EngineFatal
from sparkrt.ops.norm import ADD, RMS_NORM
from sparkrt.runtime import dtypes
from sparkrt.runtime.array import DeviceArray
from sparkrt.runtime.backend import CaptureError, MemoryFault, OutOfMemory
from sparkrt.runtime.cuda import CudaBackend
from sparkrt.runtime.kernels import UnsupportedCall

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]


def sent(backend: CudaBackend, values: np.ndarray) -> DeviceArray:
    array = backend.empty(values.shape, dtypes.from_numpy(values.dtype), "test")
    backend.copy_h2d(array.ptr, values)
    return array


def back(backend: CudaBackend, array: DeviceArray) -> np.ndarray:
    values = np.empty(array.shape, array.dtype.np)
    backend.copy_d2h(values, array.ptr)
    return values


def test_properties_and_memory(backend: CudaBackend) -> None:
    p, before = backend.properties, backend.memory_info()
    assert p.kind == "cuda"
    assert p.name
    assert p.compute_capability is not None
    assert p.compute_capability >= (8, 0)
    assert p.multiprocessors > 1
    assert p.l2_bytes > 0
    ptr = backend.alloc(1 << 26, "block")
    after = backend.memory_info()
    assert after.allocated - before.allocated == 1 << 26
    assert after.free < before.free
    backend.free(ptr)
    assert backend.memory_info().allocated == before.allocated


@pytest.mark.parametrize("dtype", dtypes.ALL, ids=str)
def test_every_dtype_round_trips(backend: CudaBackend, dtype: dtypes.DType) -> None:
    values = np.arange(6).reshape(2, 3).astype(dtype.np)
    array = sent(backend, values)
    np.testing.assert_array_equal(back(backend, array), values)
    backend.free(array.ptr)


def test_copies_within_the_device(backend: CudaBackend) -> None:
    x, y = sent(backend, np.arange(24, dtype=np.int32).reshape(4, 6)), sent(backend, np.zeros((4, 6), np.int32))
    backend.copy_d2d(y.ptr, x.ptr, 48)
    np.testing.assert_array_equal(back(backend, y)[:2], back(backend, x)[:2])
    backend.memset(y.ptr, 0, y.nbytes)
    backend.copy_d2d_2d(y.ptr.offset(4), 24, x.ptr, 24, 8, 4)
    np.testing.assert_array_equal(back(backend, y)[:, 1:3], back(backend, x)[:, :2])
    assert not back(backend, y)[:, 3:].any()
    for array in (x, y):
        backend.free(array.ptr)


def test_memory_is_checked(backend: CudaBackend) -> None:
    ptr, pinned = backend.alloc(64, "small"), backend.alloc_pinned(64, "small")
    backend.array(ptr.offset(32), dtypes.float32, (8,))
    for wrong in (
        lambda: backend.array(ptr, dtypes.float32, (17,)),
        lambda: backend.array(ptr.offset(2), dtypes.float32, (1,)),
        lambda: backend.pinned_view(pinned, 65),
        lambda: backend.free(pinned),
        lambda: backend.free_pinned(ptr),
    ):
        with pytest.raises(MemoryFault):
            wrong()
    backend.free(ptr)
    with pytest.raises(MemoryFault):
        backend.free(ptr)
    backend.free_pinned(pinned)


def test_running_out_of_memory_changes_nothing(backend: CudaBackend) -> None:
    before = backend.memory_info().allocated
    with pytest.raises(OutOfMemory, match="'weights'"):
        backend.alloc(1 << 50, "weights")
    assert backend.memory_info().allocated == before
    array = sent(backend, np.ones(4, np.float32))
    assert back(backend, array).sum() == 4
    backend.free(array.ptr)


def test_streams_wait_for_events(backend: CudaBackend) -> None:
    """A pinned copy on one stream, a launch on another after it, and the result back on the first."""
    first, second = backend.create_stream("first"), backend.create_stream("second")
    copied, added = backend.create_event(), backend.create_event()
    n = 1 << 22
    pinned = backend.alloc_pinned(4 * n, "values")
    values = backend.pinned_view(pinned, 4 * n).view(np.float32).reshape(1, n)
    values[:] = 2
    x, y = sent(backend, np.zeros((1, n), np.float32)), sent(backend, np.ones((1, n), np.float32))
    backend.copy_h2d(x.ptr, values, first)
    backend.record_event(copied, first)
    backend.stream_wait_event(second, copied)
    backend.launch(ADD, [x, y], second)
    backend.record_event(added, second)
    backend.stream_wait_event(first, added)
    backend.copy_d2h(values, x.ptr, first)
    backend.record_event(copied, first)
    backend.event_synchronize(copied)
    assert backend.event_query(copied)
    assert backend.event_query(added)
    assert (values == 3).all()
    for array in (x, y):
        backend.free(array.ptr)
    backend.free_pinned(pinned)
    for event in (copied, added):
        backend.destroy_event(event)
    for stream in (first, second):
        backend.destroy_stream(stream)


def test_a_graph_replays_what_was_captured(backend: CudaBackend) -> None:
    stream = backend.create_stream("captured")
    x, y = sent(backend, np.zeros((3, 64), np.float32)), sent(backend, np.ones((3, 64), np.float32))
    backend.begin_capture(stream)
    assert backend.is_capturing(stream)
    for _ in range(3):
        backend.launch(ADD, [x, y], stream)
    graph = backend.end_capture(stream)
    assert graph.nodes == 3
    assert not back(backend, x).any(), "a capture runs nothing"
    executable = backend.instantiate(graph)
    backend.destroy_graph(graph)
    for _ in range(2):
        backend.launch_graph(executable, stream)
    backend.synchronize(stream)
    assert (back(backend, x) == 6).all()
    backend.copy_h2d(y.ptr, np.full((3, 64), 2, np.float32))
    backend.launch_graph(executable, stream)
    backend.synchronize(stream)
    assert (back(backend, x) == 12).all(), "a replay reads what its arrays hold then"
    backend.destroy_graph(executable)
    with pytest.raises(EngineFatal, match="destroyed"):
        backend.launch_graph(executable, stream)
    for array in (x, y):
        backend.free(array.ptr)
    backend.destroy_stream(stream)


def test_what_a_graph_cannot_hold_is_refused(backend: CudaBackend) -> None:
    stream = backend.create_stream("captured")
    x = sent(backend, np.zeros((1, 8), np.float32))
    backend.begin_capture(stream)
    for wrong in (
        lambda: backend.alloc(8),
        lambda: backend.free(x.ptr),
        lambda: backend.synchronize(),
        lambda: backend.copy_h2d(x.ptr, np.zeros((1, 8), np.float32)),
        lambda: backend.copy_h2d(x.ptr, np.zeros((1, 8), np.float32), stream),  # not pinned
        lambda: backend.begin_capture(stream),
    ):
        with pytest.raises(CaptureError):
            wrong()
    backend.launch(ADD, [x, x], stream)
    backend.destroy_graph(backend.end_capture(stream))
    with pytest.raises(CaptureError):
        backend.end_capture(stream)
    backend.free(x.ptr)
    backend.destroy_stream(stream)


def test_a_wrong_call_is_told_apart(backend: CudaBackend) -> None:
    x, w = sent(backend, np.ones((2, 64), np.float32)), sent(backend, np.ones(64, np.float32))
    with pytest.raises(EngineFatal, match=r"rms_norm.*does not accept.*float32\[2, 64\]"):
        backend.launch(RMS_NORM, [x, x, w.reshape(1, 64), 1e-6, 0.0], backend.default_stream)
    ints = sent(backend, np.ones((2, 64), np.int32))
    with pytest.raises(UnsupportedCall, match="add"):
        backend.launch(ADD, [ints, ints], backend.default_stream)
    for array in (x, w, ints):
        backend.free(array.ptr)


@pytest.mark.usefixtures("backend")  # skips without a device
def test_a_fault_on_the_device_ends_the_engine() -> None:
    """In a process of its own: the fault is sticky, every later call fails with its name, and closing still works."""
    code = """
from sparkrt.errors import EngineFatal
from sparkrt.ops.norm import ADD
from sparkrt.runtime import dtypes
from sparkrt.runtime.array import DeviceArray
from sparkrt.runtime.backend import DevicePtr
from sparkrt.runtime.cuda import CudaBackend
backend = CudaBackend(debug=True)
nowhere = DeviceArray(DevicePtr(4096), dtypes.float32, (1, 64))  # the first pages are never mapped
for call in (lambda: backend.launch(ADD, [nowhere, nowhere], backend.default_stream), lambda: backend.alloc(8)):
    try:
        call()
    except EngineFatal as error:
        print(error)
backend.close()
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.startswith("operator add: cudaErrorIllegalAddress")
    assert "cudaErrorIllegalAddress" in second
