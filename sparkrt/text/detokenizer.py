"""`Detokenizer`: tokens to text as they come, never half a character.

The deltas, joined, are the text that `Tokenizer.decode(ids, continuation=True)` gives, however the tokens were cut into pieces.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from sparkrt.text.tokenizer import Tokenizer

_UNFINISHED = "�"


class Detokenizer:
    """One stream of tokens. Constant work per token."""

    __slots__ = ("_context", "_decoder", "_pending", "_skip", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        # for vocabularies without exact bytes: tokens not yet given out, and those before, whose neighbourhood shapes their text
        self._context: list[int] = []
        self._pending: list[int] = []

    def feed(self, ids: Sequence[int]) -> str:
        """The text these tokens complete."""
        shown = [i for i in ids if i not in self._skip]
        if self._tokenizer.has_exact_bytes:
            return self._decoder.decode(b"".join(map(self._tokenizer.token_bytes, shown)))
        return "".join([self._window([i]) for i in shown])

    def flush(self) -> str:
        """At the end of the stream: what an unfinished character becomes (U+FFFD), usually nothing."""
        if self._tokenizer.has_exact_bytes:
            return self._decoder.decode(b"", final=True)
        return self._window([], final=True)

    def _window(self, ids: list[int], final: bool = False) -> str:
        self._pending += ids
        before = self._tokenizer.decode(self._context, False)
        text = self._tokenizer.decode(self._context + self._pending, False)[len(before) :]
        if not text or (text.endswith(_UNFINISHED) and not final):
            return ""
        self._context, self._pending = self._pending, []
        return text
