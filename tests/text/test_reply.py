"""Answers to reasoning, content and calls: by the letter of each format, and the same however the text is cut."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkrt.errors import RequestError
from sparkrt.text.reasoning import ReasoningFormat, ThoughtCounter, reasoning_format
from sparkrt.text.reply import ReplyDelta, ReplyParser
from sparkrt.text.tools import FORMATS, tool_format
from sparkrt.text.tools.calls import read_tools
from tests.text.inputs import need

SCHEMA: dict[str, Any] = {
    "type": "object",
    "$defs": {"Point": {"type": "object", "properties": {"x": {"type": "integer"}}}},
    "properties": {
        "zip": {"type": "string"},
        "ok": {"type": "boolean"},
        "count": {"type": "integer"},
        "ratio": {"type": "number"},
        "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "word": {"type": ["string", "null"]},
        "at": {"$ref": "#/$defs/Point"},
        "list": {"type": "array"},
        "any": {},
        "size": {"enum": ["1", "2"]},
        "never": True,
    },
}
TOOLS = read_tools([{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("f", "g")])

Found = tuple[str, str, list[tuple[str, str]]]


def parsed(parser: ReplyParser, pieces: Sequence[str], cut: bool = False) -> Found:
    """(reasoning, content, calls as (name, arguments)) of an answer that came in `pieces`."""
    deltas = [*map(parser.feed, pieces), parser.flush(cut)]
    calls: list[list[str]] = []
    ids = set[str]()
    for delta in [call for gained in deltas for call in gained.calls]:
        if delta.index == len(calls):
            assert delta.id is not None
            assert delta.name is not None
            ids.add(delta.id)
            calls.append([delta.name, ""])
        else:
            assert (delta.id, delta.name) == (None, None)
            assert delta.index == len(calls) - 1
        calls[delta.index][1] += delta.arguments
    assert len(ids) == len(calls) == parser.calls
    return "".join(d.reasoning for d in deltas), "".join(d.content for d in deltas), [(n, a) for n, a in calls]


def order(parser: ReplyParser, pieces: Sequence[str]) -> list[str | None]:
    """Its texts, and the names of its calls, in the order they came."""
    whole = ReplyDelta()
    for delta in [*map(parser.feed, pieces), parser.flush(cut=False)]:
        whole.add(delta)
    return [part if isinstance(part, str) else part.name for part in whole.parts]


def read(name: str, text: str, **options: Any) -> Found:
    return parsed(ReplyParser(tools=tool_format(name, ""), offered=TOOLS, **options), [text])


def arguments(text: str) -> Any:
    [(name, found)] = read("qwen3_coder", f"<tool_call>\n<function=f>\n{text}\n</function>\n</tool_call>")[2]
    assert name == "f"
    return json.loads(found)


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("zip", "02134", "02134"),
        ("zip", "null", "null"),
        ("ok", "True", True),
        ("ok", "false", False),
        ("ok", "perhaps", "perhaps"),
        ("count", "5.0", 5),
        ("count", "5.5", "5.5"),
        ("count", "12", 12),
        ("count", "NaN", "NaN"),
        ("ratio", "5.0", 5.0),
        ("ratio", "7", 7),
        ("maybe", "null", None),
        ("maybe", "None", None),
        ("maybe", "3", 3),
        ("word", "null", None),
        ("word", "12", "12"),
        ("at", '{"x": 1}', {"x": 1}),
        ("at", "{'x': 1}", "{'x': 1}"),
        ("at", "[1]", "[1]"),
        ("list", '[1, "a"]', [1, "a"]),
        ("list", "[" * 2000, "[" * 2000),
        ("any", "5", 5),
        ("any", "five", "five"),
        ("size", "1", "1"),
        ("never", "1", 1),
        ("unheard_of", "5", "5"),
        ("zip", "two\nlines\n", "two\nlines\n"),
        ("zip", "", ""),
        ("zip", 'a "quoted" \\ é 🎉\t', 'a "quoted" \\ é 🎉\t'),
    ],
)
def test_types_by_schema(key: str, text: str, value: Any) -> None:
    """T06"""
    found = arguments(f"<parameter={key}>\n{text}\n</parameter>")
    assert found == {key: value}
    assert type(found[key]) is type(value)


@pytest.mark.parametrize(
    "broken", ["<parameter=\n", "<parameter=ids: [1]\n</parameter>\n", "<parameter=note=\nx\n</parameter>\n"]
)
def test_malformed_parameters_are_left_out(broken: str) -> None:
    """T07"""
    whole = "<parameter=count>\n5\n</parameter>\n"
    assert arguments(broken + whole) == {"count": 5}
    assert arguments(whole + broken) == {"count": 5}
    assert arguments(whole + whole.replace("5", "6")) == {"count": 5}  # a key that was there before


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\n<function=f>\n<parameter=zip>\na\n</parameter>\n",
        "<tool_call>\n<function=f>\n<parameter=zip>\na",
        "<tool_call><function=f><parameter=zip>a</function></tool_call>",
        "<function=f>\n<parameter=zip>\na\n</parameter>\n</function>\n</tool_call>",
    ],
)
def test_missing_tags(text: str) -> None:
    assert read("qwen3_coder", text) == ("", "", [("f", '{"zip": "a"}')])


F, G = ("f", '{"a": 1}'), ("g", "{}")


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "", [F]),
        ("hermes", 'Well.\n\n<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>\n', "Well.", [F]),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [F]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1', "", [F]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": tru, "b": "x\\q\n\\u12"}}', "",
         [("f", '{"a": "tru", "b": "x\\\\q\\n\\\\u12"}')]),
        ("hermes", 'It writes <tool_call> {"x": 1} and </tool_call>.', 'It writes <tool_call> {"x": 1} and </tool_call>.', []),
        ("hermes", "<tool_call>{broken</tool_call>", "<tool_call>{broken</tool_call>", []),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>', "",
         [("f", '{"a": "</tool_call>"}')]),
        ("llama3_json", '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}', "", [F, G]),
        ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {"a": 1}}', "", [F]),
        ("llama3_json", '{"names": {"f": 1}}', '{"names": {"f": 1}}', []),
        ("llama3_json", '{"name": "f"} is JSON', '{"name": "f"} is JSON', []),
        ("llama3_json", 'Use {"name": "f", "parameters": {}}', 'Use {"name": "f", "parameters": {}}', []),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]', "", [F, G]),
        ("mistral", 'Hm.[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}', "Hm.", [F, G]),
        ("mistral", '[TOOL_CALLS]f{"a": 1}', "", [F]),
        ("qwen3_coder", "a <tool_call> or <function= in prose\nis none", "a <tool_call> or <function= in prose\nis none", []),
        ("qwen3_coder", "Hm.\n<tool_call>\n<function=g>\n</function>\n</tool_call>\n<tool_call>\n<function=g>\n</function>\n"
         "</tool_call>", "Hm.", [G, G]),
    ],
)  # fmt: skip
def test_formats(name: str, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert read(name, text) == ("", content, [*map(tuple, calls)])


def test_text_between_calls() -> None:
    call = "<tool_call>\n<function=f>\n</function>\n</tool_call>"
    parser = ReplyParser(tools=tool_format("qwen3_coder", ""), offered=TOOLS)
    assert order(parser, [f"One {call}two {call} three"]) == ["One", "f", "two", "f", " three"]


def test_one_call_only() -> None:
    """T15"""
    two = "<tool_call>\n<function=f>\n</function>\n</tool_call>" * 2
    assert read("qwen3_coder", two, parallel=False)[2] == [("f", "{}")]


@pytest.mark.parametrize(
    ("implied", "thinks", "text", "reasoning", "content"),
    [
        (False, None, "<think>\nhm\n</think>\n\nyes", "hm", "yes"),
        (False, None, "\n<think>hm</think>yes ", "hm", "yes "),
        (False, None, "\nplain </think> text", "", "\nplain </think> text"),
        (False, True, "hm\n</think>\n\nyes", "hm", "yes"),
        (False, True, "<think>hm</think>yes", "hm", "yes"),
        (False, True, "hm", "hm", ""),
        (False, False, "<think> is a tag\n", "", "<think> is a tag\n"),
        (True, True, "hm</think>yes", "hm", "yes"),
    ],
)
def test_reasoning(implied: bool, thinks: bool | None, text: str, reasoning: str, content: str) -> None:
    assert parsed(ReplyParser(ReasoningFormat(implied), thinks), [text]) == (reasoning, content, [])


@pytest.mark.parametrize(
    ("thinks", "text", "thought"),
    [
        (None, "<think>\nso</think>\nYes.", "<think>\nso</think>"),
        (None, "\n<think>so", "\n<think>so"),
        (None, "<thin", ""),
        (None, "Yes <think>no</think>", ""),
        (True, "so < and </ and</think>Yes</think>", "so < and </ and</think>"),
        (True, "so", "so"),
        (False, "<think>so</think>", ""),
    ],
)
def test_counting_thoughts(thinks: bool | None, text: str, thought: str) -> None:
    """Of tokens that are bytes here; whether they are counted once or as they come."""
    ids = list(text.encode())
    counter, at_once = (ThoughtCounter(thinks, lambda i: bytes([i])) for _ in range(2))
    assert [counter.count(ids[:n]) for n in range(len(ids) + 1)][-1] == len(thought)
    assert at_once.count(ids) == len(thought)


def test_what_prompts_say_of_thinking() -> None:
    qwen, deepseek = ReasoningFormat(), ReasoningFormat(implied=True)
    assert qwen.thinks("assistant\n<think>\n", False) is deepseek.thinks("<｜Assistant｜><think>\n", False) is True
    assert qwen.thinks("assistant\n<think>\n\n</think>\n\n", False) is deepseek.thinks("<think>\n</think>", False) is False
    assert qwen.thinks("<think> what?\nassistant\n", False) is None
    assert deepseek.thinks("<｜Assistant｜>", False) is True
    assert qwen.thinks("<think> so", True) is True
    assert qwen.thinks("<think> so </think> then", True) is qwen.thinks("then", True) is False


SNIPPETS = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<function=f>", "<function=", "</function>", "<parameter=zip>"),
    *("<parameter=at>", "<parameter=count>", "<parameter=", "</parameter>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[", "]"),
    *('{"name": "f", "arguments": {', '"zip": ', '"zip"', '"a\\n\\u00e9"', '"\\', "\\u12", '{"x": [1, {}]}', "}", "}}", "{", ","),
    *("\n", " ", "\n\n", "<", ">", "5.0", "true", "null", "é", "🎉", "word", '"', "f", "<|python_tag|>", ";", '"name": "g"'),
]


@settings(max_examples=400, deadline=None)
@given(st.data())
@pytest.mark.parametrize("name", [*dict.fromkeys(FORMATS), "none"])
@pytest.mark.parametrize("thinks", [None, True])
def test_pieces_do_not_matter(name: str, thinks: bool | None, data: st.DataObject) -> None:
    """Whatever the text and however it is cut, a stream gives what the whole gives; whole calls are JSON, cut ones begin it."""
    text = "".join(data.draw(st.lists(st.sampled_from(SNIPPETS), max_size=25)))

    def parser() -> ReplyParser:
        return ReplyParser(ReasoningFormat(), thinks, tool_format(name, ""), TOOLS)

    whole = parsed(parser(), [text])
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parsed(parser(), pieces) == whole
    assert parsed(parser(), list(text)) == whole
    assert order(parser(), [text]) == order(parser(), pieces)
    for _, found in whole[2]:
        assert isinstance(json.loads(found), dict)
    short = text[: data.draw(st.integers(0, len(text)))]
    cut = parsed(parser(), [short], cut=True)
    assert cut == parsed(parser(), list(short), cut=True)
    assert whole[0].startswith(cut[0])
    for (name_found, part), (name_whole, found) in zip(cut[2], whole[2], strict=False):
        assert name_found == name_whole
        assert found.startswith(part)


GOLDENS = Path(__file__).parents[1] / "goldens" / "templates"


@pytest.mark.parametrize(
    ("template", "tools", "thinks"),
    [
        ("qwen2.5", "Hermes", False),
        ("qwen3", "Hermes", True),
        ("qwen3.5", "Qwen3Coder", True),
        ("qwen3-coder", "Qwen3Coder", False),
        ("smollm2", None, False),
    ],
)
def test_formats_of_templates(template: str, tools: str | None, thinks: bool) -> None:
    text = (GOLDENS / f"{template}.jinja").read_text()
    found = tool_format("auto", text)
    assert (None if found is None else type(found).__name__) == tools
    assert (reasoning_format("auto", text) is not None) == thinks
    assert tool_format("none", text) is reasoning_format("none", text) is None


@pytest.mark.inputs
@pytest.mark.parametrize(
    ("template", "tools", "implied"),
    [
        ("meta-llama-Llama-3.1-8B-Instruct", "Llama3Json", None),
        ("meta-llama-Llama-3.2-3B-Instruct", "Llama3Json", None),
        ("Mistral-Small-3.2-24B-Instruct-2506", "Mistral", None),
        ("mistralai-Mistral-Nemo-Instruct-2407", "Mistral", None),
        ("NousResearch-Hermes-3-Llama-3.1-8B-tool_use", "Hermes", None),
        ("deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", None, True),
        ("Qwen-QwQ-32B", "Hermes", False),
        ("GLM-4.6", None, False),
    ],
)
def test_formats_of_other_templates(template: str, tools: str | None, implied: bool | None) -> None:
    text = (need("llama.cpp") / f"{template}.jinja").read_text()
    found, thinking = tool_format("auto", text), reasoning_format("auto", text)
    assert (None if found is None else type(found).__name__) == tools
    assert (None if thinking is None else thinking.implied) == implied


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        (5, "tools[0]"),
        ({"type": "retrieval"}, "tools[0].type"),
        ({"type": "function"}, "tools[0].function"),
        ({"function": {"name": ""}}, "tools[0].function.name"),
        ({"function": {"name": 5}}, "tools[0].function.name"),
        ({"function": {"name": "a b"}}, "tools[0].function.name"),
        ({"function": {"name": "f", "description": 5}}, "tools[0].function.description"),
        ({"function": {"name": "f", "strict": "yes"}}, "tools[0].function.strict"),
        ({"function": {"name": "f", "parameters": 5}}, "tools[0].function.parameters"),
        ({"function": {"name": "f", "parameters": {"type": "array"}}}, "tools[0].function.parameters"),
        ({"function": {"name": "f", "parameters": {"properties": []}}}, "tools[0].function.parameters.properties"),
        ({"function": {"name": "f", "parameters": {"properties": {"a": 5}}}}, "tools[0].function.parameters.properties.a"),
        ({"function": {"name": "f", "parameters": {"required": "a"}}}, "tools[0].function.parameters.required"),
    ],
)
def test_what_is_no_tool(tool: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_tools([tool])
    assert caught.value.param == param
    with pytest.raises(RequestError, match="two functions"):
        read_tools([{"function": {"name": "f"}}, {"function": {"name": "f"}}])
