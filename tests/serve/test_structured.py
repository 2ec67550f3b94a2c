"""Structured outputs and enforced calls through the API (kinds J and T of the cases)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from openai import OpenAI
from pydantic import BaseModel, Field

from tests.rigs import r1
from tests.serve.conftest import THINKING_TEMPLATE
from tests.serve.harness import Server, running

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 50}, "kind": {"enum": ["a", "b"]}},
    "required": ["n", "kind"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "f", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "g", "parameters": {"type": "object", "properties": {}}}},
]


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A model that recites a thought and then prose, whatever it is asked for, behind a template that opens the thinking."""
    path: Path = tmp_path_factory.mktemp("thinker")
    r1(path, ["Hm {5}.", "</think>", " Just prose, no JSON at all!"])
    template = path / "thinking.jinja"
    template.write_text(THINKING_TEMPLATE, encoding="utf-8")
    with running(str(path), "--chat-template", str(template)) as server:
        yield server


def said(server: Server, **body: Any) -> tuple[dict[str, Any], str]:
    """(message, finish reason), the same whole and streamed."""
    body = {"messages": [{"role": "user", "content": "Go on"}], "temperature": 0, "max_tokens": 200, **body}
    [choice] = server.post(CHAT, body)["choices"]
    chunks = server.stream(CHAT, **body)
    for name in ("content", "reasoning"):
        streamed = "".join(c["delta"].get(name, "") for chunk in chunks for c in chunk["choices"])
        assert streamed == (choice["message"].get(name) or "")
    assert chunks[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]
    return choice["message"], choice["finish_reason"]


@pytest.mark.parametrize("thinking", [True, False])
def test_the_constraint_starts_after_the_thinking(thinker: Server, thinking: bool) -> None:
    """J05"""
    message, reason = said(thinker, response_format=FORMAT, enable_thinking=thinking)
    assert message.get("reasoning", "") == ("Hm {5}." if thinking else "")
    jsonschema.validate(json.loads(message["content"]), SCHEMA)
    assert reason == "stop"
    cut, reason = said(thinker, response_format=FORMAT, max_tokens=3, enable_thinking=True)
    assert (cut["content"], cut["reasoning"], reason) == (None, "Hm", "length")


def test_thinking_within_a_budget(thinker: Server) -> None:
    """A token for each character: so many of them, then the tag, then what the model says after it, or what a grammar wants."""
    for budget, thought in ((0, ""), (4, "Hm {"), (7, "Hm {5}."), (8, "Hm {5}.")):
        body: dict[str, Any] = {"enable_thinking": True, "thinking_token_budget": budget}
        message, reason = said(thinker, **body)
        assert (message.get("reasoning", ""), message["content"]) == (thought, "Just prose, no JSON at all!")
        assert reason == "stop"
        counted = {"messages": [{"role": "user", "content": "Go on"}], "n": 2, "max_tokens": 200, "temperature": 0, **body}
        spent = len(thought) + (1 if budget == 8 else 2)  # the closing tag, and the line feed before a forced one
        for usage in (
            thinker.post(CHAT, counted)["usage"],
            thinker.stream(CHAT, **counted, stream_options={"include_usage": True})[-1]["usage"],
        ):
            assert usage["completion_tokens_details"] == {"reasoning_tokens": 2 * spent}
        message, _ = said(thinker, response_format=FORMAT, **body)
        assert message.get("reasoning", "") == thought
        jsonschema.validate(json.loads(message["content"]), SCHEMA)
    cut, reason = said(thinker, max_tokens=5, enable_thinking=True, thinking_token_budget=4)
    assert (cut["reasoning"], cut["content"], reason) == ("Hm {", None, "length")
    off, _ = said(thinker, enable_thinking=False, thinking_token_budget=2)
    assert off["content"].startswith("Hm {5}.")
    [text] = thinker.complete(prompt="<think> So,\n", thinking_token_budget=2, max_tokens=60, temperature=0)["choices"]
    assert text["text"] == "Hm\n</think> Just prose, no JSON at all!"


