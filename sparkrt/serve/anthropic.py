"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API as a dialect of chat, there and back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request

from sparkrt.engine.params import MAX_INT
from sparkrt.errors import RequestError
from sparkrt.serve import protocol as p
from sparkrt.serve.chat import ChatGeneration, prepare
from sparkrt.serve.generation import Piece
from sparkrt.serve.http import anthropic_error, describe, require, respelled
from sparkrt.serve.serving import Serving
from sparkrt.text.messages import bad

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
# what chat calls them, and what this API does
_SPELLINGS = (
    (r"(tools\[\d+\])\.function\.parameters\b", r"\1.input_schema"),
    (r"(tools\[\d+\])\.function\b", r"\1"),
    (r"response_format(\.json_schema)?\b", "output_config.format"),
    (r"reasoning_effort\b", "output_config.effort"),
    (r"stop\b", "stop_sequences"),
)
_STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def describe_error(error: Exception) -> tuple[Any, int]:
    """The body and HTTP status of an exception, in this API's shape."""
    told, status = describe(error)
    return anthropic_error(status, told.error.message), status


async def messages(serving: Serving, body: Any, request: Request) -> Any:
    require(body.max_tokens >= 1, "max_tokens", f"max_tokens must be at least 1, got {body.max_tokens}")
    try:
        generation = await prepare(serving, _chat_body(body, serving.info.max_model_len), MessagesGeneration)
        return await generation.respond(request)
    except RequestError as error:
        raise respelled(error, _SPELLINGS) from None


async def count_tokens(serving: Serving, body: Any, request: Request) -> Any:
    _, ids = await asyncio.to_thread(serving.render, _chat_body(body, serving.info.max_model_len))
    return p.TokenCount(input_tokens=len(ids))


def _chat_body(body: Any, context: int) -> Any:
    """The same request for chat. More tokens than the context has are no mistake here: clients always ask for theirs."""
    said = [{"role": "system", "content": _text(body.system, "system")}] if body.system else []
    for index, message in enumerate(body.messages):
        said += _messages(message, f"messages[{index}]")
    more: dict[str, Any] = {name: getattr(body, name) for name in ("model", "stream", "temperature", "top_p", "top_k")}
    if body.max_tokens is not None:
        more["max_tokens"] = min(body.max_tokens, context)
    if body.thinking is not None and body.thinking.get("type") != "adaptive":
        more["enable_thinking"] = body.thinking.get("type") == "enabled"
        if more["enable_thinking"] and (budget := body.thinking.get("budget_tokens")) is not None:
            fits = isinstance(budget, int) and not isinstance(budget, bool) and 1 <= budget <= MAX_INT
            require(fits, "thinking", "thinking.budget_tokens: expected a number of tokens, at least 1")
            more["thinking_token_budget"] = budget
    if body.output_config is not None:
        more["reasoning_effort"] = effort = body.output_config.get("effort")
        require(effort is None or isinstance(effort, str), "output_config", "output_config.effort: expected a string")
        if (form := body.output_config.get("format")) is not None:
            require(isinstance(form, Mapping), "output_config", "output_config.format: expected an object with a schema")
            more["response_format"] = {"type": form.get("type"), "json_schema": {"schema": form.get("schema", {})}}
    if body.tool_choice is not None:
        choice = body.tool_choice
        kind = choice.get("type")
        require(kind in (*_CHOICES, "tool"), "tool_choice", "tool_choice.type: expected auto, any, tool or none")
        function = {"type": "function", "function": {"name": choice.get("name")}}
        more["tool_choice"] = function if kind == "tool" else _CHOICES[kind]
        more["parallel_tool_calls"] = choice.get("disable_parallel_tool_use") is not True
    last = said[-1] if said else {}
    more["continue_final_message"] = last.get("role") == "assistant" and "tool_calls" not in last
    return p.ChatBody(
        messages=said, tools=[*map(_tool, range(len(body.tools or ())), body.tools or ())], stop=body.stop_sequences, **more
    )


def _tool(index: int, tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type", "custom") != "custom":
        raise bad(f"tools[{index}].type", f"{tool['type']!r} is not supported; this server runs no tools of its own")
    function = {"name": tool.get("name"), "description": tool.get("description"), "parameters": tool.get("input_schema")}
    function["strict"] = tool.get("strict")
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _messages(message: Mapping[str, Any], param: str) -> list[dict[str, Any]]:
    """One message, in chat's terms: results of tools are messages of their own there."""
    role, content, found = message.get("role"), message.get("content"), list[dict[str, Any]]()
    require(role in ("user", "assistant", "system"), f"{param}.role", f"{param}.role: expected user or assistant")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise bad(f"{param}.content", "expected a string or a list of blocks")
    turn: dict[str, Any] = {"role": role, "content": ""}
    for index, block in enumerate(content):
        where = f"{param}.content[{index}]"
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "text":
            turn["content"] += _text([block], where)
        elif kind == "thinking" and role == "assistant":
            turn["reasoning_content"] = turn.get("reasoning_content", "") + str(block.get("thinking") or "")
        elif kind == "tool_use" and role == "assistant":
            require(isinstance(block.get("name"), str), f"{where}.name", f"{where}.name: expected a string")
            require(isinstance(block.get("input") or {}, Mapping), f"{where}.input", f"{where}.input: expected an object")
            function = {"name": block.get("name"), "arguments": block.get("input") or {}}
            turn.setdefault("tool_calls", []).append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result" and role == "user":
            text = _text(block.get("content") or "", f"{where}.content")
            found.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text})
        elif kind != "redacted_thinking":
            raise bad(f"{where}.type", f"{kind!r} is not supported here; this server takes text, thinking and tools")
    return found if found and not turn["content"] else [*found, turn]


