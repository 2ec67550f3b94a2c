"""Calls of strict functions in answers that need not call anything: free text, and valid arguments wherever a call begins."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkrt.text.grammar import grammar_of
from sparkrt.text.reply import ReplyParser
from sparkrt.text.tools import FORMATS
from sparkrt.text.tools.calls import Tool
from tests.text.test_grammar import follows, objects, walk

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}, "kind": {"enum": ["a", "b"]}},
    "required": ["n"],
    "additionalProperties": False,
}
TOOLS = [Tool("f", SCHEMA, strict=True), Tool("g", SCHEMA, strict=False)]
ARGS_TEMPLATE = "[ARGS]"
CASES = [("qwen3_coder", ""), ("hermes", ""), ("mistral", ""), ("mistral", ARGS_TEMPLATE), ("llama3_json", "")]
BEGINS = {"qwen3_coder": ("<tool_call>", "<function="), "hermes": ("<tool_call>",), "mistral": ("[TOOL_CALLS]",)}


def written(name: str, template: str, function: str, **arguments: Any) -> str:
    """A call as models of this format write it."""
    if name == "qwen3_coder":
        values = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
        return f"<tool_call>\n<function={function}>\n{values}</function>\n</tool_call>"
    if template == ARGS_TEMPLATE:
        return f"[TOOL_CALLS]{function}[ARGS]{json.dumps(arguments)}"
    call = json.dumps({"name": function, "parameters" if name == "llama3_json" else "arguments": arguments})
    return {"hermes": f"<tool_call>\n{call}\n</tool_call>", "mistral": f"[TOOL_CALLS] [{call}]"}.get(name, call)


@pytest.mark.parametrize("thinks", [None, True, False])
@pytest.mark.parametrize(("name", "template"), CASES)
def test_what_may_be_written(name: str, template: str, thinks: bool | None) -> None:
    def call(function: str, **arguments: Any) -> str:
        return written(name, template, function, **arguments)

    thought = {True: "So {1} <tool_call>\n</think>\n\n", None: "<think>\nSo <tool_call>\n</think>\n\n", False: ""}[thinks]
    before = "Let me see.\n\n" if name in BEGINS else ""  # where every call comes first, text before it makes it text
    good = [call("f", n=5), call("f", n=5, kind="b"), call("g", n="x", other=[1])]
    bad = [call("f", n="x"), call("f", kind="a"), call("f", n=1, other="x"), call("h", n=1)]
    for parallel in (True, False):
        grammar = grammar_of([{"lark_grammar": FORMATS[name](template).free_grammar(TOOLS, parallel, thinks is None)}], thinks)
        for text in ("", 'Hi <b>there</b>: {"a": 1}, [x] </think> <tool_cal', "\n\n{1} and {name}"):
            assert follows(grammar, thought + text)
        assert [follows(grammar, thought + before + text) for text in good + bad] == [True] * len(good) + [False] * len(bad)
        if name in BEGINS:
            assert follows(grammar, thought + before + good[0] + "\nDone.")
            assert follows(grammar, thought + before + good[0] + "\n" + good[2]) == parallel
        else:
            assert follows(grammar, thought + good[0] + "; " + good[1]) == parallel


@settings(max_examples=25, deadline=None)
@given(st.lists(objects(), min_size=1, max_size=2), st.booleans(), st.sampled_from(["", "Hm. 🎉\n\n"]), st.integers(0, 2**32))
@pytest.mark.parametrize(("name", "template"), CASES)
def test_begun_calls_are_valid(
    name: str, template: str, schemas: list[dict[str, Any]], parallel: bool, text: str, seed: int
) -> None:
    """Whatever is drawn once a call has begun is read, by the format, as a call with valid arguments."""
    rng, tools = random.Random(seed), [Tool(f"f{i}", schema, strict=True) for i, schema in enumerate(schemas)]
    found = FORMATS[name](template)
    begin = text + rng.choice(BEGINS[name]) if name in BEGINS else rng.choice(['{"name"', ' <|python_tag|>\n{ "name"'])
    answer = walk(grammar_of([{"lark_grammar": found.free_grammar(tools, parallel, False)}]), rng, begin=begin)
    parser = ReplyParser(tools=found, offered=tools)
    calls = [call for delta in (parser.feed(answer), parser.flush(cut=False)) for call in delta.calls]
    assert parser.calls >= 1
    for index in range(parser.calls):
        [called] = [call.name for call in calls if call.index == index and call.name is not None]
        arguments = json.loads("".join(call.arguments for call in calls if call.index == index))
        jsonschema.validate(arguments, {tool.name: tool.schema for tool in tools}[called])
