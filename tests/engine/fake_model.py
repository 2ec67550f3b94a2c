"""A model without arithmetic: its next token is a hash of the history, and it checks everything the engine promises.

Like the real one it computes in launch order and feeds decode rows from its own memory; unlike it, it notices slices that are
not contiguous or off the grid, rows beyond its limits, slots taken while a step still reads them, and double releases.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from sparkrt.engine.config import EngineConfig
from sparkrt.engine.job import CHUNK
from sparkrt.engine.messages import ModelInfo
from sparkrt.errors import CapacityError, EngineFatal
from sparkrt.model.batch import ForwardBatch, MixedBatchResult, SamplerParams, TokenLogprobs

VOCAB = 1000
EOS = 7
_PRIME = 2**61 - 1


def hashed(history: Iterable[int]) -> int:
    value = 17
    for token in history:
        value = (value * 1_000_003 + token + 1) % _PRIME
    return value


def next_token(history: int, params: SamplerParams, step: int, vocab: int = VOCAB) -> int:
    """A draw depends on the history and, unless greedy, on the row's seed and step; stop ids are banned until min_tokens."""
    key = history if params.greedy else hashed([history, params.seed, step])
    token = key % vocab
    while step < params.min_tokens and token in params.stop_ids:
        token = (token + 1) % vocab
    return token


@dataclass(eq=False)
class FakeSequence:
    slot: int
    blocks: int
    params: SamplerParams
    capacity: int
    length: int = 0
    generated: int = 0
    resumed: int = 0  # tokens generated before a preemption
    state: int = field(default_factory=lambda: hashed([]))
    fed: int = -1  # the token the next decode row reads
    released: bool = False


