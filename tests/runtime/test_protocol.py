"""The host backend is a GpuBackend, method by method, and what every device array and dtype promises."""

from __future__ import annotations

import contextlib
import inspect

import numpy as np
import pytest

from sparkrt.errors import LoadError
from sparkrt.runtime import DeviceArray, GpuBackend, HostBackend, dtypes, open_backend

METHODS = [name for name, member in vars(GpuBackend).items() if inspect.isfunction(member) and not name.startswith("_")]


def test_host_backend_is_a_gpu_backend() -> None:
    backend: GpuBackend = HostBackend()
    assert isinstance(backend, GpuBackend)


@pytest.mark.parametrize("name", METHODS)
def test_same_parameters_and_defaults(name: str) -> None:
    def shape(owner: type) -> list[tuple[str, object]]:
        return [(p.name, p.default) for p in inspect.signature(getattr(owner, name)).parameters.values()]

    assert shape(HostBackend) == shape(GpuBackend)


def test_properties_and_memory() -> None:
    backend = HostBackend()
    p, before = backend.properties, backend.memory_info()
    assert (p.kind, p.compute_capability, p.unified_memory) == ("host", None, True)
    assert p.multiprocessors >= 1
    assert 0 <= before.free <= before.total
    backend.alloc(1000)
    backend.alloc_pinned(1000)
    assert backend.memory_info().allocated == 1000


def test_capacity_bounds_what_memory_info_says() -> None:
    backend = HostBackend(capacity=4096)
    backend.alloc(4000)
    info = backend.memory_info()
    assert (info.free, info.total, info.allocated) == (96, 4096, 4000)


def test_open_backend() -> None:
    assert open_backend("host").properties.kind == "host"
    with contextlib.suppress(LoadError):  # says why where CUDA cannot be used
        assert open_backend("cuda").properties.kind == "cuda"
    with pytest.raises(LoadError, match=r"'tpu'.*expected"):
        open_backend("tpu")


@pytest.mark.parametrize("dtype", dtypes.ALL, ids=str)
def test_every_dtype_round_trips(dtype: dtypes.DType) -> None:
    backend = HostBackend()
    host = np.arange(6).reshape(2, 3).astype(dtype.np)
    array = backend.empty((2, 3), dtype, "x")
    backend.copy_h2d(array.ptr, host)
    back = np.zeros_like(host)
    backend.copy_d2h(back, array.ptr)
    np.testing.assert_array_equal(back, host)
    np.testing.assert_array_equal(array.view, host)
    assert dtypes.by_name(dtype.name) is dtype
    assert dtypes.from_numpy(host.dtype) is dtype


def test_array_cuts_point_at_their_own_memory() -> None:
    backend = HostBackend()
    array = backend.empty((4, 6), dtypes.int32)
    backend.copy_h2d(array.ptr, np.arange(24, dtype=np.int32))
    cuts = [array.rows(1, 3), array.rows(3, 4), array.head(2, 5), array.reshape(6, 4), array.rows(4, 4)]
    for cut in cuts:
        assert cut.view.shape == cut.shape
        assert cut.view.nbytes == cut.nbytes
        assert cut.size == 0 or cut.view.__array_interface__["data"][0] == cut.ptr.address
        again = backend.array(cut.ptr, cut.dtype, cut.shape)
        np.testing.assert_array_equal(again.view, cut.view)
    for wrong in (lambda a: a.rows(3, 5), lambda a: a.rows(2, 1), lambda a: a.head(5, 5)):
        with pytest.raises(IndexError):
            wrong(array)
    with pytest.raises(ValueError, match="reshape"):
        array.reshape(5, 5)
    assert isinstance(array, DeviceArray)
    assert "int32[4, 6]" in repr(array)
