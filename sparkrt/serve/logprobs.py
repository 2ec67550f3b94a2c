"""Log-probabilities in the shapes of the two APIs. Always finite: minus infinity cannot be written in JSON and shows as -9999."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from sparkrt.engine.messages import Logprob
from sparkrt.serve.protocol import ChatLogprobs, CompletionLogprobs, PromptLogprobs, TokenLogprob, TopLogprob

if TYPE_CHECKING:
    from sparkrt.text.tokenizer import Tokenizer

FLOOR = -9999.0


def floored(logprob: float) -> float:
    return max(FLOOR, logprob)  # NaN compares false and lands here too


def shown(raw: bytes) -> str:
    """A token as text; one that is only part of a character is spelled out, so that different tokens stay different."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def chat_logprobs(items: Iterable[Logprob], tokenizer: Tokenizer) -> ChatLogprobs:
    content = []
    for item in items:
        raw = tokenizer.token_bytes(item.token_id)
        top = []
        for token_id, logprob in zip(item.top_ids, item.top_logprobs, strict=True):
            other = tokenizer.token_bytes(token_id)
            top.append(TopLogprob(token=shown(other), logprob=floored(logprob), bytes=list(other)))
        content.append(TokenLogprob(token=shown(raw), logprob=floored(item.logprob), bytes=list(raw), top_logprobs=top))
    return ChatLogprobs(content=content)


def prompt_logprobs(ids: Sequence[int], items: Sequence[Logprob | None], tokenizer: Tokenizer) -> PromptLogprobs:
    """For each prompt token what was thought of it and of the alternatives, by id; null for the first."""

    def entry(token_id: int, logprob: float, rank: int) -> dict[str, float | int | str]:
        return {"logprob": floored(logprob), "rank": rank, "decoded_token": shown(tokenizer.token_bytes(token_id))}

    found: PromptLogprobs = []
    for token_id, item in zip(ids, items, strict=True):
        if item is None:
            found.append(None)
            continue
        ranked = enumerate(zip(item.top_ids, item.top_logprobs, strict=True), 1)
        found.append(
            {str(token_id): entry(token_id, item.logprob, item.rank)}
            | {str(other): entry(other, logprob, rank) for rank, (other, logprob) in ranked}
        )
    return found


class Offsets:
    """Where each token's text begins in a text that grows token by token: in characters, inside the cut one included."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._length = 0

    def next(self, token_id: int) -> int:
        start = self._length
        if token_id not in self._skipped:
            self._length += len(self._decoder.decode(self._tokenizer.token_bytes(token_id)))
        return start


def completion_logprobs(
    ids: Sequence[int], items: Sequence[Logprob | None], offsets: Offsets, tokenizer: Tokenizer
) -> CompletionLogprobs:
    """The chosen token is always among the alternatives, as the field has it. None: the first token of a prompt."""
    tops: list[dict[str, float] | None] = []
    for item in items:
        if item is None:
            tops.append(None)
            continue
        top = {
            shown(tokenizer.token_bytes(token_id)): floored(logprob)
            for token_id, logprob in zip(item.top_ids, item.top_logprobs, strict=True)
        }
        top.setdefault(shown(tokenizer.token_bytes(item.token_id)), floored(item.logprob))
        tops.append(top)
    return CompletionLogprobs(
        text_offset=[offsets.next(token_id) for token_id in ids],
        token_logprobs=[None if item is None else floored(item.logprob) for item in items],
        tokens=[shown(tokenizer.token_bytes(token_id)) for token_id in ids],
        top_logprobs=tops,
    )
