"""Arrays of any shape, type and strides arrive whole, whatever the ring is still doing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkrt.runtime import HostBackend, OutOfMemory, dtypes
from sparkrt.runtime.staging import Staging

SHAPES = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple), min_size=1, max_size=6)


@given(shapes=SHAPES, chunk=st.integers(4, 300), readers=st.integers(1, 3), deferred=st.booleans(), seed=st.integers(0, 99))
def test_everything_arrives(shapes: list[tuple[int, ...]], chunk: int, readers: int, deferred: bool, seed: int) -> None:
    backend, rng = HostBackend(deferred=deferred, debug=True), np.random.default_rng(seed)
    staging = Staging(backend, chunk, readers)
    pairs = []
    for i, shape in enumerate(shapes):
        values = rng.integers(-9, 9, shape).astype([np.float32, np.float16, np.int32][i % 3])
        values = values.T if i % 2 else values
        target = backend.empty(values.shape, [dtypes.bfloat16, dtypes.float32][i % 2])
        staging.copy(target, values)
        pairs.append((target, values))
    staging.flush()
    for target, values in pairs:
        np.testing.assert_array_equal(target.view.astype(np.float32), values.astype(np.float32))
        backend.free(target.ptr)
    staging.close()
    assert backend.leak_report() == ""


def test_a_fault_of_a_reader_is_raised_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = HostBackend(debug=True)
    staging = Staging(backend, 64, 2)
    target = backend.empty((8,), dtypes.float32)
    staging.copy(target, np.array(["no number"] * 8, object))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no number"):
        staging.flush()
    staging.close()
    backend.free(target.ptr)
    assert backend.leak_report() == ""


@pytest.mark.parametrize("n", [1, 2, 4])
def test_a_ring_that_cannot_be_allocated_leaves_nothing(n: int) -> None:
    backend = HostBackend(debug=True)
    backend.fail_allocation(n)
    with pytest.raises(OutOfMemory):
        Staging(backend, 64, 2)
    assert backend.leak_report() == ""
