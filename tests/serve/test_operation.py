"""Metrics, health and keys (kind O of the cases)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest

from sparkrt.engine.config import EngineConfig
from sparkrt.serve import app, engine
from sparkrt.serve.cli import parse
from tests.serve import fake_engine
from tests.serve.harness import Server, running
from tests.serve.test_disconnects import LONG, send, wait_running

CHAT = "/v1/chat/completions"


def test_what_is_counted(tiny: Server) -> None:
    before, answer = tiny.metrics(), tiny.complete(prompt="Once upon a time", max_tokens=7, temperature=0, n=2)
    after = {name: value - before[name] for name, value in tiny.metrics().items() if name in before}
    assert answer["usage"]["completion_tokens"] == 14
    assert after["sparkrt:request_success_total{length}"] == 2
    assert after["sparkrt:generation_tokens_total"] == 14
    assert after["sparkrt:time_to_first_token_seconds_count"] == 2
    assert after["sparkrt:inter_token_latency_seconds_count"] == 12
    assert after["sparkrt:request_time_per_output_token_seconds_count"] == 2
    assert after["sparkrt:e2e_request_latency_seconds_count"] == 2
    assert after["sparkrt:request_generation_tokens_sum"] == 14
    assert after["sparkrt:request_prompt_tokens_sum"] == 2 * answer["usage"]["prompt_tokens"]
    assert after["sparkrt:steps_total"] >= 7
    assert 0 < after["sparkrt:step_host_seconds_total"] < after["sparkrt:step_seconds_total"]
    assert 0 < after["sparkrt:step_gap_seconds_total"] < after["sparkrt:step_seconds_total"]
    assert after["sparkrt:num_preemptions_total"] == 0
    for phase in ("queue", "prefill", "decode", "inference"):
        assert after[f"sparkrt:request_{phase}_time_seconds_count"] == 2
    whole = after["sparkrt:e2e_request_latency_seconds_sum"]
    assert 0 < after["sparkrt:request_decode_time_seconds_sum"] < after["sparkrt:request_inference_time_seconds_sum"] < whole
    assert after["sparkrt:iteration_tokens_total_count"] == after["sparkrt:steps_total"]
    assert after["sparkrt:iteration_tokens_total_sum"] == after["sparkrt:prompt_tokens_total"] + 12
    assert after["sparkrt:iteration_tokens_total_bucket{2.0}"] >= 6
    assert 0 < after["sparkrt:gpu_idle_seconds_total"] < whole
    phases = {phase: before[f"sparkrt:startup_seconds{{{phase}}}"] for phase in ("checkpoint", "weights", "total")}
    assert 0 < phases["weights"] < phases["total"]
    assert before["process_open_fds"] > 0
    assert "sparkrt:inter_token_latency_seconds_bucket{0.001}" in before
    text = tiny.http.get("/metrics").text
    assert 'sparkrt:num_requests_running{engine="0",model_name="sparkrt-tiny"}' in text
    assert re.search(
        r'sparkrt:cache_config_info{block_size="64",.*enable_prefix_caching="True".*num_gpu_blocks="\d+".*} 1\.0', text
    )


def test_the_names_of_the_field(tiny: Server) -> None:
    """What dashboards for vLLM ask for is there, under our prefix, and nothing is below 1 ms only."""
    names = """num_requests_running num_requests_waiting kv_cache_usage_perc prompt_tokens_total generation_tokens_total
        prompt_tokens_cached_total request_success_total num_preemptions_total prefix_cache_queries_total prefix_cache_hits_total
        time_to_first_token_seconds_bucket inter_token_latency_seconds_bucket request_time_per_output_token_seconds_bucket
        e2e_request_latency_seconds_bucket request_queue_time_seconds_bucket request_prefill_time_seconds_bucket
        request_decode_time_seconds_bucket request_inference_time_seconds_bucket iteration_tokens_total_bucket
        request_prompt_tokens_bucket request_generation_tokens_bucket cache_config_info engine_sleep_state
        admission_rejections_total step_host_seconds_total gpu_idle_seconds_total state_cache_usage_perc startup_seconds"""
    samples = re.findall(r"^sparkrt:(\w+)({.*?})? ", tiny.http.get("/metrics").text, re.MULTILINE)
    assert {*names.split()} <= {name for name, _ in samples}
    for name in {name for name, _ in samples if name.endswith("_seconds_bucket")}:
        assert 'le="0.001"' in " ".join(labels for other, labels in samples if other == name), name


def test_gauges_come_back_when_everybody_goes(tiny: Server) -> None:
    """O01, O03: counters only grow, and strangers' model names are no labels."""
    tiny.wait_idle()
    before = tiny.metrics()
    connections = [send(tiny, {**LONG, "stream": True}) for _ in range(6)]
    wait_running(tiny, 6)
    busy = tiny.metrics()
    assert busy["sparkrt:num_requests_running"] == 6
    assert 0 < busy["sparkrt:kv_cache_usage_perc"] <= 1
    for connection in connections:
        connection.close()
    tiny.wait_idle()
    tiny.post(CHAT, {"model": "made-up", "messages": [{"role": "user", "content": "hi"}]}, 404)
    after = tiny.metrics()
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "state_slot_usage_perc"):
        assert after[f"sparkrt:{name}"] == 0
    assert after["sparkrt:request_success_total{abort}"] == before["sparkrt:request_success_total{abort}"] + 6
    assert all(after[name] >= value for name, value in before.items() if name.endswith(("_total", "_count")))
    assert "made-up" not in tiny.http.get("/metrics").text


