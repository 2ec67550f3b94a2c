"""POST /v1/chat/completions: what it asks for, and its answers, read as thinking, content and calls."""

from __future__ import annotations

import asyncio
from collections import defaultdict
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
from sparkrt.serve.structured import asked_structure
from sparkrt.text.grammar import Body, grammar_of
from sparkrt.text.reasoning import ThoughtCounter
from sparkrt.text.reply import ReplyDelta, ReplyParser
from sparkrt.text.tokenizer import Tokenizer
from sparkrt.text.tools.calls import CallDelta, Tool, read_tools


async def chat_completions(serving: Serving, body: Any, request: Request) -> Any:
    return await (await prepare(serving, body, ChatGeneration)).respond(request)


async def prepare(serving: Serving, body: Any, kind: Callable[..., ChatGeneration]) -> ChatGeneration:
    """The request on its way to the engine. RequestError for what is wrong with it."""
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
    choice, asked = tool_choice(body), asked_structure(body)
    require(serving.tools or not choice.forced, "tool_choice", "this model's calls have no format we know: --tool-call-parser")
    prompt, ids = await asyncio.to_thread(serving.render, body)
    return kind(prompt, choice, asked, serving, body, ids, params)


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """The functions that may be called, none if the model must not call any, and whether it must; one, if it was `named`."""

    tools: list[Tool]
    forced: bool = False
    named: bool = False


def tool_choice(body: Any) -> ToolChoice:
    """What the request wants of tools. `body.tools` become what the template sees."""
    given, old = body.tools, [{"type": "function", "function": function} for function in body.functions or ()]
    tools = read_tools(given or old, "tools" if given else "functions")
    param = "function_call" if body.tool_choice is None else "tool_choice"
    choice = getattr(body, param)
    body.tools = None if choice == "none" else given or old or None
    if choice in (None, "auto", "none"):
        return ToolChoice(tools if body.tools else [])
    require(choice == "required" or isinstance(choice, dict), param, f"{param} must be auto, none, required or a named function")
    require(tools, param, f"{param} needs tools to choose from")
    if choice == "required":
        return ToolChoice(tools, forced=True)
    if choice.get("type") == "allowed_tools":
        allowed = choice.get("allowed_tools")
        mode, listed = (allowed.get("mode"), allowed.get("tools")) if isinstance(allowed, dict) else (None, None)
        require(mode in ("auto", "required"), param, f"{param}.allowed_tools.mode: expected auto or required")
        require(isinstance(listed, list) and listed, param, f"{param}.allowed_tools.tools: expected a list of functions")
        names = {_chosen(item, tools, param).name for item in listed or ()}
        body.tools = [tool for tool in body.tools if tool["function"]["name"] in names]  # the others are not even shown
        return ToolChoice([tool for tool in tools if tool.name in names], forced=mode == "required")
    named = choice if param == "tool_choice" else {"function": choice}
    return ToolChoice([_chosen(named, tools, param)], forced=True, named=True)


def _chosen(named: Any, tools: list[Tool], param: str) -> Tool:
    """The one of `tools` that `named`, such as {"type": "function", "function": {"name": ...}}, means."""
    function = named.get("function") if isinstance(named, dict) and named.get("type", "function") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    require(isinstance(name, str), param, f"{param}: expected a function's name")
    found = [tool for tool in tools if tool.name == name]
    require(found, param, f"{param}: there is no function called {name!r} among the tools")
    return found[0]