def test_other_names_of_the_budget(thinker: Server) -> None:
    body = {"messages": [{"role": "user", "content": "Go on"}], "max_tokens": 100, "temperature": 0}
    answer = thinker.post("/v1/messages", {**body, "thinking": {"type": "enabled", "budget_tokens": 2}})
    assert [block.get("thinking", block.get("text")) for block in answer["content"]] == ["Hm", "Just prose, no JSON at all!"]
    refused = thinker.http.post("/v1/messages", json={**body, "thinking": {"type": "enabled", "budget_tokens": 0}})
    assert (refused.status_code, "budget_tokens" in refused.json()["error"]["message"]) == (400, True)
    assert thinker.post(CHAT, {**body, "thinking_token_budget": -2}, 400)["param"] == "thinking_token_budget"
    for effort, thought in (("none", ""), ("high", "Hm {5}.")):  # unless a template knows a switch, it is closed at once
        message, _ = said(thinker, reasoning_effort=effort, enable_thinking=True)
        assert message.get("reasoning", "") == thought


@pytest.mark.parametrize("thinking", [True, False])
def test_calls_are_enforced(thinker: Server, thinking: bool) -> None:
    """T02: a model that would not call anything must."""
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        message, reason = said(thinker, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, enable_thinking=thinking)
        [call] = message["tool_calls"]
        assert message["content"] is None
        assert reason == ("tool_calls" if choice == "required" else "stop")
        if call["function"]["name"] == "f":
            jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)
        assert call["function"]["name"] == "f" or choice == "required"
    legacy, _ = said(thinker, functions=[TOOLS[0]["function"]], function_call={"name": "f"}, enable_thinking=thinking)
    assert legacy["tool_calls"][0]["function"]["name"] == "f"
    free, reason = said(thinker, tools=TOOLS, enable_thinking=thinking)
    assert (reason, "tool_calls" in free) == ("stop", False)


def test_strict_calls_among_free_text(tmp_path: Path) -> None:
    """A model that would give its function a word for a number: with `strict` it cannot, and says what it likes before."""
    r1(tmp_path, ["Look:\n", "<tool_call>", "\n<function=f>\n<parameter=n>\nmany!\n</parameter>\n</function>\n", "</tool_call>"])
    template = tmp_path / "thinking.jinja"
    template.write_text(THINKING_TEMPLATE, encoding="utf-8")
    strict = [{"type": "function", "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    with running(str(tmp_path), "--chat-template", str(template)) as server:
        for tools, valid in ((TOOLS, False), (strict, True)):
            for more in ({}, {"parallel_tool_calls": False}):
                message, reason = said(server, tools=tools, **more)
                assert (message["content"], reason) == ("Look:", "tool_calls")
                arguments = json.loads(message["tool_calls"][0]["function"]["arguments"])
                assert jsonschema.Draft202012Validator(SCHEMA).is_valid(arguments) == valid
        body = {"messages": [{"role": "user", "content": "Go on"}], "max_tokens": 200, "temperature": 0}
        tool = {"name": "f", "input_schema": SCHEMA, "strict": True}
        [*_, block] = server.post("/v1/messages", {**body, "tools": [tool]})["content"]
        jsonschema.validate(block["input"], SCHEMA)


def test_each_way_to_ask(tiny: Server) -> None:
    asked: list[tuple[dict[str, Any], str]] = [
        ({"guided_regex": "[0-9]{3}"}, "[0-9]{3}"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_grammar": 'root ::= "<" [a-c] ">"'}, "<[abc]>"),
        ({"guided_json": SCHEMA}, r"\{.*\}"),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, r"\{.*\}"),
        ({"structured_outputs": {"regex": "a|b", "json": None}}, "a|b"),
        ({"response_format": FORMAT}, r"\{.*\}"),
        ({"response_format": {"type": "text"}, "guided_choice": ["x"], "structured_outputs": {}}, "x"),
    ]
    for body, pattern in asked:
        message, reason = said(tiny, **body)
        assert re.fullmatch(pattern, message["content"])
        assert reason == "stop"
        text = tiny.complete(prompt="Once", temperature=1, max_tokens=200, n=2, **body)["choices"]
        assert all(re.fullmatch(pattern, choice["text"]) for choice in text)
    found = tiny.complete(prompt="Once", temperature=0, max_tokens=60, response_format={"type": "json_object"}, stop="}")[
        "choices"
    ][0]
    assert found["text"].startswith("{")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "(?<=x)*"},  # J01
        {"$ref": "#/$defs/n", "$defs": {"n": {"$ref": "#/$defs/n"}}},  # J03
        {"type": "not-a-type"},
        {"type": "string", "pattern": "(" * 60_000},  # J02
    ],
    ids=lambda value: str(value)[:30],
)
def test_refusals_come_before_the_first_byte(tiny: Server, schema: Any, stream: bool) -> None:
    shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    body = {"messages": [{"role": "user", "content": "hi"}], "response_format": shape, "stream": stream}
    error = tiny.post(CHAT, body, 400)
    assert error["param"] == "response_format"
    assert "cannot be enforced" in error["message"]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": schema}}}}]
    call = {"messages": [{"role": "user", "content": "hi"}], "tools": tools, "tool_choice": "required", "stream": stream}
    if (
        "$ref" not in schema and len(str(schema)) < 100
    ):  # a parameter that may be left out does no harm; a long one fills the prompt
        assert tiny.post(CHAT, call, 400)["param"] == "tools"
    tiny.check_alive()


