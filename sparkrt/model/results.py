"""Where a step's results lie: one block of 4-byte words on the device, copied whole or in part to pinned memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sparkrt.model.batch import TokenLogprobs
from sparkrt.runtime import dtypes
from sparkrt.runtime.array import DeviceArray
from sparkrt.runtime.owner import Owner


@dataclass(frozen=True, slots=True)
class ResultLayout:
    """tokens [rows] first, so that a step without log-probabilities copies only those; then, for each row of logits, the
    chosen token's log-probability, its rank, and the k best ids and log-probabilities."""

    rows: int
    logit_rows: int
    k: int

    @property
    def words(self) -> int:
        return self.rows + self.logit_rows * (2 + 2 * self.k)

    def offsets(self) -> dict[str, int]:
        chosen = self.rows
        rank = chosen + self.logit_rows
        top_ids = rank + self.logit_rows
        top_logprobs = top_ids + self.logit_rows * self.k
        return {"tokens": 0, "chosen": chosen, "rank": rank, "top_ids": top_ids, "top_logprobs": top_logprobs}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        n, k = self.logit_rows, self.k
        return {"tokens": (self.rows,), "chosen": (n,), "rank": (n,), "top_ids": (n, k), "top_logprobs": (n, k)}


@dataclass(frozen=True, slots=True)
class ScoreView:
    """The log-probabilities of one step, read on the host."""

    chosen: np.ndarray
    rank: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray

    def row(self, row: int, token: int, k: int) -> TokenLogprobs:
        top = self.top_ids[row, :k].copy(), self.top_logprobs[row, :k].copy()
        return TokenLogprobs(token, float(self.chosen[row]), int(self.rank[row]), *top)


class ResultBuffers:
    """The device block and its two pinned copies (two steps may be in flight)."""

    def __init__(self, owner: Owner, layout: ResultLayout) -> None:
        self.layout = layout
        self.ptr = owner.alloc(layout.words * 4, "results")
        self.host = [owner.pinned(layout.words, "results") for _ in range(2)]
        backend = owner.backend
        floats = {"chosen", "top_logprobs"}
        offsets, shapes = layout.offsets(), layout.shapes()
        self.device: dict[str, DeviceArray] = {
            name: backend.array(self.ptr.offset(at * 4), dtypes.float32 if name in floats else dtypes.int32, shapes[name])
            for name, at in offsets.items()
        }

    def scores(self, words: np.ndarray) -> ScoreView:
        offsets, shapes = self.layout.offsets(), self.layout.shapes()

        def part(name: str) -> np.ndarray:
            shape = shapes[name]
            return words[offsets[name] : offsets[name] + int(np.prod(shape))].reshape(shape)

        return ScoreView(part("chosen").view(np.float32), part("rank"), part("top_ids"), part("top_logprobs").view(np.float32))
