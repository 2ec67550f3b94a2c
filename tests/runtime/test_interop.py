"""What other libraries see of an array and what is taken from them, without a device: no memory is touched."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

from sparkrt.runtime import HostBackend, dtypes, interop
from sparkrt.runtime.array import DeviceArray
from sparkrt.runtime.backend import DevicePtr
from sparkrt.runtime.dtypes import DType


class Interface:
    """An array of a library that speaks the older protocol alone."""

    def __init__(self, shape: tuple[int, ...], typestr: str, strides: tuple[int, ...] | None = None) -> None:
        self.__cuda_array_interface__: Any = {"shape": shape, "typestr": typestr, "data": (4096, False), "strides": strides}


@pytest.fixture(autouse=True)
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interop, "device", lambda: 0)


@pytest.mark.parametrize("dtype", dtypes.ALL, ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 4), (7,), (1, 5), ()])
def test_an_array_comes_back_through_dlpack(dtype: DType, shape: tuple[int, ...]) -> None:
    array = DeviceArray(DevicePtr(1 << 40), dtype, shape)
    back = interop.from_device(array)
    assert (back.ptr, back.dtype, back.shape) == (array.ptr, array.dtype, array.shape)
    gc.collect()
    assert not interop._exported  # the capsule was dropped


def test_types_without_a_name_appear_as_integers() -> None:
    for dtype, typestr in ((dtypes.float32, "<f4"), (dtypes.bfloat16, "<u2"), (dtypes.float8_e4m3, "|u1"), (dtypes.int8, "|i1")):
        assert DeviceArray(DevicePtr(256), dtype, (2, 3)).__cuda_array_interface__["typestr"] == typestr


def test_the_older_protocol() -> None:
    array = interop.from_device(Interface((2, 3), "<f4", (12, 4)))
    assert (array.ptr.address, array.dtype, array.shape) == (4096, dtypes.float32, (2, 3))
    for foreign in (Interface((2, 3), "<f4", (4, 8)), Interface((2,), "<c8"), object()):
        with pytest.raises(ValueError, match=r"cannot be shared|neither"):
            interop.from_device(foreign)


def test_host_arrays_are_numpys() -> None:
    array = HostBackend().empty((2, 3), dtypes.float32)
    assert np.from_dlpack(array).ctypes.data == array.ptr.address
    assert not hasattr(array, "__cuda_array_interface__")
    with pytest.raises(ValueError, match="not in CUDA memory"):
        interop.from_device(array)
