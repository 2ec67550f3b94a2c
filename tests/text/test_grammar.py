"""Grammars: what they allow is what was asked for, and what cannot be enforced is refused, soon."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkrt.errors import RequestError
from sparkrt.text.grammar import Grammars, body_of, grammar_of
from sparkrt.text.guide import Guide
from sparkrt.text.reply import ReplyParser
from sparkrt.text.tokenizer import Tokenizer
from sparkrt.text.tools import FORMATS
from sparkrt.text.tools.calls import Tool
from tests.serve import TINY

TOKENIZER = Tokenizer.from_folder(TINY)
[CLOSING] = TOKENIZER.encode("]", False)
WORDS = 192  # uint32 of a mask: 4 more than the vocabulary of 6,131 fills
OVER = ("stop", None)
GRAMMARS = Grammars(TOKENIZER, TOKENIZER.vocab_size, TOKENIZER.eos_token_ids)


def allowed(guide: Guide) -> np.ndarray:
    """The ids, in order."""
    bits = np.full(WORDS, 0xFFFFFFFF, np.uint32)
    GRAMMARS.fill([(guide, bits)])
    assert not bits[-(-TOKENIZER.vocab_size // 32) :].any()
    return np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))


def may_end(options: np.ndarray) -> bool:
    return any(i in options for i in TOKENIZER.eos_token_ids)


def follows(grammar: str, text: str) -> bool:
    """Whether `grammar` allows exactly this answer, token by token, and its end."""
    guide = GRAMMARS.guide((grammar, "x"))
    for token in TOKENIZER.encode(text, False):
        if token not in allowed(guide):
            return False
        guide.advance(token)
        assert guide.stopped in (None, OVER)
    return guide.stopped == OVER or may_end(allowed(guide))


def walk(grammar: str, rng: random.Random, limit: int = 600, begin: str = "") -> str:
    """An answer that goes on from `begin`, drawn at random from what is allowed, the end where it may come."""
    guide, ids = GRAMMARS.guide((grammar, "x")), TOKENIZER.encode(begin, False)
    for token in ids:
        assert token in allowed(guide)
        guide.advance(token)
    while guide.stopped is None and len(ids) < limit:
        options = allowed(guide)
        if not len(options) or may_end(options):
            break
        closing = CLOSING if len(ids) > limit // 3 and CLOSING in options else None  # of a list that goes on and on
        ids.append(closing or int(rng.choice(options)))
        guide.advance(ids[-1])
    assert guide.stopped in (None, OVER)
    assert len(ids) < limit
    return TOKENIZER.decode(ids)


@pytest.mark.parametrize(
    ("asked", "good", "bad"),
    [
        ({"json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}, '{"a": 5}', '{"b": 5}'),
        ({"json": '{"enum": ["x", 1, null]}'}, "null", "2"),
        ({"json_object": True}, '{"é": ["🎉"]}', "[]"),
        ({"regex": r"\d{2}/[a-z]+"}, "12/ab", "1/ab"),
        ({"choice": ['say "é"', "no\n"]}, 'say "é"', "no"),
        ({"grammar": 'root ::= "a" [0-9]+'}, "a12", "b1"),
        ({"grammar": 'start: "a" /[0-9]+/'}, "a12", "ab"),
    ],
)
def test_kinds(asked: dict[str, Any], good: str, bad: str) -> None:
    body = body_of(asked, "structured_outputs")
    assert body is not None
    for thinks, before in ((False, ""), (None, ""), (None, "<think>\nhm {}\n</think>\n\n"), (True, "hm 🎉 {}</think>")):
        grammar = grammar_of([body], thinks)
        assert follows(grammar, before + good)
        assert not follows(grammar, before + bad)
    assert not follows(grammar_of([body], True), good)


def compiled(asked: dict[str, Any]) -> Guide:
    body = body_of(asked, "guided")
    assert body is not None
    return GRAMMARS.guide((grammar_of([body]), "guided"))


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/n", "$defs": {"n": {"$ref": "#/$defs/n"}}},  # J03
        {"type": "not-a-type"},
        {"type": "string", "pattern": "(?<=x)*"},  # J01, J02
        {"type": "string", "pattern": "(" * 100_000 + ")" * 100_000},
        {"type": "array", "uniqueItems": True},
        {"type": "integer", "minimum": 5, "maximum": 4},
        False,
        5,
        "{",
        json.loads('{"items":' * 65 + "{}" + "}" * 65),
    ],
    ids=lambda schema: str(schema)[:40],
)
def test_schemas_that_cannot_be_enforced(schema: Any) -> None:
    with pytest.raises(RequestError) as caught:
        compiled({"json": schema})
    assert caught.value.param is not None
    assert caught.value.param.startswith("guided")
    assert len(caught.value.message) < 600


@pytest.mark.parametrize(
    "pattern", ["^+[a-z]$", "^{2}x$", "(a+)+$", "(a|b){1,2000}{1,2000}", "(.*a){20}b", r"\p{L}{1,1000000}", "[" * 60_000]
)
def test_expensive_expressions(pattern: str) -> None:
    """J02: compiled or refused, and the first masks made or given up, within the limits; the test's time limit is the judge."""
    for asked in ({"regex": pattern}, {"json": {"type": "string", "pattern": pattern}}):
        try:
            guide = compiled(asked)
        except RequestError:
            continue
        for _ in range(20):
            if guide.stopped or not len(options := allowed(guide)):
                break
            guide.advance(int(options[0]))


