"""One step on the device: forward, then sampler, as two captured graphs where the shape repeats, eagerly where it does not.

A graph's key is (row bucket, sampler kind) and nothing about occupants: slots, pages and lengths are read from the plan. All of
them are captured at start.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sparkrt.errors import SparkrtError
from sparkrt.model.context import F32, I32, ForwardContext
from sparkrt.ops.embedding import GATHER_ROWS, SELECT_TOKENS
from sparkrt.ops.sampling import GREEDY, LOGPROBS, SAMPLE
from sparkrt.runtime.array import DeviceArray
from sparkrt.runtime.backend import GraphExec
from sparkrt.runtime.dtypes import uint32
from sparkrt.runtime.owner import Owner

if TYPE_CHECKING:
    from sparkrt.model.layers.layer import TransformerLayer
    from sparkrt.model.residual import Residual
    from sparkrt.model.weight import Embedding, Linear, Norm

log = logging.getLogger(__name__)
_LADDER = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)


def padded_batch_n(n: int) -> int:
    """The row bucket of a decode step: the first rung that holds `n`; above the ladder, multiples of 64."""
    return next((rung for rung in _LADDER if rung >= n), -(-n // 64) * 64)


def buckets(most: int) -> list[int]:
    """Every row bucket that up to `most` decode rows can fall into, largest first."""
    return sorted({padded_batch_n(n) for n in range(1, most + 1)}, reverse=True)


@dataclass(frozen=True, slots=True)
class Decoder:
    """The network itself: embedding, layers over a residual, final norm, head."""

    embedding: Embedding
    layers: Sequence[TransformerLayer]
    residual: Residual
    norm: Norm
    head: Linear

    def forward(self, ctx: ForwardContext, feed: DeviceArray, logits: DeviceArray, gather: bool) -> None:
        """Run rows of `ctx.shape`; logits[i] is row i, or row plan["logit_rows"][i] when `gather`."""
        tokens, plan = ctx.tokens, ctx.plan
        ids = ctx.buffer("ids", tokens)
        ctx.launch(SELECT_TOKENS, ids, plan["ids"].rows(0, tokens), plan["feed_slots"].rows(0, tokens), feed)
        self.embedding(ctx, self.residual.begin(ctx), ids)
        for layer in self.layers:
            layer.forward(ctx, self.residual)
        hidden = ctx.buffer("normed", tokens, ctx.hidden_size)
        self.residual.head(ctx, self.norm, hidden)
        rows = logits.shape[0]
        if gather:
            chosen = ctx.buffer("head", rows, ctx.hidden_size)
            ctx.launch(GATHER_ROWS, chosen, hidden, plan["logit_rows"].rows(0, rows))
            hidden = chosen
        if rows:
            self.head(ctx, logits, hidden)


@dataclass(frozen=True, slots=True)
class SamplerLists:
    """Per-row lists of a step that has any: where they lie in the plan's tail."""

    bias_ids: DeviceArray
    bias_values: DeviceArray
    stop_ids: DeviceArray


@dataclass(frozen=True, slots=True)
class SamplerState:
    """Device tables of the sampler, by slot, and where its results go."""

    feed: DeviceArray  # int32 [slots + 1]: each sequence's last token, the next step's input
    counts: DeviceArray  # int32 [slots + 1, V]
    allowed: DeviceArray  # uint32 [slots + 1, ceil(V / 32)]
    tokens: DeviceArray  # int32 [rows]
    chosen: DeviceArray  # float32 [logit rows]
    rank: DeviceArray
    top_ids: DeviceArray
    top_logprobs: DeviceArray
    valid_vocab: int
    no_lists: SamplerLists

    @classmethod
    def of(cls, owner: Owner, slots: int, vocab: int, valid_vocab: int, results: Mapping[str, DeviceArray]) -> SamplerState:
        """Zeroed tables for `slots` slots, the dummy's included; `results` has the arrays from `tokens` to `top_logprobs`."""
        none_i, none_f = owner.zeros((1,), I32, "no list"), owner.zeros((1,), F32, "no list")
        return cls(
            feed=owner.zeros((slots,), I32, "feed"),
            counts=owner.zeros((slots, vocab), I32, "token counts"),
            allowed=owner.zeros((slots, -(-vocab // 32)), uint32, "allowed tokens"),
            **results,
            valid_vocab=min(valid_vocab, vocab),
            no_lists=SamplerLists(none_i, none_f, none_i),
        )

    def sample(self, ctx: ForwardContext, logits: DeviceArray, lists: SamplerLists | None, greedy: bool) -> None:
        """Choose a token for every row of `logits`; it goes to `tokens` and, by slot, to `feed`."""
        n, plan = logits.shape[0], ctx.plan
        tokens, slots = self.tokens.rows(0, n), plan["sample_slots"].rows(0, n)
        if greedy:
            ctx.launch(GREEDY, tokens, self.feed, logits, slots, self.valid_vocab)
            return
        lists = lists or self.no_lists
        ctx.launch(
            SAMPLE,
            *(tokens, self.feed, self.counts, logits, slots, plan["params_f"].rows(0, n), plan["params_i"].rows(0, n)),
            *(plan["bias_indptr"].rows(0, n + 1), lists.bias_ids, lists.bias_values),
            *(plan["stop_indptr"].rows(0, n + 1), lists.stop_ids, self.allowed, self.valid_vocab),
        )

    def logprobs(self, ctx: ForwardContext, logits: DeviceArray, tokens: DeviceArray, first: int) -> None:
        """Log-probabilities of `tokens` under `logits`, into result rows from `first`."""
        a, b = first, first + logits.shape[0]
        outputs = (self.chosen.rows(a, b), self.rank.rows(a, b), self.top_ids.rows(a, b), self.top_logprobs.rows(a, b))
        ctx.launch(LOGPROBS, *outputs, logits, tokens, self.valid_vocab)


@dataclass(slots=True)
class GraphCache:
    """Graphs by key, captured at start. What has none runs eagerly, which is logged once per key."""

    _graphs: dict[Hashable, GraphExec] = field(default_factory=dict)
    _missed: set[Hashable] = field(default_factory=set)

    def __len__(self) -> int:
        return len(self._graphs)

    def run(self, ctx: ForwardContext, key: Hashable, body: Callable[[], None]) -> None:
        graph = self._graphs.get(key)
        if graph is not None:
            ctx.backend.launch_graph(graph, ctx.stream)
            return
        if key not in self._missed:
            self._missed.add(key)
            log.warning("no graph was captured for %s: such steps run eagerly", key)
        body()

    def capture(self, ctx: ForwardContext, key: Hashable, body: Callable[[], None]) -> None:
        """Record `body`, without running it. Whatever it raises leaves no capture open."""
        ctx.backend.begin_capture(ctx.stream)
        try:
            body()
        except BaseException:
            with suppress(SparkrtError):  # the body's error is the one to tell
                ctx.backend.destroy_graph(ctx.backend.end_capture(ctx.stream))
            raise
        graph = ctx.backend.end_capture(ctx.stream)
        try:
            self._graphs[key] = ctx.backend.instantiate(graph)
        finally:
            ctx.backend.destroy_graph(graph)

    def close(self, ctx: ForwardContext) -> None:
        for graph in self._graphs.values():
            ctx.backend.destroy_graph(graph)
        self._graphs.clear()
