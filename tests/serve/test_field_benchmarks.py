"""What `vllm bench serve` and `sglang.bench_serving` ask of a server they measure, and how they read its answers."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import httpx
import pytest

from sparkrt.engine.answer import Answer
from sparkrt.engine.config import EngineConfig, load_text
from sparkrt.engine.messages import EngineOutput
from sparkrt.engine.outputs import RequestOutput
from sparkrt.engine.params import SamplingParams
from sparkrt.serve.generation import _Choice
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
    assert 1 <= measured.chunks <= TOKENS + chat  # one each, where the API process keeps up with the engine
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
            assert measured.text
        else:  # read by lines all the same: the answer must be one
            [line] = [line for line in response.iter_lines() if line]
            answer = strict(line.encode())
            assert answer["usage"]["completion_tokens"] == TOKENS
            assert answer["choices"][0]["message"]["content"] if chat else answer["choices"][0]["text"]
    info = tiny.get("/server_info")
    assert "decode" not in info  # it would be looked for the states of several engines
    assert not info.get("internal_states")


@pytest.mark.parametrize("prompt", [{"text": "Hello"}, {"input_ids": [5, 6, 7]}])
@pytest.mark.parametrize("stream", [True, False])
def test_sglang_bench_serving_by_default(tiny: Server, prompt: dict[str, Any], stream: bool) -> None:
    """Its own backend: text so far and a count in every event."""
    sampling = {"temperature": 0.0, "max_new_tokens": TOKENS, "ignore_eos": True}
    body = {**prompt, "sampling_params": sampling, "stream": stream, "lora_path": None, "return_logprob": False}
    body |= {"logprob_start_len": -1, "return_routed_experts": False}
    texts, counts = [""], [0]
    with tiny.http.stream("POST", "/generate", json=body) as response:
        assert response.status_code == 200
        for line in filter(None, (line.strip() for line in response.iter_lines())):
            if (text := line.removeprefix("data: ")) != "[DONE]":
                data = json.loads(text)
                texts.append(data["text"])
                counts.append(data["meta_info"]["completion_tokens"])
    assert counts == sorted({*counts})
    assert counts[-1] == TOKENS
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
    assert data["meta_info"]["finish_reason"] == {"type": "length", "length": TOKENS}
    assert data["meta_info"]["prompt_tokens"] == (3 if "input_ids" in prompt else 1)
    tiny.post("/flush_cache?timeout=60", None)


def test_generate(tiny: Server) -> None:
    sampling = {"max_new_tokens": 12, "temperature": 0}
    one = tiny.post("/generate", {"text": "Once upon a time", "sampling_params": sampling})
    assert one["text"] == tiny.complete(prompt="Once upon a time", max_tokens=12, temperature=0)["choices"][0]["text"]
    assert len(one["output_ids"]) == one["meta_info"]["completion_tokens"] == 12
    two = tiny.post("/generate", {"text": ["Once upon a time", "The king"], "sampling_params": {**sampling, "n": 2}})
    assert [answer["text"] for answer in two[:2]] == [one["text"]] * 2
    assert len(two) == 4
    stop = one["text"][:4]
    sampling |= {"stop": stop, "no_stop_trim": True}
    ended = tiny.post("/generate", {"text": "Once upon a time", "sampling_params": sampling})
    assert (ended["text"], ended["meta_info"]["finish_reason"]) == (stop, {"type": "stop", "matched": stop})
    scored = tiny.post("/generate", {"text": "a", "sampling_params": sampling, "return_logprob": True, "top_logprobs_num": 2})
    rows, best = (scored["meta_info"][f"output_{kind}_logprobs"] for kind in ("token", "top"))
    assert [row[1] for row in rows] == scored["output_ids"] == [row[0][1] for row in best]
    field = {"a": {"type": "integer", "maximum": 9}}
    schema = json.dumps({"type": "object", "properties": field, "required": ["a"], "additionalProperties": False})
    shaped = tiny.post("/generate", {"text": "a", "sampling_params": {"json_schema": schema, "max_new_tokens": 40}})
    assert isinstance(json.loads(shaped["text"])["a"], int)
    chunks = tiny.stream("/generate", text=["a", "b"], sampling_params={"max_new_tokens": 3, "ignore_eos": True})
    assert {chunk["index"]: chunk["meta_info"]["completion_tokens"] for chunk in chunks} == {0: 3, 1: 3}


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [5]}, "text"),
        ({"text": []}, "text"),
        ({"input_ids": [-1]}, "input_ids"),
        ({"input_ids": []}, "input_ids"),
        ({"text": 5}, "text"),
        ({"text": "a", "sampling_params": {"max_new_tokens": -1}}, "sampling_params.max_new_tokens"),
        ({"text": "a", "sampling_params": {"temperature": "hot"}}, "sampling_params.temperature"),
        ({"text": "a", "sampling_params": {"sampling_seed": 0.5}}, "sampling_params.sampling_seed"),
        ({"text": "a", "sampling_params": {"json_schema": "{"}}, "sampling_params.json_schema"),
        ({"text": "a", "sampling_params": {"stop_regex": "x"}}, "sampling_params.stop_regex"),
        ({"text": "a", "sampling_params": []}, "sampling_params"),
        ({"text": "a", "logprob_start_len": 0}, "logprob_start_len"),
        ({"text": "a", "return_logprob": True, "top_logprobs_num": 99}, "top_logprobs_num"),
        ({"text": "a", "lora_path": "x"}, "lora_path"),
        ({"text": "a", "image_data": ["x"]}, "image_data"),
    ],
)
def test_generate_refuses(tiny: Server, more: dict[str, Any], param: str) -> None:
    error = tiny.post("/generate", more, 400)
    assert error["param"] == param
    assert "guided" not in error["message"]
    assert "max_tokens" not in error["message"]


def test_a_token_without_text_is_a_piece() -> None:
    """With `ignore_eos` a model may go on with special tokens: their times count as well."""
    tokenizer, _ = load_text(EngineConfig())
    [eos] = list(tokenizer.eos_token_ids)[:1]
    answer = Answer(RequestOutput("x", None, [5]), 0, SamplingParams(ignore_eos=True), [eos], tokenizer)
    choice = _Choice(0, answer)
    for first in (True, False):
        assert choice.take(1) is None
        answer.feed(EngineOutput(request_id="x", token_ids=[eos]), 0.1)
        piece = choice.take(1)
        assert piece is not None
        assert (piece.first, piece.text, piece.token_ids) == (first, "", [eos])


@pytest.mark.parametrize("path", ["/start_profile", "/stop_profile"])
def test_profiling_is_not_offered(tiny: Server, path: str) -> None:
    """Both tools go on without it."""
    assert tiny.http.post(path).status_code == 404