def test_recursive_schemas() -> None:
    """J03: a tree with a base case."""
    properties = {"v": {"type": "integer"}, "kids": {"type": "array", "items": {"$ref": "#/$defs/t"}}}
    node = {"type": "object", "additionalProperties": False, "required": ["v"], "properties": properties}
    tree = {"$ref": "#/$defs/t", "$defs": {"t": node}}
    body = body_of({"json": tree}, "x")
    assert body is not None
    deep = '{"v": 1}'
    for _ in range(5):
        deep = '{"v": 1, "kids": [' + deep + "]}"
    assert follows(grammar_of([body]), deep)


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        (5, "s"),
        ({"jsn": {}}, "s.jsn"),
        ({"json": {}, "regex": "a"}, "s"),
        ({"choice": []}, "s.choice"),
        ({"regex": 5}, "s.regex"),
        ({"regex": "a" * 300_000}, "s.regex"),
    ],
)
def test_what_asks_for_nothing_sensible(asked: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        body_of(asked, "s")
    assert caught.value.param == param
    assert body_of({"json": None, "json_object": False}, "s") is body_of(None, "s") is None


SCALARS = st.sampled_from(
    [
        {"type": "integer", "minimum": -9, "maximum": 120},
        {"type": "boolean"},
        {"type": "null"},
        {"type": "string", "maxLength": 6},
        {"type": "string", "minLength": 1, "maxLength": 4},
        {"type": "string", "pattern": "^[a-c]{2}$"},
        {"type": ["boolean", "null"]},
        {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 9}, {"type": "null"}]},
        {"enum": ["red", "a b\n", "5"]},
        {"enum": ["red", 5, None, True]},
        {"const": 3},
        {"type": ["integer", "null"], "minimum": 0, "maximum": 9},
        {"$ref": "#/$defs/point"},
    ]
)
SCHEMAS = st.recursive(
    SCALARS, lambda inner: st.builds(lambda items: {"type": "array", "items": items, "maxItems": 2}, inner), max_leaves=3
)


def objects() -> st.SearchStrategy[dict[str, Any]]:
    def build(properties: dict[str, Any], needed: set[str]) -> dict[str, Any]:
        point = {"type": "object", "properties": {"x": {"const": 7}}, "required": ["x"], "additionalProperties": False}
        required = [key for key in properties if key in needed]
        return {
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": False,
            "$defs": {"point": point},
        }

    keys = st.sampled_from(["a", "b", "when", "é"])
    return st.builds(build, st.dictionaries(keys, SCHEMAS, max_size=4), st.sets(keys))


@settings(max_examples=200, deadline=None)
@given(objects(), st.integers(0, 2**32))
def test_json_of_random_schemas(schema: dict[str, Any], seed: int) -> None:
    body = body_of({"json": schema}, "x")
    assert body is not None
    jsonschema.validate(json.loads(walk(grammar_of([body]), random.Random(seed))), schema)


@settings(max_examples=60, deadline=None)
@given(st.lists(objects(), min_size=1, max_size=2), st.booleans(), st.integers(0, 2**32))
@pytest.mark.parametrize(("name", "template"), [*((name, "") for name in FORMATS if name != "qwen3_xml"), ("mistral", "[ARGS]")])
def test_forced_calls(name: str, template: str, schemas: list[dict[str, Any]], parallel: bool, seed: int) -> None:
    """Whatever is drawn from the grammar of a format is read, by the format, as calls whose arguments are valid."""
    tools, found = [Tool(f"f{i}", schema) for i, schema in enumerate(schemas)], FORMATS[name](template)
    text = walk(grammar_of([{"lark_grammar": found.grammar(tools, parallel)}]), random.Random(seed))
    parser = ReplyParser(tools=found, offered=tools)
    deltas = [*map(parser.feed, text), parser.flush(cut=False)]
    assert "".join(delta.content for delta in deltas) == ""
    calls = [call for delta in deltas for call in delta.calls]
    assert parser.calls >= 1
    assert parallel or parser.calls == 1
    for index in range(parser.calls):
        [called] = [call.name for call in calls if call.index == index and call.name is not None]
        arguments = json.loads("".join(call.arguments for call in calls if call.index == index))
        jsonschema.validate(arguments, {tool.name: tool.schema for tool in tools}[called])
