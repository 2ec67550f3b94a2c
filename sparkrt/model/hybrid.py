"""`HybridModel`: the model of every family, on any backend. It is `Sequences` that can step."""

from __future__ import annotations

import dataclasses
import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from sparkrt.cache.paged import PagedKvCache
from sparkrt.cache.prefix import PrefixCache
from sparkrt.cache.state import StatePool
from sparkrt.errors import SparkrtError
from sparkrt.model.batch import ForwardBatch, MixedBatchResult
from sparkrt.model.config import ModelConfig
from sparkrt.model.context import F32, I32, ForwardContext, Reservation, Scratch, StepShape
from sparkrt.model.layers.layer import TransformerLayer
from sparkrt.model.model import ModelOptions
from sparkrt.model.plan import PlanLimits, StepPlan
from sparkrt.model.planner import Planner, StepRows
from sparkrt.model.results import ResultBuffers, ResultLayout
from sparkrt.model.sequence import Needs
from sparkrt.model.sequences import Sequences
from sparkrt.model.snapshots import AuxiliaryStates
from sparkrt.model.step import Decoder, GraphCache, SamplerLists, buckets, padded_batch_n
from sparkrt.ops.sampling import MARK_PROMPT
from sparkrt.runtime.array import DeviceArray
from sparkrt.runtime.backend import CaptureError, Event, OutOfMemory
from sparkrt.runtime.comm import SoloComm
from sparkrt.runtime.owner import Owner

log = logging.getLogger(__name__)

# Per row: 1024 biases (id and value) and 1024 stop ids beside the eos ids: the most a request may carry.
_LIST_ELEMENTS = 2 * 1024 + 1024 + 64


@dataclass(slots=True)
class _InFlight:
    """A launched step: what its rows are, and where its results will lie on the host."""

    handle: int
    rows: StepRows
    words: np.ndarray  # the pinned result buffer, int32
    done: Event


class HybridModel(Sequences):
    """A decoder over a paged cache and a state pool."""

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
        o, backend = options, owner.backend
        self._results = ResultBuffers(owner, ResultLayout(o.max_rows, o.logit_rows, o.max_logprobs))
        super().__init__(owner, config, options, kv, states, prefix, self._results, AuxiliaryStates(decoder.layers))
        self.weights, self._owner, self._decoder = weights, owner, decoder
        limits = PlanLimits(o.max_rows, o.max_tokens, o.logit_rows, o.max_rows * _LIST_ELEMENTS, o.state_snapshots)
        self._plan = StepPlan(owner, limits)
        self._planner = Planner(self._table, o.page_size, states.spare_rows[0])
        self._ctx = ForwardContext(
            *(backend, self._stream, self._scratch(), self._plan.device, self._tables),
            *(kv, states, SoloComm(backend), config.hidden_size),
        )
        self._graphs = GraphCache()
        self._in_flight: deque[_InFlight] = deque()
        self._events = [owner.event(), owner.event()]
        self._next_handle = 0

    @property
    def captures(self) -> int:
        """How many graphs there are: per row bucket a forward, a greedy and a sampling sampler; none if all steps run eagerly."""
        return len(self._graphs)

    def wrap_layers(self, wrap: Callable[[int, TransformerLayer], Any]) -> None:
        """Put something that behaves like it in each layer's place, by number. What is captured already stays as it was."""
        layers = [wrap(i, layer) for i, layer in enumerate(self._decoder.layers)]
        self._decoder = dataclasses.replace(self._decoder, layers=layers)

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

    def close(self) -> None:
        """Free everything the model holds. Sequences must have been released."""
        self._backend.synchronize()
        if self.prefix is not None:
            self.prefix.end()
        self._graphs.close(self._ctx)
        for part in (self._owner, self.weights, self.kv, self.states):
            part.close()
