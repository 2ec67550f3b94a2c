"""POST /v1/chat/completions: what it asks for, and its answers, read as thinking, content and calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request

from sparkrt.engine.params import SamplingParams
from sparkrt.serve import protocol as p
from sparkrt.serve.completions import FLOOR, about, about_prompt, shown
from sparkrt.serve.generation import Generation, Piece
from sparkrt.serve.http import require
from sparkrt.serve.serving import Serving
from sparkrt.text.reply import ReplyDelta, ReplyParser
from sparkrt.text.tokenizer import Tokenizer
from sparkrt.text.tools.calls import CallDelta, Tool, read_tools


async def chat_completions(serving: Serving, body: Any, request: Request) -> Any:
    context, most = serving.info.max_model_len, serving.args.max_logprobs
    top, limit, name = body.top_logprobs, body.max_completion_tokens, "max_completion_tokens"
    require(top is None or body.logprobs, "top_logprobs", "top_logprobs needs logprobs to be true")
    require(0 <= (top or 0) <= most, "top_logprobs", f"top_logprobs must be between 0 and {most}")
    if limit is None:
        limit, name = body.max_tokens, "max_tokens"
    require(limit is None or 1 <= limit <= context, name, f"{name} must be between 1 and {context}, got {limit}")
    params = serving.params(body, max_tokens=limit, logprobs=(top or 0) if body.logprobs else None)
    if limit is None and "max_tokens" not in serving.info.sampling_defaults:
        params.max_tokens = None  # the rest of the context, not the 16 of completions
    choice = tool_choice(body)
    prompt, ids = await asyncio.to_thread(serving.render, body)
    return await ChatGeneration(prompt, choice, serving, body, ids, params).respond(request)


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """The functions that may be called; none when the model must not call any."""

    tools: list[Tool]


def tool_choice(body: Any) -> ToolChoice:
    """What the request wants of tools. `body.tools` become what the template sees."""
    param = "function_call" if body.tool_choice is None else "tool_choice"
    choice = getattr(body, param)
    require(choice != "required" and not isinstance(choice, dict), param, f"{param}: only auto and none are supported")
    require(choice in (None, "auto", "none"), param, f"{param} must be auto, none, required or a named function")
    given, old = body.tools, [{"type": "function", "function": function} for function in body.functions or ()]
    tools = read_tools(given or old, "tools" if given else "functions")
    body.tools = None if choice == "none" else given or old or None
    return ToolChoice(tools if body.tools else [])


class ChatGeneration(Generation):
    kind = "chatcmpl"

    def __init__(
        self, prompt: str, choice: ToolChoice, serving: Serving, body: Any, ids: list[int], params: SamplingParams
    ) -> None:
        tools = serving.tools if choice.tools else None
        reasoning = None if body.separate_reasoning is False else serving.reasoning
        thinks = reasoning.thinks(prompt, bool(body.continue_final_message)) if reasoning else False
        parallel = body.parallel_tool_calls is not False
        self._new_parser: Callable[[], ReplyParser] = lambda: ReplyParser(reasoning, thinks, tools, choice.tools, parallel)
        self._parsers: dict[int, ReplyParser] = {}
        super().__init__(serving, body, [ids], params, serving.marks if tools or reasoning else frozenset())

    def parts(self, piece: Piece) -> list[Piece]:
        """The first chunk of a choice says the role and nothing else; one that would say nothing is not sent."""
        roles = [Piece(piece.index, piece.prompt, True, reply=ReplyDelta())] if piece.first else []
        said = self._read(replace(piece, first=False))
        says = said.reply or said.finish_reason or self.body.logprobs or self.body.return_token_ids
        return [*roles, said] if says else roles

    def _read(self, piece: Piece) -> Piece:
        """With its text parsed. One that ends has ended in calls if there are any and the last is complete."""
        parser = self._parsers.setdefault(piece.index, self._new_parser())
        reply, reason = parser.feed(piece.text), piece.finish_reason
        if reason is not None:
            stopped = isinstance(piece.stop_reason, str) and parser.in_call
            rest = parser.flush(cut=reason != "stop" or stopped)
            reply = ReplyDelta(reply.reasoning + rest.reasoning, reply.content + rest.content, reply.calls + rest.calls)
            if reason == "stop" and parser.calls and not stopped:
                reason = "tool_calls"
        if self.body.include_reasoning is False:
            reply.reasoning = ""
        return replace(piece, reply=reply, finish_reason=reason)

    def write(self, pieces: list[Piece], is_chunk: bool, **head: Any) -> Any:
        head["object"] = "chat.completion.chunk" if is_chunk else "chat.completion"
        if pieces and pieces[0].first:
            head |= about_prompt(self, pieces[0])
        choices = [self._chunk(piece) if is_chunk else self._whole_choice(self._read(piece)) for piece in pieces]
        return p.ChatCompletion(choices=choices, **head)

    def _whole_choice(self, piece: Piece) -> Any:
        assert piece.reply is not None
        reply, calls = piece.reply, dict[int, CallDelta]()
        for delta in reply.calls:
            calls.setdefault(delta.index, CallDelta(delta.index, delta.id, delta.name)).arguments += delta.arguments
        said = [_call(call, whole=True) for call in calls.values()]
        content = reply.content or (None if said or reply.reasoning else "")
        message = p.ChatMessage(role="assistant", content=content, tool_calls=said or None, **_thought(reply))
        return p.ChatChoice(message=message, logprobs=self._logprobs(piece), **about(self, piece))

    def _chunk(self, piece: Piece) -> Any:
        reply = piece.reply or ReplyDelta()
        calls = [_call(delta, whole=False) for delta in reply.calls] or None
        delta = p.ChatDelta(content=reply.content or None, tool_calls=calls, **_thought(reply))
        choice = p.ChatChoice(delta=delta, logprobs=None, **about(self, piece))
        if piece.first:
            delta.role, delta.content, choice.token_ids = "assistant", "", None
        else:
            choice.logprobs = self._logprobs(piece)
        return choice

    def _logprobs(self, piece: Piece) -> Any:
        return _chat_logprobs(piece, self.body.top_logprobs or 0, self.tokenizer) if self.body.logprobs else None


def _thought(reply: ReplyDelta) -> dict[str, str | None]:
    """Under both of the names it has in the field."""
    return dict.fromkeys(("reasoning", "reasoning_content"), reply.reasoning or None)


def _call(delta: CallDelta, whole: bool) -> Any:
    function = p.CalledFunction(name=delta.name, arguments=delta.arguments)
    kind = None if delta.id is None else "function"
    return p.ToolCall(index=None if whole else delta.index, id=delta.id, type=kind, function=function)


def _chat_logprobs(piece: Piece, count: int, tokenizer: Tokenizer) -> Any:
    """Of the tokens of a piece, with the `count` most likely ones at each position."""
    content = []
    for token_id, row in zip(piece.token_ids, piece.logprobs, strict=True):
        texts = ((i, item, tokenizer.token_bytes(i)) for i, item in row.items())
        items = {i: {"token": shown(raw), "logprob": max(FLOOR, item.logprob), "bytes": list(raw)} for i, item, raw in texts}
        ranks = {i: item.rank or 0 for i, item in row.items() if (item.rank or 0) <= count}
        top = [p.TopLogprob(**items[i]) for i in sorted(ranks, key=ranks.__getitem__)[:count]]
        content.append(p.TokenLogprob(**items[token_id], top_logprobs=top))
    return p.ChatLogprobs(content=content)