def _text(content: Any, param: str) -> str:
    """Of a string, or of blocks of text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad(param, "expected a string or a list of blocks")
    for block in content:
        if not isinstance(block, Mapping) or block.get("type") != "text" or not isinstance(block.get("text"), str):
            raise bad(param, "expected blocks of text; this server takes nothing else here")
    return "".join(block["text"] for block in content)


class MessagesGeneration(ChatGeneration):
    kind = "msg_"
    named_events = True
    describe = staticmethod(describe_error)

    def __init__(self, *details: Any) -> None:
        super().__init__(*details)
        self._named = False  # a call is a call, however it came about
        self._blocks, self._open = 0, ""  # begun, and the type of the last unless it is over

    def write(self, pieces: list[Piece], is_chunk: bool, **head: Any) -> Any:
        piece = self._read(pieces[0])
        assert piece.reply is not None
        thought, content = piece.reply.reasoning, list[dict[str, Any]]()
        if thought:
            content.append({"type": "thinking", "thinking": thought, "signature": ""})
        for part in piece.reply.parts:
            if isinstance(part, str):
                content.append({"type": "text", "text": part})
            else:
                content.append(_tool_use(part.id, part.name, _object(part.arguments)))
        return self._message(content, *_stop(piece))

    def _message(self, content: list[dict[str, Any]], reason: str | None, sequence: str | None) -> Any:
        about = {"type": "message", "role": "assistant", "stop_reason": reason, "stop_sequence": sequence}
        return p.Message(id=self._head["id"], model=self._head["model"], content=content, usage=self._tokens(), **about)

    def _tokens(self) -> dict[str, int]:
        usage = self._usage()
        cached = usage.prompt_tokens_details.cached_tokens
        read = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": cached}
        return {"input_tokens": usage.prompt_tokens - cached, "output_tokens": usage.completion_tokens, **read}

    def chunks(self, piece: Piece) -> list[Any]:
        if piece.first:
            return [{"type": "message_start", "message": self._message([], None, None)}]
        events, reply = list[Any](), piece.reply
        assert reply is not None
        if reply.reasoning:
            events += self._begin("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            events.append(self._delta("thinking_delta", thinking=reply.reasoning))
        for part in reply.parts:
            if isinstance(part, str):
                events += self._begin("text", {"type": "text", "text": ""})
                events.append(self._delta("text_delta", text=part))
                continue
            if part.id is not None:
                events += self._begin(part.id, _tool_use(part.id, part.name, {}))
            if part.arguments:
                events.append(self._delta("input_json_delta", partial_json=part.arguments))
        if piece.finish_reason is not None:
            reason, sequence = _stop(piece)
            events += self._begin("", None)
            delta = {"stop_reason": reason, "stop_sequence": sequence}
            events += [{"type": "message_delta", "delta": delta, "usage": self._tokens()}, {"type": "message_stop"}]
        return events

    def _begin(self, name: str, block: dict[str, Any] | None) -> list[Any]:
        """The block `name` goes on or begins, and any other is over."""
        events, at = list[Any](), self._blocks
        if name != self._open:
            if self._open:
                events.append({"type": "content_block_stop", "index": at - 1})
            if block is not None:
                events.append({"type": "content_block_start", "index": at, "content_block": block})
                self._blocks += 1
            self._open = name
        return events

    def _delta(self, kind: str, **more: str) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._blocks - 1, "delta": {"type": kind, **more}}


def _stop(piece: Piece) -> tuple[str | None, str | None]:
    """(stop_reason, stop_sequence)"""
    if piece.finish_reason == "stop" and isinstance(piece.stop_reason, str):
        return "stop_sequence", piece.stop_reason
    return _STOPS.get(piece.finish_reason or "", "end_turn"), None


def _tool_use(call_id: str | None, name: str | None, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments}


def _object(text: str) -> dict[str, Any]:
    """The arguments of a call; none, if it was cut in the middle of them."""
    try:
        found: dict[str, Any] = json.loads(text)
    except ValueError:
        return {}
    return found
