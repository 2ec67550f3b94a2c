"""One allocation for many buffers: planned by name and shape first, so that the memory plan can be printed, then carved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from sparkrt.runtime.array import DeviceArray
from sparkrt.runtime.backend import NULL, DevicePtr, GpuBackend
from sparkrt.runtime.dtypes import DType

ALIGNMENT = 256  # bytes: whole sectors and TMA boxes on a device, cache lines on a host


@dataclass(frozen=True, slots=True)
class Buffer:
    """A planned buffer: `offset` bytes into the arena."""

    name: str
    shape: tuple[int, ...]
    dtype: DType
    offset: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class ArenaPlan:
    """Buffers by name. The layout follows the order of `add`, so two plans made alike are laid out alike."""

    def __init__(self) -> None:
        self.buffers: dict[str, Buffer] = {}
        self.nbytes = 0  # of the whole arena

    def add(self, name: str, shape: Sequence[int], dtype: DType) -> Buffer:
        """Plan a buffer. Raises ValueError on a name planned before or a negative size."""
        if name in self.buffers:
            raise ValueError(f"arena buffer {name!r} is planned twice")
        if any(n < 0 for n in shape):
            raise ValueError(f"arena buffer {name!r}: negative size in {list(shape)}")
        buffer = self.buffers[name] = Buffer(name, tuple(shape), dtype, self.nbytes)
        self.nbytes += -(-buffer.nbytes // ALIGNMENT) * ALIGNMENT
        return buffer


class Arena:
    """A plan carved out of one allocation. Addresses never change, as captured graphs need."""

    def __init__(self, backend: GpuBackend, plan: ArenaPlan, label: str = "arena") -> None:
        """Raises OutOfMemory; nothing is then taken."""
        self.nbytes = plan.nbytes
        self.label = label
        self._backend = backend
        self._base: DevicePtr = backend.alloc(plan.nbytes, label)
        self._arrays = {b.name: backend.array(self._base.offset(b.offset), b.dtype, b.shape) for b in plan.buffers.values()}

    def __getitem__(self, name: str) -> DeviceArray:
        """The whole buffer. Raises KeyError naming it and those that exist."""
        try:
            return self._arrays[name]
        except KeyError:
            raise KeyError(f"{self.label} has no buffer {name!r}; planned: {', '.join(self._arrays) or 'none'}") from None

    def take(self, name: str, *shape: int) -> DeviceArray:
        """The buffer's first elements under a step's own shape. Raises IndexError when the plan was smaller than that."""
        array = self[name]
        if prod(shape) > array.size:
            raise IndexError(f"{self.label} buffer {name!r} was planned as {list(array.shape)}, too small for {list(shape)}")
        return array.head(*shape)

    def release(self) -> None:
        """Free the allocation; a second call does nothing."""
        base, self._base = self._base, NULL
        self._arrays = {}
        if base:
            self._backend.free(base)