def test_a_prompt_that_came_before_is_cached(tiny: Server) -> None:
    body = {"prompt": list(range(100, 300)), "max_tokens": 3, "temperature": 0}
    tiny.post("/reset_prefix_cache", None)
    before = tiny.metrics()
    first, second = tiny.complete(**body), tiny.complete(**body)
    assert first["choices"] == second["choices"]
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in (first, second)]
    assert cached == [0, 192]
    after = tiny.metrics()
    for name, tokens in (("prefix_cache_queries", 400), ("prefix_cache_hits", 192), ("prompt_tokens_cached", 192)):
        assert after[f"sparkrt:{name}_total"] - before[f"sparkrt:{name}_total"] == tokens
    assert 0 < after["sparkrt:state_cache_usage_perc"] <= 1
    tiny.post("/reset_prefix_cache", None)
    assert tiny.complete(**body)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_a_salt_keeps_prompts_apart(tiny: Server) -> None:
    """X10: another salt finds nothing, whoever asks and however."""
    tiny.post("/reset_prefix_cache", None)
    messages = [{"role": "user", "content": "a very private matter " * 30}]
    found = list[bool]()
    for salt in ("one", "two", None, "one"):
        body = {"messages": messages, "max_tokens": 1, "cache_salt": salt}
        found.append(tiny.post(CHAT, body)["usage"]["prompt_tokens_details"]["cached_tokens"] > 0)
    assert found == [False, False, False, True]
    for path, prompt in ((CHAT, {"messages": messages}), ("/v1/completions", {"prompt": "x"}), ("/v1/responses", {"input": "x"})):
        for salt in ("", 5):
            assert tiny.post(path, {**prompt, "cache_salt": salt}, 400)["param"] == "cache_salt"


def test_health_of_an_engine_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """O04: silent for too long, /health is 503; 200 again when it goes on."""
    monkeypatch.setattr(engine, "PING_INTERVAL", 0.01)
    monkeypatch.setattr(app, "SILENCE", 0.5)

    async def watch() -> list[int]:
        with contextlib.closing(engine.EngineClient(EngineConfig(), fake_engine.load, lambda *phase: None)) as client:
            client.start()
            client.attach()
            await client.loaded
            seen, serving, pid = list[int](), SimpleNamespace(client=client), client._process.pid
            request: Any = None
            for number, status in ((signal.SIGCONT, 200), (signal.SIGSTOP, 503), (signal.SIGCONT, 200)):
                os.kill(pid, number)
                while True:
                    answer = await app.health(serving, None, request)
                    if getattr(answer, "status_code", 200) == status:
                        break
                    await asyncio.sleep(0.01)
                seen.append(status)
            await client.stop()
            return seen

    assert asyncio.run(watch()) == [200, 503, 200]


def test_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("from-file\nand-another\n", encoding="utf-8")
    argv = ["--api-key", "one", "zwei-ü", "--api-key-file", str(file), "--allowed-origins", '["*"]']
    server = Server(*argv, module="tests.serve.fake_engine")
    try:
        server.wait_listening()
        for path in ("/v1/models", "/metrics", "/server_info", "/openapi.json", "/nothing", CHAT):
            for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic one"}, {"x-api-key": ""}):
                response = server.http.request("POST" if path == CHAT else "GET", path, headers=headers, content=b"x" * 10)
                error = response.json()["error"]
                assert (response.status_code, error["code"]) == (401, "invalid_api_key")
                assert error["type"] == "AuthenticationError"
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            response = server.http.post(path, json={})
            body = response.json()
            assert (response.status_code, body["type"], body["error"]["type"]) == (401, "error", "authentication_error")
        for path, status, kind in (("/v1/messages", 405, "invalid_request_error"), ("/v1/messages/x", 404, "not_found_error")):
            response = server.http.get(path, headers={"x-api-key": "one"})
            body = response.json()
            assert (response.status_code, body["type"], body["error"]["type"]) == (status, "error", kind)
        for path in ("/health", "/ready"):  # load balancers carry no key
            assert server.http.get(path).status_code in (200, 503)
        origin = {"origin": "http://a.example", "access-control-request-method": "POST"}
        assert server.http.options(CHAT, headers=origin).status_code == 200
        for key in ("one", "zwei-ü", "from-file", "and-another"):
            for header in ({"authorization": f"Bearer {key}"}, {"x-api-key": key}):
                encoded = {name.encode(): value.encode() for name, value in header.items()}
                assert server.http.get("/v1/models", headers=encoded).status_code == 200
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="one", max_retries=0) as client:
            assert client.models.list().data
            with pytest.raises(openai.AuthenticationError):
                client.with_options(api_key="two").models.list()
    finally:
        server.kill()


@pytest.mark.parametrize("argv", [["--api-key", ""], ["--api-key-file", "/nowhere"], ["--api-key-file", "/dev/null"]])
def test_keys_that_are_none(argv: list[str]) -> None:
    with pytest.raises(SystemExit):
        parse(argv)


def test_no_keys_no_questions(fake: Server) -> None:
    assert fake.http.get("/v1/models", headers={"authorization": "Bearer anything"}).status_code == 200
    with running("--api-key", "k", module="tests.serve.fake_engine", key="k") as server:
        server.check_alive()
