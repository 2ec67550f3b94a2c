"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from sparkrt.engine.params import SamplingParams
from sparkrt.errors import RequestError
from sparkrt.serve.generation import Piece
from sparkrt.serve.http import EventStream, decode, read_body
from sparkrt.serve.logprobs import chat_logprobs, prompt_logprobs
from sparkrt.serve.protocol import (
    CHAT_REFUSED,
    ChatBody,
    ChatChoice,
    ChatCompletion,
    ChatMessage,
    Usage,
    check_refusals,
    refusals,
)
from sparkrt.serve.serving import Serving
from sparkrt.serve.tokens import render
from sparkrt.serve.writer import Writer

_body = msgspec.json.Decoder(ChatBody)
_refusals = refusals(CHAT_REFUSED)


async def chat_completions(request: Request) -> Response | EventStream:
    serving: Serving = request.app.state.serving
    raw = await read_body(request)
    body = decode(raw, _body)
    check_refusals(decode(raw, _refusals), CHAT_REFUSED)
    await serving.ready()
    serving.check_model(body.model)
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
    alternatives = (body.top_logprobs or 0) if body.logprobs else None
    if alternatives is not None and not 0 <= alternatives <= serving.args.max_logprobs:
        raise RequestError(f"top_logprobs must be between 0 and {serving.args.max_logprobs}", param="top_logprobs")
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if limit is not None and not 1 <= limit <= serving.info.max_model_len:
        name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        raise RequestError(f"{name} must be between 1 and {serving.info.max_model_len}, got {limit}", param=name)
    params = serving.params(body, max_tokens=limit, logprobs=alternatives)
    if limit is None and "max_tokens" not in serving.info.sampling_defaults:
        params.max_tokens = None  # the rest of the context, not the 16 of completions
    body.tools = _tools(body)
    if body.reasoning_effort is not None:
        body.chat_template_kwargs = {"reasoning_effort": body.reasoning_effort} | (body.chat_template_kwargs or {})
    ids = await render(serving, body, len(raw))
    return await _Writer(serving, body, [ids], params).respond(request)


def _tools(body: ChatBody) -> list[dict[str, Any]] | None:
    """The tools the template sees: none when the model must not call any. What would force a call is refused."""
    choice = body.tool_choice if body.tool_choice is not None else body.function_call
    param = "tool_choice" if body.tool_choice is not None else "function_call"
    if choice not in (None, "auto", "none"):
        if choice == "required" or isinstance(choice, dict):
            raise RequestError(f"{param}: only auto and none are supported", param=param)
        raise RequestError(f"{param} must be auto, none, required or a named function", param=param)
    tools = body.tools
    if not tools and body.functions:
        tools = [{"type": "function", "function": function} for function in body.functions]
    for index, tool in enumerate(tools or ()):
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(f"tools[{index}].function.name: expected a string", param=f"tools[{index}]")
    return None if choice == "none" else tools or None


class _Writer(Writer):
    kind = "chatcmpl"

    def __init__(self, serving: Serving, body: ChatBody, prompts: list[list[int]], params: SamplingParams) -> None:
        super().__init__(serving, body, prompts, params)
        self._body = body

    def whole(self, pieces: list[Piece], usage: Usage) -> ChatCompletion:
        choices = [self._choice(piece, message=ChatMessage(role="assistant", content=piece.text)) for piece in pieces]
        answer = ChatCompletion(object="chat.completion", choices=choices, usage=usage, **self.head())
        source = self.generation.choices[0]
        if self._body.prompt_logprobs is not None:
            answer.prompt_logprobs = prompt_logprobs(source.prompt_ids, source.prompt_logprobs, self.tokenizer)
        if self._body.return_token_ids:
            answer.prompt_token_ids = source.prompt_ids
        return answer

    def chunks(self, piece: Piece, first: bool, usage: Usage | None) -> list[ChatCompletion]:
        chunk = self._chunk([self._choice(piece, delta=ChatMessage(content=piece.text or None))], usage)
        if not first:
            return [chunk]
        opening = ChatChoice(
            index=piece.index, delta=ChatMessage(role="assistant", content=""), logprobs=None, finish_reason=None
        )
        begin = self._chunk([opening], usage)
        if self._body.return_token_ids:
            begin.prompt_token_ids = self.generation.choices[0].prompt_ids
        return [begin, chunk]

    def last_chunk(self, usage: Usage) -> ChatCompletion:
        return self._chunk([], usage)

    def _chunk(self, choices: list[ChatChoice], usage: Usage | None) -> ChatCompletion:
        return ChatCompletion(object="chat.completion.chunk", choices=choices, usage=usage, **self.head())

    def _choice(self, piece: Piece, message: ChatMessage | None = None, delta: ChatMessage | None = None) -> ChatChoice:
        return ChatChoice(
            index=piece.index,
            message=message,
            delta=delta,
            logprobs=chat_logprobs(piece.logprobs, self.tokenizer) if self._body.logprobs else None,
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason,
            token_ids=piece.token_ids if self._body.return_token_ids else None,
        )
