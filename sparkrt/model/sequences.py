"""`Sequences`: what gives sequences their slot, pages and rows of the device's tables, and takes them back."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from sparkrt.cache.paged import PagedKvCache
from sparkrt.cache.prefix import Match, PrefixCache
from sparkrt.cache.state import StatePool
from sparkrt.errors import CapacityError
from sparkrt.model.batch import SamplerParams
from sparkrt.model.config import ModelConfig
from sparkrt.model.context import I32
from sparkrt.model.model import ModelOptions
from sparkrt.model.results import ResultBuffers
from sparkrt.model.sequence import Needs, SequenceState, SlotTable
from sparkrt.model.snapshots import AuxiliaryStates, Snapshot
from sparkrt.model.step import SamplerState
from sparkrt.ops.sampling_rules import PROMPT_BIT
from sparkrt.runtime.backend import GpuBackend
from sparkrt.runtime.owner import Owner


class Sequences:
    """Sequences over a paged cache and a state pool. What they upload follows, on the one stream, the steps in flight."""

    def __init__(
        self,
        owner: Owner,
        config: ModelConfig,
        options: ModelOptions,
        kv: PagedKvCache,
        states: StatePool,
        prefix: PrefixCache | None,
        results: ResultBuffers,
        aux: AuxiliaryStates,
    ) -> None:
        self.config, self.options = config, options
        self.kv, self.states, self.prefix = kv, states, prefix
        self._backend, self._stream, self._aux = owner.backend, owner.backend.default_stream, aux
        slots, max_blocks = options.max_num_seqs + 1, -(-options.max_model_len // options.page_size)
        mirror = owner.pinned(slots * max_blocks, "block tables").reshape(slots, max_blocks)
        self._table = SlotTable(mirror, kv.dummy_block)
        self._tables = owner.put(mirror, I32, "block tables")
        self._feed = owner.pinned(slots, "feed")
        self._sampler = SamplerState.of(owner, slots, config.vocab_size, options.valid_vocab, results.device)
        words = self._sampler.allowed.shape[1]
        self._masks = owner.pinned(slots * words, "masks").view(np.uint32).reshape(slots, words)

    @property
    def backend(self) -> GpuBackend:
        return self._backend

    @property
    def num_blocks(self) -> int:
        return self.kv.num_blocks

    @property
    def free_blocks(self) -> int:
        return self.kv.free_blocks

    @property
    def free_slots(self) -> int:
        return self.states.free_slots

    def new_sequence(
        self,
        params: SamplerParams,
        total_tokens: int,
        history: Sequence[int] | np.ndarray = (),
        generated: int = 0,
        match: Match | None = None,
    ) -> SequenceState:
        """A sequence with a slot and pages for `total_tokens`. Raises CapacityError, changing nothing, when either is short.

        One that goes on after the last `generated` tokens of its `history` draws and is penalized as if it had never paused.
        With a `match` of the history it shares those pages and stands behind token `match.resume`, its state restored (what is
        spilled of that, by the caller). Behind all of its history but one token it goes on by a decode step.
        """
        if total_tokens > self.options.max_model_len:
            raise CapacityError(f"{total_tokens} tokens exceed the model length {self.options.max_model_len}")
        guard = self.states.acquire()
        blocks = self.kv.new_table()
        try:
            if match is not None:
                blocks.share(match.blocks)
            blocks.extend_to(total_tokens)
        except BaseException:
            blocks.release()
            guard.release()
            raise
        seq = SequenceState(guard, blocks, params, total_tokens, generated=generated, needs=Needs.of(params))
        try:
            self._adopt(seq)
            resume = 0 if match is None else match.resume
            if (generated or resume) and seq.needs & Needs.COUNTS:
                self._count(seq, history)
            if match is not None and match.state is not None:
                self.states.copy_slot(match.state, seq.slot, self._stream)
                self._aux.restore(seq, match.state)
            if generated and resume == len(history) - 1:  # it may decode at once
                at, self._feed[seq.slot] = slice(seq.slot, seq.slot + 1), history[-1]
                self._backend.copy_h2d(self._sampler.feed.rows(at.start, at.stop).ptr, self._feed[at], self._stream)
        except BaseException:
            self.release(seq)
            raise
        seq.length = seq.kv_valid_tokens = self._table.length[seq.slot] = resume
        return seq

    def _count(self, seq: SequenceState, history: Sequence[int] | np.ndarray) -> None:
        """What its prompt has and how often it generated which token: no prefill will say."""
        counts, answer = np.zeros(self.config.vocab_size, np.int32), len(history) - seq.generated
        counts[np.array(history[:answer], np.int64)] = PROMPT_BIT
        np.add.at(counts, np.array(history[answer:], np.int64), 1)
        self._backend.copy_h2d(self._sampler.counts.rows(seq.slot, seq.slot + 1).ptr, counts)
        seq.counted = True

    def grow(self, seq: SequenceState, total_tokens: int) -> None:
        """More pages, for `total_tokens`: what is new of its row of the device's block tables is uploaded before the next step.

        Raises CapacityError, changing nothing, when pages are short.
        """
        first = len(seq.blocks.blocks)
        seq.blocks.extend_to(total_tokens)
        seq.capacity = total_tokens
        row, last = self._table.blocks[seq.slot], len(seq.blocks.blocks)
        row[first:last] = seq.blocks.blocks[first:]
        if last > first:
            ptr = self._tables.rows(seq.slot, seq.slot + 1).ptr.offset(first * row.itemsize)
            self._backend.copy_h2d(ptr, row[first:last], self._stream)

    def _adopt(self, seq: SequenceState) -> SequenceState:
        """Write a sequence's rows of the device tables. Small copies at admission, none in the steps after it."""
        self._table.assign(seq.slot, seq.blocks.blocks, seq.params, seq.generated)
        row = self._tables.rows(seq.slot, seq.slot + 1)
        self._backend.copy_h2d(row.ptr, self._table.blocks[seq.slot], self._stream)
        seq.mask = self._masks[seq.slot] if seq.params.masked else None
        if seq.params.allowed is not None:
            bits = np.zeros(self._sampler.allowed.shape[1] * 32, np.uint8)
            bits[list(seq.params.allowed)] = 1
            packed = np.packbits(bits, bitorder="little").view(np.uint32)
            self._backend.copy_h2d(self._sampler.allowed.rows(seq.slot, seq.slot + 1).ptr, packed)
        return seq

    def fork(self, seq: SequenceState) -> SequenceState:
        """A second sequence with the same past: full pages shared, the partial tail page and the state slot copied."""
        guard = self.states.acquire()
        try:
            blocks = seq.blocks.fork(seq.length, self._stream)
            try:
                blocks.extend_to(seq.capacity)
            except BaseException:
                blocks.release()
                raise
        except BaseException:
            guard.release()
            raise
        self.states.copy_slot(seq.slot, guard.index, self._stream)
        twin = dataclasses.replace(seq, guard=guard, blocks=blocks, aux=dict(seq.aux))
        self._adopt(twin)
        for table in (self._sampler.feed, self._sampler.counts):
            old, new = (table.rows(s, s + 1) for s in (seq.slot, twin.slot))
            self._backend.copy_d2d(new.ptr, old.ptr, old.nbytes, self._stream)
        self._table.length[twin.slot] = seq.length
        return twin

    def snapshot(self, seq: SequenceState, slot: int) -> Snapshot:
        """Copy the recurrent and conv state into a spare slot, behind what is in flight; `restore` takes it back."""
        self.states.copy_slot(seq.slot, slot, self._stream)
        self._aux.keep(seq, slot, seq.length)
        return Snapshot(slot, seq.length)

    def restore(self, seq: SequenceState, snapshot: Snapshot) -> None:
        """Put a sequence back to a snapshot; pages beyond its length are simply overwritten later."""
        self.states.copy_slot(snapshot.slot, seq.slot, self._stream)
        seq.length = seq.kv_valid_tokens = snapshot.length
        self._table.length[seq.slot] = snapshot.length
        self._aux.restore(seq, snapshot.slot)

    def release(self, seq: SequenceState) -> None:
        """Give back pages and slot; once, whatever is still in flight (a later owner's work follows it in stream order)."""
        if not seq.released:
            seq.released = True
            seq.blocks.release()
            seq.guard.release()

    def check_integrity(self, sequences: Iterable[SequenceState]) -> None:
        """free + owned = total for pages and slots. Raises EngineFatal otherwise."""
        live = list(sequences)
        if self.prefix is not None:
            self.prefix.check_integrity()
        self.kv.check_integrity([s.blocks for s in live], () if self.prefix is None else self.prefix.blocks())
        self.states.check_integrity([s.guard for s in live])
