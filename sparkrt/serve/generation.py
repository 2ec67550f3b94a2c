"""From the engine's tokens to pieces of text: the one path that whole answers and streams share."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from sparkrt.engine.messages import EngineOutput, Logprob, ModelInfo
from sparkrt.engine.params import SamplingParams, to_requests
from sparkrt.serve.protocol import PromptTokensDetails, Usage
from sparkrt.serve.serving import Serving
from sparkrt.text.assembler import TextAssembler
from sparkrt.text.tokenizer import Tokenizer


@dataclass(slots=True)
class Piece:
    """What one choice gained since its last piece."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class Choice:
    """One sequence: assembles its text, finds its stop strings, counts its tokens."""

    def __init__(self, index: int, prompt_ids: list[int], params: SamplingParams, info: ModelInfo, tokenizer: Tokenizer) -> None:
        self.index = index
        self.prompt_ids = prompt_ids
        self.tokens = 0  # generated, up to where the answer ends
        self.cached_tokens = 0
        self.prompt_logprobs: list[Logprob | None] = []
        self.finished = False
        self._piece = Piece(index)
        self._quiet = frozenset(info.eos_token_ids) - set(params.stop_token_ids)  # stop ids that are no stop_reason
        self._assembler = TextAssembler(
            tokenizer,
            params.stop,
            include_stop_str_in_output=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            min_tokens=params.min_tokens,
        )

    def feed(self, output: EngineOutput) -> bool:
        """Take a step's news. True when a stop string has ended the answer and the engine does not know yet."""
        piece = self._piece
        self.cached_tokens = max(self.cached_tokens, output.cached_tokens)
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        delta = self._assembler.feed(output.token_ids, stop_token=output.stop_token)
        piece.text += delta.text
        if not delta.finished and output.finish_reason is not None:
            delta = self._assembler.flush()
            piece.text += delta.text
        if delta.finished:  # a stop string, which may come before what the engine stopped at
            piece.finish_reason, piece.stop_reason = "stop", delta.stop_reason
        elif output.finish_reason is not None:
            piece.finish_reason = output.finish_reason
            piece.stop_reason = None if output.stop_token in self._quiet else output.stop_token
        used = delta.tokens_used - self.tokens
        self.tokens = delta.tokens_used
        piece.token_ids += output.token_ids[:used]
        piece.logprobs += (output.logprobs or [])[:used]
        self.finished = piece.finish_reason is not None
        return self.finished and output.finish_reason is None

    def take(self, interval: int | None) -> Piece | None:
        """The piece gathered so far; None while it shows nothing new, or fewer than `interval` tokens after the first piece.

        Interval None: one piece, the whole answer.
        """
        piece = self._piece
        if piece.finish_reason is None:
            first = self.tokens == len(piece.token_ids)
            if interval is None or not piece.text or (len(piece.token_ids) < interval and not first):
                return None
        self._piece = Piece(self.index)
        return piece


class Generation:
    """One HTTP request being answered: `prompts` × `params.n` sequences, choice i * n + j being the j-th of prompt i.

    Raises RequestError for what to_requests refuses, before anything is sent to the engine.
    """

    def __init__(self, answer_id: str, prompts: list[list[int]], params: SamplingParams, serving: Serving) -> None:
        self.id = answer_id
        self.created = int(time.time())
        self.prompts = prompts
        self.params = params
        requests = [
            request for i, ids in enumerate(prompts) for request in to_requests(ids, params, serving.info, f"{self.id}/{i}")
        ]
        self.choices = [
            Choice(i, request.prompt_ids, params, serving.info, serving.tokenizer) for i, request in enumerate(requests)
        ]
        self.answers = serving.client.submit(requests)

    async def pieces(self, interval: int | None) -> AsyncGenerator[list[Piece]]:
        """What became visible, as it comes: at most one piece per choice and round, each choice's last with a finish_reason."""
        async for news in self.answers:
            touched = dict.fromkeys(index for index, _ in news)
            for index, output in news:
                choice = self.choices[index]
                if not choice.finished and choice.feed(output):
                    self.answers.finish(index)
            found = [piece for index in touched if (piece := self.choices[index].take(interval)) is not None]
            if found:
                yield found

    async def whole(self) -> list[Piece]:
        """Every choice's whole answer, in order."""
        return sorted([piece async for pieces in self.pieces(None) for piece in pieces], key=lambda piece: piece.index)

    def usage(self) -> Usage:
        """A prompt counts once however many answers it gets."""
        prompt = sum(map(len, self.prompts))
        completion = sum(choice.tokens for choice in self.choices)
        first = self.choices[:: self.params.n]
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(choice.cached_tokens for choice in first)),
        )
