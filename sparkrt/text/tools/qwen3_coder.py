"""Calls as Qwen3-Coder, Qwen3.5 and Qwen3.6 write them: XML-like, every value a bare text."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from sparkrt.text.grammar import escape_regex, quote
from sparkrt.text.incoming import BLANK, Incoming, Reading
from sparkrt.text.messages import bad
from sparkrt.text.tools.calls import Call, Calls, Tool, ToolFormat, dumps
from sparkrt.text.tools.coerce import coerce, types_of
from sparkrt.text.tools.free import calls_in_text
from sparkrt.text.tools.xml_values import TEXT_RULES, value_rules

_BEGIN, _CALL, _KEY, _VALUE_END, _CALL_END, _END = (
    *("<tool_call>", "<function=", "<parameter=", "</parameter>", "</function>", "</tool_call>"),
)
_KEY_END = ">\n"
_NEXT = (_KEY, _CALL_END, _END)


def _drop(text: str) -> None:
    """A sink for what belongs to a call and means nothing."""


class Qwen3Coder(ToolFormat):
    """`<tool_call>` `<function=NAME>` `<parameter=KEY>` VALUE `</parameter>` ... `</function>` `</tool_call>`.

    The outer tag may be missing, as closing ones. Values are read in the types of the schema; a parameter whose tag is malformed,
    or whose key was there before, is left out.
    """

    marks = (_BEGIN, _END)

    def read(self, source: Incoming, calls: Calls) -> Reading[None]:
        while (tag := (yield from source.until((_BEGIN, _CALL), calls.say))) is not None:
            if tag == _BEGIN:
                blank = yield from source.take(BLANK)
                if not (yield from source.follows(_CALL)):
                    calls.say(_BEGIN + blank)  # somebody writes of tags
                    continue
            name = list[str]()
            end = yield from source.until((">", "\n"), name.append)
            if end != ">" or not name:
                calls.say(f"{tag}{''.join(name)}{end or ''}")
                continue
            yield from self._call(source, "".join(name).strip(), calls)

    def grammar(self, tools: Sequence[Tool], parallel: bool) -> str:
        """Parameters come in any order, each once at most: the rule of a call counts in bits which it has had."""
        more = r' ("\n" call)*' if parallel else ""
        lines = [f"start: call{more}", f'call: "{_BEGIN}\\n" function "\\n{_END}"', *TEXT_RULES]
        return "\n".join(lines + self._functions(tools, _CALL))

    def free_grammar(self, tools: Sequence[Tool], parallel: bool, may_think: bool) -> str:
        begins = [(_BEGIN, "tagged"), (_CALL, "bare")]  # the outer tag may be missing when calls are read
        lines = [*calls_in_text(begins, parallel, may_think), f'tagged: "\\n{_CALL}" bare', f'bare: function "\\n{_END}"']
        any_body = f"free[lazy]: /(?s:.*){escape_regex(_CALL_END)}/"
        return "\n".join([*lines, any_body, *TEXT_RULES, *self._functions(tools, "", loosely=True)])

    def _functions(self, tools: Sequence[Tool], tag: str, loosely: bool = False) -> list[str]:
        """Rules of Lark: `function` is one of these, from its name to its closing tag. `loosely`: `free` is, where not strict."""
        lines = [f"function: {' | '.join(f'call{i}' for i in range(len(tools)))}"]
        for i, tool in enumerate(tools):
            if loosely and not tool.strict:
                lines.append(f"call{i}: {quote(f'{tool.name}>')} free")
                continue
            where, keys = f"tools[{i}].function.parameters", list(tool.schema.get("properties", {}))
            required = tool.schema.get("required", [])
            if len(keys) > 64:
                raise bad(f"{where}.properties", "at most 64 parameters can be enforced")
            if missing := [key for key in required if key not in keys]:
                raise bad(f"{where}.required", f"{missing[0]!r} is not among the properties")
            needs = functools.reduce("and({}, {})".format, [f"bit_set({keys.index(key)})" for key in required] or ["true"])
            head = quote(f"{tag}{tool.name}>\n")
            lines.append(f"call{i}: {head} {f'more{i}::0x0' if keys else ''} {quote(_CALL_END)}")
            lines += [f'more{i}::_: "" %if {needs}'] if keys else []
            for n, key in enumerate(keys):
                lines.append(f"  | {quote(_KEY + key + _KEY_END)} v{i}_{n} more{i}::set_bit({n}) %if bit_clear({n})")
            for n, (key, schema) in enumerate(tool.schema.get("properties", {}).items()):
                lines += value_rules(f"v{i}_{n}", schema, tool.schema, f"{where}.properties.{key}")
        return lines

    def _call(self, source: Incoming, name: str, calls: Calls) -> Reading[None]:
        call, schema = calls.call(name), calls.schema(name)
        tag = yield from source.until(_NEXT, _drop)
        while tag == _KEY:
            parts = list[str]()
            end = yield from source.until((">", "\n"), parts.append)
            key = "".join(parts).strip()
            if end == ">" and key and call.key(key):
                properties = schema.get("properties", {})
                kinds = types_of(properties[key], schema) if key in properties else frozenset(["string"])
                value = _Value(call, kinds)
                tag = yield from source.until((_VALUE_END, *_NEXT), value.take)
                value.close()
            else:
                tag = yield from source.until((_VALUE_END, *_NEXT), _drop)
            if tag == _VALUE_END:
                tag = yield from source.until(_NEXT, _drop)
        call.close()
        if tag == _CALL_END:
            yield from source.take(BLANK)
            yield from source.follows(_END)


class _Value:
    """A value between its tags, without the line feed after the first and before the last. Mere strings are written at once."""

    def __init__(self, call: Call, types: frozenset[str]) -> None:
        self._call, self._types, self._first, self._held, self._parts = call, types, True, "", list[str]()
        self._give = self._parts.append
        if types == {"string"}:
            call.put('"')
            self._give = lambda text: call.put(dumps(text)[1:-1])

    def take(self, text: str) -> None:
        text = self._held + text
        if self._first and text:
            self._first, text = False, text.removeprefix("\n")
        ready = text.removesuffix("\n")
        self._held = text[len(ready) :]
        self._give(ready)

    def close(self) -> None:
        self._call.put('"' if self._types == {"string"} else coerce("".join(self._parts), self._types))
