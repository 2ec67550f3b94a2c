from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkrt.runtime import Arena, ArenaPlan, HostBackend, OutOfMemory, dtypes


def _plan() -> ArenaPlan:
    plan = ArenaPlan()
    plan.add("hidden", (3, 5), dtypes.float32)
    plan.add("none", (0, 5), dtypes.float32)
    plan.add("ids", (7,), dtypes.int32)
    return plan


def test_one_allocation_of_the_planned_size() -> None:
    plan, backend = _plan(), HostBackend()
    with backend.count() as traffic:
        arena = Arena(backend, plan, "scratch")
    assert traffic.allocations == 1
    assert backend.memory_info().allocated == plan.nbytes == arena.nbytes == 512
    assert backend.leak_report() == "scratch: 512 bytes in 1"
    assert (arena["hidden"].shape, arena["ids"].dtype) == ((3, 5), dtypes.int32)
    arena.release()
    arena.release()
    assert backend.leak_report() == ""


def test_take_is_the_head_of_the_buffer() -> None:
    arena = Arena(HostBackend(), _plan())
    head = arena.take("hidden", 2, 5)
    assert head.shape == (2, 5)
    assert head.ptr == arena["hidden"].ptr
    head.view[...] = 3
    assert arena["hidden"].view.ravel()[:10].tolist() == [3] * 10


def test_errors_say_what_was_planned() -> None:
    arena = Arena(HostBackend(), _plan(), "scratch")
    with pytest.raises(KeyError, match="scratch has no buffer 'logits'; planned: hidden, none, ids"):
        arena["logits"]
    with pytest.raises(IndexError, match=r"'hidden' was planned as \[3, 5\], too small for \[4, 5\]"):
        arena.take("hidden", 4, 5)
    plan = _plan()
    with pytest.raises(ValueError, match="'ids' is planned twice"):
        plan.add("ids", (1,), dtypes.int32)
    with pytest.raises(ValueError, match="negative"):
        plan.add("x", (2, -1), dtypes.int32)


def test_failed_allocation_leaves_nothing() -> None:
    backend = HostBackend()
    backend.fail_allocation(1)
    with pytest.raises(OutOfMemory):
        Arena(backend, _plan())
    assert backend.leak_report() == ""


@given(st.lists(st.tuples(st.integers(0, 300), st.sampled_from(dtypes.ALL)), max_size=12))
def test_buffers_are_aligned_and_apart(buffers: list[tuple[int, dtypes.DType]]) -> None:
    plan = ArenaPlan()
    for i, (n, dtype) in enumerate(buffers):
        plan.add(str(i), (n,), dtype)
    arena = Arena(HostBackend(), plan)
    for i in range(len(buffers)):
        assert arena[str(i)].ptr.address % 256 == 0
        arena[str(i)].view.view(np.uint8)[...] = i
    for i in range(len(buffers)):
        assert (arena[str(i)].view.view(np.uint8) == i).all()
