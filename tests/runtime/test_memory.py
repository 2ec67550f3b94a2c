"""The ledger: bounds, frees, leaks, capacity and failures on demand."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sparkrt.runtime import HostBackend, OutOfMemory, dtypes
from sparkrt.runtime.backend import DevicePtr, MemoryFault


def test_alignment_and_pointer_arithmetic() -> None:
    backend = HostBackend()
    for nbytes in (1, 63, 64, 1000, 1 << 20):
        base = backend.alloc(nbytes)
        assert base.address % 256 == 0
        backend.memset(base, 7, nbytes)
        out = np.zeros(1, np.uint8)
        backend.copy_d2h(out, base.offset(nbytes - 1))
        assert out[0] == 7


def test_zero_bytes_is_an_allocation() -> None:
    backend = HostBackend()
    a, b = backend.alloc(0), backend.alloc(0)
    assert a != b
    assert backend.empty((0, 4), dtypes.float32).view.shape == (0, 4)
    backend.free(a)
    backend.free(b)


STRAY: dict[str, Callable[[HostBackend, DevicePtr, DevicePtr, np.ndarray], None]] = {
    "h2d past the end": lambda b, p, q, host: b.copy_h2d(p.offset(1), host),
    "h2d before the start": lambda b, p, q, host: b.copy_h2d(p.offset(-1), host),
    "h2d nowhere": lambda b, p, q, host: b.copy_h2d(DevicePtr(4096), host),
    "h2d to NULL": lambda b, p, q, host: b.copy_h2d(DevicePtr(0), host),
    "d2h past the end": lambda b, p, q, host: b.copy_d2h(host, p.offset(1)),
    "d2d source": lambda b, p, q, host: b.copy_d2d(p, q.offset(1), 64),
    "d2d target": lambda b, p, q, host: b.copy_d2d(p.offset(1), q, 64),
    "d2d onto itself": lambda b, p, q, host: b.copy_d2d(p, p.offset(16), 32),
    "2d last row": lambda b, p, q, host: b.copy_d2d_2d(p, 16, q, 17, 16, 4),
    "2d onto itself": lambda b, p, q, host: b.copy_d2d_2d(p, 16, p.offset(4), 16, 8, 3),
    "memset": lambda b, p, q, host: b.memset(p, 0, 65),
    "negative size": lambda b, p, q, host: b.memset(p, 0, -1),
    "array": lambda b, p, q, host: b.array(p, dtypes.float32, (17,)),
    "misaligned array": lambda b, p, q, host: b.array(p.offset(2), dtypes.float32, (1,)),
    "pinned as device": lambda b, p, q, host: b.memset(b.alloc_pinned(64), 0, 64),
    "device as pinned": lambda b, p, q, host: b.pinned_view(p, 64),
}


@pytest.mark.parametrize("what", STRAY)
def test_stray_pointers_are_faults_and_write_nothing(what: str) -> None:
    backend = HostBackend()
    p, q = backend.alloc(64, "p"), backend.alloc(64, "q")
    for i, ptr in enumerate((p, q)):
        backend.memset(ptr, i + 1, 64)
    with pytest.raises(MemoryFault), backend.count() as traffic:
        STRAY[what](backend, p, q, np.zeros(64, np.uint8))
    assert traffic.copies() == 0
    for i, ptr in enumerate((p, q)):
        out = np.zeros(64, np.uint8)
        backend.copy_d2h(out, ptr)
        assert set(out) == {i + 1}


def test_faults_name_the_allocation() -> None:
    backend = HostBackend()
    ptr = backend.alloc(64, "kv cache")
    with pytest.raises(MemoryFault, match=r"offset 60 leaves 'kv cache' \(64 bytes"):
        backend.memset(ptr.offset(60), 0, 8)
    backend.free(ptr)
    with pytest.raises(MemoryFault, match=r"'kv cache' .* was freed"):
        backend.memset(ptr, 0, 8)
    with pytest.raises(MemoryFault, match=r"'kv cache' .* freed twice"):
        backend.free(ptr)


@pytest.mark.parametrize("nbytes", [64, 1 << 20])
def test_use_after_free_through_an_array(nbytes: int) -> None:
    backend = HostBackend()
    array = backend.empty((nbytes,), dtypes.uint8, "gone")
    backend.free(array.ptr)
    # A view keeps the memory from being handed out again, so the stale pointer cannot hit somebody else's block.
    others = [backend.alloc(nbytes) for _ in range(8)]
    assert array.ptr not in others
    with pytest.raises(MemoryFault, match="'gone'"):
        backend.copy_d2d(others[0], array.ptr, 1)


def test_second_free_is_seen_although_the_block_was_reallocated() -> None:
    backend = HostBackend()
    ptr = backend.alloc(128, "first")
    backend.free(ptr)
    backend.alloc(128, "second")
    with pytest.raises(MemoryFault, match="freed twice"):
        backend.free(ptr)


def test_free_needs_the_start_and_the_right_class() -> None:
    backend = HostBackend()
    device, pinned = backend.alloc(64), backend.alloc_pinned(64)
    for wrong in (
        lambda: backend.free(device.offset(8)),
        lambda: backend.free(DevicePtr(0)),
        lambda: backend.free(pinned),
        lambda: backend.free_pinned(device),
    ):
        with pytest.raises(MemoryFault):
            wrong()
    backend.free(device)
    backend.free_pinned(pinned)
    assert backend.leak_report() == ""


def test_leak_report_sums_by_label() -> None:
    backend = HostBackend()
    for _ in range(3):
        backend.alloc(1000, "weights")
    backend.alloc_pinned(50, "plan")
    backend.free(backend.alloc(10**6, "scratch"))
    assert backend.leak_report() == "weights: 3,000 bytes in 3\nplan (pinned): 50 bytes in 1"
    backend.close()
    assert backend.leak_report() == ""


def test_capacity() -> None:
    backend = HostBackend(capacity=1000)
    first = backend.alloc(600, "a")
    with pytest.raises(OutOfMemory, match="'b' of 401 bytes: 400 of 1,000 are left"):
        backend.alloc(401, "b")
    backend.alloc_pinned(5000)  # host memory, not the device's
    backend.free(first)
    backend.alloc(1000)


def test_more_than_the_machine_has() -> None:
    with pytest.raises(OutOfMemory, match="no such memory"):
        HostBackend().alloc(1 << 62, "huge")


def test_fail_allocation_hits_the_nth_and_only_it() -> None:
    for n in range(1, 5):
        backend = HostBackend()
        backend.fail_allocation(n)
        taken = 0
        for i in range(6):
            try:
                backend.alloc_pinned(8) if i % 2 else backend.alloc(8)
                taken += 1
            except OutOfMemory:
                assert i == n - 1
        assert taken == 5
        assert backend.ledger.fail_in == 0
    backend.fail_allocation(1)
    backend.fail_allocation(0)
    backend.alloc(8)


@pytest.mark.parametrize("debug", [True, False])
def test_freed_memory_is_poisoned_in_debug_only(debug: bool) -> None:
    backend = HostBackend(debug=debug)
    array = backend.empty((16,), dtypes.float32)
    backend.memset(array.ptr, 0, array.nbytes)
    backend.free(array.ptr)
    assert bool(np.isnan(array.view).all()) is debug


def test_debug_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, expected in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv("SPARKRT_DEBUG", value)
        assert HostBackend().ledger.poison is expected


def test_only_contiguous_host_arrays() -> None:
    backend = HostBackend()
    ptr = backend.alloc(64)
    for bad in (np.zeros((4, 8), np.uint8)[:, ::2], [1, 2], b"1234"):
        with pytest.raises(ValueError, match="C-contiguous"):
            backend.copy_h2d(ptr, bad)
    frozen = np.zeros(4, np.uint8)
    frozen.flags.writeable = False
    backend.copy_h2d(ptr, frozen)
    with pytest.raises(ValueError, match="read-only"):
        backend.copy_d2h(frozen, ptr)
    with pytest.raises(ValueError, match="not a byte"):
        backend.memset(ptr, 256, 1)


def test_pitched_copy_moves_rows() -> None:
    backend = HostBackend()
    src, dst = backend.empty((5, 8), dtypes.uint8), backend.empty((5, 6), dtypes.uint8)
    backend.copy_h2d(src.ptr, np.arange(40, dtype=np.uint8))
    backend.memset(dst.ptr, 0xEE, 30)
    backend.copy_d2d_2d(dst.ptr.offset(1), 6, src.ptr.offset(2), 8, 3, 5)
    np.testing.assert_array_equal(dst.view[:, 1:4], src.view[:, 2:5])
    assert set(dst.view[:, [0, 4, 5]].ravel()) == {0xEE}
    backend.copy_d2d_2d(src.ptr, 8, src.ptr.offset(4), 8, 4, 5)  # interleaved columns of one block do not overlap
    np.testing.assert_array_equal(src.view[:, :4], src.view[:, 4:])
    backend.copy_d2d_2d(dst.ptr, 6, src.ptr, 8, 3, 0)
    with pytest.raises(ValueError, match="pitches"):
        backend.copy_d2d_2d(dst.ptr, 2, src.ptr, 8, 3, 2)


class Memory(RuleBasedStateMachine):
    """Random allocations, frees and fills against a plain dictionary of bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.backend = HostBackend(capacity=1 << 16, debug=True)
        self.blocks: dict[DevicePtr, bytearray] = {}

    @rule(nbytes=st.integers(0, 1 << 14))
    def alloc(self, nbytes: int) -> None:
        used = sum(len(b) for b in self.blocks.values())
        try:
            ptr = self.backend.alloc(nbytes)
        except OutOfMemory:
            assert used + nbytes > 1 << 16
            return
        assert used + nbytes <= 1 << 16
        assert ptr not in self.blocks
        self.backend.memset(ptr, 0, nbytes)
        self.blocks[ptr] = bytearray(nbytes)

    def choose(self, data: st.DataObject) -> DevicePtr:
        return list(self.blocks)[data.draw(st.integers(0, len(self.blocks) - 1))]

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        ptr = self.choose(data)
        self.backend.free(ptr)
        del self.blocks[ptr]
        with pytest.raises(MemoryFault):
            self.backend.free(ptr)

    @precondition(lambda self: self.blocks)
    @rule(data=st.data(), value=st.integers(0, 255))
    def fill(self, data: st.DataObject, value: int) -> None:
        ptr = self.choose(data)
        size = len(self.blocks[ptr])
        start, n = data.draw(st.integers(0, size)), data.draw(st.integers(0, size + 1))
        try:
            self.backend.memset(ptr.offset(start), value, n)
        except MemoryFault:
            assert start + n > size
        else:
            assert start + n <= size
            self.blocks[ptr][start : start + n] = bytes([value]) * n

    @invariant()
    def memory_agrees(self) -> None:
        assert self.backend.memory_info().allocated == sum(len(b) for b in self.blocks.values())
        assert [DevicePtr(b.address) for b in self.backend.ledger.live] == sorted(self.blocks)
        for ptr, expected in self.blocks.items():
            out = np.empty(len(expected), np.uint8)
            self.backend.copy_d2h(out, ptr)
            assert out.tobytes() == bytes(expected)


TestMemory = Memory.TestCase
TestMemory.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
