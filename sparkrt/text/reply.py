"""`ReplyParser`: the text of an answer to reasoning, content and tool calls, the same whether it comes in pieces or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sparkrt.text.incoming import Incoming, Reading, Trimmed
from sparkrt.text.reasoning import ReasoningFormat
from sparkrt.text.tools.calls import Call, CallDelta, Tool, ToolFormat


@dataclass(slots=True)
class ReplyDelta:
    """What an answer gained: thinking, then text and calls in the order they came."""

    reasoning: str = ""
    parts: list[str | CallDelta] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.parts)

    @property
    def content(self) -> str:
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def calls(self) -> list[CallDelta]:
        return [part for part in self.parts if not isinstance(part, str)]

    def gain(self, part: str | CallDelta) -> None:
        """What comes of one text or call at once is told at once."""
        last = self.parts[-1] if self.parts else None
        if isinstance(part, str):
            if isinstance(last, str):
                self.parts[-1] = last + part
            elif part:
                self.parts.append(part)
        elif isinstance(last, CallDelta) and part.id is None and last.index == part.index:
            last.arguments += part.arguments
        else:
            self.parts.append(part)

    def add(self, other: ReplyDelta) -> None:
        """What came right after."""
        self.reasoning += other.reasoning
        for part in other.parts:
            self.gain(part)


class ReplyParser:
    """One answer. Without formats all of it is content; blanks before and after calls are not."""

    def __init__(
        self,
        reasoning: ReasoningFormat | None = None,
        thinks: bool | None = None,
        tools: ToolFormat | None = None,
        offered: Sequence[Tool] = (),
        parallel: bool = True,
    ) -> None:
        """`thinks`: see `ReasoningFormat.thinks`. Unless `parallel`, calls after the first are dropped."""
        self._delta, self._source = ReplyDelta(), Incoming()
        self._content = Trimmed(self._say) if tools else self._say
        self._call: Call | None = None
        self._tools, self._offered, self._parallel = tools, {tool.name: tool.schema for tool in offered}, parallel
        self.calls = 0  # that began
        self._reading = self._read(reasoning, thinks)

    @property
    def in_call(self) -> bool:
        """Whether the text so far ends within a call."""
        return self._call is not None and not self._call.closed

    def feed(self, text: str) -> ReplyDelta:
        """What this text adds."""
        self._source.text += text
        return self._advance()

    def flush(self, cut: bool) -> ReplyDelta:
        """At the end: what was held back. In a `cut` answer that is dropped, and a call that is not over stays open."""
        self._source.ended = not cut
        return ReplyDelta() if cut else self._advance()

    def _advance(self) -> ReplyDelta:
        next(self._reading, None)
        delta, self._delta = self._delta, ReplyDelta()
        return delta

    def _read(self, reasoning: ReasoningFormat | None, thinks: bool | None) -> Reading[None]:
        if reasoning is not None:
            yield from reasoning.read(self._source, thinks, self._think, self._content)
        if self._tools is None:
            yield from self._source.until((), self._content)
            return
        yield from self._tools.read(self._source, self)
        if isinstance(self._content, Trimmed) and not self.calls:
            self._content.flush()

    def _think(self, text: str) -> None:
        self._delta.reasoning += text

    def _say(self, text: str) -> None:
        self._delta.gain(text)

    def say(self, text: str) -> None:
        self._content(text)

    def call(self, name: str) -> Call:
        assert self._tools is not None
        assert isinstance(self._content, Trimmed)
        self._content.drop()
        self.calls += (wanted := self._parallel or not self.calls)
        self._call = Call(self.calls - 1, self._tools.new_id(), name, self._gain if wanted else lambda call: None)
        return self._call

    def schema(self, name: str) -> dict[str, Any]:
        return self._offered.get(name, {})

    def _gain(self, call: CallDelta) -> None:
        self._delta.gain(call)
