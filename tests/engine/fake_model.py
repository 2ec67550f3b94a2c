"""A model without arithmetic: its next token is a hash of the history, and it checks everything the engine promises.

Like the real one it computes in launch order and feeds decode rows from its own memory; unlike it, it notices slices that are
not contiguous or off the grid, rows beyond its limits, slots taken while a step still reads them, and double releases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from sparkrt.cache.paged import BlockPool
from sparkrt.cache.prefix import Match, PrefixCache
from sparkrt.cache.spill import Spill
from sparkrt.engine.config import EngineConfig
from sparkrt.engine.job import CHUNK
from sparkrt.engine.messages import ModelInfo
from sparkrt.errors import CapacityError, EngineFatal
from sparkrt.model.batch import ForwardBatch, MixedBatchResult, SamplerParams, TokenLogprobs
from sparkrt.runtime.backend import OutOfMemory

VOCAB = 1000
EOS = 7
NOT_THERE = -1  # the state of a slot that is still to be restored
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
    blocks: Any  # .blocks: its table
    params: SamplerParams
    capacity: int
    shared: int  # blocks at the front that are somebody else's
    length: int = 0
    kv_valid_tokens: int = 0
    generated: int = 0
    resumed: int = 0  # tokens generated before a preemption
    state: int = field(default_factory=lambda: hashed([]))
    fed: int = -1  # the token the next decode row reads
    history: list[int] = field(default_factory=list)  # what is to be in its pages
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
        snapshots: int | None = None,  # None: no prefix cache
        recurrent: bool = True,
        spill: Callable[[FakeModel], Spill] | None = None,
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
        self.pool = BlockPool(blocks)
        self.prefix: PrefixCache | None = None
        self.recurrent, self.live = recurrent, dict[int, FakeSequence]()
        self.spill = None if spill is None else spill(self)
        if snapshots is not None:
            self.prefix = PrefixCache(self.pool, block_size, range(100, 100 + snapshots * recurrent), recurrent, self.spill)
        self.kv: dict[int, list[int]] = {}  # the tokens whose keys and values a block holds
        self.states: dict[int, tuple[int, int]] = {}  # snapshots: length, state
        self.computed = 0  # prompt tokens
        self.vocab = vocab
        self._slots = list(range(slots))
        self._steps: dict[int, tuple[MixedBatchResult, set[int], list[tuple[FakeSequence, int]]]] = {}
        self._next = 0
        self.batches: list[tuple[int, list[tuple[int, int, int]]]] = []  # decode rows, (slot, start, stop) slices
        self.fail_launch: BaseException | None = None  # raised once
        self.fail_collect: BaseException | None = None

    @property
    def free_blocks(self) -> int:
        return self.pool.free_count

    @property
    def free_slots(self) -> int:
        return len(self._slots)

    def new_sequence(
        self,
        params: SamplerParams,
        total_tokens: int,
        history: Sequence[int] = (),
        generated: int = 0,
        match: Match | None = None,
    ) -> FakeSequence:
        assert len(history) >= generated
        assert total_tokens <= self.options.max_model_len
        blocks, tokens = [] if match is None else list(match.blocks), [int(t) for t in history]
        if not self._slots:
            raise CapacityError("the engine promised room")
        fresh = self.pool.alloc(-(-total_tokens // self.options.page_size) - len(blocks))
        for block in blocks:
            self.pool.incref(block)
        slot = self._slots.pop()
        assert not self._in_use(slot), "a slot changed hands while a step reads it"
        seq = FakeSequence(slot, SimpleNamespace(blocks=blocks + fresh), params, total_tokens, len(blocks))
        seq.generated = seq.resumed = generated
        seq.history, self.live[slot] = tokens, seq
        if match is not None:
            cached = [token for block in blocks for token in self.kv[block]]
            assert cached == tokens[: len(cached)], "other tokens than those that were cached"
            assert match.resume < len(tokens), "nothing is left to compute"
            seq.length = seq.kv_valid_tokens = match.resume
            if match.state is not None:
                length, seq.state = self.states[match.state]
                assert length == match.resume, "a state of another place"
            elif match.resume:
                seq.state = NOT_THERE if self.recurrent else hashed(tokens[: match.resume])
            if generated and match.resume == len(tokens) - 1:
                seq.fed = tokens[-1]
        return seq

    def grow(self, seq: FakeSequence, total_tokens: int) -> None:
        assert not seq.released
        more = -(-total_tokens // self.options.page_size) - len(seq.blocks.blocks)
        assert more > 0, "grown without need"
        seq.blocks.blocks += self.pool.alloc(more)
        seq.capacity = total_tokens

    def snapshot(self, seq: FakeSequence, slot: int) -> None:
        self.states[slot] = seq.length, seq.state

    def release(self, seq: FakeSequence) -> None:
        assert not seq.released, "released twice"
        assert not self._in_use(seq.slot), "released while a step reads it"
        seq.released = True
        self._slots.append(seq.slot)
        for block in seq.blocks.blocks:
            if self.pool.decref(block):
                self.kv.pop(block, None)

    def _in_use(self, slot: int) -> bool:
        return any(slot in slots for _, slots, _ in self._steps.values())

    def launch(self, batch: ForwardBatch, before_sampling: Callable[[], None] | None = None) -> int:
        assert before_sampling is None, "its sequences have no masks"
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
            assert seq.generated > seq.resumed or seq.fed >= 0, "decode before the prompt is done"
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
            assert all(part.start < at <= part.start + len(part.tokens) and at % CHUNK == 0 for at, _ in part.snapshots)
            kept, ids = dict(part.snapshots), part.tokens.tolist()
            self.computed += len(ids)
            for i in range(0, len(ids), CHUNK):
                self._advance(seq, ids[i : i + CHUNK])
                if (slot := kept.get(seq.length)) is not None:
                    self.states[slot] = seq.length, seq.state
            if part.sample:
                self._sample(seq, tokens, logprobs)
        assert scored <= self.options.prompt_logit_rows
        self.batches.append((len(batch.decode), [(p.seq.slot, p.start, p.start + len(p.tokens)) for p in batch.prefill]))
        self._next += 1
        result = MixedBatchResult(np.array(tokens, np.int32), logprobs, prompt_logprobs)
        self._steps[self._next] = (result, {seq.slot for seq in everyone}, [(seq, seq.length) for seq in everyone])
        return self._next

    def collect(self, handle: int) -> MixedBatchResult:
        assert handle == min(self._steps), "steps are collected in order"
        result, _, lengths = self._steps.pop(handle)
        if (failure := self.fail_collect) is not None:
            self.fail_collect = None
            raise failure
        for seq, length in lengths:
            seq.kv_valid_tokens = max(seq.kv_valid_tokens, length)
        return result

    def check_integrity(self, sequences: Iterable[FakeSequence]) -> None:
        owned = list(sequences)
        if sorted([*self._slots, *(s.slot for s in owned)]) != list(range(self.options.max_num_seqs)):
            raise EngineFatal("slots leak")
        cached: list[int] = []
        if self.prefix is not None:
            self.prefix.check_integrity()
            cached += self.prefix.blocks()
        self.pool.check_integrity([*(block for s in owned for block in s.blocks.blocks), *cached])

    def close(self) -> None:
        if self.spill is not None:
            self.spill.close()

    def _advance(self, seq: FakeSequence, tokens: list[int]) -> None:
        assert seq.state != NOT_THERE, "it runs before its state is there"
        for token in tokens:
            assert 0 <= token < self.vocab
            at, offset = divmod(seq.length, self.options.page_size)
            assert seq.length < seq.capacity, "beyond the reservation"
            held = self.kv.setdefault(seq.blocks.blocks[at], [-1] * self.options.page_size)
            assert at >= seq.shared or held[offset] == token, "a shared page is not what the sequence takes it for"
            held[offset] = token
            seq.length += 1
            seq.state = (seq.state * 1_000_003 + token + 1) % _PRIME

    def _sample(self, seq: FakeSequence, tokens: list[int], logprobs: list[TokenLogprobs | None]) -> None:
        seq.fed = next_token(seq.state, seq.params, seq.generated, self.vocab)
        seq.generated += 1
        tokens.append(seq.fed)
        logprobs.append(None if seq.params.logprobs < 0 else self._logprobs(seq.params.logprobs, seq.fed))

    def _logprobs(self, k: int, token: int) -> TokenLogprobs:
        return TokenLogprobs(token, -0.5, 1, np.arange(k, dtype=np.int32), -np.arange(1, k + 1, dtype=np.float32))


def failing(model: Any, what: str, n: int) -> list[Any]:
    """Let the call number `n` (from 0) of a method fail; a result that is collected is gone. Returns the calls, as they come."""
    take, calls = getattr(model, what), list[Any]()

    def call(*about: Any) -> Any:
        calls.append(about)
        if len(calls) == n + 1:
            if what == "collect":
                take(*about)
            raise OutOfMemory("no memory")
        return take(*about)

    setattr(model, what, call)
    return calls


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
