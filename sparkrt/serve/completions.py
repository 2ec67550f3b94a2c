"""POST /v1/completions."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from sparkrt.engine.messages import Logprob
from sparkrt.engine.params import SamplingParams, check_prompt_ids
from sparkrt.errors import RequestError
from sparkrt.serve.generation import Piece
from sparkrt.serve.http import EventStream, decode, read_body
from sparkrt.serve.logprobs import Offsets, completion_logprobs, prompt_logprobs
from sparkrt.serve.protocol import (
    COMPLETION_REFUSED,
    Completion,
    CompletionBody,
    CompletionChoice,
    Usage,
    check_refusals,
    refusals,
)
from sparkrt.serve.serving import Serving, aside
from sparkrt.serve.writer import Writer

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
    params = serving.params(body, logprobs=body.logprobs)
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
            serving.encode(prompt, special, "prompt")
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
    return await _Writer(serving, body, ids, params, texts).respond(request)


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


class _Writer(Writer):
    kind = "cmpl"

    def __init__(
        self, serving: Serving, body: CompletionBody, prompts: list[list[int]], params: SamplingParams, texts: list[str]
    ) -> None:
        super().__init__(serving, body, prompts, params)
        self._body = body
        self._texts = texts  # to echo, by prompt
        self._offsets = [Offsets(self.tokenizer, params.skip_special_tokens) for _ in self.generation.choices]

    def whole(self, pieces: list[Piece], usage: Usage) -> Completion:
        return self._completion([self._choice(piece, first=True) for piece in pieces], usage)

    def chunks(self, piece: Piece, first: bool, usage: Usage | None) -> list[Completion]:
        return [self._completion([self._choice(piece, first)], usage)]

    def last_chunk(self, usage: Usage) -> Completion:
        return self._completion([], usage)

    def _completion(self, choices: list[CompletionChoice], usage: Usage | None) -> Completion:
        return Completion(object="text_completion", choices=choices, usage=usage, **self.head())

    def _choice(self, piece: Piece, first: bool) -> CompletionChoice:
        """`first`: what belongs before the answer comes along."""
        body, source = self._body, self.generation.choices[piece.index]
        text, ids, items = piece.text, piece.token_ids, list[Logprob | None](piece.logprobs)
        if first and self._texts:
            text = self._texts[piece.index // self.generation.params.n] + text
            if body.logprobs is not None:
                self._offsets[piece.index] = Offsets(self.tokenizer, skip_special_tokens=False)
                ids, items = source.prompt_ids + ids, source.prompt_logprobs + items
        choice = CompletionChoice(
            index=piece.index, text=text, logprobs=None, finish_reason=piece.finish_reason, stop_reason=piece.stop_reason
        )
        if body.logprobs is not None:
            choice.logprobs = completion_logprobs(ids, items, self._offsets[piece.index], self.tokenizer)
        if first and body.prompt_logprobs is not None:
            choice.prompt_logprobs = prompt_logprobs(source.prompt_ids, source.prompt_logprobs, self.tokenizer)
        if body.return_token_ids:
            choice.token_ids = piece.token_ids
            choice.prompt_token_ids = source.prompt_ids if first else None
        return choice
