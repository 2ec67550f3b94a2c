"""`TextAssembler`: an answer's tokens to its text, ended by stop strings, the same whether streamed or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sparkrt.text.detokenizer import Detokenizer
from sparkrt.text.stop import StopMatcher
from sparkrt.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Delta:
    """What one call added. `tokens_used` counts the tokens of the answer so far: usage, and where the engine may stop.

    `finished` and `stop_reason` (the stop string met) stay set once a stop string ended the answer.
    """

    text: str
    finished: bool
    stop_reason: str | None
    tokens_used: int


class TextAssembler:
    """The text of one answer. Feed tokens as they come, in pieces of any size, and flush when generation has ended.

    `min_tokens`: stop strings that end within the first so many tokens are passed over.
    """

    __slots__ = ("_detokenizer", "_include", "_matcher", "_min_tokens", "_used")

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        *,
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens)
        self._matcher = StopMatcher(stop, include_stop_str_in_output) if stop else None
        self._include = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._used = 0

    def feed(self, token_ids: Sequence[int], *, stop_token: int | None = None) -> Delta:
        """Add tokens. Those after a match do not belong to the answer: neither shown nor counted.

        `stop_token`: the id that made the engine stop, the last of `token_ids`. It counts as used; its text is shown only with
        `include_stop_str_in_output`.
        """
        shown = token_ids if stop_token is None or self._include else token_ids[:-1]
        if self._matcher is None:
            self._used += len(token_ids)
            return self._delta(self._detokenizer.feed(shown))
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
        text = self._detokenizer.flush()
        if self._matcher is not None:
            text = self._matcher.feed(text, self._used > self._min_tokens) + self._matcher.flush()
        return self._delta(text)

    def _delta(self, text: str) -> Delta:
        reason = None if self._matcher is None else self._matcher.matched
        return Delta(text, reason is not None, reason, self._used)
