"""What `vllm bench serve` and `sglang.bench_serving` ask of a server they measure, and how they read its answers."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.serve.harness import Server, strict

TOKENS = 9


class Measured:
    """A stream as those tools read it: the text, chunks with a choice, and the usage."""

    def __init__(self) -> None:
        self.text, self.chunks, self.usage = "", 0, dict[str, int]()

    def take(self, data: Any, chat: bool) -> None:
        assert "error" not in data
        if data["choices"]:
            choice, self.chunks = data["choices"][0], self.chunks + 1
            self.text += (choice["delta"].get("content") if chat else choice["text"]) or ""
        else:
            self.usage = data["usage"]


def by_blocks(response: httpx.Response, chat: bool) -> Measured:
    """Pieces are stripped; an event ends at an empty line, or where what is there is whole JSON."""
    measured, rest, seen = Measured(), "", list[str]()
    for piece in response.iter_text():
        *blocks, rest = (rest + piece.strip()).split("\n\n")
        if rest == "data: [DONE]" or is_json(rest.removeprefix("data: ")):
            blocks, rest = [*blocks, rest], ""
        seen += [block.removeprefix("data: ") for block in blocks if block]
    assert (seen.pop(), rest) == ("[DONE]", "")
    for data in seen:
        measured.take(json.loads(data), chat)
    return measured


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def by_lines(response: httpx.Response, chat: bool) -> Measured:
    """A line is an event; without usage every one of them has a choice."""
    measured, lines = Measured(), [line.strip() for line in response.iter_lines() if line.strip()]
    assert lines.pop() == "data: [DONE]"
    for line in lines:
        data = json.loads(line.removeprefix("data: "))
        assert data["choices"]
        measured.take(data, chat)
    return measured


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("logprobs", [None, 1])
def test_vllm_bench_serve(tiny: Server, chat: bool, logprobs: int | None) -> None:
    listed = tiny.get("/v1/models")["data"][0]
    assert isinstance(listed["root"], str)
    model, prompt = listed["id"], "Once upon a time there was a "
    ids = tiny.post("/tokenize", {"model": model, "prompt": prompt, "add_special_tokens": False})["tokens"]
    assert tiny.post("/detokenize", {"model": model, "tokens": ids}) == {"prompt": prompt}
    body: dict[str, Any] = {"model": model, "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
    if chat:
        content = [{"type": "text", "text": prompt}]
        body |= {"messages": [{"role": "user", "content": content}], "max_completion_tokens": TOKENS}
    else:
        body |= {"prompt": prompt, "repetition_penalty": 1.0, "max_tokens": TOKENS, "logprobs": logprobs}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    with tiny.http.stream("POST", path, json=body, headers={"x-request-id": "bench-1a2b-0"}) as response:
        assert response.status_code == 200
        measured = by_blocks(response, chat)
    assert measured.usage["completion_tokens"] == TOKENS
    assert measured.usage["prompt_tokens"] == len(ids) or chat
    if not chat:
        assert measured.chunks == TOKENS  # one each, or what it takes for the time between tokens is not
    assert tiny.http.get("/metrics").status_code == 200
    assert not any(line.startswith("vllm:") for line in tiny.http.get("/metrics").text.splitlines())  # no speculation to report


def test_vllm_bench_serve_with_token_ids(tiny: Server) -> None:
    """Its traces and its batched requests send ids, alone and in lists."""
    for prompt, count in (([5, 6, 7], 1), ([[5, 6, 7], [8, 9]], 2), (["a", "b"], 2)):
        answer = tiny.complete(prompt=prompt, max_tokens=3, min_tokens=3, ignore_eos=True)
        assert len(answer["choices"]) == count
        assert answer["usage"]["completion_tokens"] == 3 * count


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("chat", [False, True])
def test_sglang_bench_serving(tiny: Server, chat: bool, stream: bool) -> None:
    """Backends sglang-oai and sglang-oai-chat, which ask for no usage; and vllm, vllm-chat, which send the same."""
    model = tiny.get("/v1/models")["data"][0]["id"]
    asked = {"max_completion_tokens": TOKENS} if chat else {"best_of": 1, "max_tokens": TOKENS}
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]} if chat else {"prompt": "Hello"}
    body = {"model": model, **prompt, **asked, "stream": stream, "temperature": 0.0, "ignore_eos": True}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    with tiny.http.stream("POST", path, json=body, headers={"X-SMG-Routing-Key": "0"}) as response:
        assert response.status_code == 200
        if stream:
            measured = by_lines(response, chat)
            assert chat or measured.chunks == TOKENS
            assert measured.text
        else:  # read by lines all the same: the answer must be one
            [line] = [line for line in response.iter_lines() if line]
            answer = strict(line.encode())
            assert answer["usage"]["completion_tokens"] == TOKENS
            assert answer["choices"][0]["message"]["content"] if chat else answer["choices"][0]["text"]
    info = tiny.get("/server_info")
    assert "decode" not in info  # it would be looked for the states of several engines
    assert not info.get("internal_states")


def test_a_token_without_text_is_a_chunk(reciter: Any) -> None:
    """With `ignore_eos` a model may go on with special tokens: their times count as well."""
    body = {"prompt": "\n", "max_tokens": len(reciter.ids) + 4, "ignore_eos": True, "temperature": 0}
    chunks = reciter.server.stream("/v1/completions", **body)
    assert len(chunks) == len(reciter.ids) + 4
    assert [chunk["choices"][0]["text"] for chunk in chunks[-4:]] == [""] * 4


@pytest.mark.parametrize("path", ["/start_profile", "/stop_profile"])
def test_profiling_is_not_offered(tiny: Server, path: str) -> None:
    """Both tools go on without it."""
    assert tiny.http.post(path).status_code == 404


def test_caches_are_emptied_between_runs(tiny: Server) -> None:
    tiny.post("/reset_prefix_cache", None)
