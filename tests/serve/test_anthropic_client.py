"""The `anthropic` Python client: against the bundled model, and against an engine that says what it is told to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic

from sparkrt.serve import protocol as p
from tests.serve.harness import PATIENCE, Server
from tests.serve.test_openai_client import HELLO
from tests.serve.test_replies import CALLS, SCRIPT, THOUGHT

MODEL, MESSAGES = "sparkrt-tiny", "/v1/messages"
FARMER = "A farmer has 12 cows. He buys 5 more cows. How many cows does he have?"
WEATHER: Any = {
    "name": "GetWeather",
    "description": "Get the weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
TOOLS: Any = [
    {"name": "f", "input_schema": {"type": "object", "properties": {"n": {"type": "integer"}}}},
    {"name": "g", "input_schema": {"type": "object"}},
]


def user(text: str) -> Any:
    return [{"role": "user", "content": text}]


@pytest.fixture
def client(tiny: Server) -> Iterator[Anthropic]:
    with Anthropic(base_url=tiny.url, api_key="none", max_retries=0, timeout=PATIENCE) as client:
        yield client


def blocks(message: anthropic.types.Message) -> list[dict[str, Any]]:
    """Its blocks, without the ids of calls."""
    found = [block.to_dict() for block in message.content]
    for block in found:
        assert block["type"] != "tool_use" or str(block.pop("id")).startswith("call_")
    return found


def ask(client: Anthropic, **body: Any) -> anthropic.types.Message:
    """The message, the same whole and streamed."""
    body = {"model": MODEL, "max_tokens": 1000, "extra_body": {"temperature": 0}, **body}
    whole = client.messages.create(**body)
    with client.messages.stream(**body) as stream:
        streamed = stream.get_final_message()
    assert blocks(streamed) == blocks(whole)
    assert (streamed.stop_reason, streamed.stop_sequence) == (whole.stop_reason, whole.stop_sequence)
    second, first = ([m.usage.input_tokens + m.usage.cache_read_input_tokens, m.usage.output_tokens] for m in (streamed, whole))
    assert second == first  # where its prompt came from may differ: the second may find the first in the cache
    return whole


def test_greeting(client: Anthropic) -> None:
    message = ask(client, messages=user("Hello!"))
    assert message.id.startswith("msg_")
    assert (message.type, message.role, message.model) == ("message", "assistant", MODEL)
    assert blocks(message) == [{"type": "text", "text": HELLO}]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    stopped = ask(client, messages=user("Hello!"), stop_sequences=["help"])
    assert blocks(stopped) == [{"type": "text", "text": "Hello! How can I "}]
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "help")
    cut = ask(client, messages=user("Hello!"), max_tokens=2)
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 2)
    assert (
        ask(client, messages=user("Hello!"), max_tokens=32_000).stop_reason == "end_turn"
    )  # clients ask for theirs, not for ours


def test_thinking(client: Anthropic) -> None:
    thought, answer = blocks(ask(client, messages=user(FARMER)))
    assert thought["type"] == "thinking"
    assert "cows" in thought["thinking"]
    assert answer["type"] == "text"


def test_tools(client: Anthropic) -> None:
    """A call, its result, and the answer; a forced call; none."""
    asked: Any = {"messages": user("What is the weather in Paris?"), "tools": [WEATHER]}
    message = ask(client, **asked)
    assert message.stop_reason == "tool_use"
    [call] = [block for block in message.content if block.type == "tool_use"]
    assert (call.name, call.input) == ("GetWeather", {"city": "Paris"})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": '{"temperature": 21}'}]}
    turns = [*asked["messages"], {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    final = ask(client, messages=turns, tools=[WEATHER])
    assert final.stop_reason == "end_turn"
    assert final.content[0].type == "text"
    for choice in ({"type": "any"}, {"type": "tool", "name": "GetWeather"}):
        forced = ask(client, messages=user("Hello!"), tools=[WEATHER], tool_choice={**choice, "disable_parallel_tool_use": True})
        assert forced.stop_reason == "tool_use"
        assert [block["name"] for block in blocks(forced)] == ["GetWeather"]
    none = ask(client, **asked, tool_choice={"type": "none"})
    assert none.stop_reason == "end_turn"


def test_structured_outputs(client: Anthropic) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    message = ask(client, messages=user("Hello!"), output_config={"format": {"type": "json_schema", "schema": schema}})
    [block] = blocks(message)
    assert json.loads(block["text"])["n"] in (1, 2)


def test_null_equals_absent(tiny: Server) -> None:
    """A06"""
    nulls = dict.fromkeys([*p.MessagesBody.__struct_fields__, *p.REFUSED[p.MessagesBody], *p.WITHOUT_EFFECT[p.MessagesBody]])
    bare = {"messages": user("Hello!"), "max_tokens": 20, "temperature": 0}
    answers = [tiny.http.post(MESSAGES, json=body).json() for body in ({**nulls, **bare}, bare)]
    assert [answer["content"] for answer in answers] == [[{"type": "text", "text": HELLO}]] * 2


def test_counting(client: Anthropic) -> None:
    asked: Any = {"model": MODEL, "messages": user("Hello!"), "system": "Be brief.", "tools": [WEATHER]}
    count = client.messages.count_tokens(**asked).input_tokens
    usage = client.messages.create(**asked, max_tokens=1).usage
    assert usage.input_tokens + usage.cache_read_input_tokens == count
    system = [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief.", "cache_control": {"type": "ephemeral"}}]
    assert client.messages.count_tokens(**{**asked, "system": system}).input_tokens == count


def test_continuing_the_last_message(client: Anthropic) -> None:
    begun = ask(client, messages=[*user("Hello!"), {"role": "assistant", "content": "Hello! How can"}])
    assert blocks(begun) == [{"type": "text", "text": HELLO.removeprefix("Hello! How can")}]


@pytest.mark.parametrize("bytewise", [False, True])
def test_every_kind_of_block(echo: Server, bytewise: bool) -> None:
    with Anthropic(base_url=echo.url, api_key="none", max_retries=0, timeout=PATIENCE) as client:
        text = f"⟪{SCRIPT}⟫" if bytewise else f"⟦{SCRIPT}⟧"
        message = ask(client, model=echo.model, messages=user(text), tools=TOOLS)
        assert blocks(message) == [
            {"type": "thinking", "thinking": "Is 🎉 < 5? <tool_call>", "signature": ""},
            {"type": "text", "text": "I'll see."},
            {"type": "tool_use", "name": "f", "input": {"n": 5, "s": "It's 你好 \""}},
            {"type": "tool_use", "name": "g", "input": {}},
        ]
        alone = ask(client, model=echo.model, messages=user(f"⟪{CALLS}⟫"), tools=TOOLS)
        assert [block["type"] for block in blocks(alone)] == ["tool_use", "tool_use"]
        unclosed = ask(client, model=echo.model, messages=user(f"⟪{CALLS.split('</function>')[0]}⟫"), tools=TOOLS)
        assert [block["name"] for block in blocks(unclosed)] == ["f"]
        off = ask(client, model=echo.model, messages=user("⟪Yes.⟫"), thinking={"type": "disabled"})
        assert blocks(off) == [{"type": "text", "text": "Yes."}]
        assert [block["type"] for block in blocks(ask(client, model=echo.model, messages=user(f"⟪{THOUGHT}⟫")))] == ["thinking"]


def test_events_by_the_letter(echo: Server) -> None:
    body = {"messages": user(f"⟪{SCRIPT}⟫"), "tools": TOOLS, "max_tokens": 1000, "stream": True}
    with echo.http.stream("POST", MESSAGES, json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        frames = "".join(response.iter_text()).split("\n\n")
    assert frames.pop() == ""
    events = []
    for frame in frames:
        name, data = frame.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    types = [event["type"] for event in events]
    assert (types[0], types[-2:]) == ("message_start", ["message_delta", "message_stop"])
    open_block, count = None, 0
    for event in events[1:-2]:
        if event["type"] == "content_block_start":
            assert open_block is None
            assert event["index"] == count
            open_block, count = event["index"], count + 1
        else:
            assert event["index"] == open_block
            open_block = open_block if event["type"] == "content_block_delta" else None
    assert (open_block, count) == (None, 4)


def test_errors(client: Anthropic, tiny: Server) -> None:
    def refused(**body: Any) -> str:
        with pytest.raises(anthropic.BadRequestError) as caught:
            client.messages.create(**{"model": MODEL, "max_tokens": 5, "messages": user("hi"), **body})
        error: Any = caught.value.body
        assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
        return str(error["error"]["message"])

    image = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1:1/a.png"}}  # X03
    for body, part in [
        ({"max_tokens": 0}, "max_tokens"),
        ({"extra_body": {"temperature": -1}}, "temperature"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [image]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "robot", "content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "messages[0].content[0]"),
        ({"system": [image]}, "system"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "f", "input_schema": 5}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "tool", "name": "f"}}, "tool_choice"),
        ({"tool_choice": {"type": "sometimes"}}, "tool_choice"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "no-type"}}}}, "output_config.format"),
        ({"output_config": {"format": 5}}, "output_config.format"),
        ({"output_config": {"effort": 5}}, "output_config.effort"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "t", "input": {}}]}]}, "content[0].name"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "f", "input": 5}]}]}, "content[0].input"),
        ({"extra_body": {"mcp_servers": [{"url": "http://127.0.0.1:1"}]}}, "mcp_servers"),
    ]:
        assert part in refused(**body)
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="claude", max_tokens=5, messages=user("hi"))
    assert tiny.http.post(MESSAGES, content=b"{").json()["type"] == "error"
    tiny.check_alive()
