"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from sparkrt.engine.messages import Logprob
from sparkrt.engine.params import check_prompt_ids
from sparkrt.errors import RequestError
from sparkrt.serve.generation import Choice, Generation, Piece
from sparkrt.serve.http import EventStream, decode, event, json_response, read_body, wait_for
from sparkrt.serve.logprobs import Offsets, completion_logprobs, prompt_logprobs
from sparkrt.serve.protocol import (
    COMPLETION_REFUSED,
    Completion,
    CompletionBody,
    CompletionChoice,
    StreamOptions,
    check_refusals,
    refusals,
)
from sparkrt.serve.serving import Serving, aside

MAX_SEQUENCES = 1024  # prompts × n of one request

_body = msgspec.json.Decoder(CompletionBody)
_refusals = refusals(COMPLETION_REFUSED)


async def completions(request: Request) -> Response | EventStream:
    serving: Serving = request.app.state.serving
    raw = await read_body(request)
    body = decode(raw, _body)
    check_refusals(decode(raw, _refusals), COMPLETION_REFUSED)
    await serving.ready()
    serving.check_model(body.model)
    params = serving.params(body)
    if params.max_tokens == 0 and not body.echo:
        raise RequestError("max_tokens must be at least 1 unless echo is true", param="max_tokens")
    if body.echo and params.logprobs is not None:
        params.prompt_logprobs = max(params.logprobs, params.prompt_logprobs or 0)
    prompts = _split(body.prompt)
    if len(prompts) * params.n > MAX_SEQUENCES:
        raise RequestError(f"prompts × n must be at most {MAX_SEQUENCES}, got {len(prompts)} × {params.n}", param="prompt")
    special = body.add_special_tokens is not False
    ids = await aside(
        sum(map(len, prompts)),
        lambda: [
            serving.tokenizer.encode(prompt, special, param="prompt")
            if isinstance(prompt, str)
            else check_prompt_ids(prompt, serving.info.vocab_size)
            for prompt in prompts
        ],
    )
    texts = (
        [prompt if isinstance(prompt, str) else serving.tokenizer.decode(prompt, False) for prompt in prompts]
        if body.echo
        else []
    )
    generation = serving.generate("cmpl", ids, params)
    writer = _Writer(serving, generation, body, texts)
    try:
        await generation.answers.admitted()
        if body.stream:
            return EventStream(writer.events(body.stream_options or StreamOptions()), generation.answers)
        pieces = await wait_for(generation.whole(), generation.answers, request.receive)
    except BaseException:
        generation.answers.close()
        raise
    serving.log_end(generation)
    return json_response(writer.completion([writer.choice(piece, first=True) for piece in pieces], usage=True))


def _split(prompt: str | list[Any]) -> list[str | list[int]]:
    """The prompts of a request: a string, token ids, or a list of either (not mixed)."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise RequestError("prompt must not be empty", param="prompt")
    kinds = {type(item) for item in prompt}
    if kinds == {int}:
        return [prompt]
    if kinds in ({str}, {list}):
        return prompt
    raise RequestError("prompt must be a string, a list of strings, token ids, or a list of token id lists", param="prompt")


class _Writer:
    """Writes the pieces of one request, whole or streamed, in the shape of this API."""

    def __init__(self, serving: Serving, generation: Generation, body: CompletionBody, texts: list[str]) -> None:
        self._tokenizer = serving.tokenizer
        self._pieces = serving.pieces(generation)
        self._model = serving.args.names[0]
        self._generation = generation
        self._body = body
        self._texts = texts  # to echo, by prompt
        skip = generation.params.skip_special_tokens
        self._offsets = [Offsets(serving.tokenizer, skip) for _ in generation.choices]

    def choice(self, piece: Piece, first: bool) -> CompletionChoice:
        """`first`: nothing of this choice was written yet, what belongs before the answer comes along."""
        body, source = self._body, self._generation.choices[piece.index]
        text, ids, logprobs = piece.text, piece.token_ids, list[Logprob | None](piece.logprobs)
        if first and self._texts:
            text = self._texts[piece.index // self._generation.params.n] + text
            if body.logprobs is not None:
                self._offsets[piece.index] = Offsets(self._tokenizer, skip_special_tokens=False)
                ids, logprobs = source.prompt_ids + ids, source.prompt_logprobs + logprobs
        return CompletionChoice(
            index=piece.index,
            text=text,
            logprobs=None
            if body.logprobs is None
            else completion_logprobs(ids, logprobs, self._offsets[piece.index], self._tokenizer),
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason,
            prompt_logprobs=self._prompt_logprobs(source) if first and body.prompt_logprobs is not None else None,
            prompt_token_ids=source.prompt_ids if first and body.return_token_ids else None,
            token_ids=piece.token_ids if body.return_token_ids else None,
        )

    def _prompt_logprobs(self, source: Choice) -> list[dict[str, Any] | None]:
        return prompt_logprobs(source.prompt_ids, source.prompt_logprobs, self._tokenizer)

    def completion(self, choices: list[CompletionChoice], usage: bool) -> Completion:
        generation = self._generation
        return Completion(
            id=generation.id,
            object="text_completion",
            created=generation.created,
            model=self._model,
            choices=choices,
            usage=generation.usage() if usage else None,
        )

    async def events(self, options: StreamOptions) -> AsyncGenerator[bytes]:
        begun: set[int] = set()
        each = bool(options.include_usage and options.continuous_usage_stats)
        async for pieces in self._pieces:
            block = b""
            for piece in pieces:
                block += event(self.completion([self.choice(piece, first=piece.index not in begun)], usage=each))
                begun.add(piece.index)
            yield block
        if options.include_usage:
            yield event(self.completion([], usage=True))
