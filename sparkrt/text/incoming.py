"""`Incoming`: text that arrives in pieces, for parsers that are written as if it were all there.

A parser is a generator over `Incoming`; it yields where it cannot go on without more text, and every decision depends on the
text alone. So the pieces do not matter: a stream and a whole answer are read alike.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]
Sink = Callable[[str], None]
BLANK = " \t\r\n"


class Incoming:
    """`text` has arrived and is not consumed yet; `ended`: nothing will follow it."""

    def __init__(self) -> None:
        self.text, self.ended = "", False

    def until(self, tags: Sequence[str], give: Sink) -> Reading[str | None]:
        """Give out the text before the first of `tags`, and consume both; None at the end. No tag may hold another's beginning.

        Nothing is held back but what may begin a tag.
        """
        while True:
            found = min(((at, tag) for tag in tags if (at := self.text.find(tag)) >= 0), default=None)
            if found is not None:
                at, tag = found
                before, self.text = self.text[:at], self.text[at + len(tag) :]
                give(before)
                return tag
            cut = len(self.text) if self.ended else _beginning(self.text, tags)
            before, self.text = self.text[:cut], self.text[cut:]
            give(before)
            if self.ended:
                return None
            yield

    def take(self, chars: str) -> Reading[str]:
        """Consume what there is of `chars` at the front."""
        taken = ""
        while True:
            rest = self.text.lstrip(chars)
            taken, self.text = taken + self.text[: len(self.text) - len(rest)], rest
            if rest or self.ended:
                return taken
            yield

    def peek(self) -> Reading[str]:
        """The next character, "" at the end."""
        while not (self.text or self.ended):
            yield
        return self.text[:1]

    def follows(self, word: str) -> Reading[bool]:
        """Consume `word` if it is next."""
        while len(self.text) < len(word) and word.startswith(self.text) and not self.ended:
            yield
        found = self.text.startswith(word)
        self.text = self.text[len(word) :] if found else self.text
        return found


def _beginning(text: str, tags: Sequence[str]) -> int:
    """Where the longest end of `text` that begins a tag begins."""
    reach = max(map(len, tags), default=1) - 1
    starts = range(max(0, len(text) - reach), len(text))
    return next((at for at in starts if any(tag.startswith(text[at:]) for tag in tags)), len(text))


class Trimmed:
    """A sink whose text loses blanks at its end, and at its beginning too if `both`; nothing is given out and taken back."""

    def __init__(self, give: Sink, chars: str = BLANK, both: bool = False) -> None:
        self._give, self._chars, self._strip, self._held = give, chars, both, ""

    def __call__(self, text: str) -> None:
        text = self._held + text
        if self._strip:
            text = text.lstrip(self._chars)
            self._strip = not text
        kept = text.rstrip(self._chars)
        self._held = text[len(kept) :]
        if kept:
            self._give(kept)

    def drop(self) -> None:
        """Forget the blanks held back."""
        self._held = ""

    def flush(self) -> None:
        """Give them out after all."""
        held, self._held = self._held, ""
        if held:
            self._give(held)
