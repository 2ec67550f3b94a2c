"""Where a model's thinking ends and its answer begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sparkrt.text.incoming import BLANK, Incoming, Reading, Sink, Trimmed

BEGIN, END = "<think>", "</think>"
CLOSING = f"\n{END}"  # what ends thinking that is cut, as models were taught to end it
_BEGIN, _END = BEGIN.encode(), END.encode()
PARSERS = ("qwen3", "deepseek_r1")


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Thinking goes from `<think>` to `</think>`, and the prompt may have opened it, or opened and closed it.

    `implied`: where the prompt says nothing an answer thinks from its first word, whether it opens the tag or not. `optional`:
    the model was taught to think or not as a switch says, so an answer that must have some form may think before it.
    """

    implied: bool = False
    optional: bool = False

    def thinks(self, prompt: str, continues: bool) -> bool | None:
        """Whether an answer to this prompt begins inside (True) or after (False) its thinking; None: it says so itself.

        `continues`: the prompt ends in the middle of a message that the answer goes on with.
        """
        tail = prompt.rstrip()
        if continues:
            return prompt.rfind(BEGIN) > prompt.rfind(END)
        if tail.endswith((BEGIN, END)):
            return tail.endswith(BEGIN)
        return True if self.implied else None

    def within(self, prompt: str) -> bool | None:
        """The same for a prompt that nobody rendered: it may end anywhere."""
        return self.thinks(prompt, continues=True) or self.thinks(prompt, continues=False)

    def read(self, source: Incoming, thinks: bool | None, think: Sink, say: Sink) -> Reading[None]:
        """Read up to where the answer begins. Blanks around the thinking are not given out."""
        if thinks is False:
            return
        blank = yield from source.take(BLANK)
        if not (yield from source.follows(BEGIN)) and not thinks:
            say(blank)
            return
        yield from source.until((END,), Trimmed(think, both=True))
        yield from source.take(BLANK)


class ThoughtCounter:
    """How many of an answer's tokens are thinking, its tags included. Tokens may come in pieces; `thinks`: see above."""

    def __init__(self, thinks: bool | None, token_bytes: Callable[[int], bytes]) -> None:
        self.open = thinks is not False  # more may come
        self._thinks, self._token_bytes = thinks, token_bytes
        self._seen = self._count = 0
        self._text = b""  # all of it until it is known whether it is thinking, then what may begin the closing tag

    def count(self, token_ids: Sequence[int]) -> int:
        """Of `token_ids`, all there are so far."""
        while self.open and self._seen < len(token_ids):
            self._text += self._token_bytes(token_ids[self._seen])
            self._seen += 1
            begun = self._text.lstrip()
            if self._thinks is None and len(begun) >= len(_BEGIN):
                self._thinks = self.open = begun.startswith(_BEGIN)
            if self._thinks:
                self._count = self._seen
                self.open = _END not in self._text
                self._text = self._text[-len(_END) :]
        return self._count


class ThinkingBudget:
    """Closes an answer's thinking when it has had so many tokens: from there the closing tag is forced, token by token."""

    def __init__(self, budget: int, thinks: bool | None, token_bytes: Callable[[int], bytes], closing: Sequence[int]) -> None:
        self._budget, self._counter, self._ids = budget, ThoughtCounter(thinks, token_bytes), list[int]()
        self._due = list(closing[::-1]) if thinks and not budget else []
        self._closing = closing

    @property
    def forced(self) -> int | None:
        """The token that must come next; None: any."""
        return self._due[-1] if self._due else None

    def depends(self, place: int) -> bool:
        """Whether the token at `place` in the answer may be forced: depending on the one before it."""
        return self._counter.open and place >= self._budget

    def advance(self, token_id: int) -> None:
        if self._due:
            self._due.pop()
        if not self._counter.open:
            return
        self._ids.append(token_id)
        thought = self._counter.count(self._ids)
        if self._counter.open and thought >= max(self._budget, 1) and not self._due:
            self._due = list(self._closing[::-1])


def reasoning_format(name: str, template: str) -> ReasoningFormat | None:
    """The format called `name`; "auto": what `template` shows, None if it never mentions thinking; "none": none."""
    if name == "auto":
        name = (
            "" if END not in template and BEGIN not in template else "deepseek_r1" if "<｜Assistant｜>" in template else "qwen3"
        )
    if name not in PARSERS:
        return None
    return ReasoningFormat(implied=name == "deepseek_r1", optional="enable_thinking" in template)