class ChatGeneration(Generation):
    kind = "chatcmpl-"

    def __init__(
        self,
        prompt: str,
        choice: ToolChoice,
        asked: tuple[Body, str] | None,
        serving: Serving,
        body: Any,
        ids: list[int],
        params: SamplingParams,
    ) -> None:
        self._named = choice.named
        tools = serving.tools if choice.tools else None
        reasoning = serving.reasoning
        thinks = reasoning.thinks(prompt, bool(body.continue_final_message)) if reasoning else False
        parallel = body.parallel_tool_calls is not False and not choice.named
        bodies = [] if asked is None or choice.forced else [asked[0]]
        if tools and (bodies or choice.forced):
            bodies.append({"lark_grammar": tools.grammar(choice.tools, parallel)})
        may_think = thinks if thinks is not None or (reasoning and reasoning.optional) else False
        if tools and not bodies and any(tool.strict for tool in choice.tools):
            bodies.append({"lark_grammar": tools.free_grammar(choice.tools, parallel, thinks is None)})
            may_think = thinks
        grammar = (grammar_of(bodies, may_think), asked[1] if asked else "tools") if bodies else None
        if body.separate_reasoning is False:
            reasoning = None
        details = reasoning, thinks, tools, choice.tools, parallel
        self._parsers = defaultdict[int, ReplyParser](lambda: ReplyParser(*details))  # by choice
        self._thoughts = defaultdict[int, ThoughtCounter](lambda: ThoughtCounter(thinks, serving.tokenizer.token_bytes))
        super().__init__(serving, body, [ids], params, grammar, serving.marks if tools or reasoning else frozenset(), [thinks])

    def _usage(self) -> Any:
        usage, outputs = super()._usage(), self._prompts[0].outputs
        thought = sum(self._thoughts[output.index].count(output.token_ids) for output in outputs)
        usage.completion_tokens_details = p.ReasoningTokens(reasoning_tokens=thought)
        return usage

    def parts(self, piece: Piece) -> list[Piece]:
        """The first chunk of a choice says the role and nothing else; one that would say nothing is not sent."""
        roles = [Piece(piece.index, piece.prompt, True, reply=ReplyDelta())] if piece.first else []
        said = self._read(replace(piece, first=False))
        says = said.reply or said.finish_reason or self.body.logprobs or self.body.return_token_ids
        return [*roles, said] if says else roles

    def _read(self, piece: Piece) -> Piece:
        """With its text parsed. One that ends has ended in calls if there are any and the last is complete; where a function was
        named, OpenAI says `stop` all the same.
        """
        parser = self._parsers[piece.index]
        reply, reason = parser.feed(piece.text), piece.finish_reason
        if reason is not None:
            stopped = isinstance(piece.stop_reason, str) and parser.in_call
            reply.add(parser.flush(cut=reason != "stop" or stopped))
            if reason == "stop" and parser.calls and not stopped and not self._named:
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
        reply, said = piece.reply, [_call(call, whole=True) for call in piece.reply.calls]
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
        return chat_logprobs(piece, self.body.top_logprobs or 0, self.tokenizer) if self.body.logprobs else None


def _thought(reply: ReplyDelta) -> dict[str, str | None]:
    """Under both of the names it has in the field."""
    return dict.fromkeys(("reasoning", "reasoning_content"), reply.reasoning or None)


def _call(delta: CallDelta, whole: bool) -> Any:
    function = p.CalledFunction(name=delta.name, arguments=delta.arguments)
    kind = None if delta.id is None else "function"
    return p.ToolCall(index=None if whole else delta.index, id=delta.id, type=kind, function=function)


def chat_logprobs(piece: Piece, count: int, tokenizer: Tokenizer) -> Any:
    """Of the tokens of a piece, with the `count` most likely ones at each position."""
    content = []
    for token_id, row in zip(piece.token_ids, piece.logprobs, strict=True):
        texts = ((i, item, tokenizer.token_bytes(i)) for i, item in row.items())
        items = {i: {"token": shown(raw), "logprob": max(FLOOR, item.logprob), "bytes": list(raw)} for i, item, raw in texts}
        ranks = {i: item.rank or 0 for i, item in row.items() if (item.rank or 0) <= count}
        top = [p.TopLogprob(**items[i]) for i in sorted(ranks, key=ranks.__getitem__)[:count]]
        content.append(p.TokenLogprob(**items[token_id], top_logprobs=top))
    return p.ChatLogprobs(content=content)
