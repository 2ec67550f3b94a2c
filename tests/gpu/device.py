"""Arrays on the device between guard bands, and calls of an operator with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparkrt.ops.operator import Operator
from sparkrt.runtime import dtypes
from sparkrt.runtime.array import DeviceArray
from sparkrt.runtime.backend import DevicePtr
from sparkrt.runtime.cuda import CudaBackend
from sparkrt.runtime.dtypes import DType

GUARD = 256  # bytes on either side
PATTERN = 0xA5


@dataclass(frozen=True)
class Sent:
    """An array on the device. Guard bands around it show writes outside."""

    backend: CudaBackend
    base: DevicePtr
    array: DeviceArray

    @classmethod
    def of(cls, backend: CudaBackend, value: np.ndarray, dtype: DType) -> Sent:
        raw = np.full(2 * GUARD + value.size * dtype.itemsize, PATTERN, np.uint8)
        with np.errstate(over="ignore", invalid="ignore"):
            raw[GUARD : len(raw) - GUARD] = np.ascontiguousarray(value.astype(dtype.np)).reshape(-1).view(np.uint8)
        base = backend.alloc(raw.nbytes, "test")
        backend.copy_h2d(base, raw)
        return cls(backend, base, DeviceArray(base.offset(GUARD), dtype, value.shape))

    def back(self) -> np.ndarray:
        """Its content in its own dtype; the guard bands are checked."""
        raw = np.empty(2 * GUARD + self.array.nbytes, np.uint8)
        self.backend.copy_d2h(raw, self.base)
        inside = raw[GUARD : len(raw) - GUARD]
        assert (raw[:GUARD] == PATTERN).all(), "written before the array"
        assert (raw[len(raw) - GUARD :] == PATTERN).all(), "written past the array"
        return inside.view(self.array.dtype.np).reshape(self.array.shape)

    def free(self) -> None:
        self.backend.free(self.base)


def types_of(op: Operator, args: Sequence[Any], activation: DType) -> list[DType | None]:
    """What each array of a call is on the device: activations in `activation`, the rest as it is."""
    kinds = zip(op.argument_types(), args, strict=True)
    return [
        None if not isinstance(a, np.ndarray) else activation if kind == "A" else dtypes.from_numpy(a.dtype) for kind, a in kinds
    ]


def rounded(args: Sequence[Any], types: Sequence[DType | None]) -> list[Any]:
    """The arguments with the values that the device will hold, as float32."""
    with np.errstate(over="ignore", invalid="ignore"):
        return [a if t is None or not t.is_float else a.astype(t.np).astype(np.float32) for a, t in zip(args, types, strict=True)]


def call(backend: CudaBackend, op: Operator, args: Sequence[Any], types: Sequence[DType | None]) -> list[Any]:
    """Launch `op` on copies of `args`; returns what the arrays hold afterwards, floats as float32."""
    sent = [a if t is None else Sent.of(backend, a, t) for a, t in zip(args, types, strict=True)]
    try:
        backend.launch(op, [a.array if isinstance(a, Sent) else a for a in sent], backend.default_stream)
        backend.synchronize()
        back = [a.back() if isinstance(a, Sent) else a for a in sent]
    finally:
        for a in sent:
            if isinstance(a, Sent):
                a.free()
    return [b.astype(np.float32) if t is not None and t.is_float else b for b, t in zip(back, types, strict=True)]
