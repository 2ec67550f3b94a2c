"""What must not be served: an error that names the field, in OpenAI's body, strict JSON, and a server as good as before."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from sparkrt.serve.http import MAX_BODY, MAX_HEAD
from tests.serve.harness import Server, events, exchange, raw_post, strict

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
IMAGE = {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}


@pytest.fixture(autouse=True)
def _alive(tiny: Server) -> Iterator[None]:
    yield
    tiny.check_alive()


def refused(server: Server, path: str, field: str, value: Any) -> str:
    """The `param` of the refusal of a request that is fine but for one field."""
    base = {"prompt": "hi"} if path == COMPLETIONS else {"messages": USER}
    for stream in (False, True):
        error = server.post(path, {**base, "max_tokens": 2, "stream": stream, field: value}, 400)
    assert error["type"] == "BadRequestError"
    return str(error["param"])


BOTH = [
    *[("n", n) for n in (0, -1, True, 10**6, "2", 1.5, 10**30)],  # A07, X07
    *[("temperature", t) for t in (-0.1, 999999, "hot", True, [])],
    *[("top_p", p) for p in (-1, 0, 1.5)],
    *[("top_k", k) for k in (-2, 0.5, 2**40)],
    *[("min_p", p) for p in (-0.1, 1.1)],
    *[("repetition_penalty", p) for p in (0, -1)],
    *[("presence_penalty", p) for p in (-2.1, 2.1)],
    *[("frequency_penalty", p) for p in (-2.1, 2.1)],
    *[("seed", s) for s in (2**64, 1.5, "x")],
    *[("max_tokens", m) for m in (0, -1, 2**31, "many", 1.5, 5000)],
    *[("min_tokens", m) for m in (-1, 3)],
    *[("prompt_logprobs", p) for p in (-1, 10**6)],
    *[("logit_bias", b) for b in ({"AI": -100}, {"191222": 5}, {"-1": 5}, {"5": 101}, {"5": "much"}, [5])],  # A10
    *[("stop", s) for s in ("", [""], [5], ["x"] * 100_000, 5)],
    *[("stop_token_ids", s) for s in ([10**6], [-1], [True], 5)],
    *[("allowed_token_ids", s) for s in ([], [10**6])],
    *[("best_of", b) for b in (3, 0)],
    *[("stream", s) for s in ("yes", 1)],
    ("priority", 1),
    *[
        ("response_format", f)
        for f in ({"type": "yaml"}, {}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": {"schema": 5}})
    ],
    *[("guided_json", g) for g in (5, "{", {"type": "not-a-type"})],
    *[("guided_regex", g) for g in ("[", 5, "", "(?<=x)*")],
    *[("guided_choice", g) for g in ("a", [5], [""])],
    *[("guided_grammar", g) for g in ("start: nothing", "root ::= (")],
    ("structured_outputs", 5),
    ("use_beam_search", True),
    ("truncate_prompt_tokens", 5),
    ("bad_words", ["no"]),
    ("audio", {"voice": "x"}),
    ("modalities", ["audio"]),
    ("documents", [{"title": "x"}]),
]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_fields_of_both(tiny: Server, path: str) -> None:
    for field, value in BOTH:
        assert refused(tiny, path, field, value) == field, (field, str(value)[:50])


def test_best_of_is_not_ignored(tiny: Server) -> None:
    """A07"""
    for path, body in ((COMPLETIONS, {"prompt": "hi"}), (CHAT, {"messages": USER})):
        assert tiny.post(path, {**body, "best_of": 1, "n": 3}, 400)["param"] == "best_of"
        assert tiny.post(path, {**body, "best_of": 3, "n": 1}, 400)["param"] == "best_of"


def test_fields_of_completions(tiny: Server) -> None:
    for field, value in [("suffix", "end"), ("logprobs", 21), ("logprobs", 10**6), ("logprobs", -1), ("logprobs", True)]:
        assert refused(tiny, COMPLETIONS, field, value) == field
    for prompt in ("", [""], [], [[]], ["a", ""], None, 5, {"a": 1}, ["a", 5], [5, [5]]):  # A17
        assert refused(tiny, COMPLETIONS, "prompt", prompt) == "prompt", prompt
    for prompt in ([200000], [-1], [[-1]], [1.5], [True], [9999999999999999999], [[1.5]], [6140]):  # A12
        assert refused(tiny, COMPLETIONS, "prompt", prompt) == "prompt", prompt
    assert tiny.post(COMPLETIONS, {"prompt": ["a"] * 2000}, 400)["param"] == "prompt"
    assert tiny.post(COMPLETIONS, {}, 400)["param"] == "prompt"


def test_fields_of_chat(tiny: Server) -> None:
    named = {"type": "function", "function": {"name": "f"}}
    for field, value in [
        ("messages", []),
        ("messages", "hi"),
        ("top_logprobs", 3),
        ("logprobs", 5),
        ("tool_choice", "required"),  # without tools
        ("tool_choice", named),
        ("tool_choice", "sometimes"),
        ("function_call", {"name": "f"}),
        ("tools", 5),
        ("echo", True),
        ("chat_template", "{{ 1 }}"),
        ("max_completion_tokens", -1),
        ("reasoning_effort", 5),
    ]:
        param = refused(tiny, CHAT, field, value)
        assert param == field
    assert tiny.post(CHAT, {"messages": USER, "logprobs": True, "top_logprobs": 21}, 400)["param"] == "top_logprobs"
    assert refused(tiny, CHAT, "tools", [{"type": "function"}]) == "tools[0].function"
    assert refused(tiny, CHAT, "functions", [{"name": "f", "parameters": 5}]) == "functions[0].function.parameters"
    tools = [{"type": "function", "function": {"name": "g"}}]
    some = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "g"}}]}
    listed = [{**some, "mode": "any"}, {**some, "tools": []}, {**some, "tools": [*some["tools"], named]}, {}, 5]
    allowed = [{"type": "allowed_tools", "allowed_tools": value} for value in listed]
    for choice in (named, {"type": "function"}, *allowed, {}, {"type": "function", "function": {"name": 5}}):
        assert tiny.post(CHAT, {"messages": USER, "tools": tools, "tool_choice": choice}, 400)["param"] == "tool_choice"
    both = {"messages": USER, "guided_regex": "a", "guided_choice": ["a"]}
    assert tiny.post(CHAT, both, 400)["param"] == "guided_choice"
    assert tiny.post(CHAT, {"messages": USER, "guided_regex": "a", "allowed_token_ids": [5]}, 400)["param"] == "guided_regex"
    for kwargs in ({"chat_template": "{{ 1 }}"}, {"messages": []}, {"tools": []}):  # X01
        assert refused(tiny, CHAT, "chat_template_kwargs", kwargs).startswith("chat_template_kwargs.")
    assert tiny.post(CHAT, {}, 400)["param"] == "messages"


@pytest.mark.parametrize(
    ("message", "where"),
    [
        ({"content": "hi"}, "messages[0].role"),
        ({"role": 5, "content": "hi"}, "messages[0].role"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]},
            "messages[0].content[0].type",
        ),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": [5]}, "messages[0].content[0]"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "messages[0].tool_calls[0].function"),
        *[
            (
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]},
                "messages[0].tool_calls[0].function.arguments",
            )
            for arguments in ("{bad", "[]", "42", 42)  # T09
        ],
    ],
)
def test_messages(tiny: Server, message: dict[str, Any], where: str) -> None:
    assert refused(tiny, CHAT, "messages", [message]) == where


def test_accepted_without_effect(tiny: Server) -> None:
    """A22: what clients send and what asks for nothing; a field nobody knows has no effect on any endpoint."""
    body = {"messages": USER, "temperature": 0, "max_tokens": 5}
    plain = tiny.post(CHAT, body)["choices"]
    ignored = ["user", "service_tier", "safety_identifier", "verbosity", "unheard_of"]
    harmless = dict.fromkeys(ignored, "low") | {
        "best_of": 1,
        "function_call": "auto",
        "functions": [],
        "length_penalty": 1.0,
        "logprobs": False,
        "metadata": {"a": "b"},
        "modalities": ["text"],
        "parallel_tool_calls": True,
        "guided_choice": [],
        "response_format": {"type": "text"},
        "structured_outputs": {},
        "spaces_between_special_tokens": True,
        "store": True,
        "tool_choice": "auto",
        "tools": [],
    }
    assert tiny.post(CHAT, {**body, **harmless})["choices"] == plain
    for path, more in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [5]}), (COMPLETIONS, {"prompt": "a"})):
        assert tiny.http.post(path, json={**more, "unheard_of": 1, "user": "u"}).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt":"a","temperature":NaN}',
        b'{"prompt":"a","temperature":Infinity}',
        b'{"prompt":"a","temperature":-Infinity}',
        b'{"prompt":"a","temperature":1e400}',
        b'{"prompt":"a","logit_bias":{"5":NaN}}',
        b'{"prompt":"a","unknown":NaN}',
        b'{"prompt":"a","seed":' + b"9" * 5000 + b"}",
        b'{"prompt":"a","max_tokens":' + b"9" * 5000 + b"}",
        b'{"prompt":["a","\\ud800"]}',
        b'{"prompt":"a","unknown":"\xff\xfe"}',
        b'{"prompt":"\xff\xfe"}',
        b'{"prompt":"a",}',
        b'{"prompt":"a"} x',
        b'{"prompt":"a"',
        b'\xef\xbb\xbf{"prompt":"a"}',
        b"",
        b"null",
        b"[]",
        b'"prompt"',
        b"prompt=a",
        b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt":"a","unknown":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt":"a","unknown":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
    ],
    ids=lambda body: body[:40].decode("latin-1"),
)
def test_bytes_that_are_no_request(tiny: Server, body: bytes) -> None:
    """A13, U04, X06: sent as they are, over a socket."""
    error = raw_post(tiny, COMPLETIONS, body)
    assert error["type"] == "BadRequestError"
    assert "Error" not in error["message"]


@pytest.mark.parametrize("stream", [b"false", b"true"])
@pytest.mark.parametrize(
    "message",
    [
        rb'{"role":"user","content":"a\ud800"}',
        rb'{"role":"user","content":"a\udc00b"}',
        rb'{"role":"user","content":[{"type":"text","text":"\ud83d"}]}',
        rb'{"role":"user","name":"\ud800","content":"a"}',
        rb'{"role":"assistant","content":"","tool_calls":[{"function":{"name":"f","arguments":"{\"a\":\"\ud800\"}"}}]}',
        rb'{"role":"assistant","content":"","tool_calls":[{"function":{"name":"f","arguments":"{\"a\":\"\\ud800\"}"}}]}',
    ],
)
def test_half_surrogate_pairs(tiny: Server, message: bytes, stream: bytes) -> None:
    """U04: in content, parts, names and (once or twice escaped) tool arguments."""
    raw_post(tiny, CHAT, b'{"stream":' + stream + b',"messages":[' + message + b"]}")


def test_whole_surrogate_pairs(tiny: Server) -> None:
    body = rb'{"prompt":"\ud83c\udf89"}'
    tokens = tiny.post("/tokenize", body)["tokens"]
    assert tiny.post("/detokenize", {"tokens": tokens}) == {"prompt": "🎉"}


def test_deep_arguments(tiny: Server) -> None:
    deep = '{"a":' * 5000 + "1" + "}" * 5000
    message = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": deep}}]}
    assert tiny.post(CHAT, {"messages": [message]}, 400)["param"].startswith("messages[0].tool_calls[0].function.arguments")


def test_large_bodies(tiny: Server) -> None:
    """X06: refused on what the header says, or as soon as too much has come."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    status, body = exchange(tiny, head + b"Content-Length: 100000000\r\n\r\n", [b'{"prompt":"'])
    assert status == 413
    assert strict(body)["error"]["code"] == "request_too_large"
    piece = b"x" * 2**20
    chunks = (b"%x\r\n%s\r\n" % (len(piece), piece) for _ in range(MAX_BODY // len(piece) + 2))
    status, body = exchange(tiny, head + b"Transfer-Encoding: chunked\r\n\r\n", list(chunks))
    assert status == 413
    assert strict(body)["error"]["code"] == "request_too_large"


def test_long_lists(tiny: Server) -> None:
    """X07: refused before anything is done for each of them, and what they took is given back."""
    before = tiny.metrics()["process_resident_memory_bytes"]
    many, tool = 100_000, {"type": "function", "function": {"name": "f"}}
    for path, body, param in (
        (COMPLETIONS, {"prompt": [1] * many}, "prompt"),
        (COMPLETIONS, {"prompt": ["a"] * many}, "prompt"),
        (COMPLETIONS, {"prompt": "a", "allowed_token_ids": [1] * (2**20 + 1)}, "allowed_token_ids"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": dict.fromkeys(map(str, range(many)), 1)}, "logit_bias"),
        (COMPLETIONS, {"prompt": "a", "stop_token_ids": [1] * many}, "stop_token_ids"),
        (COMPLETIONS, {"prompt": "a", "n": 10**6, "logprobs": 10**6, "max_tokens": 2**31, "stop": ["x"] * many}, None),
        (COMPLETIONS, {"prompt": "a", "guided_choice": [str(i) for i in range(many)]}, "guided_choice"),
        (CHAT, {"messages": USER * many}, "messages"),
        (CHAT, {"messages": USER, "tools": [tool] * many}, None),
        ("/v1/messages", {"messages": USER * many, "max_tokens": 1}, None),
        ("/v1/responses", {"input": USER * many}, "input"),
        ("/v1/responses", {"input": "a", "metadata": dict.fromkeys(map(str, range(17)), "a")}, "metadata"),
        ("/detokenize", {"tokens": [1] * (2**20 + 1)}, "tokens"),
    ):
        response = tiny.http.post(path, json=body)
        assert response.status_code == 400, path
        assert param in (None, response.json()["error"].get("param")), response.text
    assert tiny.metrics()["process_resident_memory_bytes"] - before < 100 * 2**20


def test_endless_heads(tiny: Server) -> None:
    """Of many headers, of one, and of an address. Not a byte more than it takes: what nobody reads would reset the connection."""
    for begin, more in ((b"GET / HTTP/1.1\r\n", b"a: 12345\r\n"), (b"GET / HTTP/1.1\r\na: ", b"x"), (b"GET /", b"x")):
        head = (begin + more * (MAX_HEAD // len(more)))[:MAX_HEAD]
        status, body = exchange(tiny, head, [b"x"])
        assert status == 431
        assert "65536 bytes" in strict(body)["error"]["message"]


def test_lying_lengths(tiny: Server) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
    status, body = exchange(tiny, head + b'Content-Length: 5\r\n\r\n{"prompt":"a"}')  # cut, and its rest is no request
    assert status == 400
    assert "error" in strict(body)
    status, body = exchange(tiny, head + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n")
    assert status == 400
    assert "error" in strict(body)
    status, body = exchange(tiny, b"NONSENSE\r\n\r\n")
    assert status == 400
    assert strict(body)["error"]["type"] == "BadRequestError"


def test_compressed_bodies(tiny: Server) -> None:
    response = tiny.http.post(COMPLETIONS, content=b"x", headers={"content-encoding": "gzip"})
    assert response.status_code == 415
    assert strict(response.content)["error"]["code"] == "unsupported_encoding"


def test_routes_and_methods(tiny: Server) -> None:
    for method, path, status in [
        ("GET", "/v1/nothing", 404),
        ("POST", "/nothing", 404),
        ("POST", "/", 405),
        ("GET", COMPLETIONS, 405),
        ("DELETE", "/health", 405),
        ("PUT", CHAT, 405),
    ]:
        response = tiny.http.request(method, path)
        assert response.status_code == status
        assert set(strict(response.content)["error"]) == {"message", "type", "param", "code"}
    assert tiny.http.get(COMPLETIONS).headers["allow"] == "POST"


def test_unknown_models(tiny: Server) -> None:
    for path, more in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": USER}), ("/tokenize", {"prompt": "a"})):
        error = tiny.post(path, {**more, "model": "gpt-5"}, 404)
        assert (error["type"], error["param"], error["code"]) == ("NotFoundError", "model", "model_not_found")
    assert strict(tiny.http.get("/v1/models/gpt-5").content)["error"]["code"] == "model_not_found"


def test_tokenize_fields(tiny: Server) -> None:
    for body in ({}, {"prompt": "a", "messages": USER}, {"prompt": 5}, {"messages": []}):
        assert tiny.post("/tokenize", body, 400)["param"] in ("prompt", "messages")
    for tokens in ([-1], [10**6], ["a"], [True], None):
        assert tiny.post("/detokenize", {"tokens": tokens}, 400)["param"] == "tokens"


def test_stream_options_need_a_stream(tiny: Server) -> None:
    error = tiny.post(COMPLETIONS, {"prompt": "a", "stream_options": {"include_usage": True}}, 400)
    assert error["param"] == "stream_options"


def test_templates_that_refuse(dice: Server) -> None:
    """A21: a template's own words, as a 400."""
    late = [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]
    for messages in (late, [late[1], late[1], late[0]]):
        for stream in (False, True):
            error = dice.post(CHAT, {"messages": messages, "stream": stream}, 400)
            assert error["message"] == "System message must be at the beginning."
            assert error["param"] == "messages"
    dice.check_alive()


def test_developers_are_systems(tiny: Server) -> None:
    """A20, A21: spellings of one conversation are one prompt."""

    def count(*messages: dict[str, Any]) -> list[int]:
        return list(tiny.post("/tokenize", {"messages": list(messages)})["tokens"])

    user = {"role": "user", "content": "Hello there"}
    assert count({"role": "developer", "content": "Be brief."}, user) == count({"role": "system", "content": "Be brief."}, user)
    parts = [{"type": "text", "text": "Hello"}, {"type": "text", "text": " there"}]
    assert count({"role": "user", "content": parts}) == count(user)
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    tool = {"role": "tool", "tool_call_id": "c1", "content": "42"}
    plain = count(user, {"role": "assistant", "content": "", "tool_calls": [call]}, tool)
    assert plain == count(user, {"role": "assistant", "content": None, "tool_calls": [call]}, tool)
    assert plain == count(
        user, {"role": "assistant", "tool_calls": [call]}, {**tool, "content": [{"type": "text", "text": "42"}]}
    )
    for empty in ("", "null", None):  # T09
        nothing = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": empty}}
        assert count(user, {"role": "assistant", "tool_calls": [nothing]}, tool)
    assert tiny.chat("", max_tokens=1)["usage"]["prompt_tokens"] > 0  # A17: an empty message is a message


def test_refusals_of_the_engine(fake: Server) -> None:
    """What only the engine can know comes before the first byte of a stream, too."""
    for path, body in ((COMPLETIONS, {"prompt": "REFUSE"}), (CHAT, {"messages": [{"role": "user", "content": "REFUSE"}]})):
        for stream in (False, True):
            error = fake.post(path, {**body, "stream": stream}, 400)
            assert (error["message"], error["param"], error["code"]) == ("the engine does not like this", "prompt", "disliked")
            assert fake.post(COMPLETIONS, {"prompt": "FULL", "stream": stream}, 503)["type"] == "ServiceUnavailableError"
    assert fake.post(COMPLETIONS, {"prompt": ["fine", "REFUSE"]}, 400)["code"] == "disliked"
    assert fake.stats()["running"] == 0  # all of a request or nothing


def test_failures_of_one_request(fake: Server) -> None:
    """An error in the middle: an event of a stream, then [DONE]; a 500 otherwise. No inner words."""
    assert "hidden" not in str(fake.post(COMPLETIONS, {"prompt": "FAIL", "max_tokens": 9}, 500))
    with fake.http.stream(
        "POST", COMPLETIONS, json={"prompt": ["FAIL", "FOREVER"], "max_tokens": 999, "stream": True}
    ) as response:
        assert response.status_code == 200
        chunks = events("".join(response.iter_text()))
    assert chunks[0]["choices"]
    assert chunks[-1]["error"]["type"] == "InternalServerError"
    assert "hidden" not in json.dumps(chunks)
    fake.check_alive()
    assert fake.stats()["running"] == 0


def test_nothing_is_fetched(tiny: Server) -> None:
    """X03: an address in a request is refused where images would be, and nobody connects to it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/a.png"
        source = {"type": "url", "url": url}
        for path, field, part in (
            (CHAT, "messages", {"type": "image_url", "image_url": {"url": url}}),
            ("/v1/messages", "messages", {"type": "image", "source": source}),
            ("/v1/messages", "messages", {"type": "document", "source": source}),
            ("/v1/responses", "input", {"type": "input_image", "image_url": url}),
            ("/v1/responses", "input", {"type": "input_file", "file_url": url}),
        ):
            body = {"max_tokens": 2, field: [{"role": "user", "content": [{"type": "text", "text": "see"}, part]}]}
            assert tiny.http.post(path, json=body).status_code == 400, part
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()
