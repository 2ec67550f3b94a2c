"""`TextAssembler`: an answer's tokens to its text, ended by stop strings, the same whether streamed or not."""

from __future__ import annotations

import codecs
from collections.abc import Sequence, Set
from dataclasses import dataclass

from sparkrt.errors import RequestError
from sparkrt.text.tokenizer import Tokenizer


class Detokenizer:
    """One stream of tokens. The deltas, joined, are `Tokenizer.decode(ids, continuation=True)`; none ends in half a character."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True, shown: Set[int] = frozenset()) -> None:
        """`shown`: special tokens that are not skipped."""
        self._bytes_of = tokenizer.token_bytes
        self._skip = tokenizer.special_ids - shown if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, ids: Sequence[int]) -> str:
        """The text these tokens complete."""
        return self._decoder.decode(b"".join([self._bytes_of(i) for i in ids if i not in self._skip]))

    def flush(self) -> str:
        """At the end of the stream: what an unfinished character becomes (U+FFFD), usually nothing."""
        return self._decoder.decode(b"", final=True)


class StopMatcher:
    """Finds the first stop string to be complete, the longest if several are; holds back only what begins one."""

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        if "" in stops:
            raise RequestError("stop: a stop string may not be empty", param="stop")
        self._include, self._held = include_stop, ""
        self.matched: str | None = None
        self._stops = frozenset(stops)
        self._beginnings = {stop[:n] for stop in stops for n in range(1, len(stop))}
        self._lengths = sorted({len(stop) for stop in stops}, reverse=True)

    def feed(self, text: str, armed: bool = True) -> str:
        """The text that can be given out now; after a match nothing. Unless `armed`, stop strings that end in this piece pass."""
        if self.matched is not None:
            return ""
        whole, seen = self._held + text, len(self._held)
        for end in range(seen + 1, len(whole) + 1) if armed else ():
            for start in (end - length for length in self._lengths if length <= end):
                if whole[start:end] in self._stops:
                    self.matched, self._held = whole[start:end], ""
                    return whole[: end if self._include else start]
        tails = range(max(0, len(whole) - max(self._lengths, default=0) + 1), len(whole))
        cut = next((at for at in tails if whole[at:] in self._beginnings), len(whole))
        self._held = whole[cut:]
        return whole[:cut]

    def flush(self) -> str:
        """At the end of the text: what was held back for nothing."""
        held, self._held = self._held, ""
        return held


@dataclass(frozen=True, slots=True)
class Delta:
    """What one call added, the stop string that ended the answer, if one did, and how many tokens the answer has so far."""

    text: str
    finished: bool
    stop_reason: str | None
    tokens_used: int


class TextAssembler:
    """The text of one answer; flush when generation has ended. Within the first `min_tokens`, stop strings are passed over."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        *,
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
        shown: Set[int] = frozenset(),
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens, shown)
        self._matcher = StopMatcher(stop, include_stop_str_in_output)
        self._include, self._min_tokens, self._used = include_stop_str_in_output, min_tokens, 0

    def feed(self, token_ids: Sequence[int], *, stop_token: int | None = None) -> Delta:
        """Add tokens. Those after a match do not belong to the answer: neither shown nor counted.

        `stop_token`, the last of them, made the engine stop: it counts, and is shown with `include_stop_str_in_output` only.
        """
        shown = token_ids if stop_token is None or self._include else token_ids[:-1]
        parts = []
        for token_id in shown:
            if self._matcher.matched is not None:
                break
            self._used += 1
            parts.append(self._matcher.feed(self._detokenizer.feed([token_id]), self._used > self._min_tokens))
        if self._matcher.matched is None:
            self._used += len(token_ids) - len(shown)
        return self._delta("".join(parts))

    def flush(self) -> Delta:
        """The end of generation: gives out what was held back."""
        text = self._matcher.feed(self._detokenizer.flush(), self._used > self._min_tokens)
        return self._delta(text + self._matcher.flush())

    def _delta(self, text: str) -> Delta:
        return Delta(text, self._matcher.matched is not None, self._matcher.matched, self._used)
