"""POST /v1/completions: what it asks for, and its answers; what both APIs say of theirs."""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import Callable, Container, Iterable
from typing import Any

from starlette.requests import Request

from sparkrt.engine.outputs import Logprob
from sparkrt.serve import protocol as p
from sparkrt.serve.generation import Generation, Piece
from sparkrt.serve.http import require
from sparkrt.serve.serving import Serving
from sparkrt.serve.structured import asked_structure
from sparkrt.text.grammar import grammar_of
from sparkrt.text.tokenizer import Tokenizer

MAX_SEQUENCES = 1024  # prompts × n of one request
FLOOR = -9999.0  # minus infinity cannot be written in JSON; max(FLOOR, NaN) is FLOOR, too

Row = dict[int, Logprob]  # of one position: the chosen token, then the most likely ones


async def completions(serving: Serving, body: Any, request: Request) -> Any:
    return await (await prepare(serving, body, CompletionGeneration)).respond(request)


async def prepare(serving: Serving, body: Any, kind: type[CompletionGeneration]) -> CompletionGeneration:
    """The request on its way to the engine. RequestError for what is wrong with it."""
    params = serving.params(body)
    require(params.max_tokens != 0 or body.echo, "max_tokens", "max_tokens must be at least 1 unless echo is true")
    if body.echo and params.logprobs is not None:
        params.prompt_logprobs = max(params.logprobs, params.prompt_logprobs or 0)
    prompts, most = _split(body.prompt), MAX_SEQUENCES
    require(len(prompts) * params.n <= most, "prompt", f"prompts × n must be at most {most}, got {len(prompts)} × {params.n}")
    special, decode = body.add_special_tokens is not False, serving.tokenizer.decode
    ids = await asyncio.to_thread(lambda: [serving.encode(prompt, special, "prompt") for prompt in prompts])
    echoed = [prompt if isinstance(prompt, str) else decode(prompt, False) for prompt in prompts] if body.echo else []
    asked = asked_structure(body)
    grammar = (grammar_of([asked[0]]), asked[1]) if asked else None
    thinks, reasoning = list[bool | None](), serving.reasoning
    if params.thinking_token_budget is not None and reasoning is not None:
        thinks = [reasoning.within(decode(prompt, False)) for prompt in ids]
    return kind(echoed, serving, body, ids, params, grammar, thinks=thinks)


def _split(prompt: str | list[Any]) -> list[Any]:
    """The prompts of a request: a string, token ids, or a list of either (not mixed)."""
    if isinstance(prompt, str):
        return [prompt]
    kinds = {type(item) for item in prompt}
    require(kinds, "prompt", "prompt must not be empty")
    wanted = "prompt must be a string, a list of strings, token ids, or a list of token id lists"
    require(kinds in ({int}, {str}, {list}), "prompt", wanted)
    return [prompt] if kinds == {int} else prompt


class CompletionGeneration(Generation):
    kind = "cmpl-"

    def __init__(self, echoed: list[str], *rest: Any, **more: Any) -> None:
        super().__init__(*rest, **more)
        self._echoed = echoed  # texts, by prompt
        self._offsets: dict[int, Callable[[int], int]] = {}

    def write(self, pieces: list[Piece], is_chunk: bool, **head: Any) -> Any:
        return p.Completion(object="text_completion", choices=[self._choice(piece) for piece in pieces], **head)

    def _choice(self, piece: Piece) -> Any:
        text, ids, rows, scored = piece.text, piece.token_ids, list[Row | None](piece.logprobs), self.body.logprobs is not None
        if piece.first:
            skips = self.params.skip_special_tokens and not self._echoed
            self._offsets[piece.index] = _offsets(self.tokenizer, self.tokenizer.special_ids if skips else ())
        if piece.first and self._echoed:
            text = self._echoed[piece.index // self.params.n] + text
            if scored:
                ids, rows = piece.prompt.prompt_token_ids + ids, [*(piece.prompt.prompt_logprobs or ()), *rows]
        logprobs = _completion_logprobs(ids, rows, self._offsets[piece.index], self.tokenizer) if scored else None
        prompt = about_prompt(self, piece) if piece.first else {}
        return p.CompletionChoice(text=text, logprobs=logprobs, **about(self, piece), **prompt)


def about(generation: Generation, piece: Piece) -> dict[str, Any]:
    """What both APIs say of a choice."""
    ids = piece.token_ids if generation.body.return_token_ids else None
    reasons = {"finish_reason": piece.finish_reason, "stop_reason": piece.stop_reason}
    return {"index": piece.index, "token_ids": ids, **reasons}


def about_prompt(generation: Generation, piece: Piece) -> dict[str, Any]:
    """What the request wants to know of its prompt. Log-probabilities are those of the token and of the alternatives, by id."""
    body, found, name = generation.body, dict[str, Any](), generation.tokenizer.token_bytes
    if body.return_token_ids:
        found["prompt_token_ids"] = piece.prompt.prompt_token_ids
    if body.prompt_logprobs is not None:
        found["prompt_logprobs"] = scored = list[Any]()
        for row in piece.prompt.prompt_logprobs or ():
            items = ((i, x, shown(name(i))) for i, x in (row or {}).items())
            entries = {str(i): {"logprob": max(FLOOR, x.logprob), "rank": x.rank, "decoded_token": text} for i, x, text in items}
            scored.append(entries or None)
    return found


def _completion_logprobs(ids: Iterable[int], rows: list[Row | None], start: Callable[[int], int], tokenizer: Tokenizer) -> Any:
    """The chosen token is always among the alternatives, as the field has it. A row None: the first token of a prompt."""
    names = {i: shown(tokenizer.token_bytes(i)) for i in {*ids, *(i for row in rows for i in row or ())}}
    return p.CompletionLogprobs(
        text_offset=[start(i) for i in ids],
        token_logprobs=[max(FLOOR, row[i].logprob) if row else None for i, row in zip(ids, rows, strict=True)],
        tokens=[names[i] for i in ids],
        top_logprobs=[{names[i]: max(FLOOR, row[i].logprob) for i in reversed(row)} if row else None for row in rows],
    )


def _offsets(tokenizer: Tokenizer, skipped: Container[int]) -> Callable[[int], int]:
    """Where the text of the next token begins in a text that grows by it: in characters, inside the cut one included."""
    decoder, length = codecs.getincrementaldecoder("utf-8")("replace"), 0

    def start(token_id: int) -> int:
        nonlocal length
        begins = length
        if token_id not in skipped:
            length += len(decoder.decode(tokenizer.token_bytes(token_id)))
        return begins

    return start


def shown(raw: bytes) -> str:
    """A token as text; one that is only part of a character is spelled out, so that different tokens stay different."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
