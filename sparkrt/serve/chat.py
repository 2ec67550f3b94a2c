"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from sparkrt.errors import RequestError
from sparkrt.serve.generation import Generation, Piece
from sparkrt.serve.http import EventStream, decode, event, json_response, read_body, wait_for
from sparkrt.serve.logprobs import chat_logprobs, prompt_logprobs
from sparkrt.serve.protocol import (
    CHAT_REFUSED,
    ChatBody,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatMessage,
    StreamOptions,
    check_refusals,
    refusals,
)
from sparkrt.serve.serving import Serving
from sparkrt.serve.tokens import render

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
    if limit == 0:
        raise RequestError("max_tokens must be at least 1", param="max_tokens")
    params = serving.params(body, max_tokens=limit, logprobs=alternatives)
    if limit is None and "max_tokens" not in serving.info.sampling_defaults:
        params.max_tokens = None  # the rest of the context, not the 16 of completions
    body.tools = _tools(body)
    if body.reasoning_effort is not None:
        body.chat_template_kwargs = {"reasoning_effort": body.reasoning_effort} | (body.chat_template_kwargs or {})
    ids = await render(serving, body, len(raw))
    generation = serving.generate("chatcmpl", [ids], params)
    writer = _Writer(serving, generation, body)
    try:
        await generation.answers.admitted()
        if body.stream:
            return EventStream(writer.events(body.stream_options or StreamOptions()), generation.answers)
        pieces = await wait_for(generation.whole(), generation.answers, request.receive)
    except BaseException:
        generation.answers.close()
        raise
    serving.log_end(generation)
    return json_response(writer.completion(pieces))


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


class _Writer:
    """Writes the pieces of one request, whole or streamed, in the shape of this API."""

    def __init__(self, serving: Serving, generation: Generation, body: ChatBody) -> None:
        self._tokenizer = serving.tokenizer
        self._pieces = serving.pieces(generation)
        self._model = serving.args.names[0]
        self._generation = generation
        self._body = body

    def completion(self, pieces: list[Piece]) -> ChatCompletion:
        generation, body = self._generation, self._body
        source = generation.choices[0]
        return ChatCompletion(
            id=generation.id,
            object="chat.completion",
            created=generation.created,
            model=self._model,
            choices=[
                ChatChoice(
                    index=piece.index,
                    message=ChatMessage(role="assistant", content=piece.text),
                    logprobs=self._logprobs(piece),
                    finish_reason=piece.finish_reason,
                    stop_reason=piece.stop_reason,
                    token_ids=piece.token_ids if body.return_token_ids else None,
                )
                for piece in pieces
            ],
            usage=generation.usage(),
            prompt_logprobs=prompt_logprobs(source.prompt_ids, source.prompt_logprobs, self._tokenizer)
            if body.prompt_logprobs is not None
            else None,
            prompt_token_ids=source.prompt_ids if body.return_token_ids else None,
        )

    async def events(self, options: StreamOptions) -> AsyncGenerator[bytes]:
        begun: set[int] = set()
        each = bool(options.include_usage and options.continuous_usage_stats)
        async for pieces in self._pieces:
            block = b""
            for piece in pieces:
                if piece.index not in begun:
                    begun.add(piece.index)
                    block += event(self._chunk(Piece(piece.index), ChatMessage(role="assistant", content=""), usage=each))
                block += event(self._chunk(piece, ChatMessage(content=piece.text or None), usage=each))
            yield block
        if options.include_usage:
            yield event(self._frame([], usage=True))

    def _chunk(self, piece: Piece, delta: ChatMessage, usage: bool) -> ChatChunk:
        choice = ChatChunkChoice(
            index=piece.index,
            delta=delta,
            logprobs=self._logprobs(piece) if delta.role is None else None,
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason,
            token_ids=piece.token_ids if self._body.return_token_ids and delta.role is None else None,
        )
        chunk = self._frame([choice], usage)
        if delta.role is not None and self._body.return_token_ids:
            chunk.prompt_token_ids = self._generation.choices[piece.index].prompt_ids
        return chunk

    def _frame(self, choices: list[ChatChunkChoice], usage: bool) -> ChatChunk:
        generation = self._generation
        return ChatChunk(
            id=generation.id,
            object="chat.completion.chunk",
            created=generation.created,
            model=self._model,
            choices=choices,
            usage=generation.usage() if usage else None,
        )

    def _logprobs(self, piece: Piece) -> ChatLogprobs | None:
        return chat_logprobs(piece.logprobs, self._tokenizer) if self._body.logprobs else None
