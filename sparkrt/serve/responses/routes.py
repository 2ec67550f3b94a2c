"""/v1/responses: OpenAI's later API as a dialect of chat, whose answers are items that are kept for a while."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from sparkrt.errors import RequestError
from sparkrt.serve import protocol as p
from sparkrt.serve.chat import prepare
from sparkrt.serve.http import require, respelled
from sparkrt.serve.responses.generation import Asked, ResponsesGeneration
from sparkrt.serve.responses.items import Item, check_outputs, read_items, to_messages
from sparkrt.serve.responses.store import ResponseStore
from sparkrt.serve.serving import Serving
from sparkrt.text.messages import bad

_LOGPROBS = "message.output_text.logprobs"
# the others are of things that there are none of here: thinking is shown as it is, never encrypted
_INCLUDABLE = [_LOGPROBS, "reasoning.encrypted_content", "message.input_image.image_url", "file_search_call.results"]
_INCLUDABLE += ["web_search_call.action.sources", "web_search_call.results", "code_interpreter_call.outputs"]
_INCLUDABLE += ["computer_call_output.output.image_url"]
# what chat calls them, and what this API does
_SPELLINGS = (
    (r"(tools\[\d+\])\.function\b", r"\1"),
    (r"response_format(\.json_schema)?\b", "text.format"),
    (r"(messages|prompt)\b", "input"),
    (r"max_tokens\b", "max_output_tokens"),
)
MAX_METADATA = 16  # pairs, as OpenAI has it
_PAGE = 100  # items


async def create_response(serving: Serving, body: Any, request: Request) -> Any:
    try:
        asked, chat = await _read(serving, body)
        return await (await prepare(serving, chat, partial(ResponsesGeneration, asked))).respond(request)
    except RequestError as error:
        raise respelled(error, _SPELLINGS) from None


async def count_input_tokens(serving: Serving, body: Any, request: Request) -> Any:
    try:
        _, chat = await _read(serving, body)
        _, ids = await asyncio.to_thread(serving.render, chat)
    except RequestError as error:
        raise respelled(error, _SPELLINGS) from None
    return p.InputTokens(object="response.input_tokens", input_tokens=len(ids))


async def get_response(serving: Serving, body: None, request: Request) -> Any:
    again = request.query_params.get("stream", "false") != "false"
    require(not again, "stream", "stream is not supported here: nothing runs in the background, so there is nothing to follow")
    return Response(await _found(serving, request), media_type="application/json")


async def delete_response(serving: Serving, body: None, request: Request) -> Any:
    name = request.path_params["response_id"]
    if not await asyncio.to_thread(serving.responses.delete, name):
        raise _unknown(name)
    return p.Deleted(id=name, object="response", deleted=True)


async def cancel_response(serving: Serving, body: None, request: Request) -> Any:
    await _found(serving, request)
    raise RequestError(
        "only a response that runs in the background can be cancelled, and this server has none", param="response_id"
    )


async def list_input_items(serving: Serving, body: None, request: Request) -> Any:
    """What the response was made from, earlier turns included, a page at a time, the last item first unless `order` is asc."""
    name, query = request.path_params["response_id"], request.query_params
    found = await asyncio.to_thread(serving.responses.items, name)
    if found is None:
        raise _unknown(name)
    order, limit, after = query.get("order", "desc"), query.get("limit", "20"), query.get("after")
    require(order in ("asc", "desc"), "order", "order must be asc or desc")
    fits = limit.isascii() and limit.isdigit() and len(limit) < 4 and 1 <= int(limit) <= _PAGE
    require(fits, "limit", f"limit must be a whole number from 1 to {_PAGE}")
    items = found[0] if order == "asc" else found[0][::-1]
    ids = [item["id"] for item in items]
    require(after is None or after in ids, "after", f"after: there is no item {after!r} among them")
    begin = 0 if after is None else ids.index(after) + 1
    page = items[begin : begin + int(limit)]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": "", "last_id": ""}
    return p.ResponseItems(object="list", data=page, has_more=begin + len(page) < len(items), **ends)


async def _found(serving: Serving, request: Request) -> bytes:
    name = request.path_params["response_id"]
    if (found := await asyncio.to_thread(serving.responses.get, name)) is None:
        raise _unknown(name)
    return found


def _unknown(name: str) -> RequestError:
    return RequestError(f"Response with id '{name}' not found.", param="response_id", code="response_not_found", status=404)


async def _read(serving: Serving, body: Any) -> tuple[Asked, Any]:
    """What is asked for, and the same request for chat."""
    asked = await asyncio.to_thread(_gather, serving.responses, body)
    most = serving.args.max_logprobs
    require(len(body.metadata or ()) <= MAX_METADATA, "metadata", f"metadata takes at most {MAX_METADATA} pairs")
    require(0 <= (body.top_logprobs or 0) <= most, "top_logprobs", f"top_logprobs must be between 0 and {most}")
    return asked, _chat_body(asked, serving.info.max_model_len)


def _gather(store: ResponseStore, body: Any) -> Asked:
    history, previous = list[Item](), body.previous_response_id
    if previous is not None:
        if (found := store.items(previous)) is None:
            message, code = f"Previous response with id '{previous}' not found.", "previous_response_not_found"
            raise RequestError(message, param="previous_response_id", code=code)
        history = found[0] + found[1]
    given = read_items(body.input, partial(_recall, cache(store.items)))
    check_outputs(history, given)
    return Asked(body, given, history)


def _recall(items: Callable[[str], tuple[list[Item], list[Item]] | None], item_id: str) -> Item | None:
    """An item of a stored response, whose id is part of its own. Clients may refer to every item of a long conversation."""
    owner = re.fullmatch(r"[a-z]+_([0-9a-f]{32})_\w+", item_id)
    found = items(f"{ResponsesGeneration.kind}{owner[1]}") if owner else None
    return next((item for part in found or () for item in part if item["id"] == item_id), None)


def _chat_body(asked: Asked, context: int) -> Any:
    """More tokens than the context has are no mistake here: clients ask for theirs."""
    body = asked.body
    more = {name: getattr(body, name) for name in (*p.SHARED, "model", "stream", "parallel_tool_calls")}
    if (limit := body.max_output_tokens) is not None:
        require(limit >= 1, "max_output_tokens", f"max_output_tokens must be at least 1, got {limit}")
        more["max_tokens"] = min(limit, context)
    effort = (body.reasoning or {}).get("effort")
    require(effort is None or isinstance(effort, str), "reasoning.effort", "reasoning.effort: expected a string")
    for index, name in enumerate(body.include or ()):
        param = f"include[{index}]"
        require(name in _INCLUDABLE, param, f"{param}: {name!r} is not supported; expected one of {', '.join(_INCLUDABLE)}")
    if _LOGPROBS in (body.include or ()):
        more |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    require(body.stream or body.stream_options is None, "stream_options", "stream_options needs stream to be true")
    return p.ChatBody(
        messages=to_messages(body.instructions, [*asked.history, *asked.given]),
        tools=[_tool(tool, f"tools[{index}]") for index, tool in enumerate(body.tools or ())],
        tool_choice=_tool_choice(body.tool_choice),
        response_format=_format(body.text),
        reasoning_effort=effort,
        **more,
    )


def _tool(tool: Mapping[str, Any], param: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        kind = tool.get("type")
        raise bad(f"{param}.type", f"{kind!r} is not supported; this server runs no tools of its own, it takes functions")
    known = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in known if tool.get(name) is not None}}


def _tool_choice(choice: Any) -> Any:
    """In chat's form, where a function's name lies one level deeper."""
    if not isinstance(choice, dict):
        return choice
    kind = choice.get("type")
    if kind == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    require(
        kind == "allowed_tools", "tool_choice", f"tool_choice.type: {kind!r} is not supported; expected function or allowed_tools"
    )
    listed = choice.get("tools")
    tools = [_tool_choice(tool) for tool in listed] if isinstance(listed, list) else listed
    return {"type": kind, "allowed_tools": {"mode": choice.get("mode"), "tools": tools}}


def _format(text: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if (asked := (text or {}).get("format")) is None:
        return None
    require(isinstance(asked, Mapping), "text.format", "text.format: expected an object with a type")
    if asked.get("type") != "json_schema":
        return {"type": asked.get("type")}
    return {"type": "json_schema", "json_schema": {key: value for key, value in asked.items() if key != "type"}}
