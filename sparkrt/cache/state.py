"""`StatePool`: recurrent and convolution state of every sequence, at fixed addresses by slot.

Kernels find a sequence's state by its slot index, so a captured graph does not depend on who occupies a slot, and slots need
not be neighbours. The row behind the last slot is the dummy that padding rows use. A fresh slot is not cleared: a sequence
that starts at position 0 reads neither the state nor ring columns of negative positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sparkrt.errors import CapacityError, EngineFatal
from sparkrt.runtime.array import DeviceArray
from sparkrt.runtime.backend import NULL, DevicePtr, GpuBackend, Stream
from sparkrt.runtime.dtypes import DType, float32


class StateDims(NamedTuple):
    """What one slot of one layer holds; zeros where there is no recurrent layer."""

    value_heads: int
    v_dim: int
    k_dim: int
    conv_channels: int


@dataclass(frozen=True, slots=True)
class StatePlan:
    """Bytes of a pool before it exists. `depth` counts copies of the recurrent state: the live one and draft checkpoints."""

    layers: int
    slots: int
    dims: StateDims
    conv_dtype: DType = float32
    ring: int = 4
    depth: int = 1

    @property
    def state_bytes(self) -> int:
        """Recurrent state of one slot in one layer, at one depth."""
        return self.dims.value_heads * self.dims.v_dim * self.dims.k_dim * float32.itemsize

    @property
    def ring_bytes(self) -> int:
        """Convolution ring of one slot in one layer. A ring needs no depth: drafts have columns of their own in it."""
        return self.ring * self.dims.conv_channels * self.conv_dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Of the whole pool, dummy slot included."""
        return self.layers * (self.slots + 1) * (self.depth * self.state_bytes + self.ring_bytes)

    @property
    def snapshot_bytes(self) -> int:
        return self.layers * (self.state_bytes + self.ring_bytes)


