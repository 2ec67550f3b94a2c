"""Arrays shared with CuPy, both ways."""

from __future__ import annotations

import numpy as np
import pytest

from sparkrt.runtime import dtypes, interop
from sparkrt.runtime.cuda import CudaBackend

cupy = pytest.importorskip("cupy")


@pytest.mark.parametrize("dtype", [dtypes.float32, dtypes.float16, dtypes.int32, dtypes.uint8], ids=str)
def test_cupy_sees_our_memory_and_we_see_cupys(backend: CudaBackend, dtype: dtypes.DType) -> None:
    values = np.arange(24).reshape(2, 3, 4).astype(dtype.np)
    array = backend.empty(values.shape, dtype, "shared")
    backend.copy_h2d(array.ptr, values)
    for theirs in (cupy.from_dlpack(array), cupy.asarray(array)):
        assert theirs.data.ptr == array.ptr.address
        np.testing.assert_array_equal(cupy.asnumpy(theirs), values)
    theirs *= 2
    for protocol in (theirs, cupy.ascontiguousarray(theirs)):
        back = np.empty_like(values)
        backend.copy_d2h(back, interop.from_device(protocol).ptr)
        np.testing.assert_array_equal(back, values * 2)
    backend.free(array.ptr)


def test_bf16_appears_as_integers(backend: CudaBackend) -> None:
    values = np.linspace(-3, 3, 8).astype(dtypes.bfloat16.np)
    array = backend.empty((8,), dtypes.bfloat16, "shared")
    backend.copy_h2d(array.ptr, values)
    np.testing.assert_array_equal(cupy.asnumpy(cupy.asarray(array)).view(dtypes.bfloat16.np), values)
    backend.free(array.ptr)


def test_strided_arrays_are_refused(backend: CudaBackend) -> None:
    with pytest.raises(ValueError, match="strides"):
        interop.from_device(cupy.zeros((4, 6), np.float32)[:, ::2])
