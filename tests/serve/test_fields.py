"""Every field and every kind of part that the official clients have types for: it works, has no effect, or is refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from typing import Any, Literal, get_args, get_origin

import anthropic.types as a
import anthropic.types.message_count_tokens_params
import anthropic.types.message_create_params
import openai.types.chat as c
import openai.types.chat.completion_create_params
import openai.types.completion_create_params
import openai.types.responses as r
import openai.types.responses.response_create_params
import pytest
from anthropic.types.beta import message_count_tokens_params as beta_count
from anthropic.types.beta import message_create_params as beta
from typing_extensions import get_type_hints

from sparkrt.serve import protocol as p
from tests.serve.harness import Server

COMPARED = {"openai": (3, 57), "anthropic": (2, 14)}  # the clients that were looked at; later ones may know more
CHAT = openai.types.chat.completion_create_params
COMPLETION = openai.types.completion_create_params
RESPONSE = openai.types.responses.response_create_params
MESSAGE = anthropic.types.message_create_params
COUNT = anthropic.types.message_count_tokens_params
REQUESTS: dict[str, tuple[Any, list[Any]]] = {
    "chat": (p.ChatBody, [CHAT.CompletionCreateParamsNonStreaming, CHAT.CompletionCreateParamsStreaming]),
    "completions": (
        p.CompletionBody,
        [COMPLETION.CompletionCreateParamsNonStreaming, COMPLETION.CompletionCreateParamsStreaming],
    ),
    "responses": (p.ResponsesBody, [RESPONSE.ResponseCreateParamsNonStreaming, RESPONSE.ResponseCreateParamsStreaming]),
    "messages": (p.MessagesBody, [MESSAGE.MessageCreateParamsNonStreaming, MESSAGE.MessageCreateParamsStreaming]),
    "messages in beta": (p.MessagesBody, [beta.MessageCreateParamsNonStreaming, beta.MessageCreateParamsStreaming]),
    "count_tokens": (p.CountTokensBody, [COUNT.MessageCountTokensParams]),
    "count_tokens in beta": (p.CountTokensBody, [beta_count.MessageCountTokensParams]),
}
ASKED: dict[Any, tuple[str, dict[str, Any]]] = {
    p.ChatBody: ("/v1/chat/completions", {"messages": [{"role": "user", "content": "⟪Yes.⟫"}]}),
    p.CompletionBody: ("/v1/completions", {"prompt": "⟪Yes.⟫"}),
    p.ResponsesBody: ("/v1/responses", {"input": "⟪Yes.⟫"}),
    p.MessagesBody: ("/v1/messages", {"messages": [{"role": "user", "content": "⟪Yes.⟫"}], "max_tokens": 50}),
    p.CountTokensBody: ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "⟪Yes.⟫"}]}),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_every_field_is_known(name: str) -> None:
    kind, documented = REQUESTS[name]
    fields = {field for params in documented for field in get_type_hints(params)} - {"betas"}  # which becomes a header
    assert {"model", "messages" if kind is not p.CompletionBody else "prompt"} & fields
    rules = [set(kind.__struct_fields__), set(p.REFUSED[kind]), set(p.WITHOUT_EFFECT[kind])]
    assert not set.intersection(*rules[:2]) | set.intersection(*rules[1:]) | (rules[0] & rules[2])
    unknown = fields.difference(*rules)
    client = "openai" if name in ("chat", "completions", "responses") else "anthropic"
    if unknown and tuple(map(int, version(client).split(".")[:2])) > COMPARED[client]:
        pytest.skip(f"{client} {version(client)} is newer than {COMPARED[client]} and has {sorted(unknown)}")
    assert not unknown


@pytest.mark.parametrize("kind", ASKED, ids=lambda kind: kind.__name__)
def test_fields_without_effect(fake: Server, kind: Any) -> None:
    """Whatever is in them."""
    path, body = ASKED[kind]
    wanted = plain(fake.post(path, body))
    for value in ({"a": "b"}, "low", True, 5, [1]):
        more = dict.fromkeys((*p.WITHOUT_EFFECT[kind], "unheard_of"), value)
        assert plain(fake.post(path, {**body, **more})) == wanted


def plain(value: Any) -> Any:
    """An answer without what is never the same."""
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items() if key not in ("id", "created", "created_at", "completed_at")}
    return [plain(part) for part in value] if isinstance(value, list) else value


@pytest.mark.parametrize("kind", ASKED, ids=lambda kind: kind.__name__)
def test_fields_that_are_refused(fake: Server, kind: Any) -> None:
    """By name, whatever is in them; what asks for nothing is no reason."""
    path, body = ASKED[kind]
    for field, harmless in p.REFUSED[kind].items():
        for value in ({"a": 1}, "something", True, 5, [1]):
            response = fake.http.post(path, json={**body, field: value})
            assert response.status_code == 400, (field, value)
            error = response.json()["error"]
            assert error["message"] == f"{field} is not supported by this server"
            assert error.get("param", field) == field
        for value in (*harmless, None):
            assert fake.http.post(path, json={**body, field: value}).status_code == 200, (field, value)


def members(union: Any) -> Iterator[Any]:
    """The types in a union of a client, those in unions and lists within it included."""
    if get_args(union) and get_origin(union) is not Literal:
        for part in get_args(union):
            yield from members(part)
    elif hasattr(union, "__annotations__"):
        yield union


def kinds(union: Any) -> set[str]:
    """What `type` can be in the members of a union."""
    return {kind for member in members(union) for kind in words(get_type_hints(member).get("type"))}


def words(hint: Any) -> list[str]:
    """The strings that a hint allows by name."""
    return [hint] if isinstance(hint, str) else [word for part in get_args(hint) for word in words(part)]


def test_parts_of_chat_messages(fake: Server) -> None:
    found = kinds(c.ChatCompletionContentPartParam) | kinds(c.ChatCompletionContentPartRefusalParam)
    assert {"text", "refusal", "image_url", "input_audio", "file"} <= found
    for kind in found - {"text", "refusal"}:
        message = {"role": "user", "content": [{"type": kind, kind: {"url": "http://127.0.0.1:1/"}}]}
        for stream in (False, True):
            error = fake.post("/v1/chat/completions", {"messages": [message], "stream": stream}, 400)
            assert error["param"] == "messages[0].content[0].type"
            assert repr(kind) in error["message"]


def test_tools_of_chat(fake: Server) -> None:
    found = kinds(c.ChatCompletionToolUnionParam)
    assert {"function", "custom"} <= found
    for kind in found - {"function"}:
        body = {"messages": [{"role": "user", "content": "a"}], "tools": [{"type": kind, kind: {"name": "f"}}]}
        assert fake.post("/v1/chat/completions", body, 400)["param"] == "tools[0].type"


def test_items_of_responses(fake: Server) -> None:
    found = kinds(r.ResponseInputItemParam)
    taken = {"message", "function_call", "function_call_output", "reasoning", "item_reference"}
    assert taken | {"image_generation_call", "mcp_call"} <= found
    for kind in found - taken:
        error = fake.post("/v1/responses", {"input": [{"type": kind, "id": "x"}]}, 400)
        assert error["param"] == "input[0].type"
        assert repr(kind) in error["message"]
    parts = kinds(r.ResponseInputContentParam)
    assert {"input_text", "input_image", "input_file"} <= parts
    for kind in parts - {"input_text"}:
        error = fake.post("/v1/responses", {"input": [{"role": "user", "content": [{"type": kind}]}]}, 400)
        assert error["param"] == "input[0].content[0].type"
    tools = kinds(r.ToolParam)
    assert {"function", "web_search", "mcp", "custom"} <= tools
    for kind in tools - {"function"}:
        error = fake.post("/v1/responses", {"input": "a", "tools": [{"type": kind, "name": "f"}]}, 400)
        assert error["param"] == "tools[0].type"
        assert repr(kind) in error["message"]


def test_everything_includable_is_taken(fake: Server) -> None:
    for name in get_args(r.ResponseIncludable):
        fake.post("/v1/responses", {"input": "⟪Yes.⟫", "include": [name]})


def test_blocks_and_tools_of_messages(fake: Server) -> None:
    found = kinds(a.ContentBlockParam)
    taken = {"text", "thinking", "redacted_thinking", "tool_use", "tool_result"}
    assert taken | {"image", "document"} <= found
    for kind in found - taken:
        body = {"messages": [{"role": "user", "content": [{"type": kind}]}], "max_tokens": 5}
        response = fake.http.post("/v1/messages", json=body)
        assert response.status_code == 400
        assert f"messages[0].content[0].type: {kind!r}" in response.json()["error"]["message"]
    tools = kinds(a.ToolUnionParam)
    assert "custom" in tools
    for kind in tools - {"custom"}:
        body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5, "tools": [{"type": kind, "name": "f"}]}
        response = fake.http.post("/v1/messages", json=body)
        assert response.status_code == 400
        assert f"tools[0].type: {kind!r}" in response.json()["error"]["message"]