class StatePool:
    """Slots 0 … slots-1. Without layers (a pure attention model) slots are indices and nothing is allocated."""

    def __init__(
        self,
        backend: GpuBackend,
        layers: Sequence[int],
        slots: int,
        dims: tuple[int, int, int, int],
        conv_dtype: DType = float32,
        ring: int = 4,
        depth: int = 1,
    ) -> None:
        """Raises OutOfMemory; what was taken until then is given back."""
        if slots < 1 or ring < 1 or depth < 1:
            raise ValueError(f"a state pool of {slots} slots, {ring} ring columns, depth {depth}")
        self.plan = StatePlan(len(layers), slots, StateDims(*dims), conv_dtype, ring, depth)
        self.slots = slots
        self.dummy_slot = slots
        self._backend = backend
        self._free = list(range(slots - 1, -1, -1))  # taken from the end: slot 0 first, then the one last released
        self._held: set[int] = set()
        self._state: dict[tuple[int, int], DeviceArray] = {}
        self._ring: dict[int, DeviceArray] = {}
        self._state_base = self._ring_base = NULL
        if not layers:
            return
        try:
            self._allocate(layers)
        except BaseException:
            self.close()
            raise

    @property
    def free_slots(self) -> int:
        return len(self._free)

    def state(self, layer: int, depth: int = 0) -> DeviceArray:
        """Recurrent state of a layer: float32 [slots + 1, value heads, DV, DK]. Depth 0 is the live one."""
        return self._state[layer, depth]

    def ring(self, layer: int) -> DeviceArray:
        """Convolution inputs of a layer: [slots + 1, ring, channels]; column = position mod ring."""
        return self._ring[layer]

    def acquire(self) -> SlotGuard:
        """A slot of one's own. Raises CapacityError when all are taken."""
        if not self._free:
            raise CapacityError(f"all {self.slots} sequence slots are taken")
        slot = self._free.pop()
        self._held.add(slot)
        return SlotGuard(self, slot)

    def copy_slot(self, src: int, dst: int, stream: Stream | None = None) -> None:
        """Live state and ring of all layers, from one slot to another: two copies, whatever the number of layers."""
        if src != dst:
            self._copy(self._slot_addresses(dst), self._slot_addresses(src), stream)

    def snapshot(self, slot: int, stream: Stream | None = None) -> StateSnapshot:
        """A copy of a slot's live state outside the pool. Raises OutOfMemory. Close it when done."""
        base = self._backend.alloc(self.plan.snapshot_bytes, "state snapshot")
        saved = StateSnapshot(self._backend, base)
        try:
            self._copy(self._snapshot_addresses(saved), self._slot_addresses(slot), stream)
        except BaseException:
            saved.close()
            raise
        return saved

    def restore(self, slot: int, saved: StateSnapshot, stream: Stream | None = None) -> None:
        """Put a snapshot back, into any slot."""
        self._copy(self._slot_addresses(slot), self._snapshot_addresses(saved), stream)

    def check_integrity(self, guards: Iterable[SlotGuard]) -> None:
        """free + owned = total, when `guards` are all that live. Raises EngineFatal otherwise."""
        owned = sorted(guard.index for guard in guards)
        if owned != sorted(self._held) or sorted([*self._free, *owned]) != list(range(self.slots)):
            raise EngineFatal(f"state slots: {owned} owned, {sorted(self._held)} held, {len(self._free)} of {self.slots} free")

    def close(self) -> None:
        """Free the memory; a second call does nothing."""
        bases, self._state_base, self._ring_base = (self._ring_base, self._state_base), NULL, NULL
        self._state.clear()
        self._ring.clear()
        for base in bases:
            if base:
                self._backend.free(base)

    def _give_back(self, slot: int) -> None:
        self._held.remove(slot)
        self._free.append(slot)

    def _allocate(self, layers: Sequence[int]) -> None:
        p, backend, rows = self.plan, self._backend, self.slots + 1
        self._state_base = backend.alloc(p.layers * p.depth * rows * p.state_bytes, "recurrent state")
        self._ring_base = backend.alloc(p.layers * rows * p.ring_bytes, "conv state")
        for i, layer in enumerate(layers):
            for depth in range(p.depth):
                start = self._state_base.offset((i * p.depth + depth) * rows * p.state_bytes)
                self._state[layer, depth] = backend.array(start, float32, (rows, *p.dims[:3]))
                # Padding rows update the dummy slot over and over: zeros keep it finite.
                backend.memset(start.offset(self.dummy_slot * p.state_bytes), 0, p.state_bytes)
            start = self._ring_base.offset(i * rows * p.ring_bytes)
            self._ring[layer] = backend.array(start, p.conv_dtype, (rows, p.ring, p.dims.conv_channels))
            backend.memset(start.offset(self.dummy_slot * p.ring_bytes), 0, p.ring_bytes)

    def _slot_addresses(self, slot: int) -> _Addresses:
        if not 0 <= slot <= self.dummy_slot:
            raise EngineFatal(f"state slot {slot} of {self.slots}")
        p, rows = self.plan, self.slots + 1
        state, ring = self._state_base.offset(slot * p.state_bytes), self._ring_base.offset(slot * p.ring_bytes)
        return _Addresses(state, p.depth * rows * p.state_bytes, ring, rows * p.ring_bytes)

    def _snapshot_addresses(self, saved: StateSnapshot) -> _Addresses:
        p = self.plan
        return _Addresses(saved.base, p.state_bytes, saved.base.offset(p.layers * p.state_bytes), p.ring_bytes)

    def _copy(self, dst: _Addresses, src: _Addresses, stream: Stream | None) -> None:
        p = self.plan
        if p.layers:
            self._backend.copy_d2d_2d(dst.state, dst.state_pitch, src.state, src.state_pitch, p.state_bytes, p.layers, stream)
            self._backend.copy_d2d_2d(dst.ring, dst.ring_pitch, src.ring, src.ring_pitch, p.ring_bytes, p.layers, stream)


class _Addresses(NamedTuple):
    """Where a slot's state and ring lie: the first layer's, and the bytes from a layer to the next."""

    state: DevicePtr
    state_pitch: int
    ring: DevicePtr
    ring_pitch: int


class SlotGuard:
    """One slot, owned until `release`, which happens exactly once."""

    __slots__ = ("_pool", "index")

    def __init__(self, pool: StatePool, index: int) -> None:
        self.index = index
        self._pool: StatePool | None = pool

    def release(self) -> None:
        """Give the slot back. Raises EngineFatal the second time: by then it may be somebody else's."""
        if self._pool is None:
            raise EngineFatal(f"state slot {self.index} is released twice")
        pool, self._pool = self._pool, None
        pool._give_back(self.index)

    @property
    def held(self) -> bool:
        return self._pool is not None


class StateSnapshot:
    """A slot's state outside the pool, all layers: states, then rings."""

    __slots__ = ("_backend", "base")

    def __init__(self, backend: GpuBackend, base: DevicePtr) -> None:
        self.base = base
        self._backend = backend

    def close(self) -> None:
        """Free the memory; a second call does nothing."""
        base, self.base = self.base, NULL
        if base:
            self._backend.free(base)