class FakeModel:
    def __init__(
        self,
        *,
        slots: int = 4,
        blocks: int = 64,
        block_size: int = 64,
        budget: int = 256,
        context: int = 4096,
        vocab: int = VOCAB,
    ) -> None:
        self.options: Any = SimpleNamespace(
            max_num_seqs=slots,
            max_num_batched_tokens=budget,
            max_tokens=max(budget, slots + CHUNK),
            max_model_len=context,
            page_size=block_size,
            num_blocks=blocks,
            valid_vocab=vocab,
            prompt_logit_rows=CHUNK,
        )
        self.num_blocks = blocks
        self.free_blocks = blocks
        self.vocab = vocab
        self._slots = list(range(slots))
        self._steps: dict[int, tuple[MixedBatchResult, set[int]]] = {}
        self._next = 0
        self.batches: list[tuple[int, list[tuple[int, int, int]]]] = []  # decode rows, (slot, start, stop) slices
        self.fail_launch: BaseException | None = None  # raised once
        self.fail_collect: BaseException | None = None

    @property
    def free_slots(self) -> int:
        return len(self._slots)

    def new_sequence(
        self, params: SamplerParams, total_tokens: int, history: Sequence[int] = (), generated: int = 0
    ) -> FakeSequence:
        assert len(history) >= generated
        assert total_tokens <= self.options.max_model_len
        blocks = -(-total_tokens // self.options.page_size)
        if not self._slots or blocks > self.free_blocks:
            raise CapacityError("the engine promised room")
        slot = self._slots.pop()
        assert not any(slot in slots for _, slots in self._steps.values()), "a slot changed hands while a step reads it"
        self.free_blocks -= blocks
        return FakeSequence(slot, blocks, params, total_tokens, generated=generated, resumed=generated)

    def grow(self, seq: FakeSequence, total_tokens: int) -> None:
        assert not seq.released
        more = -(-total_tokens // self.options.page_size) - seq.blocks
        assert more > 0, "grown without need"
        if more > self.free_blocks:
            raise CapacityError("the engine promised room")
        self.free_blocks -= more
        seq.blocks += more
        seq.capacity = total_tokens

    def release(self, seq: FakeSequence) -> None:
        assert not seq.released, "released twice"
        assert not any(seq.slot in slots for _, slots in self._steps.values()), "released while a step reads it"
        seq.released = True
        self._slots.append(seq.slot)
        self.free_blocks += seq.blocks

    def launch(self, batch: ForwardBatch) -> int:
        assert len(self._steps) < 2, "more than one step ahead"
        assert batch.num_tokens > 0
        assert batch.num_tokens <= self.options.max_tokens
        if (failure := self.fail_launch) is not None:
            self.fail_launch = None
            raise failure
        everyone: list[Any] = [*batch.decode, *(p.seq for p in batch.prefill)]
        assert len(set(everyone)) == len(everyone), "a sequence twice in one step"
        assert not any(seq.released for seq in everyone), "a released sequence runs"
        tokens: list[int] = []
        logprobs: list[TokenLogprobs | None] = []
        prompt_logprobs: list[list[TokenLogprobs]] = []
        scored = 0
        for seq in batch.decode:
            assert seq.generated > seq.resumed, "decode before the prompt is done"
            self._advance(seq, [seq.fed])
            self._sample(seq, tokens, logprobs)
        for part in batch.prefill:
            seq = part.seq
            assert seq.generated == seq.resumed, "a prompt after its answer"
            assert part.start == seq.length, "slices are not contiguous"
            assert len(part.tokens) > 0
            assert part.start % CHUNK == 0, "a slice ended off the grid and another follows"
            assert part.tokens.dtype == np.int32
            if part.targets is not None:
                assert len(part.tokens) - 1 <= len(part.targets) <= len(part.tokens)
                prompt_logprobs.append([self._logprobs(20, int(t)) for t in part.targets])
                scored += len(part.targets)
            self._advance(seq, part.tokens.tolist())
            if part.sample:
                self._sample(seq, tokens, logprobs)
        assert scored <= self.options.prompt_logit_rows
        self.batches.append((len(batch.decode), [(p.seq.slot, p.start, p.start + len(p.tokens)) for p in batch.prefill]))
        self._next += 1
        result = MixedBatchResult(np.array(tokens, np.int32), logprobs, prompt_logprobs)
        self._steps[self._next] = (result, {seq.slot for seq in everyone})
        return self._next

    def collect(self, handle: int) -> MixedBatchResult:
        assert handle == min(self._steps), "steps are collected in order"
        result, _ = self._steps.pop(handle)
        if (failure := self.fail_collect) is not None:
            self.fail_collect = None
            raise failure
        return result

    def check_integrity(self, sequences: Iterable[FakeSequence]) -> None:
        owned = list(sequences)
        if sorted([*self._slots, *(s.slot for s in owned)]) != list(range(self.options.max_num_seqs)):
            raise EngineFatal("slots leak")
        if self.free_blocks + sum(s.blocks for s in owned) != self.num_blocks:
            raise EngineFatal("blocks leak")

    def close(self) -> None:
        pass

    def _advance(self, seq: FakeSequence, tokens: list[int]) -> None:
        for token in tokens:
            assert 0 <= token < self.vocab
            seq.state = (seq.state * 1_000_003 + token + 1) % _PRIME
        seq.length += len(tokens)
        assert seq.length <= seq.capacity, "beyond the reservation"

    def _sample(self, seq: FakeSequence, tokens: list[int], logprobs: list[TokenLogprobs | None]) -> None:
        seq.fed = next_token(seq.state, seq.params, seq.generated, self.vocab)
        seq.generated += 1
        tokens.append(seq.fed)
        logprobs.append(None if seq.params.logprobs < 0 else self._logprobs(seq.params.logprobs, seq.fed))

    def _logprobs(self, k: int, token: int) -> TokenLogprobs:
        return TokenLogprobs(token, -0.5, 1, np.arange(k, dtype=np.int32), -np.arange(1, k + 1, dtype=np.float32))


def expected(prompt: list[int], params: SamplerParams, max_tokens: int, vocab: int = VOCAB) -> list[int]:
    """What this request alone gives, stop token included."""
    history, answer = hashed(prompt), []
    while len(answer) < max_tokens:
        token = next_token(history, params, len(answer), vocab)
        answer.append(token)
        if token in params.stop_ids:
            break
        history = (history * 1_000_003 + token + 1) % _PRIME
    return answer


def config(**changes: Any) -> EngineConfig:
    return EngineConfig(**{"model": "fake", "device": "host", "max_num_batched_tokens": 256, "debug": True, **changes})


def info(model: FakeModel, **changes: Any) -> ModelInfo:
    fields: dict[str, Any] = {
        "name": "fake",
        "architecture": "Fake",
        "dtype": "float32",
        "device": "host",
        "max_model_len": model.options.max_model_len,
        "vocab_size": model.vocab,
        "eos_token_ids": [EOS],
    }
    return ModelInfo(**{**fields, **changes})
