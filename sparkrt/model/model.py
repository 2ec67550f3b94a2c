"""`Model`: the small protocol the engine drives, and `HybridModel`, its implementation for every family.

A step is launched (planned, uploaded, enqueued, nothing waited for) and later collected (its tokens read). The next step may
be launched in between: decode rows take their input from the device's feed table, so the host need not know it yet.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np

from sparkrt.cache.paged import PagedKvCache
from sparkrt.cache.prefix import Match, PrefixCache
from sparkrt.cache.spill import SpillOptions
from sparkrt.cache.state import StatePool
from sparkrt.errors import CapacityError, SparkrtError
from sparkrt.model.batch import ForwardBatch, MixedBatchResult, SamplerParams
from sparkrt.model.config import ModelConfig
from sparkrt.model.context import F32, I32, ForwardContext, Reservation, Scratch, StepShape
from sparkrt.model.layers.layer import TransformerLayer
from sparkrt.model.plan import PlanLimits, StepPlan
from sparkrt.model.planner import Planner, StepRows
from sparkrt.model.results import ResultBuffers, ResultLayout
from sparkrt.model.sequence import Needs, SequenceState, SlotTable
from sparkrt.model.snapshots import AuxiliaryStates, Snapshot
from sparkrt.model.step import Decoder, GraphCache, SamplerLists, SamplerState, buckets, padded_batch_n
from sparkrt.ops.sampling import MARK_PROMPT
from sparkrt.ops.sampling_rules import PROMPT_BIT
from sparkrt.runtime.array import DeviceArray
from sparkrt.runtime.backend import CaptureError, Event, GpuBackend, OutOfMemory
from sparkrt.runtime.comm import SoloComm
from sparkrt.runtime.dtypes import DType, uint32
from sparkrt.runtime.owner import Owner

log = logging.getLogger(__name__)

# Per row: 1024 biases (id and value) and 1024 stop ids beside the eos ids: the most a request may carry.
_LIST_ELEMENTS = 2 * 1024 + 1024 + 64


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


@dataclass(slots=True)
class _InFlight:
    """A launched step: what its rows are, and where its results will lie on the host."""

    handle: int
    rows: StepRows
    words: np.ndarray  # the pinned result buffer, int32
    done: Event


class HybridModel:
    """A decoder over a paged cache and a state pool, on any backend."""

    def __init__(
        self,
        owner: Owner,
        weights: Owner,
        config: ModelConfig,
        options: ModelOptions,
        decoder: Decoder,
        kv: PagedKvCache,
        states: StatePool,
        prefix: PrefixCache | None = None,
    ) -> None:
        """Takes over `owner`, of all that a step needs, `weights`, `kv`, `states` and `prefix`: `close` ends them."""
        self.config = config
        self.options = options
        self.kv = kv
        self.states = states
        self.weights = weights
        self._owner = owner
        self._backend = backend = owner.backend
        self._decoder, self._aux = decoder, AuxiliaryStates(decoder.layers)
        o = options
        slots, max_blocks = o.max_num_seqs + 1, -(-o.max_model_len // o.page_size)
        mirror = owner.pinned(slots * max_blocks, "block tables").reshape(slots, max_blocks)
        self._table = SlotTable(mirror, kv.dummy_block)
        self._tables = owner.put(mirror, I32, "block tables")
        limits = PlanLimits(o.max_rows, o.max_tokens, o.logit_rows, o.max_rows * _LIST_ELEMENTS, o.state_snapshots)
        self._plan = StepPlan(owner, limits)
        self._planner = Planner(self._table, o.page_size, states.spare_rows[0])
        self.prefix, self._feed = prefix, owner.pinned(slots, "feed")
        self._results = ResultBuffers(owner, ResultLayout(o.max_rows, o.logit_rows, o.max_logprobs))
        self._sampler = self._sampler_state(slots)
        words = self._sampler.allowed.shape[1]
        self._masks = owner.pinned(slots * words, "masks").view(np.uint32).reshape(slots, words)
        self._ctx = ForwardContext(
            *(backend, backend.default_stream, self._scratch(), self._plan.device, self._tables),
            *(kv, states, SoloComm(backend), config.hidden_size),
        )
        self._graphs = GraphCache()
        self._in_flight: deque[_InFlight] = deque()
        self._events = [owner.event(), owner.event()]
        self._next_handle = 0

    # --- capacity ---------------------------------------------------------------------------------------------------------
    @property
    def num_blocks(self) -> int:
        return self.kv.num_blocks

    @property
    def free_blocks(self) -> int:
        return self.kv.free_blocks

    @property
    def free_slots(self) -> int:
        return self.states.free_slots

    @property
    def captures(self) -> int:
        """How many graphs there are: per row bucket a forward, a greedy and a sampling sampler; none if all steps run eagerly."""
        return len(self._graphs)

    @property
    def backend(self) -> GpuBackend:
        return self._backend

    def wrap_layers(self, wrap: Callable[[int, TransformerLayer], Any]) -> None:
        """Put something that behaves like it in each layer's place, by number. What is captured already stays as it was."""
        layers = [wrap(i, layer) for i, layer in enumerate(self._decoder.layers)]
        self._decoder = dataclasses.replace(self._decoder, layers=layers)

    # --- sequences --------------------------------------------------------------------------------------------------------
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
                self.states.copy_slot(match.state, seq.slot, self._ctx.stream)
                self._aux.restore(seq, match.state)
            if generated and resume == len(history) - 1:  # it may decode at once
                at, self._feed[seq.slot] = slice(seq.slot, seq.slot + 1), history[-1]
                self._backend.copy_h2d(self._sampler.feed.rows(at.start, at.stop).ptr, self._feed[at], self._ctx.stream)
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
            self._backend.copy_h2d(ptr, row[first:last], self._ctx.stream)

    def _adopt(self, seq: SequenceState) -> SequenceState:
        """Write a sequence's rows of the device tables. Small copies at admission, none in the steps after it."""
        self._table.assign(seq.slot, seq.blocks.blocks, seq.params, seq.generated)
        row = self._tables.rows(seq.slot, seq.slot + 1)
        self._backend.copy_h2d(row.ptr, self._table.blocks[seq.slot], self._ctx.stream)
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
            blocks = seq.blocks.fork(seq.length, self._ctx.stream)
            try:
                blocks.extend_to(seq.capacity)
            except BaseException:
                blocks.release()
                raise
        except BaseException:
            guard.release()
            raise
        self.states.copy_slot(seq.slot, guard.index, self._ctx.stream)
        twin = dataclasses.replace(seq, guard=guard, blocks=blocks, aux=dict(seq.aux))
        self._adopt(twin)
        for table in (self._sampler.feed, self._sampler.counts):
            old, new = (table.rows(s, s + 1) for s in (seq.slot, twin.slot))
            self._backend.copy_d2d(new.ptr, old.ptr, old.nbytes, self._ctx.stream)
        self._table.length[twin.slot] = seq.length
        return twin

    def snapshot(self, seq: SequenceState, slot: int) -> Snapshot:
        """Copy the recurrent and conv state into a spare slot, behind what is in flight; `restore` takes it back."""
        self.states.copy_slot(seq.slot, slot, self._ctx.stream)
        self._aux.keep(seq, slot, seq.length)
        return Snapshot(slot, seq.length)

    def restore(self, seq: SequenceState, snapshot: Snapshot) -> None:
        """Put a sequence back to a snapshot; pages beyond its length are simply overwritten later."""
        self.states.copy_slot(snapshot.slot, seq.slot, self._ctx.stream)
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

    # --- steps ------------------------------------------------------------------------------------------------------------
    def launch(self, batch: ForwardBatch, before_sampling: Callable[[], None] | None = None) -> int:
        """Enqueue one step and return its handle. At most two may be in flight.

        `before_sampling` runs when the forward is on its way and the sampler is not: it may collect the step before, and fill
        masks by what that says, while the device computes.
        """
        assert len(self._in_flight) < 2, "collect a step before launching a third"
        host = self._plan.begin()
        graph = not batch.prefill and self._graphable
        bucket = padded_batch_n(len(batch.decode)) if graph else len(batch.decode)
        rows = self._planner.fill(host, batch, bucket)
        lists = self._lists(host, rows) if rows.needs & Needs.LISTS else None
        for layer in self._decoder.layers:
            layer.prestage(self._plan)
        self._plan.upload(self._ctx.stream)
        try:
            self._ctx.shape = StepShape(bucket, rows.prefill_tokens, len(batch.prefill), rows.snapshots)
            logits = self._forward(rows, graph)
            if before_sampling is not None:
                before_sampling()
            for seq in rows.sequences if rows.needs & Needs.MASK else ():
                if seq.mask is not None and seq.refilled:  # by who has collected its last step: nothing reads the row any more
                    self._backend.copy_h2d(self._sampler.allowed.rows(seq.slot, seq.slot + 1).ptr, seq.mask, self._ctx.stream)
                    seq.refilled = False
            self._sample(rows, logits, lists, graph)
            self._aux.keep_of_step(batch)
        except BaseException:
            for layer in self._decoder.layers:
                layer.rearm()
            with suppress(SparkrtError):
                self._backend.synchronize(self._ctx.stream)  # nobody collects this step, and its plan will be written over
            raise
        return self._read_back(rows)

    @property
    def _graphable(self) -> bool:
        return not (self.options.enforce_eager or any(layer.graph_veto for layer in self._decoder.layers))

    def _forward(self, rows: StepRows, graph: bool) -> DeviceArray:
        """Logits; it and the sampler are two graphs where the shape repeats."""
        ctx = self._ctx
        logits = ctx.buffer("logits", rows.logit_rows, self.config.vocab_size)
        if graph:
            self._graphs.run(ctx, ("forward", ctx.tokens), lambda: self._decode(logits))
        else:
            self._decoder.forward(ctx, self._sampler.feed, logits, gather=rows.chosen)
        return logits

    def _decode(self, logits: DeviceArray) -> None:
        self._decoder.forward(self._ctx, self._sampler.feed, logits, gather=False)

    def _sample(self, rows: StepRows, logits: DeviceArray, lists: SamplerLists | None, graph: bool) -> None:
        """Choose tokens for the sampling rows, and score what was asked for."""
        ctx, n = self._ctx, rows.sampling
        if rows.needs & Needs.COUNTS and rows.prefill_tokens:
            s, first = ctx.shape.slices, ctx.shape.decode
            ids = ctx.buffer("ids", ctx.tokens).rows(first, ctx.tokens)
            plan = ctx.plan
            slots, starts = plan["mark_slots"].rows(0, s), plan["prefill_starts"].rows(0, s)
            cu = plan["prefill_cu"].rows(0, s + 1)
            ctx.launch(MARK_PROMPT, self._sampler.counts, slots, ids, cu, starts)
        if n:
            greedy = not rows.needs & Needs.SAMPLER
            chosen = ctx.buffer("logits", n, self.config.vocab_size)
            if graph and lists is None:
                self._graphs.run(ctx, ("sampler", n, greedy), lambda: self._sampler.sample(ctx, chosen, None, greedy))
            else:
                self._sampler.sample(ctx, chosen, lists, greedy)
            if rows.needs & Needs.LOGPROBS:
                self._sampler.logprobs(ctx, chosen, self._sampler.tokens.rows(0, n), 0)
        if rows.scored:
            last = n + rows.scored
            self._sampler.logprobs(ctx, logits.rows(n, last), ctx.plan["logit_targets"].rows(n, last), n)

    def _lists(self, host: dict[str, np.ndarray], rows: StepRows) -> SamplerLists:
        ids, values, stops = self._planner.lists(host, rows)
        return SamplerLists(self._plan.append(ids), self._plan.append(values), self._plan.append(stops))

    def _read_back(self, rows: StepRows) -> int:
        """Copy results to pinned memory behind the step; the whole block only if log-probabilities were asked for."""
        turn = self._next_handle & 1
        words = self._results.host[turn]
        used = self._results.layout.words if rows.needs & Needs.LOGPROBS or rows.scored else rows.sampling
        if used:
            self._backend.copy_d2h(words[:used], self._results.ptr, self._ctx.stream)
        self._backend.record_event(self._events[turn], self._ctx.stream)
        self._in_flight.append(_InFlight(self._next_handle, rows, words, self._events[turn]))
        self._next_handle += 1
        return self._next_handle - 1

    def collect(self, handle: int) -> MixedBatchResult:
        """Wait for the oldest step, which must be `handle`, and read what it produced."""
        step = self._in_flight.popleft()
        assert step.handle == handle, "steps are collected in the order they were launched"
        self._backend.event_synchronize(step.done)
        rows, live = step.rows, len(step.rows.sequences)
        logits = self._ctx.buffer("logits", live, self.config.vocab_size)
        hidden = self._ctx.buffer("head" if rows.chosen else "normed", live, self.config.hidden_size)
        result = MixedBatchResult(step.words[:live].copy(), [None] * live, [], logits, hidden)
        for seq, length in zip(rows.touched, rows.lengths, strict=True):
            if length > seq.kv_valid_tokens:
                seq.kv_valid_tokens = length
        if rows.needs & Needs.LOGPROBS:
            view = self._results.scores(step.words)
            for i, seq in enumerate(rows.sequences):
                if seq.needs & Needs.LOGPROBS:
                    result.logprobs[i] = view.row(i, int(result.tokens[i]), seq.params.logprobs)
        if rows.scored:
            view, at = self._results.scores(step.words), rows.sampling
            for targets in rows.targets:
                k = self.options.max_logprobs
                result.prompt_logprobs.append([view.row(at + j, int(t), k) for j, t in enumerate(targets)])
                at += len(targets)
        return result

    def capture_graphs(self, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Capture what decode steps of every size replay, largest first; a size that cannot be captured will run eagerly."""
        if not self._graphable:
            return
        ctx, sizes = self._ctx, buckets(self.options.max_num_seqs)
        for done, n in enumerate(sizes):
            progress(done, len(sizes))
            ctx.shape = StepShape(n)
            logits = ctx.buffer("logits", n, self.config.vocab_size)
            try:
                self._graphs.capture(ctx, ("forward", n), partial(self._decode, logits))
                for greedy in (True, False):
                    self._graphs.capture(ctx, ("sampler", n, greedy), partial(self._sampler.sample, ctx, logits, None, greedy))
            except (CaptureError, OutOfMemory) as error:
                log.warning("decode steps of %d rows could not be captured: %s", n, error)
        progress(len(sizes), len(sizes))

    # --- construction and end ---------------------------------------------------------------------------------------------
    def _scratch(self) -> Scratch:
        c, o = self.config, self.options
        reservation = Reservation(o.max_tokens, o.max_rows)
        for name in ("residual", "normed", "delta"):
            reservation.rows(name, c.hidden_size)
        reservation.rows("ids", 1, I32)
        reservation.elements("head", o.logit_rows * c.hidden_size)
        reservation.elements("logits", o.logit_rows * c.vocab_size, F32)
        for layer in self._decoder.layers:
            layer.reserve(reservation)
        return Scratch(self._owner, o.dtype, reservation)

    def _sampler_state(self, slots: int) -> SamplerState:
        vocab = self.config.vocab_size
        owner, words = self._owner, -(-vocab // 32)
        none_i, none_f = owner.zeros((1,), I32, "no list"), owner.zeros((1,), F32, "no list")
        return SamplerState(
            feed=owner.zeros((slots,), I32, "feed"),
            counts=owner.zeros((slots, vocab), I32, "token counts"),
            allowed=owner.zeros((slots, words), uint32, "allowed tokens"),
            **self._results.device,
            valid_vocab=min(self.options.valid_vocab, vocab),
            no_lists=SamplerLists(none_i, none_f, none_i),
        )

    def close(self) -> None:
        """Free everything the model holds. Sequences must have been released."""
        self._backend.synchronize()
        if self.prefix is not None:
            self.prefix.end()
        self._graphs.close(self._ctx)
        for part in (self._owner, self.weights, self.kv, self.states):
            part.close()
