"""POST /v1/chat/completions and /v1/completions: what their requests ask for, and the shapes of their answers."""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import Callable, Container, Iterable
from dataclasses import replace
from typing import Any

from starlette.requests import Request

from sparkrt.engine.outputs import Logprob
from sparkrt.serve import protocol as p
from sparkrt.serve.generation import Generation, Piece
from sparkrt.serve.http import require
from sparkrt.serve.serving import Serving
from sparkrt.text.tokenizer import Tokenizer

MAX_SEQUENCES = 1024  # prompts × n of one request
FLOOR = -9999.0  # minus infinity cannot be written in JSON; max(FLOOR, NaN) is FLOOR, too

Row = dict[int, Logprob]  # of one position: the chosen token, then the most likely ones


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
    body.tools = _tools(body)
    ids = await asyncio.to_thread(serving.render, body)
    return await ChatGeneration(serving, body, [ids], params).respond(request)


def _tools(body: Any) -> list[dict[str, Any]] | None:
    """The tools the template sees: none when the model must not call any. What would force a call is refused."""
    param = "function_call" if body.tool_choice is None else "tool_choice"
    choice = getattr(body, param)
    require(choice != "required" and not isinstance(choice, dict), param, f"{param}: only auto and none are supported")
    require(choice in (None, "auto", "none"), param, f"{param} must be auto, none, required or a named function")
    tools = body.tools or [{"type": "function", "function": function} for function in body.functions or ()]
    for index, tool in enumerate(tools):
        function = tool.get("function")
        named = isinstance(function, dict) and isinstance(function.get("name"), str)
        require(named, f"tools[{index}]", f"tools[{index}].function.name: expected a string")
    return None if choice == "none" else tools or None


class ChatGeneration(Generation):
    kind = "chatcmpl"

    def parts(self, piece: Piece) -> list[Piece]:
        """The first chunk of a choice says the role and nothing else."""
        return [Piece(piece.index, piece.prompt, True), replace(piece, first=False)] if piece.first else [piece]

    def write(self, pieces: list[Piece], is_chunk: bool, **head: Any) -> Any:
        head["object"] = "chat.completion.chunk" if is_chunk else "chat.completion"
        if pieces and pieces[0].first:
            head |= _about_prompt(self, pieces[0])
        return p.ChatCompletion(choices=[self._choice(piece, is_chunk) for piece in pieces], **head)

    def _choice(self, piece: Piece, is_chunk: bool) -> Any:
        role = "assistant" if piece.first else None
        message = p.ChatMessage(role=role, content=piece.text if piece.first else piece.text or None)
        choice = p.ChatChoice(logprobs=None, **{"delta" if is_chunk else "message": message}, **_about(self, piece))
        if is_chunk and piece.first:
            choice.token_ids = None
        elif self.body.logprobs:
            choice.logprobs = _chat_logprobs(piece, self.body.top_logprobs or 0, self.tokenizer)
        return choice


async def completions(serving: Serving, body: Any, request: Request) -> Any:
    params = serving.params(body)
    require(params.max_tokens != 0 or body.echo, "max_tokens", "max_tokens must be at least 1 unless echo is true")
    if body.echo and params.logprobs is not None:
        params.prompt_logprobs = max(params.logprobs, params.prompt_logprobs or 0)
    prompts, most = _split(body.prompt), MAX_SEQUENCES
    require(len(prompts) * params.n <= most, "prompt", f"prompts × n must be at most {most}, got {len(prompts)} × {params.n}")
    special, decode = body.add_special_tokens is not False, serving.tokenizer.decode
    ids = await asyncio.to_thread(lambda: [serving.encode(prompt, special, "prompt") for prompt in prompts])
    echoed = [prompt if isinstance(prompt, str) else decode(prompt, False) for prompt in prompts] if body.echo else []
    return await CompletionGeneration(echoed, serving, body, ids, params).respond(request)


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
    kind = "cmpl"

    def __init__(self, echoed: list[str], *rest: Any) -> None:
        super().__init__(*rest)
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
        prompt = _about_prompt(self, piece) if piece.first else {}
        return p.CompletionChoice(text=text, logprobs=logprobs, **_about(self, piece), **prompt)


def _about(generation: Generation, piece: Piece) -> dict[str, Any]:
    """What both APIs say of a choice."""
    ids = piece.token_ids if generation.body.return_token_ids else None
    reasons = {"finish_reason": piece.finish_reason, "stop_reason": piece.stop_reason}
    return {"index": piece.index, "token_ids": ids, **reasons}


def _about_prompt(generation: Generation, piece: Piece) -> dict[str, Any]:
    """What the request wants to know of its prompt. Log-probabilities are those of the token and of the alternatives, by id."""
    body, found, name = generation.body, dict[str, Any](), generation.tokenizer.token_bytes
    if body.return_token_ids:
        found["prompt_token_ids"] = piece.prompt.prompt_token_ids
    if body.prompt_logprobs is not None:
        found["prompt_logprobs"] = scored = list[Any]()
        for row in piece.prompt.prompt_logprobs or ():
            items = ((i, x, _shown(name(i))) for i, x in (row or {}).items())
            entries = {str(i): {"logprob": max(FLOOR, x.logprob), "rank": x.rank, "decoded_token": text} for i, x, text in items}
            scored.append(entries or None)
    return found


def _chat_logprobs(piece: Piece, count: int, tokenizer: Tokenizer) -> Any:
    """Of the tokens of a piece, with the `count` most likely ones at each position."""
    content = []
    for token_id, row in zip(piece.token_ids, piece.logprobs, strict=True):
        texts = ((i, item, tokenizer.token_bytes(i)) for i, item in row.items())
        items = {i: {"token": _shown(raw), "logprob": max(FLOOR, item.logprob), "bytes": list(raw)} for i, item, raw in texts}
        ranks = {i: item.rank or 0 for i, item in row.items() if (item.rank or 0) <= count}
        top = [p.TopLogprob(**items[i]) for i in sorted(ranks, key=ranks.__getitem__)[:count]]
        content.append(p.TokenLogprob(**items[token_id], top_logprobs=top))
    return p.ChatLogprobs(content=content)


def _completion_logprobs(ids: Iterable[int], rows: list[Row | None], start: Callable[[int], int], tokenizer: Tokenizer) -> Any:
    """The chosen token is always among the alternatives, as the field has it. A row None: the first token of a prompt."""
    names = {i: _shown(tokenizer.token_bytes(i)) for i in {*ids, *(i for row in rows for i in row or ())}}
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


def _shown(raw: bytes) -> str:
    """A token as text; one that is only part of a character is spelled out, so that different tokens stay different."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
