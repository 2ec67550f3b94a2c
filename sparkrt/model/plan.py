"""`StepPlan`: everything one step needs, in one pinned buffer uploaded by one copy.

The plan is self-contained plain numbers at fixed offsets (rank 0 could broadcast it). Its device copy has a fixed address, so
captured graphs read the plan of whatever step they are replayed for. Lists of unpredictable length (table updates, biases,
stop ids) come last, so that the copy ends where the used part does.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from sparkrt.ops import sampling_rules as sampling
from sparkrt.runtime import dtypes
from sparkrt.runtime.array import DeviceArray
from sparkrt.runtime.backend import Stream
from sparkrt.runtime.owner import Owner

_ALIGN = 64  # elements: 256 bytes


@dataclass(frozen=True, slots=True)
class PlanLimits:
    """Capacities. `rows` bounds sequences in a step, `tokens` its rows of activations, `logit_rows` its rows of logits."""

    rows: int
    tokens: int
    logit_rows: int
    tail: int  # 4-byte elements shared by the lists at the end
    snapshots: int = 0  # spare slots of the state pool

    def fields(self) -> list[tuple[str, bool, tuple[int, ...]]]:
        """(name, is float, shape) in buffer order; every element is four bytes."""
        r, t = self.rows, self.tokens
        return [
            ("ids", False, (t,)),  # input tokens of rows that do not read the feed
            ("feed_slots", False, (t,)),  # slot whose last token is the input, or -1
            ("positions", False, (t,)),
            ("slot_map", False, (t,)),  # page * page_size + offset, or -1: do not write
            ("decode_slots", False, (r,)),
            ("decode_kv_len", False, (r,)),
            ("prefill_slots", False, (r,)),
            ("mark_slots", False, (r,)),  # slots whose counts a slice marks; the dummy where there is nothing to mark
            ("prefill_starts", False, (r,)),
            ("prefill_kv_len", False, (r,)),
            ("prefill_cu", False, (r + 1,)),  # cumulative lengths of prefill slices, from 0
            ("snap_rows", False, (self.snapshots, 2)),  # by spare slot: slice, and offset in it where the state is kept; or -1
            ("logit_rows", False, (self.logit_rows,)),
            ("logit_targets", False, (self.logit_rows,)),  # token scored by each row of a prompt
            ("sample_slots", False, (r,)),
            ("params_f", True, (r, sampling.PARAMS_F)),
            ("params_i", False, (r, sampling.PARAMS_I)),
            ("bias_indptr", False, (r + 1,)),
            ("stop_indptr", False, (r + 1,)),
        ]


class StepPlan:
    """Two pinned copies (step N+1 is planned while N's upload may still run) and one device copy."""

    def __init__(self, owner: Owner, limits: PlanLimits) -> None:
        self.limits = limits
        self._backend = backend = owner.backend
        offsets, at = {}, 0
        for name, _, shape in limits.fields():
            offsets[name] = at
            at += -(-prod(shape) // _ALIGN) * _ALIGN
        self.fixed = at
        self.elements = at + limits.tail
        self._device = owner.alloc(self.elements * 4, "plan")
        self._raw = [owner.pinned(self.elements, "plan") for _ in range(2)]
        self._views = [self._host_views(raw, offsets) for raw in self._raw]
        self.device = {
            name: backend.array(self._device.offset(offsets[name] * 4), dtypes.float32 if is_float else dtypes.int32, shape)
            for name, is_float, shape in limits.fields()
        }
        self._turn = 0
        self._tail = 0

    def _host_views(self, raw: np.ndarray, offsets: dict[str, int]) -> dict[str, np.ndarray]:
        views = {}
        for name, is_float, shape in self.limits.fields():
            part = raw[offsets[name] : offsets[name] + prod(shape)].reshape(shape)
            views[name] = part.view(np.float32) if is_float else part
        return views

    def begin(self) -> dict[str, np.ndarray]:
        """The host arrays to fill for the next step: those of two steps ago, which was collected, so its upload is over."""
        self._turn ^= 1
        self._tail = 0
        return self._views[self._turn]

    def append(self, values: np.ndarray) -> DeviceArray:
        """Put a list at the end of the plan; returns where it will be on the device. float32 or int32."""
        n = values.size
        if self._tail + n > self.limits.tail:
            raise OverflowError(f"the step's lists need {self._tail + n} elements, the plan has {self.limits.tail}")
        at = self.fixed + self._tail
        self._raw[self._turn][at : at + n] = values.view(np.int32)
        self._tail += n
        return self._backend.array(self._device.offset(at * 4), dtypes.from_numpy(values.dtype), (n,))

    def upload(self, stream: Stream) -> None:
        """One asynchronous copy of the used part."""
        used = self.fixed + self._tail
        self._backend.copy_h2d(self._device, self._raw[self._turn][:used], stream)
