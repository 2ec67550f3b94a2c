"""Answers by the letter, from a model whose tokens and log-probabilities are known (kind A and U of the cases)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serve.conftest import SCRIPT, Reciter
from tests.serve.harness import Server, strict

SCRIPTED, OTHER = -0.006217, -11.319926  # log-probabilities of the reciting model
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
GREEDY: dict[str, Any] = {"prompt": "\n", "temperature": 0, "max_tokens": 64}
USER = [{"role": "user", "content": "Go on"}]


def joined(chunks: list[Any], key: str = "text") -> str:
    return "".join((c[key] if key == "text" else c["delta"].get(key)) or "" for chunk in chunks for c in chunk["choices"])


def test_recites(reciter: Reciter) -> None:
    answer = reciter.server.complete(**GREEDY)
    assert answer["choices"][0]["text"] == SCRIPT
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == len(reciter.ids) + 1  # the end of turn counts
    assert reciter.server.chat("Go on", temperature=0)["choices"][0]["message"] == {"role": "assistant", "content": SCRIPT}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": True}])
def test_usage_in_streams(reciter: Reciter, path: str, options: dict[str, bool] | None) -> None:
    """A01, A03"""
    body = GREEDY if path == COMPLETIONS else {"messages": USER, "temperature": 0}
    more = {} if options is None else {"stream_options": options}
    chunks = reciter.server.stream(path, **body, **more)
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"text_completion" if path == COMPLETIONS else "chat.completion.chunk"}
    assert all(len(chunk["choices"]) == 1 for chunk in chunks[:-1])
    with_usage = [chunk for chunk in chunks if chunk.get("usage")]
    if options != {"include_usage": True}:
        assert with_usage == []
        return
    assert with_usage == [chunks[-1]]
    assert chunks[-1]["choices"] == []
    whole = reciter.server.post(path, body)["usage"]
    assert chunks[-1]["usage"] == whole
    assert whole["total_tokens"] == whole["prompt_tokens"] + whole["completion_tokens"]


def test_usage_on_every_chunk(reciter: Reciter) -> None:
    chunks = reciter.server.stream(COMPLETIONS, **GREEDY, stream_options={"include_usage": True, "continuous_usage_stats": True})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == len(reciter.ids) + 1


@pytest.mark.parametrize("n", [1, 3])
def test_usage_counts_a_prompt_once(reciter: Reciter, n: int) -> None:
    """A02"""
    one = reciter.server.complete(**GREEDY)["usage"]
    many = reciter.server.complete(**GREEDY, n=n)["usage"]
    assert many["prompt_tokens"] == one["prompt_tokens"]
    assert many["completion_tokens"] == n * one["completion_tokens"]
    chunks = reciter.server.stream(COMPLETIONS, **GREEDY, n=n, stream_options={"include_usage": True})
    assert chunks[-1]["usage"] == many


@pytest.mark.parametrize("n", [1, 2])
def test_roles_and_finish_reasons_in_streams(reciter: Reciter, n: int) -> None:
    """A03"""
    chunks = reciter.server.stream(CHAT, messages=USER, temperature=0, n=n)
    for index in range(n):
        choices = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert [c["delta"].get("role") for c in choices] == ["assistant"] + [None] * (len(choices) - 1)
        assert [c["finish_reason"] for c in choices] == [None] * (len(choices) - 1) + ["stop"]
        assert "".join(c["delta"].get("content", "") for c in choices) == SCRIPT


@pytest.mark.parametrize("stream", [False, True])
def test_scoring_a_prompt(reciter: Reciter, stream: bool) -> None:
    """A04: the prompt's own log-probabilities, nothing generated."""
    ids = reciter.ids[:4]
    body = {"prompt": [*ids, ids[0]], "echo": True, "max_tokens": 0, "logprobs": 1}
    if stream:
        [chunk, last] = reciter.server.stream(COMPLETIONS, **body, stream_options={"include_usage": True})
        answer = {**chunk, "usage": last["usage"]}
    else:
        answer = reciter.server.complete(**body)
    [choice] = answer["choices"]
    assert choice["text"] == SCRIPT[:4] + SCRIPT[0]
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == [*SCRIPT[:4], SCRIPT[0]]
    assert logprobs["text_offset"] == [0, 1, 2, 3, 4]
    assert logprobs["token_logprobs"] == [None, *[pytest.approx(x, abs=1e-4) for x in [SCRIPTED] * 3 + [OTHER]]]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["top_logprobs"][4][SCRIPT[4]] == pytest.approx(SCRIPTED, abs=1e-4)


