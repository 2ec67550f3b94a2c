"""`DecodeLoop`: token ids straight from the model. No scheduler, no text, nothing between the model and the caller.

A loop takes its slot and KV blocks out of the same books as requests, so both may run side by side, and always gives them
back: at the end, on `close`, at the end of a `with`, on an error, and when it is forgotten.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np

from sparkrt.engine.scheduler import CHUNK
from sparkrt.errors import RequestError
from sparkrt.model.batch import ForwardBatch, PrefillSlice

if TYPE_CHECKING:
    from sparkrt.engine.llm import LLM
    from sparkrt.engine.params import SamplingParams
    from sparkrt.model.sequence import SequenceState


@dataclass(slots=True, eq=False)
class _Row:
    index: int
    seq: SequenceState
    tokens: np.ndarray  # int32, the prompt
    stop_ids: frozenset[int]
    max_tokens: int
    planned: int = 0  # tokens sampled or in flight
    given: int = 0  # tokens given to the caller
    done: bool = False


class BatchDecodeLoop(Iterator[list[int | None]]):
    """Several prompts in step: each `next` is one model step and gives one token id per prompt, None for those that ended.

    A row ends with its stop id (given last) or after `max_tokens`. Without `sampling_params` the model's defaults hold, for the
    rest of the context. Raises CapacityError, taking nothing, when there is no room for all prompts now.
    """

    def __init__(self, llm: LLM, prompts: Sequence[Sequence[int]], sampling_params: SamplingParams | None = None) -> None:
        self._core = core = llm.core
        self._rows: list[_Row] = []
        self._live: list[_Row] = []
        self._ahead: tuple[int, list[_Row]] | None = None  # a step launched before the caller asked for it
        self._read: tuple[list[int], list[_Row]] | None = None  # the same, read because somebody else needed the device
        self._started = False
        self._closed = False
        if not prompts:
            raise RequestError("no prompts", param="prompt")
        try:
            for index, ids in enumerate(prompts):
                r = llm.loop_request(ids, sampling_params)
                seq = core.claim(r)
                tokens = np.array(r.prompt_ids, np.int32)
                self._rows.append(_Row(index, seq, tokens, frozenset(r.stop_token_ids), r.max_tokens))
        except BaseException:
            self.close()
            raise
        self._live = list(self._rows)

    def __next__(self) -> list[int | None]:
        if self._closed:
            raise StopIteration
        try:
            return self._next()
        except BaseException:  # StopIteration included: whatever ended the loop, it holds nothing
            self.close()
            raise

    def _next(self) -> list[int | None]:
        core = self._core
        core.take_turn(self)
        if not self._started:
            self._started = True
            return self._give(self._prefill(), self._live)
        while self._live:
            if self._read is not None:
                (tokens, rows), self._read = self._read, None
            else:
                if self._ahead is None:
                    self._ahead = self._launch()
                handle, rows = self._ahead
                # One step ahead: a row that stops in `handle` runs once more for nothing.
                more = core.config.async_scheduling and any(row.planned < row.max_tokens for row in self._live)
                self._ahead = self._launch() if more else None
                tokens = core.collect(handle).tokens.tolist()
            given = self._give(tokens, rows)
            if any(token is not None for token in given):
                return given
        raise StopIteration

    def _launch(self) -> tuple[int, list[_Row]]:
        rows = [row for row in self._live if row.planned < row.max_tokens]
        handle = self._core.launch(ForwardBatch(decode=[row.seq for row in rows]))
        for row in rows:
            row.planned += 1
        return handle, rows

    def _prefill(self) -> list[int]:
        """Run all prompts, several in a step under the token budget; returns the first token of each."""
        core, first = self._core, dict[int, int]()
        todo = [(row, 0) for row in self._rows]
        while todo:
            left, batch = max(core.scheduler.limits.budget, CHUNK), ForwardBatch()
            sampled, rest = list[int](), list[tuple[_Row, int]]()
            for row, start in todo:
                stop = min(start + left, len(row.tokens))
                if stop < len(row.tokens):
                    stop -= stop % CHUNK
                sample = stop == len(row.tokens)
                if stop > start:
                    left -= stop - start
                    batch.prefill.append(PrefillSlice(row.seq, row.tokens[start:stop], start, sample))
                if sample:
                    sampled.append(row.index)
                else:
                    rest.append((row, stop))
            tokens = core.collect(core.launch(batch)).tokens.tolist()
            first |= zip(sampled, tokens, strict=True)
            todo = rest
        for row in self._rows:
            row.planned = 1
        return [first[row.index] for row in self._rows]

    def _give(self, tokens: list[int], rows: list[_Row]) -> list[int | None]:
        """One step's tokens by prompt. A row that ended gives its slot back, or after the step it still flies in."""
        given: list[int | None] = [None] * len(self._rows)
        flying = self._ahead[1] if self._ahead else []
        ended = False
        for row, token in zip(rows, tokens, strict=True):
            if not row.done:
                given[row.index] = token
                row.given += 1
                row.done = token in row.stop_ids or row.given == row.max_tokens
            if row.done:
                ended = True
                if row not in flying:
                    self._core.unclaim(row.seq)
        if ended:
            self._live = [row for row in self._live if not row.done]
        return given

    def settle(self) -> None:
        """Read the step in flight: somebody else is about to launch."""
        if self._ahead is not None:
            (handle, rows), self._ahead = self._ahead, None
            self._read = (self._core.collect(handle).tokens.tolist(), rows)

    def close(self) -> None:
        """Give everything back; again is fine."""
        if self._closed:
            return
        self._closed = True
        try:
            self.settle()
        finally:
            for row in self._rows:
                self._core.unclaim(row.seq)
            self._live = []

    def __iter__(self) -> Self:
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class DecodeLoop(Iterator[int]):
    """One prompt: an iterator of token ids, the stop id included. See `BatchDecodeLoop`."""

    def __init__(self, llm: LLM, prompt_ids: Sequence[int], sampling_params: SamplingParams | None = None) -> None:
        self._loop = BatchDecodeLoop(llm, [prompt_ids], sampling_params)

    def __next__(self) -> int:
        token = next(self._loop)[0]
        assert token is not None
        return token

    def close(self) -> None:
        self._loop.close()

    def __iter__(self) -> Self:
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
