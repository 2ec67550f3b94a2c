"""The load itself: requests sent at their times, and their answers measured."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import Any

import msgspec

from sparkrt.bench.client import Client, Reply
from sparkrt.bench.dataset import Sample
from sparkrt.bench.report import Outcome

ENDPOINTS = {"openai": "/v1/completions", "vllm": "/v1/completions", "openai-chat": "/v1/chat/completions"}


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    def said(self) -> str | None:
        """What came with this chunk; None for one that only announces the role."""
        if self.delta is None:
            return self.text or ""
        text = self.delta.content or self.delta.reasoning_content or self.delta.reasoning or ""
        return text if text or self.delta.tool_calls or self.finish_reason else None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode
encode = msgspec.json.Encoder().encode


def body_of(backend: str, sample: Sample, more: dict[str, Any]) -> dict[str, Any]:
    """The request for a sample; `more` goes on top."""
    if backend == "openai-chat":
        asked = {"messages": [{"role": "user", "content": sample.prompt}], "max_completion_tokens": sample.output_len}
    else:
        asked = {"prompt": sample.prompt, "max_tokens": sample.output_len}
    return {**asked, "stream": True, "stream_options": {"include_usage": True}, **more}


def read(reply: Reply, sample: Sample) -> Outcome:
    """What a reply says. An answer of which no token came, or that ends in an error, has failed."""
    outcome = Outcome(reply.sent, input_tokens=sample.prompt_len)
    if reply.status != 200:
        outcome.error = f"HTTP {reply.status}: {reply.body[:300].decode(errors='replace')}"
        return outcome
    parts = []
    try:
        for at, data in reply.events():
            if data == b"[DONE]":
                break
            chunk = _decode(data)
            if chunk.error is not None:
                outcome.error = str(chunk.error)
            for choice in chunk.choices[:1]:
                if (said := choice.said()) is not None:
                    parts.append(said)
                    outcome.chunks.append(at)
            if chunk.usage is not None:
                outcome.input_tokens = chunk.usage.prompt_tokens or outcome.input_tokens
                outcome.output_tokens = chunk.usage.completion_tokens or outcome.output_tokens
    except msgspec.DecodeError as error:
        outcome.error = f"an event that is no chunk of an answer: {error}"
    outcome.text = "".join(parts)
    outcome.output_tokens = outcome.output_tokens or len(outcome.chunks)  # a server that counts nothing: a token a chunk
    if not outcome.chunks:
        outcome.error = outcome.error or "an answer without a token"
    return outcome


def arrivals(count: int, rate: float, burstiness: float, seed: int) -> Iterator[float]:
    """Seconds after the start at which to send: a gamma process whose intervals have the shape `burstiness` (1: Poisson),
    stretched so that all are sent within `count` / `rate`.
    """
    if rate == float("inf"):
        yield from [0.0] * count
        return
    rng, even = random.Random(seed), burstiness == float("inf")
    gaps = [1.0 if even else rng.gammavariate(burstiness, 1.0) for _ in range(count)]
    scale, at = count / rate / (sum(gaps) or 1.0), 0.0
    for gap in gaps:
        at += gap * scale
        yield at


async def run(
    client: Client,
    endpoint: str,
    requests: Sequence[tuple[Sample, bytes]],
    times: Iterator[float],
    max_concurrency: int | None = None,
    prefix: str = "bench-",
    on_done: Callable[[Outcome], None] = lambda outcome: None,
) -> tuple[list[Outcome], float]:
    """Send every request at its time, and return what came of each, in their order, and the seconds it all took."""
    room = contextlib.nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)

    async def one(number: int, sample: Sample, body: bytes) -> Outcome:
        arrived = perf_counter()
        async with room:
            began = perf_counter()
            try:
                outcome = read(await client.send("POST", endpoint, body, f"{prefix}{number}"), sample)
            except OSError as error:
                outcome = Outcome(began, input_tokens=sample.prompt_len, error=f"{type(error).__name__}: {error}")
        outcome.waited = began - arrived
        on_done(outcome)
        return outcome

    began = perf_counter()
    async with asyncio.TaskGroup() as group:
        tasks = []
        for number, ((sample, body), at) in enumerate(zip(requests, times, strict=True)):
            if (pause := began + at - perf_counter()) > 0:
                await asyncio.sleep(pause)
            tasks.append(group.create_task(one(number, sample, body)))
    return [task.result() for task in tasks], perf_counter() - began
