"""Calls as Hermes, Qwen2.5 and Qwen3 write them: JSON between tags."""

from __future__ import annotations

from collections.abc import Sequence

from sparkrt.text.incoming import BLANK, Incoming, Reading
from sparkrt.text.tools.calls import Calls, Tool, ToolFormat
from sparkrt.text.tools.free import calls_in_text, loose
from sparkrt.text.tools.json_calls import call_rules, read_call

_BEGIN, _END = "<tool_call>", "</tool_call>"
_HEAD, _TAIL = '\n{"name": "NAME", "arguments": ', f"}}\n{_END}"


class Hermes(ToolFormat):
    """`<tool_call>` `{"name": NAME, "arguments": {...}}` `</tool_call>`"""

    marks = (_BEGIN, _END)

    def read(self, source: Incoming, calls: Calls) -> Reading[None]:
        while (yield from source.until((_BEGIN,), calls.say)) is not None:
            blank = yield from source.take(BLANK)
            text: str | None = ""
            if (yield from source.peek()) == "{":
                text = yield from read_call(source, calls)
            if text is None:
                yield from source.take(BLANK)
                yield from source.follows(_END)
            else:
                calls.say(_BEGIN + blank + text)

    def grammar(self, tools: Sequence[Tool], parallel: bool) -> str:
        rules = call_rules(tools, _BEGIN + _HEAD, _TAIL)
        return f"start: call{' (BREAK call)*' if parallel else ''}\nBREAK: /\\n/\n{rules}"

    def free_grammar(self, tools: Sequence[Tool], parallel: bool, may_think: bool) -> str:
        return "\n".join([*calls_in_text([(_BEGIN, "call")], parallel, may_think), call_rules(loose(tools), _HEAD, _TAIL)])
