"""`Model`: the small protocol the engine drives, and `ModelOptions`, what is fixed of one at its start.

A step is launched (planned, uploaded, enqueued, nothing waited for) and later collected (its tokens read). The next step may
be launched in between: decode rows take their input from the device's feed table, so the host need not know it yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from sparkrt.cache.prefix import Match, PrefixCache
from sparkrt.cache.spill import SpillOptions
from sparkrt.model.batch import ForwardBatch, MixedBatchResult, SamplerParams
from sparkrt.model.config import ModelConfig
from sparkrt.model.context import F32
from sparkrt.model.sequence import SequenceState
from sparkrt.model.snapshots import Snapshot
from sparkrt.model.step import padded_batch_n
from sparkrt.runtime.dtypes import DType


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Capacities fixed at start. `num_blocks` pages of `page_size` tokens; `valid_vocab` ids exist in the tokenizer."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_blocks: int
    valid_vocab: int
    dtype: DType = F32
    page_size: int = 64
    enforce_eager: bool = False
    batch_invariant: bool = False
    max_logprobs: int = 20
    prompt_logit_rows: int = 64
    prefix_caching: bool = False
    state_snapshots: int = 0  # spare slots of the state pool
    spill: SpillOptions | None = None  # where the prefix cache puts what it evicts

    @property
    def max_rows(self) -> int:
        return padded_batch_n(self.max_num_seqs)

    @property
    def max_tokens(self) -> int:
        """Rows of activations: a full budget, or all decode rows and the one chunk of 64 that every step may add."""
        return max(self.max_num_batched_tokens, self.max_rows + 64)

    @property
    def logit_rows(self) -> int:
        return self.max_rows + self.prompt_logit_rows


class Model(Protocol):
    """What the engine needs of a model."""

    @property
    def config(self) -> ModelConfig: ...
    @property
    def options(self) -> ModelOptions: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def free_blocks(self) -> int: ...
    @property
    def free_slots(self) -> int: ...
    @property
    def prefix(self) -> PrefixCache | None: ...
    def new_sequence(
        self,
        params: SamplerParams,
        total_tokens: int,
        history: Sequence[int] | np.ndarray = (),
        generated: int = 0,
        match: Match | None = None,
    ) -> SequenceState: ...
    def grow(self, seq: SequenceState, total_tokens: int) -> None: ...
    def launch(self, batch: ForwardBatch, before_sampling: Callable[[], None] | None = None) -> int: ...
    def collect(self, handle: int) -> MixedBatchResult: ...
    def fork(self, seq: SequenceState) -> SequenceState: ...
    def snapshot(self, seq: SequenceState, slot: int) -> Snapshot: ...
    def restore(self, seq: SequenceState, snapshot: Snapshot) -> None: ...
    def release(self, seq: SequenceState) -> None: ...
    def check_integrity(self, sequences: Iterable[SequenceState]) -> None: ...
    def close(self) -> None: ...