def test_echo_goes_before_the_answer(reciter: Reciter) -> None:
    answer = reciter.server.complete(prompt=["x\n", "\n"], echo=True, max_tokens=3, temperature=0, logprobs=0)
    assert [choice["text"] for choice in answer["choices"]] == ["x\nabc", "\nabc"]
    assert [len(choice["logprobs"]["tokens"]) for choice in answer["choices"]] == [5, 4]
    assert answer["choices"][0]["logprobs"]["text_offset"] == [0, 1, 2, 3, 4]
    assert joined(reciter.server.stream(COMPLETIONS, prompt="x\n", echo=True, max_tokens=3, temperature=0)) == "x\nabc"
    assert reciter.server.complete(prompt="x\n", echo=True, max_tokens=0)["choices"][0]["text"] == "x\n"


def test_prompt_logprobs(reciter: Reciter) -> None:
    ids = reciter.ids[:3]
    choice = reciter.server.complete(prompt=ids, max_tokens=1, prompt_logprobs=1)["choices"][0]
    assert choice["prompt_logprobs"][0] is None
    entry = choice["prompt_logprobs"][1][str(ids[1])]
    assert entry == {"logprob": pytest.approx(SCRIPTED, abs=1e-4), "rank": 1, "decoded_token": SCRIPT[1]}
    answer = reciter.server.chat(prompt_logprobs=0, max_tokens=1)
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]


