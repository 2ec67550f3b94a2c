"""Messages as clients send them become the one form templates know; what cannot is refused, naming the field."""

from __future__ import annotations

from typing import Any

import pytest

from sparkrt.errors import RequestError
from sparkrt.text.messages import normalize_messages, plain


def one(message: dict[str, Any]) -> dict[str, Any]:
    return normalize_messages([message])[0]


def call(arguments: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": function}]}


@pytest.mark.parametrize("role", ["user", "assistant", "tool", "system"])
def test_parts_equal_the_plain_string(role: str) -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    assert one({"role": role, "content": parts}) == one({"role": role, "content": "one two"})
    assert one({"role": role, "content": []}) == one({"role": role, "content": ""}) == one({"role": role, "content": None})


def test_list_content_beside_tool_calls() -> None:
    message = call("{}") | {"content": [{"type": "text", "text": "Look: "}]}
    assert one(message)["content"] == "Look: "
    assert one(call("{}"))["content"] == ""


def test_developer_is_system_and_nulls_are_absent() -> None:
    message = {"role": "developer", "content": "x", "name": None, "tool_calls": None, "refusal": None}
    assert one(message) == {"role": "system", "content": "x"}
    assert one({"role": "assistant", "content": "x", "tool_calls": []}) == {"role": "assistant", "content": "x"}


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_is_found_under_the_names_templates_read(name: str) -> None:
    message = one({"role": "assistant", "content": "4", name: "2+2"})
    assert message["reasoning_content"] == message["thinking"] == "2+2"
    assert "reasoning_content" not in one({"role": "assistant", "content": "4", name: None})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ('{"a": 1, "b": [null]}', {"a": 1, "b": [None]}),
        ({"a": 1}, {"a": 1}),
        ("", {}),
        (" ", {}),
        (None, {}),
        ("null", {}),
        ("{}", {}),
    ],
)
def test_arguments_become_an_object(given: Any, expected: dict[str, Any]) -> None:
    message = one(call(given))
    assert message["tool_calls"] == [{"id": "c", "type": "function", "function": {"name": "f", "arguments": expected}}]


@pytest.mark.parametrize(
    "bad", ["{bad", "[]", "42", "[1]", '"text"', '{"a": NaN}', [], 7, "[" * 100_000, '{"a":' * 5000, "1" * 5000]
)
def test_other_arguments_are_refused_by_name(bad: Any) -> None:
    with pytest.raises(RequestError) as caught:
        normalize_messages([{"role": "user", "content": "x"}, call(bad)])
    assert caught.value.param == "messages[1].tool_calls[0].function.arguments"
    assert caught.value.param in caught.value.message


def test_the_order_of_keys_is_kept_and_nothing_is_shared() -> None:
    given = [{"tool_calls": [{"function": {"arguments": '{"z": 1, "a": 2}', "name": "f"}, "id": "c"}], "role": "assistant"}]
    message = normalize_messages(given)[0]
    assert list(message["tool_calls"][0]) == ["function", "id"]
    assert list(message["tool_calls"][0]["function"]) == ["arguments", "name"]
    assert list(message["tool_calls"][0]["function"]["arguments"]) == ["z", "a"]
    message["tool_calls"][0]["function"]["name"] = "changed"
    assert given[0]["tool_calls"][0]["function"]["name"] == "f"  # type: ignore[index]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        (None, "messages"),
        ({"role": "user"}, "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": 1, "content": "x"}], "messages[0].role"),
        ([{"role": "", "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": {"type": "text", "text": "x"}}], "messages[0].content"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"text": "x"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": 1}]}],
            "messages[0].content[1].text",
        ),
        ([{"role": "assistant", "tool_calls": 1}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [1]}], "messages[0].tool_calls[0].function"),
        ([{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}], "messages[0].tool_calls[0].function"),
        ([{"role": "assistant", "reasoning": ["x"]}], "messages[0].reasoning_content"),
    ],
)
def test_malformed_messages_name_the_field(messages: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        normalize_messages(messages)
    assert caught.value.param == param
    assert param in caught.value.message


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "video"])
def test_unknown_part_type_is_named(kind: str) -> None:
    parts = [{"type": "text", "text": "x"}, {"type": kind, kind: {"url": "file:///etc/passwd"}}]
    with pytest.raises(RequestError, match=kind) as caught:
        normalize_messages([{"role": "user", "content": parts}])
    assert caught.value.param == "messages[0].content[1].type"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": "a\ud800"}, "messages[0].content"),
        ({"role": "user\udfff", "content": "a"}, "messages[0].role"),
        ({"role": "user", "content": "a", "name": "\ud800"}, "messages[0].name"),
        ({"role": "user", "content": [{"type": "text", "text": "\ud800"}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": [{"type": "\ud800"}]}, "messages[0].content[0].type"),
        (call('{"a": "\\ud800"}'), "messages[0].tool_calls[0].function.arguments.a"),
        (call({"a": ["\ud800"]}), "messages[0].tool_calls[0].function.arguments.a[0]"),
        ({"role": "user", "content": "a", "extra": {"\ud800": 1}}, "messages[0].extra"),
        ({"role": "assistant", "content": "a", "reasoning": "\ud800"}, "messages[0].reasoning"),
    ],
)
def test_lone_surrogates_are_refused_everywhere(message: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError, match="half of a surrogate pair") as caught:
        normalize_messages([message])
    assert caught.value.param == param
    caught.value.message.encode()  # the message itself can be sent


def test_plain_takes_json_data_only() -> None:
    deep: Any = 1
    for _ in range(99):
        deep = [deep]
    assert plain(deep, "x") == deep
    for bad in ([[deep]], float("nan"), float("inf"), {1: 2}, object(), b"x"):
        with pytest.raises(RequestError, match="x"):
            plain(bad, "x")
