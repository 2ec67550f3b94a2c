"""StatePool and SlotGuard: fixed addresses, copies and snapshots, every slot released exactly once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sparkrt.cache.state import SlotGuard, StateDims, StatePlan, StatePool
from sparkrt.errors import CapacityError, EngineFatal
from sparkrt.runtime import HostBackend, OutOfMemory, dtypes

DIMS = (2, 3, 5, 7)  # value heads, DV, DK, conv channels
LAYERS = (0, 2, 5)


def _pool(
    slots: int = 4, depth: int = 1, ring: int = 4, dtype: dtypes.DType = dtypes.float32, spare: int = 0
) -> tuple[HostBackend, StatePool]:
    backend = HostBackend(debug=True)
    return backend, StatePool(backend, LAYERS, slots, DIMS, dtype, ring, depth, spare)


def _fill(pool: StatePool, slot: int, value: float) -> None:
    for i, layer in enumerate(LAYERS):
        pool.state(layer).view[slot] = value + i
        pool.ring(layer).view[slot] = value - i


def _value(pool: StatePool, slot: int) -> float:
    """What `_fill` wrote, checked in every layer and element."""
    values = set()
    for i, layer in enumerate(LAYERS):
        values |= set((pool.state(layer).view[slot].ravel() - i).tolist())
        values |= set((pool.ring(layer).view[slot].astype(np.float32).ravel() + i).tolist())
    assert len(values) == 1
    return float(values.pop())


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("ring", [4, 7])
@pytest.mark.parametrize("dtype", [dtypes.float32, dtypes.bfloat16], ids=str)
@pytest.mark.parametrize("spare", [0, 3])
def test_layout_size_and_plan_agree(depth: int, ring: int, dtype: dtypes.DType, spare: int) -> None:
    backend, pool = _pool(4, depth, ring, dtype, spare)
    plan, rows = StatePlan(3, 4, StateDims(*DIMS), dtype, ring, depth, spare), 5 + spare
    assert pool.plan == plan
    assert backend.memory_info().allocated == plan.nbytes
    assert plan.nbytes == 3 * rows * (depth * 2 * 3 * 5 * 4 + ring * 7 * dtype.itemsize)
    arrays = [pool.state(layer, d) for layer in LAYERS for d in range(depth)] + [pool.ring(layer) for layer in LAYERS]
    assert pool.state(2) is pool.state(2, 0)
    assert all(a.shape == (rows, 2, 3, 5) for a in arrays[: 3 * depth])
    assert all(a.shape == (rows, ring, 7) and a.dtype is dtype for a in arrays[3 * depth :])
    assert all(not a.view[pool.dummy_slot].any() for a in arrays)  # padding rows start finite
    for i, array in enumerate(arrays):
        array.view[...] = i
    assert [set(a.view.astype(np.float32).ravel().tolist()) for a in arrays] == [{float(i)} for i in range(len(arrays))]
    with pytest.raises(KeyError):
        pool.state(2, depth)
    pool.close()
    pool.close()
    assert backend.leak_report() == ""


def test_a_failed_allocation_leaves_nothing() -> None:
    for n in (1, 2, 3):
        backend = HostBackend()
        backend.fail_allocation(n)
        if n < 3:
            with pytest.raises(OutOfMemory):
                StatePool(backend, LAYERS, 4, DIMS)
        else:
            StatePool(backend, LAYERS, 4, DIMS).close()
        assert backend.leak_report() == ""


def test_without_recurrent_layers_slots_are_only_indices() -> None:
    backend = HostBackend()
    pool = StatePool(backend, (), 2, (0, 0, 0, 0))
    assert backend.leak_report() == ""
    assert pool.plan.nbytes == 0
    guard = pool.acquire()
    with backend.count() as traffic:
        pool.copy_slot(0, 1)
    assert traffic.copies() == 0
    pool.check_integrity([guard])
    guard.release()
    pool.close()
    assert backend.leak_report() == ""


def test_slots_come_in_order_and_the_last_released_first() -> None:
    _, pool = _pool(3)
    guards = [pool.acquire() for _ in range(3)]
    assert [g.index for g in guards] == [0, 1, 2]
    assert pool.free_slots == 0
    with pytest.raises(CapacityError, match="all 3 sequence slots"):
        pool.acquire()
    guards[2].release()
    guards[0].release()
    assert [pool.acquire().index, pool.acquire().index] == [0, 2]


def test_a_guard_is_released_exactly_once() -> None:
    _, pool = _pool(2)
    first = pool.acquire()
    assert first.held
    first.release()
    assert not first.held
    second = pool.acquire()
    assert second.index == first.index
    with pytest.raises(EngineFatal, match="slot 0 is released twice"):
        first.release()
    assert second.held
    pool.check_integrity([second])


def test_integrity_sees_leaks_and_strangers() -> None:
    _, pool = _pool(3)
    a, b = pool.acquire(), pool.acquire()
    pool.check_integrity([b, a])
    a_again = SlotGuard(pool, 0)
    for guards in ([a], [a, b, a_again], []):
        with pytest.raises(EngineFatal, match=r"\[0, 1\] held, 1 of 3 free"):
            pool.check_integrity(guards)


@pytest.mark.parametrize("depth", [1, 2])
def test_copy_slot_moves_one_slot_of_every_layer(depth: int) -> None:
    backend, pool = _pool(4, depth)
    stream = backend.create_stream("s")
    for slot in range(5):
        _fill(pool, slot, 100.0 * (slot + 1))
    with backend.count() as traffic:
        pool.copy_slot(3, 1, stream)
    assert (traffic.copies(), traffic.copies("2d", stream=stream)) == (2, 2)
    assert traffic.nbytes() == pool.plan.layers * (pool.plan.state_bytes + pool.plan.ring_bytes)
    assert [_value(pool, slot) for slot in range(5)] == [100, 400, 300, 400, 500]
    pool.copy_slot(2, 2)
    for src, dst in ((-1, 0), (0, 5)):
        with pytest.raises(EngineFatal, match="state slot"):
            pool.copy_slot(src, dst)


@pytest.mark.parametrize("dtype", [dtypes.float32, dtypes.bfloat16], ids=str)
def test_spare_slots_keep_what_running_ones_lose(dtype: dtypes.DType) -> None:
    backend, pool = _pool(3, 2, dtype=dtype, spare=2)
    first, end = pool.spare_rows
    assert (first, end) == (4, 6)
    assert pool.plan.nbytes == 6 * pool.plan.layers * (2 * pool.plan.state_bytes + pool.plan.ring_bytes)
    guards = [pool.acquire() for _ in range(3)]
    with pytest.raises(CapacityError):
        pool.acquire()  # nobody runs in a spare one
    _fill(pool, 0, 12.0)
    _fill(pool, 1, 50.0)
    pool.copy_slot(0, first)
    _fill(pool, 0, 99.0)
    pool.copy_slot(first, 0)
    pool.copy_slot(first, 2)  # into another slot as well: a snapshot knows no slot
    assert [_value(pool, slot) for slot in range(3)] == [12, 50, 12]
    with pytest.raises(EngineFatal):
        pool.copy_slot(0, end)
    pool.check_integrity(guards)
    pool.close()
    assert backend.leak_report() == ""


@pytest.mark.parametrize("wrong", [{"slots": 0}, {"ring": 0}, {"depth": 0}, {"spare": -1}])
def test_wrong_sizes(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="a state pool of"):
        _pool(**wrong)


class Slots(RuleBasedStateMachine):
    """Sequences that begin, compute, fork, are saved and restored, and end: nobody ever sees another's state."""

    def __init__(self) -> None:
        super().__init__()
        self.backend, self.pool = _pool(4, spare=1)
        self.live: list[tuple[SlotGuard, float]] = []
        self.ended: list[SlotGuard] = []
        self.clock = 0.0

    def choose(self, data: st.DataObject) -> int:
        return data.draw(st.integers(0, len(self.live) - 1))

    def tick(self) -> float:
        self.clock += 10.0
        return self.clock

    def acquire(self) -> SlotGuard | None:
        try:
            return self.pool.acquire()
        except CapacityError:
            assert len(self.live) == 4
            return None

    @rule()
    def begin(self) -> None:
        if guard := self.acquire():
            value = self.tick()
            _fill(self.pool, guard.index, value)
            self.live.append((guard, value))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        i = self.choose(data)
        guard, value = self.live[i][0], self.tick()
        _fill(self.pool, guard.index, value)
        self.live[i] = guard, value

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent, value = self.live[self.choose(data)]
        if guard := self.acquire():
            self.pool.copy_slot(parent.index, guard.index)
            self.live.append((guard, value))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def save_and_move(self, data: st.DataObject) -> None:
        source, value = self.live[self.choose(data)]
        target = self.choose(data)
        spare, _ = self.pool.spare_rows
        self.pool.copy_slot(source.index, spare)
        self.pool.copy_slot(spare, self.live[target][0].index)
        self.live[target] = self.live[target][0], value

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        guard, _ = self.live.pop(self.choose(data))
        guard.release()
        self.ended.append(guard)

    @precondition(lambda self: self.ended)
    @rule(data=st.data())
    def end_again(self, data: st.DataObject) -> None:
        with pytest.raises(EngineFatal):
            self.ended[data.draw(st.integers(0, len(self.ended) - 1))].release()

    @invariant()
    def nothing_is_lost(self) -> None:
        self.pool.check_integrity([guard for guard, _ in self.live])
        assert self.pool.free_slots + len(self.live) == 4
        assert all(_value(self.pool, guard.index) == value for guard, value in self.live)


TestSlots = Slots.TestCase
TestSlots.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
