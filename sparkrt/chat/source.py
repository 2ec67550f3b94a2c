"""What a conversation asks: a model in this process, or a server (remote.py)."""

from __future__ import annotations

import signal
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

from sparkrt.engine.answer import Answer
from sparkrt.engine.config import EngineConfig, Progress
from sparkrt.engine.loading import load
from sparkrt.engine.outputs import RequestOutput
from sparkrt.engine.params import SamplingParams, to_requests
from sparkrt.errors import SparkrtError
from sparkrt.text.reasoning import reasoning_format
from sparkrt.text.reply import ReplyDelta, ReplyParser
from sparkrt.text.tools import MARKS, tool_format
from sparkrt.text.tools.calls import read_tools


@dataclass(frozen=True, slots=True)
class Said:
    """What an answer gained, its `tokens` so far, and at its end the reason in OpenAI's words."""

    delta: ReplyDelta
    tokens: int
    reason: str | None = None


@dataclass(slots=True)
class Asked:
    """A conversation as OpenAI spells it. `sampling`: fields of SamplingParams; `thinking`: None leaves it to the model."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]]
    sampling: Mapping[str, float]
    thinking: bool | None = None


class Source(Protocol):
    name: str  # of the model, and where it is

    def answer(self, asked: Asked) -> Generator[Said, None, None]:
        """The answer as it is made. Close the iterator to stop it; so does KeyboardInterrupt. SparkrtError: there is none."""

    def close(self) -> None: ...


class Local:
    """A model loaded into this process."""

    def __init__(self, config: EngineConfig, progress: Progress) -> None:
        """LoadError: the model cannot be loaded."""
        self._core, self._tokenizer, self._template, self._info = load(config, progress)
        text = "\n".join(self._template.texts.values())
        self._tools, self._reasoning = tool_format("auto", text), reasoning_format("auto", text)
        self._shown = {i for i in self._tokenizer.special_ids if self._tokenizer.token_str(i) in MARKS}
        self._ids, self.name = count(), f"{self._info.name} on {self._info.device}"

    def answer(self, asked: Asked) -> Generator[Said, None, None]:
        info, defaults = self._info, {"max_tokens": None} | self._info.sampling_defaults
        params = SamplingParams.from_optional(defaults, **asked.sampling)
        variables = {} if asked.thinking is None else {"enable_thinking": asked.thinking}
        prompt = self._template.render(asked.messages, asked.tools or None, **variables)
        ids = self._tokenizer.encode(prompt, add_special_tokens=False)
        [request] = to_requests(ids, params, info, f"chat-{next(self._ids)}")
        offered, thinks = read_tools(asked.tools), self._reasoning.thinks(prompt, False) if self._reasoning else None
        parser = ReplyParser(self._reasoning, thinks, self._tools if offered else None, offered)
        result = RequestOutput(request.request_id, prompt, ids)
        answer = Answer(result, 0, params, info.eos_token_ids, self._tokenizer, self._shown)
        output, seen = answer.output, 0
        self._core.add(request)
        try:
            with _interrupts_between() as check:
                while not answer.finished:
                    for news in self._core.step():
                        if news.error is not None:
                            raise SparkrtError(news.error)
                        answer.feed(news, 0.0)
                    check()
                    yield Said(parser.feed(output.text[seen:]), len(output.token_ids))
                    seen = len(output.text)
            reason = "tool_calls" if output.finish_reason == "stop" and parser.calls else output.finish_reason
            yield Said(parser.flush(cut=output.finish_reason != "stop"), len(output.token_ids), reason)
        finally:
            self._core.abort([request.request_id])
            self._core.settle()

    def close(self) -> None:
        self._core.close()


@contextmanager
def _interrupts_between() -> Iterator[Any]:
    """Ctrl-C waits for the call of what this yields, so that no step of the engine is broken off; a second one does not."""
    pressed = list[int]()

    def press(number: int, frame: Any) -> None:
        pressed.append(number)
        if len(pressed) > 1:
            raise KeyboardInterrupt

    def check() -> None:
        if pressed:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, press)
    try:
        yield check
        check()
    finally:
        signal.signal(signal.SIGINT, before)
