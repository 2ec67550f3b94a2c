"""`Owner`: the arena of one object: what it allocated, at fixed addresses, freed together on every way out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple

import numpy as np

from sparkrt.errors import LoadError
from sparkrt.runtime.array import DeviceArray
from sparkrt.runtime.backend import DevicePtr, Event, GpuBackend
from sparkrt.runtime.dtypes import DType


class Block(NamedTuple):
    ptr: DevicePtr
    nbytes: int
    label: str


class Owner:
    """Allocates through a backend and remembers it. An allocation that fails leaves the rest for `close`."""

    def __init__(self, backend: GpuBackend) -> None:
        self.backend = backend
        self.blocks: list[Block] = []  # of device memory, in the order they were taken
        self._undo: list[Callable[[], None]] = []

    def alloc(self, nbytes: int, label: str) -> DevicePtr:
        ptr = self.backend.alloc(nbytes, label)
        self.blocks.append(Block(ptr, nbytes, label))
        self._undo.append(lambda: self.backend.free(ptr))
        return ptr

    def empty(self, shape: Sequence[int], dtype: DType, label: str) -> DeviceArray:
        return self.backend.array(self.alloc(prod(shape) * dtype.itemsize, label), dtype, shape)

    def put(self, values: np.ndarray, dtype: DType, label: str) -> DeviceArray:
        """A device copy of `values` as `dtype`. Blocking: for load time."""
        host = np.ascontiguousarray(values, dtype=dtype.np)
        array = self.empty(host.shape, dtype, label)
        if host.size:
            self.backend.copy_h2d(array.ptr, host)
        return array

    def zeros(self, shape: Sequence[int], dtype: DType, label: str) -> DeviceArray:
        array = self.empty(shape, dtype, label)
        self.backend.memset(array.ptr, 0, array.nbytes)
        return array

    def host(self, nbytes: int, label: str) -> np.ndarray:
        """uint8 [nbytes] of pinned host memory, contents undefined."""
        ptr = self.backend.alloc_pinned(nbytes, label)
        self._undo.append(lambda: self.backend.free_pinned(ptr))
        view: np.ndarray = self.backend.pinned_view(ptr, nbytes)
        return view

    def pinned(self, words: int, label: str) -> np.ndarray:
        """`words` zeroed int32 of pinned host memory."""
        view = self.host(words * 4, label).view(np.int32)
        view[:] = 0
        return view

    def event(self) -> Event:
        event = self.backend.create_event()
        self._undo.append(lambda: self.backend.destroy_event(event))
        return event

    def close(self) -> None:
        """Free everything, last first; a second call does nothing."""
        self.blocks.clear()
        while self._undo:
            self._undo.pop()()


class Again(Owner):
    """Hands out once more, in order, what another owner was asked for: to fill its arrays anew at the addresses they have."""

    def __init__(self, owner: Owner) -> None:
        super().__init__(owner.backend)
        self._left = iter(owner.blocks)

    def alloc(self, nbytes: int, label: str) -> DevicePtr:
        """Raises LoadError when this is not what was asked for the first time."""
        block = next(self._left, None)
        if block is None or (block.nbytes, block.label) != (nbytes, label):
            raise LoadError(f"the weights have changed: {label} has {nbytes:,} bytes now, where there was {block}")
        return block.ptr
