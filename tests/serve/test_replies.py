"""Tool calls and thinking through the API, from an engine that says what it is told to (kind T of the cases)."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.rigs import r1
from tests.serve.conftest import THINKING_TEMPLATE
from tests.serve.harness import Server, running

CHAT = "/v1/chat/completions"
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}}}},
    {"type": "function", "function": {"name": "g"}},
]
THOUGHT = "<think>\nIs 🎉 < 5? <tool_call>\n</think>\n\n"
CALLS = (
    "<tool_call>\n<function=f>\n<parameter=n>\n5.0\n</parameter>\n<parameter=s>\nIt's 你好 \"\n</parameter>\n</function>\n"
    "</tool_call>\n<tool_call>\n<function=g>\n</function>\n</tool_call>"
)
SCRIPT = THOUGHT + "I'll see.\n\n" + CALLS


def message_of(choices: list[Any]) -> dict[str, Any]:
    """What a client puts together from the chunks of one choice."""
    message: dict[str, Any] = {"finish_reason": choices[-1]["finish_reason"], "tool_calls": []}
    assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
    assert "�" not in json.dumps(choices[:-1], ensure_ascii=False)  # at the end, what a cut left of a character
    for delta in (choice["delta"] for choice in choices):
        assert delta.get("reasoning") == delta.get("reasoning_content")
        for name in ("content", "reasoning", "reasoning_content"):
            message[name] = message.get(name, "") + delta.get(name, "")
        for call in delta.get("tool_calls", []):
            if call["index"] == len(message["tool_calls"]):
                assert call["type"] == "function"
                message["tool_calls"].append({"id": call["id"], "name": call["function"]["name"], "arguments": ""})
            else:
                assert call["index"] == len(message["tool_calls"]) - 1
                assert {"id", "type"}.isdisjoint(call)
            message["tool_calls"][-1]["arguments"] += call["function"]["arguments"]
    ids = [call.pop("id") for call in message["tool_calls"]]
    assert len(set(ids)) == len(ids)
    return message


def ask(server: Server, script: str, by_bytes: bool = True, **body: Any) -> dict[str, Any]:
    """The message, the same whole and streamed; "" and [] where there is nothing."""
    text = f"⟪{script}⟫" if by_bytes else f"⟦{script}⟧"
    return both(server, {"messages": [{"role": "user", "content": text}], "max_tokens": 2000, **body})


def both(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    [choice] = server.post(CHAT, body)["choices"]
    whole = {name: choice["message"].get(name) or "" for name in ("content", "reasoning", "reasoning_content")}
    assert "content" in choice["message"]
    calls = choice["message"].get("tool_calls", [])
    whole |= {"finish_reason": choice["finish_reason"], "tool_calls": [call["function"] for call in calls]}
    chunks = server.stream(CHAT, **body)
    assert [c["delta"].get("role") for chunk in chunks for c in chunk["choices"]] == ["assistant"] + [None] * (len(chunks) - 1)
    streamed = message_of([c for chunk in chunks for c in chunk["choices"]])
    assert streamed == whole
    return whole


@pytest.mark.parametrize("by_bytes", [True, False])
def test_thinking_content_and_two_calls(echo: Server, by_bytes: bool) -> None:
    """T03, T06, U01"""
    found = ask(echo, SCRIPT, by_bytes, tools=TOOLS)
    assert found["reasoning"] == found["reasoning_content"] == "Is 🎉 < 5? <tool_call>"
    assert found["content"] == "I'll see."
    assert found["finish_reason"] == "tool_calls"
    first, second = found["tool_calls"]
    assert (first["name"], json.loads(first["arguments"])) == ("f", {"n": 5, "s": "It's 你好 \""})
    assert second == {"name": "g", "arguments": "{}"}
    alone = ask(echo, CALLS, by_bytes, tools=TOOLS)
    assert (alone["content"], alone["reasoning"], alone["tool_calls"]) == ("", "", found["tool_calls"])


def test_calls_that_are_cut(echo: Server) -> None:
    """T01: at every token."""
    whole = ask(echo, CALLS, tools=TOOLS)["tool_calls"]
    limits = range(1, len(CALLS.encode()), 3)
    with ThreadPoolExecutor(8) as pool:
        cut = list(pool.map(lambda limit: ask(echo, CALLS, tools=TOOLS, max_tokens=limit), limits))
    for found in cut:
        assert (found["finish_reason"], found["content"]) == ("length", "")
        for part, call in zip(found["tool_calls"], whole, strict=False):
            assert part["name"] == call["name"]
            assert call["arguments"].startswith(part["arguments"].rstrip("�"))


def test_no_tools_no_calls(echo: Server) -> None:
    """T02, T10: what is not on offer stays text, and prose ends with `stop`."""
    for more in ({}, {"tools": []}, {"tool_choice": "auto"}, {"tool_choice": "none"}, {"tools": TOOLS, "tool_choice": "none"}):
        found = ask(echo, CALLS, **more)
        assert (found["content"], found["tool_calls"], found["finish_reason"]) == (CALLS, [], "stop")
    prose = ask(echo, "Just <b>text</b>.\n", tools=TOOLS)
    assert (prose["content"], prose["tool_calls"], prose["finish_reason"]) == ("Just <b>text</b>.\n", [], "stop")


def test_some_of_the_tools(echo: Server) -> None:
    """`allowed_tools`: the prompt shows no others, and what is not on offer is no call that must be made."""
    listed = [{"type": "function", "function": {"name": "g"}}]
    choice: dict[str, Any] = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": listed}}
    only = {"messages": [{"role": "user", "content": f"⟪{CALLS}⟫"}], "tools": TOOLS[1:], "max_tokens": 999}
    some = {**only, "tools": TOOLS, "tool_choice": choice}
    assert echo.post(CHAT, some)["usage"]["prompt_tokens"] == echo.post(CHAT, only)["usage"]["prompt_tokens"]
    assert len(ask(echo, CALLS, tools=TOOLS, tool_choice=choice)["tool_calls"]) == 2


def test_one_call_at_most(echo: Server) -> None:
    """T15"""
    found = ask(echo, CALLS, tools=TOOLS, parallel_tool_calls=False)
    assert [call["name"] for call in found["tool_calls"]] == ["f"]
    assert found["finish_reason"] == "tool_calls"


def test_malformed_calls(echo: Server) -> None:
    """T07"""
    script = CALLS.replace("<parameter=n>", "<parameter=\n<parameter=ids: [1]\n</parameter>\n<parameter=n>")
    assert ask(echo, script, tools=TOOLS)["tool_calls"] == ask(echo, CALLS, tools=TOOLS)["tool_calls"]
    unclosed = ask(echo, "<tool_call>\n<function=f>\n<parameter=s>\nabc", tools=TOOLS)
    assert unclosed["tool_calls"] == [{"name": "f", "arguments": '{"s": "abc"}'}]


@pytest.mark.parametrize("switch", ["kwargs", "field", "effort"])
def test_thinking_switched_off(echo: Server, switch: str) -> None:
    """T11: the prompt closes the thinking, so all of the answer is content."""
    off: dict[str, Any] = {
        "kwargs": {"chat_template_kwargs": {"enable_thinking": False}},
        "field": {"enable_thinking": False},
        "effort": {"reasoning_effort": "none"},
    }[switch]
    body = {"messages": [{"role": "user", "content": "⟪Yes.⟫"}], **off}
    found = ask(echo, "Yes.", **off)
    assert (found["content"], found["reasoning"]) == ("Yes.", "")
    assert "reasoning" not in echo.post(CHAT, body)["choices"][0]["message"]
    tokens = echo.post("/tokenize", {**body, "return_token_strs": True})
    assert "".join(tokens["token_strs"]).endswith("</think>\n\n")


def test_thinking_opened_by_the_prompt(echo: Server) -> None:
    """T11: cut within the thinking there is no content yet."""
    on = {"chat_template_kwargs": {"enable_thinking": True}}
    script = "So, 你好.\n</think>\n\nYes."
    found = ask(echo, script, **on)
    assert (found["reasoning"], found["content"], found["finish_reason"]) == ("So, 你好.", "Yes.", "stop")
    cut = ask(echo, script, **on, max_tokens=3)
    assert (cut["reasoning"], cut["content"], cut["finish_reason"]) == ("So,", "", "length")


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_of_thinking_are_counted(echo: Server, stream: bool) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": f"⟪{SCRIPT}⟫"}], "max_tokens": 999, "n": 2}
    if stream:
        usage = echo.stream(CHAT, **body, stream_options={"include_usage": True})[-1]["usage"]
    else:
        usage = echo.post(CHAT, body)["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 2 * len(THOUGHT.strip().encode())}
    assert usage["completion_tokens"] == 2 * (len(SCRIPT.encode()) + 1)


def test_stop_strings_beside_thinking(echo: Server) -> None:
    """T14: one that is not met changes nothing, whatever its length."""
    expected = ask(echo, SCRIPT, tools=TOOLS)
    stops = [text[:length] + "Q" for length in range(1, 13) for text in ("Q" * 12, "</thinkQ>_____", "ink>\nQ______")]
    with ThreadPoolExecutor(8) as pool:
        assert all(found == expected for found in pool.map(lambda stop: ask(echo, SCRIPT, tools=TOOLS, stop=stop), stops))
    met = ask(echo, SCRIPT, tools=TOOLS, stop="see")
    assert (met["content"], met["tool_calls"], met["finish_reason"]) == ("I'll ", [], "stop")
    within = ask(echo, SCRIPT, tools=TOOLS, stop="你")  # inside an argument: that call is not over
    assert (within["finish_reason"], within["tool_calls"][0]["arguments"]) == ("stop", '{"n": 5, "s": "It\'s ')


def test_reasoning_on_request(echo: Server) -> None:
    assert ask(echo, THOUGHT + "Yes.", include_reasoning=False)["reasoning"] == ""
    kept = ask(echo, THOUGHT + "Yes.", separate_reasoning=False)
    assert (kept["content"], kept["reasoning"]) == (THOUGHT + "Yes.", "")


def test_several_choices_and_logprobs(echo: Server) -> None:
    """Every token keeps its log-probability, that of a tag too."""
    body = {"messages": [{"role": "user", "content": f"⟪{SCRIPT}⟫"}], "tools": TOOLS, "n": 2, "logprobs": True, "max_tokens": 999}
    answer = echo.post(CHAT, body)
    assert [len(choice["message"]["tool_calls"]) for choice in answer["choices"]] == [2, 2]
    count = len(SCRIPT.encode()) + 1
    assert [len(choice["logprobs"]["content"]) for choice in answer["choices"]] == [count] * 2
    chunks = echo.stream(CHAT, **body)
    for index in range(2):
        choices = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert len(message_of(choices)["tool_calls"]) == 2
        assert sum(len(c["logprobs"]["content"]) for c in choices if c["logprobs"]) == count


def test_a_model_that_recites(tmp_path: Path) -> None:
    """T01, T03, T14, U01 by a real engine: a token for each byte of an emoji, and limits and stop strings all over the answer."""
    thought, text = "\nIs 🎉 < 5?\n", "\n\nWell你é, I'll see.\n\n"
    call = '\n<function=f>\n<parameter=n>\n5.0\n</parameter>\n<parameter=s>\n"x"\n</parameter>\n</function>\n'
    parts = ["<think>", thought, "</think>", text, "<tool_call>", call, "</tool_call>"]
    _, ids, _ = r1(tmp_path, parts, cuts=range(5, 9))
    template = tmp_path / "thinking.jinja"
    template.write_text(THINKING_TEMPLATE, encoding="utf-8")
    body = {"messages": [{"role": "user", "content": "Go on"}], "max_tokens": 300, "temperature": 0, "tools": TOOLS}
    with running(str(tmp_path), "--chat-template", str(template)) as server:
        whole = both(server, body)
        assert (whole["reasoning"], whole["content"]) == ("Is 🎉 < 5?", "Well你é, I'll see.")
        assert whole["tool_calls"] == [{"name": "f", "arguments": '{"n": 5, "s": "\\"x\\""}'}]
        for limit in range(1, len(ids), 7):
            found = both(server, {**body, "max_tokens": limit})
            assert found["finish_reason"] == "length"
            assert all(whole[name].startswith(found[name].rstrip("�")) for name in ("reasoning", "content"))
        said = "".join(parts)
        for part in (thought, text):
            for at in range(1, len(part) - 4, 3):
                for stop in (part[at], part[at : at + 4]):
                    if said.index(stop) < said.index(part):
                        continue  # it ends the answer before
                    found = both(server, {**body, "stop": stop})
                    assert found["finish_reason"] == "stop"
                    assert all(whole[name].startswith(found[name]) for name in ("reasoning", "content"))
