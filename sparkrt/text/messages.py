"""Chat messages as clients send them, brought to the one form that chat templates are written for: a copy in plain JSON types.

Content becomes a string ("" where there is none), `developer` becomes `system`, tool-call arguments become objects, other nulls
disappear, and reasoning is found under each of the names templates read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from sparkrt.errors import RequestError
from sparkrt.text.tokenizer import check_surrogates

_MAX_DEPTH = 100  # of nested objects in messages, tools and template arguments
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_REASONING = ("reasoning_content", "thinking", "reasoning")


def bad(param: str, why: str) -> RequestError:
    return RequestError(f"{param}: {why}", param=param)


def normalize_messages(messages: object, param: str = "messages") -> list[dict[str, Any]]:
    """Check and copy `messages`. RequestError names the field, such as `messages[1].tool_calls[0].function.arguments`."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise bad(param, "expected at least one message" if messages == [] else "expected a list of messages")
    return [_message(message, f"{param}[{i}]") for i, message in enumerate(messages)]


def plain(value: object, param: str, depth: int = 0) -> Any:
    """A copy of JSON data: a template can neither reach rich objects nor change the caller's. RequestError on anything else."""
    if isinstance(value, str):
        return _text(value, param)
    if value is None or isinstance(value, bool | int) or (isinstance(value, float) and isfinite(value)):
        return value
    if isinstance(value, float):
        raise bad(param, "expected a finite number")
    if not isinstance(value, Mapping | list | tuple):
        raise bad(param, "expected JSON data")
    if depth >= _MAX_DEPTH:
        raise bad(param, f"nested deeper than {_MAX_DEPTH} levels")
    if not isinstance(value, Mapping):
        return [plain(item, f"{param}[{i}]", depth + 1) for i, item in enumerate(value)]
    if any(not isinstance(key, str) for key in value):
        raise bad(param, "expected string keys")
    return {_text(key, param): plain(item, f"{param}.{key}", depth + 1) for key, item in value.items()}


def _text(value: object, param: str) -> str:
    if not isinstance(value, str):
        raise bad(param, "expected a string")
    check_surrogates(value, param)
    return str(value)


def _message(message: object, param: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise bad(param, "expected an object with role and content")
    given = {key: value for key, value in message.items() if value is not None}
    role = given.get("role")
    if not isinstance(role, str) or not role:
        raise bad(f"{param}.role", "expected a string such as 'user'")
    calls, content = given.pop("tool_calls", None), given.get("content", "")
    result: dict[str, Any] = {k: "" if k == "content" else plain(value, f"{param}.{k}") for k, value in given.items()}
    result["role"] = "system" if role == "developer" else role
    if calls:  # an empty list is the same as none
        result["tool_calls"] = _tool_calls(calls, f"{param}.tool_calls")
    # templates join the content to other strings without asking, that of a mere tool call too
    result["content"] = content_text(content, f"{param}.content")
    reasoning = next((result[name] for name in _REASONING if name in result), None)
    if reasoning is None:
        return result
    return {"thinking": reasoning, **result, "reasoning_content": _text(reasoning, f"{param}.reasoning_content")}


def content_text(content: object, param: str) -> str:
    """The text of a content: a string, or the texts of its parts in order."""
    if isinstance(content, str):
        return _text(content, param)
    if not isinstance(content, list | tuple):
        raise bad(param, "expected a string, a list of text parts or null")
    texts = []
    for i, part in enumerate(content):
        where = f"{param}[{i}]"
        if not isinstance(part, Mapping):
            raise bad(where, "expected an object such as {'type': 'text', 'text': ...}")
        kind = plain(part.get("type"), f"{where}.type")
        key = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
        if key is None:
            raise bad(f"{where}.type", f"{kind!r} is not supported; this server takes text only ({', '.join(_TEXT_PARTS)})")
        texts.append(_text(part.get(key), f"{where}.{key}"))
    return "".join(texts)


def _tool_calls(calls: object, param: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list | tuple):
        raise bad(param, "expected a list")
    result = []
    for i, call in enumerate(calls):
        where = f"{param}[{i}]"
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise bad(f"{where}.function", "expected an object with a name")
        arguments = call_arguments(function.get("arguments"), f"{where}.function.arguments")
        # the order of keys is kept: templates may print a call as JSON
        result.append(plain({**call, "function": {**function, "arguments": arguments}}, where))
    return result


def call_arguments(arguments: object, param: str) -> Mapping[str, Any]:
    """Arguments as an object, from an object or its JSON text. None, "" and the text "null" mean none were given."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments, parse_constant=int) if arguments.strip() else None  # int refuses NaN, Infinity
        except (ValueError, RecursionError) as error:
            raise bad(param, f"not valid JSON: {error if isinstance(error, ValueError) else 'nested too deep'}") from None
    if arguments is not None and not isinstance(arguments, Mapping):
        raise bad(param, "expected a JSON object")
    return arguments or {}