def told(chunks: list[Any]) -> tuple[str, Any]:
    """What a stream said, and why it ended."""
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    return "".join(choice["text"] for choice in choices), choices[-1]["finish_reason"]


def test_expensive_patterns_beside_a_stream(tiny: Server) -> None:
    """J02: each is answered or refused, and who streams meanwhile gets what they would have got."""
    body = {"prompt": "Once upon a time", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    alone = tiny.stream(COMPLETIONS, **body)
    patterns = ["^+[a-z]$", "^{2}x$", "(a+)+$", "(" * 100_000, "(" * 60_000 + ")" * 60_000]
    schemas: list[Any] = [{"type": "string", "pattern": pattern} for pattern in patterns]
    schemas.append({"type": "string", "maxLength": 5000})
    with ThreadPoolExecutor(2) as pool:
        beside = pool.submit(tiny.stream, COMPLETIONS, **body)
        for schema in schemas:
            shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
            asked = {"messages": [{"role": "user", "content": "hi"}], "response_format": shape, "max_tokens": 5}
            assert tiny.http.post(CHAT, json=asked).status_code in (200, 400)
        assert told(beside.result()) == told(alone)  # where the chunks are cut depends on who is waiting when
    tiny.check_alive()


def test_many_at_once(tiny: Server) -> None:
    """Different grammars, and none, in the same steps; everything comes back."""

    def ask(i: int) -> bool:
        regex = f"[a-z]{{{1 + i % 7}}}"
        more = {"guided_regex": regex} if i % 3 else {}
        text = tiny.complete(prompt="Once upon", max_tokens=10, temperature=1, seed=i, **more)["choices"][0]["text"]
        return not more or re.fullmatch(regex, text) is not None

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(ask, range(48)))
    tiny.wait_idle()
    tiny.check_alive()


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Booking(BaseModel):
    seats: int = Field(ge=1, le=20)
    colour: Colour
    note: str | None = Field(max_length=12)


def test_parsing_with_pydantic(client: OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="sparkrt-tiny",
        messages=[{"role": "user", "content": "I want to book a table."}],
        response_format=Booking,
        temperature=0,
        max_tokens=200,
    )
    booking = answer.choices[0].message.parsed
    assert booking is not None
    assert booking.colour in Colour
