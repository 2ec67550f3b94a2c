"""One request being answered: from resolved prompts to pieces of text, and from those to a response, whole or streamed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence, Set
from dataclasses import asdict, dataclass, field
from typing import Any

from starlette.requests import ClientDisconnect, Request

from sparkrt.engine.answer import Answer
from sparkrt.engine.messages import EngineOutput
from sparkrt.engine.outputs import Logprob, RequestOutput
from sparkrt.engine.params import SamplingParams, to_requests
from sparkrt.errors import CapacityError, EngineFatal
from sparkrt.serve.http import describe, event_stream
from sparkrt.serve.metrics import Times
from sparkrt.serve.protocol import CachedTokens, StreamOptions, Usage
from sparkrt.serve.serving import Serving
from sparkrt.text.reply import ReplyDelta

log = logging.getLogger("sparkrt.serve")

_PRIVATE = ("stop", "logit_bias", "allowed_token_ids", "stop_token_ids", "structured_outputs")  # or long: not for the log


@dataclass(slots=True)
class Piece:
    """What choice `index`, an answer to `prompt`, gained since its last piece."""

    index: int
    prompt: RequestOutput
    first: bool
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)  # the chosen token, then the most likely ones
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    reply: ReplyDelta | None = None  # its text, read by a parser


class _Choice:
    """One sequence: its `Answer`, and how much of it was taken."""

    def __init__(self, index: int, answer: Answer) -> None:
        self.answer = answer
        self.over = False  # the last piece was taken
        self.first: float | None = None  # s after the request when its first token came
        self.last = 0.0  # and its last, so far
        self.queued = 0.0  # how much of that it waited for a slot
        self._index = index
        self._text = self._tokens = 0

    def take(self, interval: int | None) -> Piece | None:
        """The next piece; None while fewer than `interval` tokens (None: not all) have come after the first."""
        output, text, tokens = self.answer.output, self._text, self._tokens
        few = interval is None or len(output.token_ids) - tokens < (interval if tokens else 1)
        if self.over or (few and not self.answer.finished):
            return None
        self.over, self._text, self._tokens = self.answer.finished, len(output.text), len(output.token_ids)
        gained = output.text[text:], output.token_ids[tokens:], (output.logprobs or [])[tokens:]
        return Piece(self._index, self.answer.result, tokens == 0, *gained, output.finish_reason, output.stop_reason)


class Generation(ABC):
    """`prompts` × `params.n` sequences, choice i * n + j being the j-th of prompt i, in the shape of one API.

    Making it sends the request to the engine. Raises RequestError for what `to_requests` refuses, before anything is sent.
    A slow reader delays nobody: answers grow by themselves, and pieces are what they grew by since the last look.
    """

    kind: str  # begins the ids of its answers
    named_events = False  # see `event_stream`
    describe = staticmethod(describe)

    def __init__(
        self,
        serving: Serving,
        body: Any,
        prompts: list[list[int]],
        params: SamplingParams,
        grammar: tuple[str, str] | None = None,
        marks: Set[int] = frozenset(),
        thinks: Sequence[bool | None] = (),
    ) -> None:
        """`grammar`: see `EngineRequest`; `marks`: special tokens that texts have all the same; `thinks`: see `to_requests`, by
        prompt.
        """
        self.tokenizer = serving.tokenizer
        self.params = params
        self.body = body
        self._head = {"id": f"{self.kind}{uuid.uuid4().hex}", "created": int(time.time()), "model": serving.args.names[0]}
        self._prompts = [RequestOutput(f"{self._head['id']}/{i}", None, ids) for i, ids in enumerate(prompts)]
        self._serving = serving
        self._began = time.monotonic()
        self._changed = asyncio.Event()
        self._admitted = self._closed = False
        self._error: Exception | None = None
        self._choices: dict[str, _Choice] = {}
        self.names = {self._head["id"]}  # that /abort_request may call it by
        details = params, serving.info
        requests = []
        for p, thinking in zip(self._prompts, thinks or [False] * len(prompts), strict=True):
            made = to_requests(p.prompt_token_ids, *details, p.request_id, grammar, body.priority, thinking, body.cache_salt)
            requests += [(p, request) for request in made]
        for index, (prompt, request) in enumerate(requests):
            answer = Answer(prompt, index % params.n, params, serving.info.eos_token_ids, serving.tokenizer, marks)
            self._choices[request.request_id] = _Choice(index, answer)
        serving.client.submit([request for _, request in requests], self)
        if serving.args.enable_log_requests:
            shown = {name: value for name, value in asdict(params).items() if name not in _PRIVATE}
            log.info("%s arrived: %s prompt tokens, %s", self._head["id"], sum(map(len, prompts)), shown)

    def admit(self) -> None:
        self._admitted = True
        self._changed.set()

    def take(self, output: EngineOutput) -> None:
        if output.finish_reason == "error":
            log.error("request %s failed in the engine: %s", output.request_id, output.error)
            self.close(EngineFatal("the engine could not finish this request"))
            return
        if output.finish_reason == "timeout":
            self.close(CapacityError(f"{output.error}: try again, or ask for less"))
            return
        choice, seconds = self._choices[output.request_id], time.monotonic() - self._began
        answer, metrics = choice.answer, self._serving.metrics
        if output.token_ids:
            if choice.first is None:
                choice.first, choice.queued = seconds, output.queued_seconds
                metrics.time_to_first_token.observe(seconds)
            else:
                metrics.inter_token_latency.observe(seconds - choice.last)
            choice.last = seconds
        try:
            answer.feed(output, seconds)
        except Exception as error:  # others have news in the same message
            self.close(error)
        if answer.finished:  # perhaps by a stop string, and the engine does not know yet
            self._serving.client.forget([output.request_id])
            self._count(choice, answer.output.finish_reason or "error")
        self._changed.set()

    def _count(self, choice: _Choice, reason: str) -> None:
        """For the metrics: this answer has ended."""
        result, generated = choice.answer.result, len(choice.answer.output.token_ids)
        times = Times(choice.queued, choice.first, choice.last)
        details = times, len(result.prompt_token_ids), result.num_cached_tokens, generated
        self._serving.metrics.ended(reason, time.monotonic() - self._began, *details)

    def close(self, error: Exception | None = None) -> None:
        """The engine forgets what still runs: nobody listens any more, or `error` is what they get. Idempotent."""
        self._serving.client.forget(self._choices)
        self._error = self._error or error
        self._changed.set()
        for choice in () if self._closed else self._choices.values():
            if not choice.answer.finished:
                self._count(choice, "abort" if error is None or isinstance(error, ClientDisconnect) else "error")
        self._closed = True

    def abort(self) -> None:
        """End what still runs: its answers stay as they are, with the finish_reason "abort"."""
        for name in [name for name, choice in self._choices.items() if not choice.answer.finished]:
            self.take(EngineOutput(request_id=name, finish_reason="abort"))
        self.admit()

    async def respond(self, request: Request) -> Any:
        """The answer, once the engine has taken the request. Raises what the engine refuses it with."""
        self.names.add(request.scope["access"]["id"])
        while not self._admitted and self._error is None:
            await self._change()
        if self._error is not None:
            raise self._error
        return event_stream(self._events(request), self.named_events) if self.body.stream else await self._whole(request)

    @contextlib.asynccontextmanager
    async def _watched(self, request: Request) -> AsyncGenerator[None]:
        """When the client goes, the engine forgets the request, and whoever waits for it is woken by ClientDisconnect."""

        async def watch() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            self.close(ClientDisconnect())

        watcher = asyncio.ensure_future(watch())
        try:
            yield
        finally:
            watcher.cancel()
            self.close()
            request.scope["access"] |= self._summary()

    async def _whole(self, request: Request) -> Any:
        async with self._watched(request):
            pieces = [piece async for found in self._pieces(None) for piece in found]
        return self.write(sorted(pieces, key=lambda piece: piece.index), False, usage=self._usage(), **self._head)

    async def _events(self, request: Request) -> AsyncGenerator[list[Any]]:
        """An error after the first byte cannot change the status any more: it is sent as an event."""
        try:
            async with self._watched(request):
                if events := self.opening():
                    yield events
                async for pieces in self._pieces(self._serving.args.stream_interval):
                    if events := [event for piece in pieces for part in self.parts(piece) for event in self.chunks(part)]:
                        yield events
            if events := await self.closing():
                yield events
        except ClientDisconnect:
            pass
        except Exception as error:
            yield self.failure(error)

    async def _pieces(self, interval: int | None) -> AsyncGenerator[list[Piece]]:
        """What became visible, as it comes: each choice's last piece has a finish_reason. Raises what `close` was given."""
        while not all(choice.over for choice in self._choices.values()):
            if found := [piece for choice in self._choices.values() if (piece := choice.take(interval)) is not None]:
                yield found
            elif self._error is not None:
                raise self._error
            else:
                await self._change()
        if self._serving.args.enable_log_requests:
            seconds = time.monotonic() - self._began
            log.info("%s done: %s tokens in %.3f s", self._head["id"], self._usage().completion_tokens, seconds)

    async def _change(self) -> None:
        await self._changed.wait()
        self._changed.clear()

    def _usage(self) -> Any:
        """A prompt counts once however many answers it gets."""
        prompt = sum(len(p.prompt_token_ids) for p in self._prompts)
        completion = sum(len(output.token_ids) for p in self._prompts for output in p.outputs)
        cached = CachedTokens(cached_tokens=sum(p.num_cached_tokens for p in self._prompts))
        total = prompt + completion
        return Usage(prompt_tokens=prompt, completion_tokens=completion, total_tokens=total, prompt_tokens_details=cached)

    def _summary(self) -> dict[str, Any]:
        """For the access log."""
        usage, outputs = self._usage(), [choice.answer.output for choice in self._choices.values()]
        firsts = [choice.first for choice in self._choices.values() if choice.first is not None]
        return {
            "answer": self._head["id"],
            "stream": bool(self.body.stream),
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.prompt_tokens_details.cached_tokens,
            "completion_tokens": usage.completion_tokens,
            "finish_reasons": [output.finish_reason for output in outputs],
            "first_token_seconds": round(min(firsts), 6) if firsts else None,
        }

    def opening(self) -> list[Any]:
        """What is sent before there is any token."""
        return []

    async def closing(self) -> list[Any]:
        """What is sent after the last piece."""
        options = self.body.stream_options or StreamOptions()
        wanted = options.include_usage or self._serving.args.enable_force_include_usage
        return [self.write([], True, usage=self._usage(), **self._head)] if wanted else []

    def failure(self, error: Exception) -> list[Any]:
        """What is sent instead, when something goes wrong on the way."""
        return [self.describe(error)[0]]

    def parts(self, piece: Piece) -> list[Piece]:
        """What is sent of a piece, a chunk each; perhaps nothing."""
        return [piece]

    def chunks(self, piece: Piece) -> list[Any]:
        """What is sent for a part."""
        options = self.body.stream_options or StreamOptions()
        usage = self._usage() if options.include_usage and options.continuous_usage_stats else None
        return [self.write([piece], True, usage=usage, **self._head)]

    @abstractmethod
    def write(self, pieces: list[Piece], is_chunk: bool, **head: Any) -> Any:
        """A whole answer, or a chunk of a stream; `head`: what every answer and chunk begins with."""
