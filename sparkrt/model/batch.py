"""What a forward takes and gives: a ragged batch of decode rows and prefill slices, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from sparkrt.model.sequence import SequenceState
    from sparkrt.runtime.array import DeviceArray


@dataclass(frozen=True, slots=True)
class SamplerParams:
    """How one sequence's next token is chosen; resolved (no None that means a default), fixed for the sequence's life.

    `bias` is (ids, values); `allowed` restricts to these ids (None: all); `stop_ids` are banned until `min_tokens` were
    generated. `logprobs` is the number of alternatives wanted (-1: none, not even the chosen token's).
    """

    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    bias: tuple[tuple[int, ...], tuple[float, ...]] = ((), ())
    allowed: tuple[int, ...] | None = None
    masked: bool = False  # `SequenceState.mask` says what is allowed, in each step anew
    stop_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    logprobs: int = -1

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def plain_greedy(self) -> bool:
        """Argmax of the raw logits chooses the token."""
        return (
            self.greedy
            and self.repetition_penalty == 1.0
            and self.presence_penalty == 0.0
            and self.frequency_penalty == 0.0
            and not self.bias[0]
            and self.allowed is None
            and not self.masked
            and self.min_tokens == 0
        )


@dataclass(slots=True)
class PrefillSlice:
    """Tokens [start, start + len(tokens)) of a prompt. `sample` on the last slice: its last row yields a token.

    `targets` asks for prompt log-probabilities: `targets[i]` is the token that followed row i (rows beyond it are not scored).
    `snapshots`: at these positions, multiples of 64 in (start, start + len(tokens)], the state is kept in these spare slots.
    """

    seq: SequenceState
    tokens: np.ndarray  # int32
    start: int
    sample: bool
    targets: np.ndarray | None = None  # int32
    snapshots: tuple[tuple[int, int], ...] = ()


@dataclass(slots=True)
class ForwardBatch:
    """One step. Decode rows take their input token from the device's feed table: the host need not know it yet."""

    decode: list[SequenceState] = field(default_factory=list)
    prefill: list[PrefillSlice] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.decode) + sum(len(p.tokens) for p in self.prefill)


@dataclass(slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: the token's own, its rank (1 = most likely), and the top alternatives."""

    token: int
    logprob: float
    rank: int
    top_ids: np.ndarray  # int32 [k]
    top_logprobs: np.ndarray  # float32 [k]


@dataclass(slots=True)
class MixedBatchResult:
    """What a step produced, read back once it is done.

    `tokens[i]` belongs to the i-th sampling row: decode rows in order, then prefill slices with `sample`.
    `prompt_logprobs[j]` belongs to the j-th slice with `targets`. `logits` are device rows [rows, vocab] in that same
    order (valid until the next step), `hidden` the final-norm hidden states of those rows.
    """

    tokens: np.ndarray  # int32
    logprobs: list[TokenLogprobs | None]
    prompt_logprobs: list[list[TokenLogprobs]]
    logits: DeviceArray | None = None
    hidden: DeviceArray | None = None
