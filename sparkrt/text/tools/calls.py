"""What a request offers to call, what a format is, and how a call is written out while it is being read."""

from __future__ import annotations

import json
import re
import secrets
import string
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sparkrt.text.incoming import Incoming, Reading
from sparkrt.text.messages import bad, plain

_NAME = re.compile(r"[\w.:/-]{1,128}")
_HALF = re.compile("[\ud800-\udfff]")
_LETTERS = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class Tool:
    """A function by its name and the JSON schema of its arguments, an object's, which holds wherever it is called if `strict`."""

    name: str
    schema: dict[str, Any]
    strict: bool = False


def read_tools(tools: Sequence[Any], param: str = "tools") -> list[Tool]:
    """The functions that a request offers. RequestError names the field of what is no tool."""
    found = dict[str, Tool]()
    for index, tool in enumerate(tools):
        where = f"{param}[{index}]"
        if not isinstance(tool, Mapping) or tool.get("type", "function") != "function":
            raise bad(f"{where}.type" if isinstance(tool, Mapping) else where, "expected a tool of type 'function'")
        function, where = tool.get("function"), f"{where}.function"
        if not isinstance(function, Mapping):
            raise bad(where, "expected an object with a name")
        name, schema = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise bad(f"{where}.name", "expected a string of 1 to 128 letters, digits and _ . : / -")
        if name in found:
            raise bad(f"{where}.name", f"there are two functions called {name!r}")
        for key, kind in (("description", str), ("strict", bool)):
            if not isinstance(function.get(key), kind | None):
                raise bad(f"{where}.{key}", f"expected a {'string' if kind is str else 'boolean'}")
        found[name] = Tool(name, _object_schema(schema, f"{where}.parameters"), function.get("strict") is True)
    return list(found.values())


def _object_schema(schema: Any, param: str) -> dict[str, Any]:
    """Only the outline is checked here: formats read it, templates print it."""
    if schema is None:
        return {"type": "object", "properties": {}}
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        raise bad(param, "expected a JSON schema of type 'object'")
    for key in ("properties", "$defs", "definitions"):
        parts = schema.get(key, {})
        if not isinstance(parts, Mapping):
            raise bad(f"{param}.{key}", "expected an object")
        for name, part in parts.items():
            if not isinstance(part, Mapping | bool):
                raise bad(f"{param}.{key}.{name}", "expected a JSON schema")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise bad(f"{param}.required", "expected a list of strings")
    return {"type": "object", **plain(schema, param)}


@dataclass(slots=True)
class CallDelta:
    """What call `index` of an answer gained. `id` and `name` come with the first of them; `arguments`, joined, are JSON."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class Call:
    """Writes the arguments of one call as they become known: at any time the beginning of a JSON object."""

    def __init__(self, index: int, call_id: str, name: str, give: Callable[[CallDelta], None]) -> None:
        self._index, self._give, self._keys, self.closed = index, give, set[str](), False
        give(CallDelta(index, call_id, name))

    def key(self, key: str) -> bool:
        """Begin a member, whose value follows by `put`. False, and nothing is written, for a key that was there before."""
        if key in self._keys:
            return False
        self.put(f"{', ' if self._keys else '{'}{dumps(key)}: ")
        self._keys.add(key)
        return True

    def put(self, text: str) -> None:
        if text:
            self._give(CallDelta(self._index, arguments=text))

    def close(self) -> None:
        self.put("}" if self._keys else "{}")
        self.closed = True


class Calls(Protocol):
    """Where a format puts what it reads."""

    def say(self, text: str) -> None:
        """Text that is no call."""

    def call(self, name: str) -> Call:
        """A call begins. Blanks said just before are dropped."""

    def schema(self, name: str) -> dict[str, Any]:
        """Of the arguments of this function, {} if it is not on offer."""


class ToolFormat(ABC):
    """How a family of models writes calls. One is for all requests."""

    marks: tuple[str, ...] = ()  # texts it looks for that may be special tokens, and must be shown all the same

    def __init__(self, template: str = "") -> None:
        """`template`: the model's, where a format has variants."""
        self._template = template

    @abstractmethod
    def read(self, source: Incoming, calls: Calls) -> Reading[None]:
        """Read an answer to its end. What only looks like a call is said, and one that breaks off in the middle is closed."""

    @abstractmethod
    def grammar(self, tools: Sequence[Tool], parallel: bool) -> str:
        """A grammar of Lark: nothing but calls of these functions with valid arguments, one or, if `parallel`, several."""

    @abstractmethod
    def free_grammar(self, tools: Sequence[Tool], parallel: bool, may_think: bool) -> str:
        """A grammar of Lark: any text, in which what begins a call is one of these functions, with valid arguments if `strict`.

        `may_think`: a text that begins with thinking is another rule's.
        """

    def new_id(self) -> str:
        """The id of a call."""
        return f"call_{secrets.token_hex(12)}"


def short_id() -> str:
    """Nine letters and digits, which the templates of Mistral insist on."""
    return "".join(secrets.choice(_LETTERS) for _ in range(9))


def dumps(value: Any) -> str:
    """JSON as models write it; with escapes only if it holds half a surrogate pair, which JSON can spell."""
    text = json.dumps(value, ensure_ascii=False)
    return json.dumps(value) if _HALF.search(text) else text
