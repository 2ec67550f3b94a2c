"""Device arrays for other libraries and from them: DLPack (which knows bf16 and fp8) and `__cuda_array_interface__`.

Memory is shared, never copied, and everything issued so far is waited for, in both directions.
"""

from __future__ import annotations

import ctypes
from itertools import accumulate
from math import prod
from operator import mul
from typing import Any

from sparkrt.runtime import dtypes
from sparkrt.runtime.array import DeviceArray
from sparkrt.runtime.backend import DevicePtr
from sparkrt.runtime.dtypes import DType

CUDA = 2  # DLDeviceType
# DLDataTypeCode: int, uint, float, bfloat, and fp8 as DLPack 1.1 numbers it
_CODES = {"int": 0, "uint": 1, "float": 2, "bfloat16": 4, "float8_e4m3": 10, "float8_e5m2": 12}


class _Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("id", ctypes.c_int32))


class _Tensor(ctypes.Structure):
    _fields_ = (
        *(("data", ctypes.c_void_p), ("device", _Device), ("ndim", ctypes.c_int32)),
        *(("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)),
        *(("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)), ("offset", ctypes.c_uint64)),
    )


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


_P, _S = ctypes.c_void_p, ctypes.c_char_p
_new = ctypes.PYFUNCTYPE(ctypes.py_object, _P, _S, _P)(("PyCapsule_New", ctypes.pythonapi))
_get = ctypes.PYFUNCTYPE(_P, ctypes.py_object, _S)(("PyCapsule_GetPointer", ctypes.pythonapi))
_peek = ctypes.PYFUNCTYPE(_P, _P, _S)(("PyCapsule_GetPointer", ctypes.pythonapi))  # of one that is being destroyed
_is_named = ctypes.PYFUNCTYPE(ctypes.c_int, _P, _S)(("PyCapsule_IsValid", ctypes.pythonapi))
_exported: dict[int, Any] = {}  # by address of the _Managed: what must live until its consumer lets go


def _forget(managed: int) -> None:
    _exported.pop(managed, None)


def _drop(capsule: int) -> None:
    if _is_named(capsule, b"dltensor"):  # whoever consumes it gives it another name
        _forget(_peek(capsule, b"dltensor"))


_deleter = ctypes.CFUNCTYPE(None, _P)(_forget)
_destructor = ctypes.PYFUNCTYPE(None, _P)(_drop)


def _code(dtype: DType) -> int:
    return _CODES.get(dtype.name, _CODES.get(dtype.name.rstrip("0123456789"), -1))


def device() -> int:
    """The current device, when everything issued to it is done."""
    from cuda.bindings import runtime

    runtime.cudaDeviceSynchronize()
    return int(runtime.cudaGetDevice()[1])


def cuda_array_interface(array: DeviceArray) -> dict[str, Any]:
    """Version 3. bf16 and fp8, for which it has no name, appear as unsigned integers of their size."""
    device()
    kind = array.dtype.np.kind if array.dtype.np.kind in "iuf" else "u"
    typestr = f"{'|' if array.dtype.itemsize == 1 else '<'}{kind}{array.dtype.itemsize}"
    return {"shape": array.shape, "typestr": typestr, "data": (array.ptr.address, False), "strides": None, "version": 3}


def dlpack(array: DeviceArray) -> Any:
    """A capsule that keeps `array`, though not its memory, until its consumer lets go."""
    shape = (ctypes.c_int64 * len(array.shape))(*array.shape)
    kind = _code(array.dtype), 8 * array.dtype.itemsize, 1
    tensor = _Tensor(array.ptr.address, _Device(CUDA, device()), len(array.shape), *kind, shape, None, 0)
    managed = _Managed(tensor, None, ctypes.cast(_deleter, _P))
    address = ctypes.addressof(managed)
    _exported[address] = managed, shape, array
    return _new(address, b"dltensor", ctypes.cast(_destructor, _P))


def from_device(source: Any) -> DeviceArray:
    """The memory of another library's contiguous CUDA array, which lives as long as the result does; parts of it do not count.

    Raises ValueError for anything else.
    """
    if hasattr(source, "__dlpack__"):
        if int(source.__dlpack_device__()[0]) != CUDA:
            raise ValueError(f"{type(source).__name__} is not in CUDA memory")
        capsule = source.__dlpack__(stream=1)  # never marked as used: it cleans up after itself
        t = _Managed.from_address(_get(capsule, b"dltensor")).tensor
        shape, known = tuple(t.shape[: t.ndim]), {(_code(d), 8 * d.itemsize): d for d in dtypes.ALL}
        dtype = known.get((t.code, t.bits))
        strides = tuple(t.strides[: t.ndim]) if t.strides else None
        address = (t.data or 0) + t.offset
    elif hasattr(source, "__cuda_array_interface__"):
        said = source.__cuda_array_interface__
        shape, address = tuple(said["shape"]), said["data"][0]
        dtype = {f"{d.np.kind}{d.itemsize}": d for d in dtypes.ALL if d.np.kind in "iuf"}.get(said["typestr"][1:])
        strides = said.get("strides") and tuple(s // dtype.itemsize for s in said["strides"]) if dtype else None
    else:
        raise ValueError(f"{type(source).__name__} has neither __dlpack__ nor __cuda_array_interface__")
    dense = tuple(accumulate(shape[:0:-1], mul, initial=1))[::-1] if shape else ()
    if dtype is None or (strides is not None and prod(shape) and strides != dense):
        raise ValueError(f"{type(source).__name__} of this type or with these strides cannot be shared: {shape}, {strides}")
    device()
    return _Borrowed(DevicePtr(address), dtype, shape, source)


class _Borrowed(DeviceArray):
    __slots__ = ("source",)

    def __init__(self, ptr: DevicePtr, dtype: DType, shape: tuple[int, ...], source: Any) -> None:
        super().__init__(ptr, dtype, shape)
        self.source = source
