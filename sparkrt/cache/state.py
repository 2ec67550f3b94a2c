"""`StatePool`: recurrent and convolution state of every sequence, at fixed addresses by slot, with a dummy slot behind the last.

Behind the dummy lie spare slots that no sequence runs in: snapshots (prefix.py). A fresh slot is not cleared: a sequence at
position 0 reads neither the state nor ring columns of negative positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sparkrt.errors import CapacityError, EngineFatal
from sparkrt.runtime.array import DeviceArray
from sparkrt.runtime.backend import DevicePtr, GpuBackend, Stream
from sparkrt.runtime.dtypes import DType, float32
from sparkrt.runtime.owner import Owner


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
    spare: int = 0

    @property
    def state_bytes(self) -> int:
        """Of one slot in one layer, at one depth."""
        return self.dims.value_heads * self.dims.v_dim * self.dims.k_dim * float32.itemsize

    @property
    def ring_bytes(self) -> int:
        """Of one slot in one layer. A ring needs no depth: drafts have columns of their own in it."""
        return self.ring * self.dims.conv_channels * self.conv_dtype.itemsize

    @property
    def rows(self) -> int:
        """Slots, the dummy and the spare ones."""
        return self.slots + 1 + self.spare

    @property
    def nbytes(self) -> int:
        """Of the whole pool, dummy slot included."""
        return self.layers * self.rows * (self.depth * self.state_bytes + self.ring_bytes)


_Places = list[tuple[DevicePtr, int]]  # where a slot's state and ring lie: in the first layer, and bytes to the next layer


class StatePool(Owner):
    """Slots 0 … slots-1; without layers (a pure attention model) mere indices. OutOfMemory gives back what was taken."""

    def __init__(
        self,
        backend: GpuBackend,
        layers: Sequence[int],
        slots: int,
        dims: tuple[int, int, int, int],
        conv_dtype: DType = float32,
        ring: int = 4,
        depth: int = 1,
        spare: int = 0,
    ) -> None:
        super().__init__(backend)
        if slots < 1 or ring < 1 or depth < 1 or spare < 0:
            raise ValueError(f"a state pool of {slots} slots, {spare} spare, {ring} ring columns, depth {depth}")
        self.plan = StatePlan(len(layers), slots, StateDims(*dims), conv_dtype, ring, depth, spare)
        self.slots = self.dummy_slot = slots
        self.spare_rows = slots + 1, slots + 1 + spare
        self._free = list(range(slots - 1, -1, -1))  # taken from the end: slot 0 first, then the one last released
        self._arrays: dict[tuple[int, int | None], DeviceArray] = {}  # states by layer and depth, rings under None
        self._bases: _Places = []
        self._sizes = (self.plan.state_bytes, self.plan.ring_bytes) if layers else ()
        try:
            if layers:
                self._allocate(layers)
            self.clear_dummy()
        except BaseException:
            self.close()
            raise

    @property
    def free_slots(self) -> int:
        return len(self._free)

    def state(self, layer: int, depth: int = 0) -> DeviceArray:
        """Recurrent state of a layer: float32 [slots + 1 + spare, value heads, DV, DK]. Depth 0 is the live one."""
        return self._arrays[layer, depth]

    def ring(self, layer: int) -> DeviceArray:
        """Convolution inputs of a layer: [slots + 1 + spare, ring, channels]; column = position mod ring."""
        return self._arrays[layer, None]

    def acquire(self) -> SlotGuard:
        """Raises CapacityError when all slots are taken."""
        if not self._free:
            raise CapacityError(f"all {self.slots} sequence slots are taken")
        return SlotGuard(self, self._free.pop())

    def copy_slot(self, src: int, dst: int, stream: Stream | None = None) -> None:
        """Live state and ring of all layers: two copies, whatever their number. Either slot may be a spare one."""
        if src != dst:
            for (to, pitch), (source, _), size in zip(self._slot(dst), self._slot(src), self._sizes, strict=True):
                self.backend.copy_d2d_2d(to, pitch, source, pitch, size, self.plan.layers, stream)

    @property
    def slot_bytes(self) -> int:
        """Of the live state and the ring of one slot in all layers."""
        return sum(self._sizes) * self.plan.layers

    def pack(self, slot: int, dst: DevicePtr, stream: Stream) -> None:
        """Gather a slot, states of all layers and then rings, into `slot_bytes` at `dst`; `unpack` brings it back from there."""
        for (base, pitch), size in zip(self._slot(slot), self._sizes, strict=True):
            self.backend.copy_d2d_2d(dst, size, base, pitch, size, self.plan.layers, stream)
            dst = dst.offset(size * self.plan.layers)

    def unpack(self, slot: int, src: DevicePtr, stream: Stream) -> None:
        for (base, pitch), size in zip(self._slot(slot), self._sizes, strict=True):
            self.backend.copy_d2d_2d(base, pitch, src, size, size, self.plan.layers, stream)
            src = src.offset(size * self.plan.layers)

    def check_integrity(self, guards: Iterable[SlotGuard]) -> None:
        """Raises EngineFatal unless free + owned = total, `guards` being all that live."""
        owned, held = sorted(guard.index for guard in guards), sorted({*range(self.slots)} - {*self._free})
        if owned != held or len(owned) + len(self._free) != self.slots:
            raise EngineFatal(f"state slots: {owned} owned, {held} held, {len(self._free)} of {self.slots} free")

    def _allocate(self, layers: Sequence[int]) -> None:
        p, rows = self.plan, self.plan.rows
        depths: list[int | None] = list(range(p.depth))
        state, ring = (p.state_bytes, float32, p.dims[:3]), (p.ring_bytes, p.conv_dtype, (p.ring, p.dims.conv_channels))
        for label, kinds, (size, dtype, shape) in (("recurrent state", depths, state), ("conv state", [None], ring)):
            base, pitch = self.alloc(len(layers) * len(kinds) * rows * size, label), len(kinds) * rows * size
            self._bases.append((base, pitch))
            for i, key in enumerate((layer, kind) for layer in layers for kind in kinds):
                start = base.offset(i * rows * size)
                self._arrays[key] = self.backend.array(start, dtype, (rows, *shape))

    def clear_dummy(self) -> None:
        """Padding rows update the dummy slot over and over: zeros keep it finite."""
        for array in self._arrays.values():
            dummy = array.rows(self.dummy_slot, self.dummy_slot + 1)
            self.backend.memset(dummy.ptr, 0, dummy.nbytes)

    def _slot(self, slot: int) -> _Places:
        if not 0 <= slot < self.plan.rows:
            raise EngineFatal(f"state slot {slot} of {self.plan.rows}")
        return [(base.offset(slot * size), pitch) for (base, pitch), size in zip(self._bases, self._sizes, strict=True)]


class SlotGuard:
    """One slot, owned until `release`, which happens exactly once."""

    def __init__(self, pool: StatePool, index: int) -> None:
        self._pool, self.index, self.held = pool, index, True

    def release(self) -> None:
        """Give the slot back. Raises EngineFatal the second time: by then it may be somebody else's."""
        if not self.held:
            raise EngineFatal(f"state slot {self.index} is released twice")
        self.held = False
        self._pool._free.append(self.index)
