"""Calls as Mistral's models write them: JSON after a token, in one of two ways."""

from __future__ import annotations

from collections.abc import Sequence

from sparkrt.text.grammar import quote
from sparkrt.text.incoming import BLANK, Incoming, Reading
from sparkrt.text.tools.calls import Calls, Tool, ToolFormat, short_id
from sparkrt.text.tools.free import calls_in_text, loose
from sparkrt.text.tools.json_calls import call_rules, read_call, read_members

_TAG, _ID, _ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_OLD = '{"name": "NAME", "arguments": ', "}"


class Mistral(ToolFormat):
    """`[TOOL_CALLS]` `[{"name": NAME, "arguments": {...}}, ...]`, or for each call `[TOOL_CALLS]` NAME `[ARGS]` `{...}`."""

    marks = (_TAG, _ID, _ARGS)

    def read(self, source: Incoming, calls: Calls) -> Reading[None]:
        while (yield from source.until((_TAG,), calls.say)) is not None:
            blank = yield from source.take(BLANK)
            if (yield from source.follows("[")):
                yield from source.take(BLANK)
                while (yield from source.peek()) == "{":
                    if (text := (yield from read_call(source, calls))) is not None:
                        calls.say(text)
                    yield from source.take(BLANK + ",")
                yield from source.follows("]")
                continue
            parts = list[str]()
            if (tag := (yield from source.until((_ID, _ARGS, "{"), parts.append))) == _ID:
                tag = yield from source.until((_ARGS, "{"), lambda text: None)
            name = "".join(parts).strip()
            if tag is None or not name:
                calls.say(_TAG + blank + "".join(parts) + (tag or ""))
                continue
            if tag == _ARGS:
                yield from source.take(BLANK)
                yield from source.follows("{")
            call = calls.call(name)
            yield from read_members(source, call)
            call.close()

    def grammar(self, tools: Sequence[Tool], parallel: bool) -> str:
        if _ARGS not in self._template:  # as older models write
            more = ' (", " call)*' if parallel else ""
            return f'start: {quote(_TAG)} "[" call{more} "]"\n' + call_rules(tools, *_OLD)
        return f"start: call{'+' if parallel else ''}\n" + call_rules(tools, f"{_TAG}NAME{_ARGS}", "")

    def free_grammar(self, tools: Sequence[Tool], parallel: bool, may_think: bool) -> str:
        more = ' (", " call)*' if parallel else ""
        old = f'list: /[ ]?/ "[" call{more} "]"', call_rules(loose(tools), *_OLD)
        new = "list: call", call_rules(loose(tools), f"NAME{_ARGS}", "")
        return "\n".join([*calls_in_text([(_TAG, "list")], parallel, may_think), *(new if _ARGS in self._template else old)])

    def new_id(self) -> str:
        return short_id()