def test_logprobs_without_alternatives(reciter: Reciter) -> None:
    """A05"""
    completion = reciter.server.complete(**GREEDY, logprobs=0)["choices"][0]["logprobs"]
    assert completion["token_logprobs"] == pytest.approx([SCRIPTED] * (len(reciter.ids) + 1), abs=1e-4)
    assert all(len(top) == 1 for top in completion["top_logprobs"])  # the chosen token itself
    chat = reciter.server.chat(logprobs=True, temperature=0)
    items = chat["choices"][0]["logprobs"]["content"]
    assert [item["logprob"] for item in items] == pytest.approx([SCRIPTED] * chat["usage"]["completion_tokens"], abs=1e-4)
    assert all(item["top_logprobs"] == [] for item in items)


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_parts_of_characters(reciter: Reciter, stream: bool) -> None:
    """U01: tokens that are bytes of one character stay apart, and their bytes join to the text."""
    body = {"messages": USER, "temperature": 0, "logprobs": True}
    if stream:
        chunks = reciter.server.stream(CHAT, **body)
        items = [item for chunk in chunks for c in chunk["choices"] for item in (c["logprobs"] or {"content": []})["content"]]
    else:
        items = reciter.server.post(CHAT, body)["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(item["bytes"]) for item in items[:-1]).decode() == SCRIPT
    assert "�" not in "".join(item["token"] for item in items)
    assert r"bytes:\xf0" in {item["token"] for item in items}
    offsets = reciter.server.complete(**GREEDY, logprobs=0)["choices"][0]["logprobs"]["text_offset"]
    assert offsets[-1] == len(SCRIPT)
    assert offsets == sorted(offsets)


def test_no_half_characters_in_streams(reciter: Reciter) -> None:
    """U01"""
    for path, key, body in ((COMPLETIONS, "text", GREEDY), (CHAT, "content", {"messages": USER, "temperature": 0})):
        chunks = reciter.server.stream(path, **body)
        assert all("�" not in joined([chunk], key) for chunk in chunks)
        assert joined(chunks, key) == SCRIPT
    cut = reciter.server.complete(prompt="\n", temperature=0, max_tokens=SCRIPT.encode().index("你".encode()) + 1)
    assert cut["choices"][0]["text"] == SCRIPT[: SCRIPT.index("你")] + "�"  # cut inside a character: once, at the very end


def test_null_equals_absent(reciter: Reciter) -> None:
    """A06"""
    from sparkrt.serve.protocol import REFUSED, ChatBody, CompletionBody

    nulls = dict.fromkeys([*CompletionBody.__struct_fields__, *REFUSED[CompletionBody]])
    body = {**nulls, "prompt": "\n", "temperature": 0}
    assert reciter.server.post(COMPLETIONS, body)["choices"] == reciter.server.complete(prompt="\n", temperature=0)["choices"]
    nulls = dict.fromkeys([*ChatBody.__struct_fields__, *REFUSED[ChatBody]])
    message = {"role": "user", "content": "Go on", "name": None, "tool_calls": None, "tool_call_id": None, "refusal": None}
    body = {**nulls, "messages": [message], "temperature": 0}
    assert reciter.server.post(CHAT, body)["choices"] == reciter.server.chat("Go on", temperature=0)["choices"]
    tokens = {"prompt": "ab", "messages": None, "add_special_tokens": None, "return_token_strs": None, "model": None}
    assert reciter.server.post("/tokenize", tokens) == reciter.server.post("/tokenize", {"prompt": "ab"})


@pytest.mark.parametrize("n", [1, 2])
def test_several_prompts(reciter: Reciter, n: int) -> None:
    """A08: choice i * n + j is the j-th answer of prompt i, however often."""
    prompts = [[reciter.ids[0]], [reciter.ids[4]], [reciter.ids[2]]]
    expected = [SCRIPT[i + 1 :] for i in (0, 4, 2) for _ in range(n)]
    for _ in range(10):
        choices = reciter.server.complete(prompt=prompts, n=n, temperature=0, max_tokens=64)["choices"]
        assert [choice["index"] for choice in choices] == list(range(len(expected)))
        assert [choice["text"] for choice in choices] == expected
        texts, ends = [""] * len(expected), [0] * len(expected)
        for chunk in reciter.server.stream(COMPLETIONS, prompt=prompts, n=n, temperature=0, max_tokens=64):
            [choice] = chunk["choices"]
            texts[choice["index"]] += choice["text"]
            ends[choice["index"]] += choice["finish_reason"] is not None
        assert texts == expected
        assert ends == [1] * len(expected)


def test_minus_infinity(fake: Server) -> None:
    """A14: the fake engine's log-probabilities are all minus infinity or not a number."""
    chat = fake.chat(logprobs=True, top_logprobs=2, max_tokens=2)["choices"][0]["logprobs"]["content"]
    assert [item["logprob"] for item in chat] == [-9999.0] * 2
    assert [top["logprob"] for item in chat for top in item["top_logprobs"]] == [-9999.0] * 4
    completion = fake.complete(prompt="a", logprobs=2, max_tokens=2)["choices"][0]["logprobs"]
    assert completion["token_logprobs"] == [-9999.0] * 2
    assert all(value == -9999.0 for top in completion["top_logprobs"] for value in top.values())


def test_logprobs_of_what_is_forbidden(reciter: Reciter) -> None:
    """A14 with the real engine: top_k 1, and a bias that takes the scripted token away."""
    banned = str(reciter.ids[0])
    choice = reciter.server.complete(**{**GREEDY, "max_tokens": 1}, top_k=1, logprobs=5)["choices"][0]
    assert choice["text"] == SCRIPT[0]
    answer = reciter.server.post(COMPLETIONS, {**GREEDY, "max_tokens": 1, "logit_bias": {banned: -100}, "logprobs": 5})
    assert answer["choices"][0]["text"] != SCRIPT[0]
    echo = {**GREEDY, "max_tokens": 1, "echo": True, "logit_bias": {banned: -100}, "logprobs": 5}
    assert strict(reciter.server.http.post(COMPLETIONS, json=echo).content)["choices"][0]["logprobs"]["token_logprobs"][0] is None


def test_logit_bias(reciter: Reciter) -> None:
    """A10, what works"""
    forced = reciter.ids[5]
    text = reciter.server.complete(**{**GREEDY, "max_tokens": 1}, logit_bias={str(forced): 100})["choices"][0]["text"]
    assert text == SCRIPT[5]


def test_context(reciter: Reciter) -> None:
    """A16: one token short of the context is one token; the context is none, said before any byte of a stream."""
    server, context = reciter.server, 192
    almost = server.complete(prompt=[10] * (context - 1), max_tokens=5, temperature=0)
    assert almost["usage"]["completion_tokens"] == 1
    assert almost["choices"][0]["finish_reason"] == "length"
    for count in (context, context + 1, 20 * context):
        for stream in (False, True):
            error = server.post(COMPLETIONS, {"prompt": [10] * count, "stream": stream}, 400)
            assert error["code"] == "context_length_exceeded"
            assert str(context) in error["message"]
            assert str(count) in error["message"]
    for length in (context, 600 * context):  # the second is refused without being tokenized
        error = server.post(COMPLETIONS, {"prompt": "x" * length}, 400)
        assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    error = server.post(CHAT, {"messages": [{"role": "user", "content": "x" * context}], "stream": True}, 400)
    assert error["code"] == "context_length_exceeded"
    capped = server.complete(prompt=[10], max_tokens=context, ignore_eos=True, temperature=0)  # capped at what is left
    assert capped["usage"]["total_tokens"] == context


@pytest.mark.parametrize("length", range(1, 8))
def test_stop_across_tokens(reciter: Reciter, length: int) -> None:
    """A23: nothing of a stop string is sent, a false start is; streamed or not."""
    stop = "DEFGHIJ"[:length]
    body = {**GREEDY, "stop": stop, "stream_options": {"include_usage": True}}
    whole = reciter.server.complete(**GREEDY, stop=stop)
    [choice] = whole["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("abc", "stop", stop)
    assert whole["usage"]["completion_tokens"] == 3 + length  # up to the token that completed it
    *chunks, last = reciter.server.stream(COMPLETIONS, **body)
    assert joined(chunks) == "abc"
    assert [c["finish_reason"] for chunk in chunks for c in chunk["choices"]][-1] == "stop"
    assert last["usage"] == whole["usage"]
    for false in (stop + "x", "zzz", SCRIPT + "!"):
        assert joined(reciter.server.stream(COMPLETIONS, **GREEDY, stop=[false])) == SCRIPT
    shown = reciter.server.complete(**GREEDY, stop=[stop], include_stop_str_in_output=True)["choices"][0]["text"]
    assert shown == "abc" + stop
    reciter.server.wait_idle()  # the engine was told


def test_stop_token_ids(reciter: Reciter) -> None:
    stop = reciter.ids[3]
    [choice] = reciter.server.complete(**GREEDY, stop_token_ids=[stop])["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("abc", "stop", stop)
    assert reciter.server.complete(**GREEDY, stop_token_ids=[stop], min_tokens=6)["choices"][0]["text"] != "abc"


def test_stop_cuts_logprobs_too(reciter: Reciter) -> None:
    answer = reciter.server.complete(**GREEDY, stop="EF", logprobs=1)
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == answer["usage"]["completion_tokens"] == 6


def test_returned_token_ids(reciter: Reciter) -> None:
    prompt = reciter.server.post("/tokenize", {"prompt": "\n"})["tokens"]
    [choice] = reciter.server.complete(**GREEDY, return_token_ids=True)["choices"]
    assert choice["prompt_token_ids"] == prompt
    assert choice["token_ids"] == [*reciter.ids, reciter.eos]
    chunks = reciter.server.stream(CHAT, messages=USER, temperature=0, return_token_ids=True)
    assert chunks[0]["prompt_token_ids"]
    assert [i for chunk in chunks for c in chunk["choices"] for i in c.get("token_ids", [])] == [*reciter.ids, reciter.eos]


def test_special_tokens_shown_on_request(reciter: Reciter) -> None:
    text = reciter.server.complete(
        **GREEDY, skip_special_tokens=False, include_stop_str_in_output=True
    )["choices"][0]["text"]  # fmt: skip
    assert text == SCRIPT + "<|im_end|>"


def test_models_and_aliases(reciter: Reciter) -> None:
    assert [model["id"] for model in reciter.server.get("/v1/models")["data"]] == ["reciter", "alias"]
    assert reciter.server.get("/v1/models/alias")["max_model_len"] == 192
    assert reciter.server.complete(**GREEDY, model="alias")["model"] == "reciter"  # the first name is echoed


def test_continuing_the_last_message(reciter: Reciter) -> None:
    messages = [*USER, {"role": "assistant", "content": "abcD"}]
    answer = reciter.server.post(CHAT, {"messages": messages, "temperature": 0, "continue_final_message": True})
    whole = reciter.server.post("/tokenize", {"messages": messages, "continue_final_message": True, "return_token_strs": True})
    assert answer["usage"]["prompt_tokens"] == whole["count"]
    assert "".join(whole["token_strs"]).endswith("abcD")
    both = {"messages": messages, "continue_final_message": True, "add_generation_prompt": True}
    assert reciter.server.post(CHAT, both, 400)["param"] == "continue_final_message"


def test_tokenize_and_back(reciter: Reciter) -> None:
    found = reciter.server.post("/tokenize", {"prompt": "ab 你", "return_token_strs": True})
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert found["max_model_len"] == 192
    assert reciter.server.post("/detokenize", {"tokens": found["tokens"]}) == {"prompt": "ab 你"}
    chat = reciter.server.post("/tokenize", {"messages": USER})
    assert reciter.server.post("/detokenize", {"tokens": chat["tokens"]})["prompt"].endswith("<|im_start|>assistant\n")
    assert chat["count"] == reciter.server.chat("Go on", max_tokens=1)["usage"]["prompt_tokens"]
    assert reciter.server.post("/tokenize", {"prompt": "a"})["token_strs"] is None


@pytest.mark.parametrize("stream", [False, True])
def test_seeds(dice: Server, stream: bool) -> None:
    """A09: a seed decides, not the neighbours. Every draw of this model is uniform, so any slip shows."""
    from concurrent.futures import ThreadPoolExecutor

    def draw(seed: int | None) -> str:
        body = {"prompt": "roll", "temperature": 1, "max_tokens": 12, "top_k": -1, "top_p": 1, "seed": seed}
        return joined(dice.stream(COMPLETIONS, **body)) if stream else str(dice.complete(**body)["choices"][0]["text"])

    alone = {seed: draw(seed) for seed in range(8)}
    assert len(set(alone.values())) == 8
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(draw, [3, None, None, 3, None, 5, None, None]))
    assert together[0] == together[3] == alone[3]
    assert together[5] == alone[5]
    assert len({together[i] for i in (1, 2, 4, 6, 7)}) == 5
    many = dice.complete(prompt="roll", temperature=1, max_tokens=12, top_k=-1, seed=3, n=4)["choices"]
    again = dice.complete(prompt="roll", temperature=1, max_tokens=12, top_k=-1, seed=3, n=4)["choices"]
    assert many == again
    assert len({choice["text"] for choice in many}) == 4
    assert many[0]["text"] == alone[3]


def test_openapi(reciter: Reciter) -> None:
    document = reciter.server.get("/openapi.json")
    assert document["openapi"].startswith("3.1")
    assert set(document["paths"]["/v1/chat/completions"]) == {"post"}
    refs = [node["$ref"] for node in _walk(document) if isinstance(node.get("$ref"), str)]
    assert refs
    for ref in refs:
        node = document
        for key in ref.removeprefix("#/").split("/"):
            node = node[key]
    properties = document["components"]["schemas"]["ChatBody"]["properties"]
    assert {"messages", "tools", "max_completion_tokens", "top_k"} <= set(properties)


def _walk(node: Any) -> Any:
    if isinstance(node, dict):
        yield node
        for value in node.values():
            yield from _walk(value)
    elif isinstance(node, list):
        for value in node:
            yield from _walk(value)
