"""Memory that goes while its addresses stay: contents kept or lost, room that others took, and what a ledger says of it."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from sparkrt.errors import CapacityError, LoadError
from sparkrt.runtime import HostBackend, OutOfMemory, dtypes, machine
from sparkrt.runtime.backend import DevicePtr, MemoryFault
from sparkrt.runtime.owner import Again, Owner
from sparkrt.runtime.parking import Parked

SIZES = (0, 1, 4096, 100_000, (8 << 20) * 3 + 17)  # bytes; the largest takes several staging buffers


def filled(backend: HostBackend) -> tuple[Owner, list[np.ndarray]]:
    owner, rng = Owner(backend), np.random.default_rng(0)
    values = [rng.integers(0, 255, n, np.uint8) for n in SIZES]
    for value in values:
        owner.put(value, dtypes.uint8, "filled")
    return owner, values


def contents(owner: Owner) -> list[np.ndarray]:
    found = [np.empty(block.nbytes, np.uint8) for block in owner.blocks]
    for host, block in zip(found, owner.blocks, strict=True):
        owner.backend.copy_d2h(host, block.ptr)
    return found


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("deferred", [False, True])
def test_what_is_kept_comes_back(keep: bool, deferred: bool) -> None:
    backend = HostBackend(deferred=deferred, debug=True)
    owner, values = filled(backend)
    parked = Parked(owner, keep)
    assert parked.nbytes == sum(SIZES)
    assert backend.memory_info().allocated == 0
    with pytest.raises(MemoryFault, match="suspended"):
        contents(owner)
    parked.resume()
    parked.refill()
    assert backend.memory_info().allocated == sum(SIZES)
    same = [np.array_equal(now, was) for now, was in zip(contents(owner), values, strict=True)]
    assert all(same) if keep else not any(same[1:])
    owner.close()
    assert not backend.leak_report()


def test_room_that_others_took_is_missed_and_nothing_is_half_awake() -> None:
    backend = HostBackend(capacity=sum(SIZES) + 100)
    owner, values = filled(backend)
    parked = Parked(owner, keep=True)
    other = backend.alloc(SIZES[-1])
    with pytest.raises(OutOfMemory):
        parked.resume()
    assert backend.memory_info().allocated == SIZES[-1]
    backend.free(other)
    for n in (1, len(SIZES) - 1):
        backend.fail_allocation(n)
        with pytest.raises(OutOfMemory):
            parked.resume()
        assert backend.memory_info().allocated == 0
    parked.resume()
    parked.refill()
    for now, was in zip(contents(owner), values, strict=True):
        np.testing.assert_array_equal(now, was)


def test_a_host_too_small_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = HostBackend()
    owner, values = filled(backend)
    monkeypatch.setattr(machine, "available_memory", lambda: sum(SIZES) - 1)
    with pytest.raises(CapacityError, match="level 2"):
        Parked(owner, keep=True)
    for now, was in zip(contents(owner), values, strict=True):
        np.testing.assert_array_equal(now, was)


def test_suspending_is_for_whole_device_allocations() -> None:
    backend = HostBackend()
    block, pinned = backend.alloc(1 << 20), backend.alloc_pinned(64)
    for wrong in (block.offset(8), pinned, DevicePtr(4096)):
        with pytest.raises(MemoryFault):
            backend.suspend(wrong)
    assert backend.suspend(block) == 1 << 20
    assert backend.suspend(block) == 0
    backend.free(block)
    assert backend.memory_info().allocated == 0
    with pytest.raises(MemoryFault):
        backend.resume(block)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the advice empties no pages")
def test_pages_go_back_to_the_system() -> None:
    backend = HostBackend()
    array = backend.empty((1 << 20,), dtypes.int32)
    array.view[:] = 7
    backend.suspend(array.ptr)
    backend.resume(array.ptr)
    assert not array.view[2048:-2048].any()  # fresh pages are zeros


def test_an_owner_hands_out_again_only_what_it_handed_out() -> None:
    backend = HostBackend()
    owner = Owner(backend)
    first, second = owner.empty((4, 8), dtypes.float32, "a"), owner.empty((3,), dtypes.int32, "b")
    again = Again(owner)
    assert again.empty((4, 8), dtypes.float32, "a").ptr == first.ptr
    assert again.empty((3,), dtypes.int32, "b").ptr == second.ptr
    for wrong in ((5, 8), dtypes.float32, "a"), ((4, 8), dtypes.float32, "z"):
        with pytest.raises(LoadError, match="have changed"):
            Again(owner).empty(*wrong)
    with pytest.raises(LoadError, match="have changed"):
        again.empty((1,), dtypes.int32, "c")
    again.close()
    assert backend.memory_info().allocated == first.nbytes + second.nbytes
