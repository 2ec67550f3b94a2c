"""The items of /v1/responses: as clients send them, checked; as they are kept and shown; and as the messages of a chat."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from sparkrt.errors import RequestError
from sparkrt.text.messages import bad, call_arguments, content_text, plain

Item = dict[str, Any]
PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}  # of their ids
_SYSTEM = ("system", "developer")
_ROLES = ("user", "assistant", *_SYSTEM)


def read_items(given: str | Sequence[Any], recall: Callable[[str], Item | None]) -> list[Item]:
    """The items of `input`, each in the one form it is kept in. `recall` finds what an `item_reference` means.

    RequestError names the field, such as `input[2].content[0].type`.
    """
    if isinstance(given, str):
        return [_message({"role": "user", "content": given}, "input")]
    return [_item(item, f"input[{index}]", recall) for index, item in enumerate(given)]


def _item(item: Any, param: str, recall: Callable[[str], Item | None]) -> Item:
    if not isinstance(item, Mapping):
        raise bad(param, "expected an object with a type")
    kind = item.get("type") or ("message" if "role" in item else "item_reference" if set(item) == {"id"} else None)
    if kind == "item_reference":
        found = recall(item["id"]) if isinstance(item.get("id"), str) else None
        if found is None:
            message = f"{param}.id: there is no item {item.get('id')!r} here (any more)"
            raise RequestError(message, param=f"{param}.id", status=404)
        return found
    if not isinstance(kind, str) or kind not in _READERS:
        raise bad(f"{param}.type", f"{kind!r} is not supported; this server takes {', '.join([*_READERS, 'item_reference'])}")
    read = _READERS[kind](item, param)
    return {"id": item["id"], **read} if isinstance(item.get("id"), str) else read


def _message(item: Mapping[str, Any], param: str) -> Item:
    role, where = item.get("role"), param if param == "input" else f"{param}.content"
    if role not in _ROLES:
        raise bad(f"{param}.role", f"expected one of {', '.join(_ROLES)}")
    text = content_text("" if item.get("content") is None else item["content"], where)
    about = {"type": "output_text", "annotations": []} if role == "assistant" else {"type": "input_text"}
    return {"type": "message", "role": role, "content": [{**about, "text": text}], "status": "completed"}


def _function_call(item: Mapping[str, Any], param: str) -> Item:
    names = {key: _string(item.get(key), f"{param}.{key}") for key in ("call_id", "name")}
    arguments = plain(call_arguments(item.get("arguments"), f"{param}.arguments"), f"{param}.arguments")
    return {"type": "function_call", **names, "arguments": json.dumps(arguments, ensure_ascii=False), "status": "completed"}


def _function_call_output(item: Mapping[str, Any], param: str) -> Item:
    call_id = _string(item.get("call_id"), f"{param}.call_id")
    output = content_text(item.get("output"), f"{param}.output")
    return {"type": "function_call_output", "call_id": call_id, "output": output, "status": "completed"}


def _reasoning(item: Mapping[str, Any], param: str) -> Item:
    """Its text or, where a client kept that only, its summary."""
    texts = dict[str, list[Item]]()
    for name, kind in (("content", "reasoning_text"), ("summary", "summary_text")):
        parts = item.get(name) or []
        if not isinstance(parts, list) or not all(isinstance(p, Mapping) and isinstance(p.get("text"), str) for p in parts):
            raise bad(f"{param}.{name}", f"expected a list of objects of type {kind!r}")
        texts[name] = [{"type": kind, "text": part["text"]} for part in parts]
    return {"type": "reasoning", **texts, "status": "completed"}


_READERS: dict[str, Callable[[Mapping[str, Any], str], Item]] = {
    "message": _message,
    "function_call": _function_call,
    "function_call_output": _function_call_output,
    "reasoning": _reasoning,
}


def _string(value: Any, param: str) -> str:
    if not isinstance(value, str) or not value:
        raise bad(param, "expected a string that is not empty")
    return value


def check_outputs(history: Iterable[Item], given: Sequence[Item]) -> None:
    """RequestError where the output of a call comes without the call, as it does when earlier turns were left out."""
    calls = {item["call_id"] for item in history if item["type"] == "function_call"}
    for index, item in enumerate(given):
        if item["type"] == "function_call":
            calls.add(item["call_id"])
        elif item["type"] == "function_call_output" and item["call_id"] not in calls:
            raise bad(f"input[{index}].call_id", f"no call {item['call_id']!r} comes before this output of it")


def to_messages(instructions: str | None, items: Iterable[Item]) -> list[dict[str, Any]]:
    """A chat's messages. Thinking, text and calls that follow each other are one turn of the assistant; the instructions and
    system messages at the beginning are one, since many templates allow no more.
    """
    system, messages = [instructions] if instructions else [], list[dict[str, Any]]()
    for item in items:
        kind, last = item["type"], messages[-1] if messages else {}
        if kind == "function_call" and item.get("status") == "incomplete":
            continue  # an answer was cut in the middle of its arguments
        if kind == "message" and item["role"] in _SYSTEM and not messages:
            system.append(_text(item))
        elif kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]})
        elif kind == "message" and item["role"] != "assistant":
            messages.append({"role": item["role"], "content": _text(item)})
        else:
            begun = last.get("role") == "assistant" and not (kind == "reasoning" and (last["content"] or "tool_calls" in last))
            if not begun or (kind == "message" and (last["content"] or "tool_calls" in last)):
                last = {"role": "assistant", "content": ""}
                messages.append(last)
            if kind == "message":
                last["content"] = _text(item)
            elif kind == "reasoning":
                thought = "".join(part["text"] for part in item.get("content") or item["summary"])
                last["reasoning_content"] = last.get("reasoning_content", "") + thought
            else:
                function = {"name": item["name"], "arguments": item["arguments"]}
                last.setdefault("tool_calls", []).append({"id": item["call_id"], "type": "function", "function": function})
    return [*([{"role": "system", "content": "\n\n".join(system)}] if system else []), *messages]


def _text(message: Item) -> str:
    return "".join(part["text"] for part in message["content"])
