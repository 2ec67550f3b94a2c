"""Element types known to every backend. bf16 and fp8 are `ml_dtypes`', so that host arrays of them are ordinary NumPy arrays."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np


@dataclass(frozen=True, slots=True)
class DType:
    """One element type. `code` is the stable integer that C launchers receive."""

    name: str
    np: np.dtype
    code: int

    @property
    def itemsize(self) -> int:
        return self.np.itemsize

    @property
    def is_float(self) -> bool:
        return self.code < 8

    def __repr__(self) -> str:
        return self.name


float32 = DType("float32", np.dtype(np.float32), 0)
float16 = DType("float16", np.dtype(np.float16), 1)
bfloat16 = DType("bfloat16", np.dtype(ml_dtypes.bfloat16), 2)
float8_e4m3 = DType("float8_e4m3", np.dtype(ml_dtypes.float8_e4m3fn), 3)
float8_e5m2 = DType("float8_e5m2", np.dtype(ml_dtypes.float8_e5m2), 4)
float64 = DType("float64", np.dtype(np.float64), 5)
int8 = DType("int8", np.dtype(np.int8), 8)
int32 = DType("int32", np.dtype(np.int32), 9)
int64 = DType("int64", np.dtype(np.int64), 10)
uint8 = DType("uint8", np.dtype(np.uint8), 11)
uint32 = DType("uint32", np.dtype(np.uint32), 12)

ALL = (float32, float16, bfloat16, float8_e4m3, float8_e5m2, float64, int8, int32, int64, uint8, uint32)
_BY_NAME = {d.name: d for d in ALL} | {"float8_e4m3fn": float8_e4m3, "half": float16, "float": float32}
_BY_NP = {d.np: d for d in ALL}


def by_name(name: str) -> DType:
    """The dtype called `name` ("bfloat16", "torch.bfloat16" and the common aliases). Raises KeyError on an unknown name."""
    return _BY_NAME[name.removeprefix("torch.")]


def from_numpy(dtype: np.dtype) -> DType:
    """The `DType` of a NumPy dtype. Raises KeyError if there is none."""
    return _BY_NP[np.dtype(dtype)]
