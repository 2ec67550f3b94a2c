"""The `openai` Python client against the bundled model."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.serve.harness import Server

HELLO = "Hello! How can I help you today?"
MODEL = "sparkrt-tiny"


def greet(text: str = "Hello!") -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    model = client.models.retrieve(MODEL)
    assert model.object == "model"
    assert model.model_extra == {"root": MODEL, "parent": None, "max_model_len": 4096}


def test_chat(client: OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=greet(), temperature=0)
    [choice] = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", HELLO, "stop")
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens + answer.usage.completion_tokens == answer.usage.total_tokens
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_chat_stream(client: OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL, messages=greet(), temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    *spoken, last = chunks
    assert "".join(chunk.choices[0].delta.content or "" for chunk in spoken) == HELLO
    assert [chunk.choices[0].delta.role for chunk in spoken] == ["assistant"] + [None] * (len(spoken) - 1)
    assert [chunk.choices[0].finish_reason for chunk in spoken] == [None] * (len(spoken) - 1) + ["stop"]
    assert last.choices == []
    assert last.usage is not None
    whole = client.chat.completions.create(model=MODEL, messages=greet(), temperature=0).usage
    assert last.usage == whole


def test_completion(client: OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="Once upon a time", temperature=0)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16  # the default of this endpoint
    assert answer.choices[0].finish_reason == "length"
    streamed = client.completions.create(model=MODEL, prompt="Once upon a time", temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == answer.choices[0].text


def test_chat_logprobs(client: OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=greet(), temperature=0, logprobs=True, top_logprobs=3)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert answer.usage is not None
    assert len(logprobs.content) == answer.usage.completion_tokens
    *spoken, end = logprobs.content
    assert "".join(item.token for item in spoken) == HELLO
    assert b"".join(bytes(item.bytes or []) for item in spoken) == HELLO.encode()
    assert end.token == "<|im_end|>"
    for item in logprobs.content:
        assert item.top_logprobs[0].token == item.token  # greedy: the chosen one is the best
        assert item.top_logprobs[0].logprob == item.logprob <= 0
        assert len(item.top_logprobs) == 3


def test_completion_logprobs(client: OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="Once upon a time", temperature=0, max_tokens=5, logprobs=2)
    choice = answer.choices[0]
    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert "".join(logprobs.tokens) == choice.text
    starts = logprobs.text_offset or []
    assert [choice.text[a:b] for a, b in zip(starts, [*starts[1:], None], strict=True)] == logprobs.tokens
    for token, logprob, top in zip(logprobs.tokens, logprobs.token_logprobs or [], logprobs.top_logprobs or [], strict=True):
        assert top[token] == logprob == max(top.values())


def test_n_and_seed(client: OpenAI) -> None:
    def draw(seed: int, n: int = 2) -> list[str | None]:
        answer = client.chat.completions.create(
            model=MODEL, messages=greet("Tell me a story."), n=n, seed=seed, temperature=1.5, max_tokens=12
        )
        assert [choice.index for choice in answer.choices] == list(range(n))
        return [choice.message.content for choice in answer.choices]

    first = draw(7)
    assert first == draw(7)
    assert len(set(first)) == 2
    assert draw(7, n=1) == first[:1]
    assert draw(8) != first


def test_stop(client: OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=greet(), temperature=0, stop=["help"])
    [choice] = answer.choices
    assert (choice.message.content, choice.finish_reason) == ("Hello! How can I ", "stop")
    assert choice.model_extra == {"stop_reason": "help"}


WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "GetWeather",
        "description": "Get the weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
ASKED: Any = {"model": MODEL, "messages": greet("What is the weather in Paris?"), "tools": [WEATHER], "temperature": 0}


def test_tools(client: OpenAI) -> None:
    """A call, its result, and the answer; streamed or not."""
    answer = client.chat.completions.create(**ASKED)
    [choice] = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    [call] = choice.message.tool_calls or []
    assert (call.type, call.function.name) == ("function", "GetWeather")
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    with client.chat.completions.stream(**ASKED) as stream:
        whole = stream.get_final_completion().choices[0]
    assert whole.finish_reason == "tool_calls"
    [again] = whole.message.tool_calls or []
    assert (again.function.name, again.function.arguments) == (call.function.name, call.function.arguments)
    messages = [*ASKED["messages"], choice.message, {"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 21}'}]
    final = client.chat.completions.create(**{**ASKED, "messages": messages})
    assert final.choices[0].finish_reason == "stop"
    assert final.choices[0].message.content
    assert final.choices[0].message.tool_calls is None
    without = client.chat.completions.create(**ASKED, tool_choice="none")
    assert without.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert without.usage is not None
    assert without.usage.prompt_tokens < answer.usage.prompt_tokens  # a model that must not call sees no tools


def test_reasoning(client: OpenAI) -> None:
    farmer = "A farmer has 12 cows. He buys 5 more cows. How many cows does he have?"
    asked: Any = {"model": MODEL, "messages": greet(farmer), "temperature": 0}
    message: Any = client.chat.completions.create(**asked).choices[0].message
    chunks: Any = list(client.chat.completions.create(**asked, stream=True))
    assert message.reasoning == message.reasoning_content
    for name in ("reasoning", "reasoning_content"):
        said = "".join(getattr(chunk.choices[0].delta, name, None) or "" for chunk in chunks)
        assert said == getattr(message, name)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == message.content


def test_errors(client: OpenAI, tiny: Server) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="gpt-5", messages=greet())
    assert (unknown.value.param, unknown.value.code) == ("model", "model_not_found")
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model=MODEL, messages=greet(), temperature=-1)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model=MODEL, messages=[])
    with pytest.raises(openai.BadRequestError) as late:
        client.chat.completions.create(model=MODEL, messages=greet("a " * 5000), stream=True)
    assert late.value.code == "context_length_exceeded"
    tiny.check_alive()
