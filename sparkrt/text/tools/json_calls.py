"""Calls written as JSON objects, `{"name": ..., "arguments": {...}}`: what three formats have in common."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from sparkrt.text.grammar import json_schema, quote
from sparkrt.text.incoming import BLANK, Incoming, Reading
from sparkrt.text.tools.calls import Call, Calls, Tool, dumps
from sparkrt.text.tools.coerce import loads

_NAME = re.compile(r'[^"\\\s<>\ud800-\udfff]+')
_HEAD = re.compile(rf'\{{\s*"name"\s*:\s*"({_NAME.pattern})"\s*,\s*"(?:arguments|parameters)"\s*:\s*\{{')
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_STRUCTURE = re.compile(rf"{_STRING.pattern}|[{{}}\[\]]", re.DOTALL)
_SCALAR = re.compile(r"[^\s,{}\[\]]+")
_PLAIN = re.compile(r'(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))+')  # of a string, as JSON has it
_HALF_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")


def read_call(source: Incoming, calls: Calls, bare: bool = False) -> Reading[str | None]:
    """Read the object at the front. Members are written as they come if the name comes first, as models are taught.

    `bare`: no tags around it say that it is a call, so it must have arguments. Returns None after a call, else the text,
    consumed, of what is no call.
    """
    head, end = None, None
    scan = _Scan(source)
    while (head := _HEAD.match(source.text)) is None and (end := scan.end()) is None and not source.ended:
        yield
    if head is not None:
        source.text = source.text[head.end() :]
        call = calls.call(head[1])
        yield from read_members(source, call)
        call.close()
        yield from skip_value(source, depth=1)  # what else is in the object
        return None
    end = len(source.text) if end is None else end
    text, source.text = source.text[:end], source.text[end:]
    found = loads(text)
    name = found.get("name") if isinstance(found, dict) else None
    if not isinstance(found, dict) or not isinstance(name, str) or not _NAME.fullmatch(name):
        return text
    given = [found[key] for key in ("arguments", "parameters") if key in found]
    if bare and not given:
        return text
    arguments = given[0] if given else {}
    if isinstance(arguments, str):  # JSON in JSON
        arguments = loads(arguments)
    call = calls.call(name)
    for key, value in (arguments if isinstance(arguments, dict) else {}).items():
        call.key(key)
        call.put(dumps(value))
    call.close()
    return None


def read_members(source: Incoming, call: Call) -> Reading[None]:
    """The members of an object after its `{`, up to its `}`. Strings are mended where they are no JSON, and other values made
    strings; it ends where no member can be found.
    """
    while True:
        yield from source.take(BLANK + ",")
        if (yield from source.follows("}")):
            return
        while (key := _STRING.match(source.text)) is None and source.text[:1] in ('"', "") and not source.ended:
            yield
        if key is None:
            return
        source.text = source.text[key.end() :]
        yield from source.take(BLANK)
        if not (yield from source.follows(":")):
            return
        yield from source.take(BLANK)
        name = loads(key[0])
        is_new = isinstance(name, str) and call.key(name)
        sink = call if is_new else _Nothing()
        if (yield from source.follows('"')):
            yield from _string(source, sink)
        else:
            text = yield from skip_value(source)
            sink.put(text if loads(text) is not None or text == "null" else dumps(text))


class _Nothing:
    def put(self, text: str) -> None:
        """A value that is not wanted."""


def _string(source: Incoming, call: Call | _Nothing) -> Reading[None]:
    """A string after its opening quote, as it comes; what JSON does not allow in one is escaped."""
    call.put('"')
    while (yield from source.peek()):
        if found := _PLAIN.match(source.text):
            source.text = source.text[found.end() :]
            call.put(found[0])
        elif _HALF_ESCAPE.fullmatch(source.text) and not source.ended:
            yield
        else:
            char, source.text = source.text[0], source.text[1:]
            if char == '"':
                break
            call.put(dumps(char)[1:-1])
    call.put('"')


def skip_value(source: Incoming, depth: int = 0) -> Reading[str]:
    """Consume a value that is no string, or the rest of one that is `depth` brackets deep; returns its text."""
    scan = _Scan(source, depth)
    while (end := scan.end()) is None and not source.ended:
        yield
    end = len(source.text) if end is None else end
    text, source.text = source.text[:end], source.text[end:]
    return text


class _Scan:
    """Finds where the value at the front of a text ends, going on where it was when more of it comes."""

    def __init__(self, source: Incoming, depth: int = 0) -> None:
        self._source, self._depth, self._at = source, depth, 0

    def end(self) -> int | None:
        text = self._source.text
        if self._depth == 0 and self._at == 0 and text[:1] not in ("{", "[", ""):
            scalar = _SCALAR.match(text)
            end = scalar.end() if scalar else 0
            return end if end < len(text) else None
        while found := _STRUCTURE.search(text, self._at):
            if '"' in text[self._at : found.start()]:
                return None  # it begins a string whose end has not come
            self._at = found.end()
            self._depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(found[0], 0)
            if self._depth <= 0:
                return self._at
        return None


def call_rules(tools: Sequence[Tool], before: str, after: str) -> str:
    """Rules of Lark: `call` is a call of one of `tools`, `before` and `after` its arguments, with NAME for its name."""
    lines = [f"call: {' | '.join(f'call{i}' for i in range(len(tools)))}"]
    for i, tool in enumerate(tools):
        head, schema = before.replace("NAME", tool.name), json.dumps(json_schema(tool.schema, f"tools[{i}].function.parameters"))
        lines.append(f"call{i}: {quote(head)} args{i} {quote(after)}" if after else f"call{i}: {quote(head)} args{i}")
        lines.append(f"args{i}: %json {schema}")
    return "\n".join(lines)
