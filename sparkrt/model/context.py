"""`ForwardContext`: what every layer is handed — the device, this step's shape, its plan on the device, and scratch memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sparkrt.runtime import dtypes
from sparkrt.runtime.array import DeviceArray
from sparkrt.runtime.backend import GpuBackend, Launchable, Stream
from sparkrt.runtime.dtypes import DType

if TYPE_CHECKING:
    from sparkrt.cache.paged import PagedKvCache
    from sparkrt.cache.state import StatePool
    from sparkrt.runtime.comm import Comm
    from sparkrt.runtime.owner import Owner


@dataclass(frozen=True, slots=True)
class StepShape:
    """Sizes of one step: rows [0, decode) are decode rows, the rest belongs to `slices` prefill slices.

    `snapshots`: (row, slot) pairs: the state behind row - 1 is to be kept in that spare slot of the state pool.
    """

    decode: int
    prefill: int = 0  # tokens
    slices: int = 0
    snapshots: tuple[tuple[int, int], ...] = ()

    @property
    def tokens(self) -> int:
        return self.decode + self.prefill


class Reservation:
    """Collects what layers need of scratch for `tokens` rows of `sequences`; the widest request for a name wins."""

    def __init__(self, tokens: int, sequences: int) -> None:
        self.tokens = tokens
        self.sequences = sequences
        self.sizes: dict[str, tuple[int, DType | None, bool]] = {}

    def rows(self, name: str, width: int, dtype: DType | None = None) -> None:
        """`tokens` rows of `width` elements; dtype None: that of activations."""
        self.elements(name, self.tokens * width, dtype)

    def elements(self, name: str, count: int, dtype: DType | None = None, zeroed: bool = False) -> None:
        """`zeroed` once, at the start: counters that kernels leave as they found them."""
        have, _, _ = self.sizes.get(name, (0, None, False))
        self.sizes[name] = (max(have, count), dtype, zeroed)


class Scratch:
    """Named activation buffers, allocated once for the largest step and cut to each step's shape.

    Cuts are remembered: a replayed or repeated shape makes no new views. One `Scratch` belongs to one stream of forwards.
    """

    def __init__(self, owner: Owner, activation: DType, reservation: Reservation) -> None:
        self._buffers = {
            name: (owner.zeros if zeroed else owner.empty)((count,), dtype or activation, f"scratch.{name}")
            for name, (count, dtype, zeroed) in reservation.sizes.items()
        }
        self._cuts: dict[tuple[str, tuple[int, ...]], DeviceArray] = {}

    def cut(self, name: str, shape: tuple[int, ...]) -> DeviceArray:
        key = (name, shape)
        array = self._cuts.get(key)
        if array is None:
            if len(self._cuts) >= 4096:  # prefill lengths vary without end
                self._cuts.clear()
            array = self._cuts[key] = self._buffers[name].head(*shape)
        return array


@dataclass(slots=True)
class ForwardContext:
    """Valid for one forward. `plan` are the fixed-address device arrays of `StepPlan`."""

    backend: GpuBackend
    stream: Stream
    scratch: Scratch
    plan: dict[str, DeviceArray]
    tables: DeviceArray  # [slots + 1, max_blocks] page ids by slot
    kv: PagedKvCache
    states: StatePool
    comm: Comm
    hidden_size: int
    shape: StepShape = field(default_factory=lambda: StepShape(0))

    @property
    def tokens(self) -> int:
        return self.shape.tokens

    def launch(self, op: Launchable, *args: Any) -> None:
        self.backend.launch(op, args, self.stream)

    def buffer(self, name: str, *shape: int) -> DeviceArray:
        """Scratch under a name that must have been reserved; contents last until the same name is asked for again."""
        return self.scratch.cut(name, shape)


F32 = dtypes.float32
I32 = dtypes.int32
