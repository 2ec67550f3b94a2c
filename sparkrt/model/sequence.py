"""`SequenceState`: what one sequence owns on the device, and the table that mirrors it by slot.

Everything a step needs of a sequence sits in NumPy rows indexed by its slot (`SlotTable`), so that planning a step of 256
decode rows is a handful of gathers and no loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sparkrt.cache.paged import BlockTable
from sparkrt.cache.state import SlotGuard
from sparkrt.model.batch import SamplerParams
from sparkrt.ops import sampling_rules as sampling


class Needs:
    """Bits of what a sequence's sampler rows need beyond an argmax. Plain ints: an IntFlag's `|` takes a microsecond, a row's."""

    NOTHING = 0
    SAMPLER = 1  # temperature, penalties, restrictions
    LISTS = 2  # per-row lists: logit bias, or stop ids banned until min_tokens
    LOGPROBS = 4
    COUNTS = 8  # penalties look at the prompt and at what was generated
    MASK = 16  # a mask of its own for this step

    @classmethod
    def of(cls, p: SamplerParams) -> int:
        needs = cls.NOTHING
        if not p.plain_greedy:
            needs |= cls.SAMPLER
        if p.bias[0] or (p.min_tokens and p.stop_ids):
            needs |= cls.LISTS
        if p.masked:
            needs |= cls.MASK
        if p.logprobs >= 0:
            needs |= cls.LOGPROBS
        if p.repetition_penalty != 1.0 or p.presence_penalty or p.frequency_penalty:
            needs |= cls.COUNTS
        return needs


@dataclass(slots=True, eq=False)
class SequenceState:
    """One sequence: its slot (recurrent and conv state, sampler rows) and its pages.

    `length` counts tokens whose KV and state are computed *or in flight*: a launched step has advanced it before the host has
    read that step's token. `kv_valid_tokens` is the prefix proven written (collected), the only part that may be shared.
    """

    guard: SlotGuard
    blocks: BlockTable
    params: SamplerParams
    capacity: int  # tokens reserved
    length: int = 0
    generated: int = 0  # tokens sampled or in flight
    kv_valid_tokens: int = 0
    adapter_id: int = 0
    needs: int = Needs.NOTHING
    mask: np.ndarray | None = None  # of `masked` params: uint32 bits of what may be sampled next,
    refilled: bool = False  # and whether they changed since the last step took them
    counted: bool = False  # its counts are on the device already: its prompt is not to be marked
    aux: dict[str, Any] = field(default_factory=dict)  # per-layer auxiliary state (snapshot_aux / restore_aux)
    released: bool = False

    @property
    def slot(self) -> int:
        return self.guard.index


class SlotTable:
    """Host mirror of per-slot facts: rows 0 … max_slots-1 are sequences, the last row is the dummy that padding uses."""

    def __init__(self, blocks: np.ndarray, dummy_block: int) -> None:
        """`blocks` int32 [slots + 1, max_blocks] is pinned memory: its rows are copied to the device as they change."""
        rows = len(blocks)
        self.dummy = rows - 1
        self.blocks = blocks
        self.blocks[:] = dummy_block
        self.length = np.zeros(rows, np.int32)
        self.generated = np.zeros(rows, np.int32)
        self.params_f = np.zeros((rows, sampling.PARAMS_F), np.float32)
        self.params_i = np.zeros((rows, sampling.PARAMS_I), np.int32)
        self._dummy_block = dummy_block
        self._fill_params(self.dummy, SamplerParams(temperature=0.0))

    def assign(self, slot: int, blocks: Sequence[int], params: SamplerParams, generated: int = 0) -> None:
        """A new sequence takes `slot`, after it `generated` this many tokens elsewhere."""
        row = self.blocks[slot]
        row[: len(blocks)] = blocks
        row[len(blocks) :] = self._dummy_block
        self.length[slot] = 0
        self.generated[slot] = generated
        self._fill_params(slot, params)

    def _fill_params(self, slot: int, p: SamplerParams) -> None:
        f, i = self.params_f[slot], self.params_i[slot]
        f[sampling.F_TEMPERATURE] = p.temperature
        f[sampling.F_TOP_P] = p.top_p
        f[sampling.F_MIN_P] = p.min_p
        f[sampling.F_REPETITION] = p.repetition_penalty
        f[sampling.F_PRESENCE] = p.presence_penalty
        f[sampling.F_FREQUENCY] = p.frequency_penalty
        seed = p.seed & 0xFFFFFFFFFFFFFFFF
        i[sampling.I_TOP_K] = p.top_k
        i[sampling.I_SEED_LO : sampling.I_SEED_LO + 2] = np.array([seed], np.uint64).view(np.int32)
        i[sampling.I_MIN_TOKENS] = p.min_tokens
        i[sampling.I_ALLOWED_ROW] = slot if p.masked or p.allowed is not None else -1
