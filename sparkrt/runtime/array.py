"""`DeviceArray`: a pointer, a dtype and a contiguous shape. No strides, no arithmetic, no ownership."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from sparkrt.runtime.backend import DevicePtr

if TYPE_CHECKING:
    from sparkrt.runtime.dtypes import DType


class DeviceArray:
    """`view` is the backend's native handle: the NumPy array on the host (what `op.host` receives), None on CUDA."""

    __slots__ = ("dtype", "ptr", "shape", "view")

    def __init__(self, ptr: DevicePtr, dtype: DType, shape: Sequence[int], view: Any = None) -> None:
        self.ptr, self.dtype, self.shape, self.view = ptr, dtype, tuple(shape), view

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def rows(self, start: int, stop: int) -> DeviceArray:
        """Rows [start, stop) of the first axis: still contiguous."""
        if not 0 <= start <= stop <= self.shape[0]:
            raise IndexError(f"rows {start}:{stop} of an array of {self.shape[0]} rows")
        step = self.nbytes // self.shape[0] if self.shape[0] else 0
        view = None if self.view is None else self.view[start:stop]
        return DeviceArray(self.ptr.offset(start * step), self.dtype, (stop - start, *self.shape[1:]), view)

    def head(self, *shape: int) -> DeviceArray:
        """The first prod(shape) elements under another shape: how a scratch buffer is cut to a step's size."""
        n = prod(shape)
        if n > self.size:
            raise IndexError(f"shape {shape} needs {n} elements, the buffer has {self.size}")
        view = None if self.view is None else self.view.reshape(-1)[:n].reshape(shape)
        return DeviceArray(self.ptr, self.dtype, shape, view)

    def reshape(self, *shape: int) -> DeviceArray:
        if prod(shape) != self.size:
            raise ValueError(f"cannot reshape {self.shape} to {shape}")
        return self.head(*shape)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if self.view is not None:
            raise AttributeError("this array is not in CUDA memory")
        from sparkrt.runtime.interop import cuda_array_interface

        return cuda_array_interface(self)

    def __dlpack__(self, **options: Any) -> Any:
        """For `cupy.from_dlpack` and the like (`numpy.from_dlpack` on the host); what was issued before is done then."""
        if self.view is not None:
            return self.view.__dlpack__(**options)
        from sparkrt.runtime.interop import dlpack

        return dlpack(self)

    def __dlpack_device__(self) -> tuple[int, int]:
        if self.view is not None:
            device: tuple[int, int] = self.view.__dlpack_device__()
            return device
        from sparkrt.runtime.interop import CUDA
        from sparkrt.runtime.interop import device as current

        return CUDA, current()

    def __repr__(self) -> str:
        return f"DeviceArray({self.dtype}{list(self.shape)} @ {self.ptr.address:#x})"
