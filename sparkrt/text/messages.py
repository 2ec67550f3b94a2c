"""Chat messages as clients send them, brought to the one form that chat templates are written for.

Content becomes a string ("" where there is none), `developer` becomes `system`, tool-call arguments become objects, other nulls
disappear, and reasoning is found under each of the names templates read. The result is a copy made of plain JSON types.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from sparkrt.errors import RequestError
from sparkrt.text.unicode import check_surrogates

_MAX_DEPTH = 100  # of nested objects in messages, tools and template arguments
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_REASONING = ("reasoning_content", "thinking", "reasoning")


def normalize_messages(messages: object, param: str = "messages") -> list[dict[str, Any]]:
    """Check and copy `messages`. RequestError names the field, such as `messages[1].tool_calls[0].function.arguments`."""
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise RequestError(f"{param}: expected a list of messages", param=param)
    if not messages:
        raise RequestError(f"{param}: expected at least one message", param=param)
    return [_message(message, f"{param}[{i}]") for i, message in enumerate(messages)]


def plain(value: object, param: str, depth: int = 0) -> Any:
    """A copy of JSON data, so that a template can neither reach rich objects nor change the caller's.

    RequestError on lone surrogates, numbers that are not finite, values that are not JSON, and deep nesting.
    """
    if isinstance(value, str):
        check_surrogates(value, param)
        return str(value)
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        if not isfinite(value):
            raise RequestError(f"{param}: expected a finite number", param=param)
        return value
    if depth >= _MAX_DEPTH:
        raise RequestError(f"{param}: nested deeper than {_MAX_DEPTH} levels", param=param)
    if isinstance(value, Mapping):
        result = {}
        for key, item in value.items():
            if not isinstance(key, str):
                raise RequestError(f"{param}: expected string keys", param=param)
            check_surrogates(key, param)
            result[key] = plain(item, f"{param}.{key}", depth + 1)
        return result
    if isinstance(value, list | tuple):
        return [plain(item, f"{param}[{i}]", depth + 1) for i, item in enumerate(value)]
    raise RequestError(f"{param}: expected JSON data", param=param)


def _message(message: object, param: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{param}: expected an object with role and content", param=param)
    given = {key: value for key, value in message.items() if value is not None}
    role = given.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(f"{param}.role: expected a string such as 'user'", param=f"{param}.role")
    result: dict[str, Any] = {}
    for key, value in given.items():
        result[key] = plain(value, f"{param}.{key}") if key not in ("content", "tool_calls") else value
    result["role"] = "system" if role == "developer" else role
    calls = result.pop("tool_calls", None)
    if calls:  # an empty list is the same as none
        result["tool_calls"] = _tool_calls(calls, f"{param}.tool_calls")
    # templates join the content to other strings without asking, that of a mere tool call too
    result["content"] = _content(result.get("content", ""), f"{param}.content")
    reasoning = next((result[name] for name in _REASONING if name in result), None)
    if reasoning is not None:
        if not isinstance(reasoning, str):
            raise RequestError(f"{param}.reasoning_content: expected a string", param=f"{param}.reasoning_content")
        result = {"thinking": reasoning, **result, "reasoning_content": reasoning}
    return result


def _content(content: object, param: str) -> str:
    """The text of a content: a string, or the texts of its parts in order."""
    if isinstance(content, str):
        check_surrogates(content, param)
        return content
    if not isinstance(content, list | tuple):
        raise RequestError(f"{param}: expected a string, a list of text parts or null", param=param)
    texts = []
    for i, part in enumerate(content):
        where = f"{param}[{i}]"
        if not isinstance(part, Mapping):
            raise RequestError(f"{where}: expected an object such as {{'type': 'text', 'text': ...}}", param=where)
        kind = part.get("type")
        if not isinstance(kind, str) or kind not in _TEXT_PARTS:
            shown = plain(kind, f"{where}.type")
            raise RequestError(
                f"{where}.type: {shown!r} is not supported; this server takes text only ({', '.join(_TEXT_PARTS)})",
                param=f"{where}.type",
            )
        text = part.get(_TEXT_PARTS[kind])
        if not isinstance(text, str):
            raise RequestError(f"{where}.{_TEXT_PARTS[kind]}: expected a string", param=f"{where}.{_TEXT_PARTS[kind]}")
        check_surrogates(text, f"{where}.{_TEXT_PARTS[kind]}")
        texts.append(text)
    return "".join(texts)


def _tool_calls(calls: object, param: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list | tuple):
        raise RequestError(f"{param}: expected a list", param=param)
    result = []
    for i, call in enumerate(calls):
        where = f"{param}[{i}]"
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RequestError(f"{where}.function: expected an object with a name", param=f"{where}.function")
        copy = plain({key: value for key, value in call.items() if key != "function"}, where)
        rest = plain({key: value for key, value in function.items() if key != "arguments"}, f"{where}.function")
        # the order of keys is kept: templates may print a call as JSON
        inner = {key: rest.get(key) for key in function} | {"arguments": _arguments(function.get("arguments"), where)}
        result.append({key: copy.get(key) for key in call} | {"function": inner})
    return result


def _arguments(arguments: object, where: str) -> dict[str, Any]:
    """Arguments as an object, from an object or its JSON text. None and "" mean none were given."""
    param = f"{where}.function.arguments"
    if isinstance(arguments, str) and arguments.strip():
        try:
            arguments = json.loads(arguments, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            reason = str(error) if isinstance(error, ValueError) else "nested too deep"
            raise RequestError(f"{param}: not valid JSON: {reason}", param=param) from None
    elif arguments is None or isinstance(arguments, str):
        return {}
    if arguments is None:  # the text "null"
        return {}
    if not isinstance(arguments, Mapping):
        raise RequestError(f"{param}: expected a JSON object", param=param)
    copy: dict[str, Any] = plain(arguments, param)
    return copy


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")
