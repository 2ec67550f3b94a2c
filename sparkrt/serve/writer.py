"""What the two generating endpoints share: from resolved prompts to a response, whole or streamed."""

from __future__ import annotations

import logging
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from sparkrt.engine.params import SamplingParams
from sparkrt.serve.generation import Generation, Piece
from sparkrt.serve.http import EventStream, event, json_response, wait_for
from sparkrt.serve.protocol import GenerationBody, StreamOptions, Usage
from sparkrt.serve.serving import Serving

log = logging.getLogger("sparkrt.serve")

_PRIVATE = ("stop", "logit_bias", "allowed_token_ids", "stop_token_ids")  # or long: not for the log


class Writer(ABC):
    """Answers one request in the shape of one API. Making it sends the request to the engine."""

    kind: str  # begins the ids of its answers

    def __init__(self, serving: Serving, body: GenerationBody, prompts: list[list[int]], params: SamplingParams) -> None:
        self.tokenizer = serving.tokenizer
        answer_id = f"{self.kind}-{uuid.uuid4().hex}"
        self.generation = Generation(answer_id, prompts, params, serving)
        self._args = serving.args
        self._options = body.stream_options or StreamOptions()
        self._stream = bool(body.stream)
        self._started = time.monotonic()
        if serving.args.enable_log_requests:
            shown = {name: value for name, value in asdict(params).items() if name not in _PRIVATE}
            log.info("%s arrived: %s prompt tokens, %s", self.generation.id, sum(map(len, prompts)), shown)

    async def respond(self, request: Request) -> Response | EventStream:
        """The response, once the engine has taken the request. Raises what the engine refuses it with."""
        answers = self.generation.answers
        try:
            await answers.admitted()
            if self._stream:
                return EventStream(self._events(), answers)
            pieces = await wait_for(self.generation.whole(), answers, request.receive)
        except BaseException:
            answers.close()
            raise
        self._log_end()
        return json_response(self.whole(pieces, self.generation.usage()))

    async def _events(self) -> AsyncGenerator[bytes]:
        generation, begun = self.generation, set[int]()
        each = bool(self._options.include_usage and self._options.continuous_usage_stats)
        async for pieces in generation.pieces(self._args.stream_interval):
            block = b""
            for piece in pieces:
                for chunk in self.chunks(piece, piece.index not in begun, generation.usage() if each else None):
                    block += event(chunk)
                begun.add(piece.index)
            yield block
        if self._options.include_usage:
            yield event(self.last_chunk(generation.usage()))
        self._log_end()

    def _log_end(self) -> None:
        if self._args.enable_log_requests:
            tokens, seconds = self.generation.usage().completion_tokens, time.monotonic() - self._started
            log.info("%s done: %s tokens in %.3f s", self.generation.id, tokens, seconds)

    def head(self) -> dict[str, Any]:
        """What every answer and every chunk of one begins with."""
        return {"id": self.generation.id, "created": self.generation.created, "model": self._args.names[0]}

    @abstractmethod
    def whole(self, pieces: list[Piece], usage: Usage) -> Any:
        """The whole answer; `pieces` has one for each choice."""

    @abstractmethod
    def chunks(self, piece: Piece, first: bool, usage: Usage | None) -> list[Any]:
        """The events of a piece. `first`: nothing of this choice was sent yet."""

    @abstractmethod
    def last_chunk(self, usage: Usage) -> Any:
        """The event with the usage and no choices."""
