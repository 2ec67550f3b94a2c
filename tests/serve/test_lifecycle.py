"""From the command line to the exit code: starting, failing, being stopped, losing the engine."""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from sparkrt.serve.cli import parse
from tests.serve import ROOT
from tests.serve.harness import PATIENCE, Server, events, running

FAKE = "tests.serve.fake_engine"
ANY = ("--port", "0")  # that of the other tests of this machine must not be in the way
FOREVER = {"prompt": "FOREVER", "max_tokens": 4000, "stream": True}


def run(*argv: str, module: str = "sparkrt.serve") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", module, *argv], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=False
    )


def fails(code: int, *argv: str, module: str = "sparkrt.serve") -> str:
    """The one line that a failing command ends with."""
    done = run(*argv, module=module)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    *_, line = done.stderr.strip().splitlines()
    return line


def engine_pid(server: Server) -> int:
    """The child that is the engine and not multiprocessing's resource tracker."""
    listed = subprocess.run(["ps", "-axww", "-o", "pid=,ppid=,args="], capture_output=True, text=True, check=True).stdout
    rows = (line.split(maxsplit=2) for line in listed.splitlines())
    [pid] = [int(pid) for pid, parent, args in rows if int(parent) == server.process.pid and "spawn_main" in args]
    return pid


def wait_loading(server: Server) -> None:
    while "weights" not in server.log:
        assert server.process.poll() is None


def test_summary(tiny: Server) -> None:
    assert re.search(r"model +sparkrt-tiny \(Qwen3_5MoeForCausalLM\)", tiny.summary)
    assert re.search(r"dtype +float32", tiny.summary)
    assert re.search(r"weights +[\d.]+ MiB", tiny.summary)
    assert re.search(r"KV cache +.* tokens", tiny.summary)
    assert re.search(r"ready +in [\d.]+ s at http://127\.0\.0\.1:\d+/v1", tiny.summary)


def test_version_and_readiness(tiny: Server) -> None:
    assert set(tiny.get("/version")) == {"version"}
    assert tiny.get("/ready") == {"status": "ready"}
    assert tiny.get("/health") == {"status": "ok"}
    info = tiny.get("/server_info")
    assert info["config"]["block_size"] == "64"
    assert info["model"]["architecture"] == "Qwen3_5MoeForCausalLM"


def test_prompts_are_not_logged(tiny: Server) -> None:
    tiny.complete(prompt="a very private matter", max_tokens=1)
    tiny.post("/v1/completions", {"prompt": "a very private matter", "max_tokens": -1}, 400)
    assert "private" not in tiny.log + tiny.summary


def test_request_log_without_prompts() -> None:
    with running("--enable-log-requests", module=FAKE) as server:
        server.complete(prompt="a very private matter", max_tokens=3, stop="secret")
        assert "3 tokens in" in server.log
        assert "private" not in server.log
        assert "secret" not in server.log


def test_wrong_command_lines() -> None:
    for argv, words in [
        (["--no-such-flag"], "--no-such-flag"),
        (["--port", "70000"], "'70000' is not a port"),
        (["--port", "x"], "--port"),
        (["--max-model-len", "many"], "--max-model-len must be a positive number"),
        (["--max-num-seqs", "0"], "--max-num-seqs"),
        (["--block-size", "7"], "--block-size"),
        (["--dtype", "int4"], "--dtype"),
        (["--gpu-memory-utilization", "2"], "--gpu-memory-utilization must be in (0, 1]"),
        (["--tensor-parallel-size", "2"], "--tensor-parallel-size 2"),
        (["--kv-cache-dtype", "fp8"], "--kv-cache-dtype fp8"),
        (["--response-store-bytes", "-1"], "'-1' is not a number of bytes"),
        (["--default-chat-template-kwargs", "[]"], "is not a JSON object"),
        (["--override-generation-config", "{"], "is not JSON"),
        (["a", "--model", "b"], "two models named"),
        (["a", "b"], "b"),
    ]:
        line = fails(2, *argv)
        assert words in line, argv
        assert line.startswith("sparkrt serve: error: ")


def test_help_and_version() -> None:
    done = run("--help")
    assert done.returncode == 0
    for flag in ("--served-model-name", "--max-model-len", "--shutdown-timeout"):
        assert flag in done.stdout
    command = "import sys; from sparkrt.serve.cli import main; sys.exit(main(sys.argv[1:]))"
    for argv, code in ((["--version"], 0), (["--help"], 0), (["dance"], 2), ([], 2), (["serve", "--port", "x"], 2)):
        done = subprocess.run([sys.executable, "-c", command, *argv], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == code
        assert "Traceback" not in done.stderr


def test_models_that_cannot_be_served(tmp_path: Path) -> None:
    assert "no-such-folder" in fails(1, str(tmp_path / "no-such-folder"), *ANY)
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    assert "config.json" in fails(1, str(tmp_path), *ANY)
    assert "absent.jinja: no such file" in fails(1, "--chat-template", str(tmp_path / "absent.jinja"), *ANY, module=FAKE)
    store = str(tmp_path / "absent" / "responses.db")
    assert fails(1, "--response-store", store, *ANY, module=FAKE).endswith(f"--response-store {store}: No such file or directory")
    assert fails(1, "load-error", *ANY, module=FAKE).endswith("model.safetensors: tensor x has shape [2], expected [3]")
    assert fails(1, "load-bug", *ANY, module=FAKE).endswith("loading failed: ZeroDivisionError: a bug of two lines")


def test_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"cannot listen on 127.0.0.1:{port}" in fails(1, "--port", str(port))


@pytest.mark.parametrize("everybody", [False, True])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopping_an_idle_server(number: int, everybody: bool) -> None:
    """`everybody`: the engine process gets the signal as well, as from a terminal or an init system."""
    server = Server(module=FAKE)
    try:
        server.wait_ready()
        engine = engine_pid(server)
        if everybody:
            os.kill(engine, number)
        assert server.stop(number) == 0
        with pytest.raises(ProcessLookupError):
            os.kill(engine, 0)
        assert "Traceback" not in server.log
    finally:
        server.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopping_while_loading(number: int) -> None:
    server = Server("load-forever", module=FAKE)
    try:
        wait_loading(server)
        os.kill(server.process.pid, number)
        assert server.stop(number) == 0
        assert "Traceback" not in server.log
    finally:
        server.kill()


def test_stopping_waits_for_what_runs() -> None:
    """Finished within the timeout: the whole answer. Meanwhile the server is alive, not ready, and takes nothing new."""
    server = Server("--shutdown-timeout", "30", module=FAKE)
    try:
        server.wait_ready()
        body = {"prompt": "FOREVER", "max_tokens": 300, "stream": True}
        with server.http.stream("POST", "/v1/completions", json=body) as response:
            parts = response.iter_text()
            first = next(parts)
            server.process.send_signal(signal.SIGTERM)
            while server.http.get("/ready").status_code == 200:
                pass
            assert server.http.get("/health").status_code == 200
            assert "shutting down" in server.post("/v1/completions", {"prompt": "hi"}, 503)["message"]
            chunks = events(first + "".join(parts))
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        assert server.stop() == 0
    finally:
        server.kill()


@pytest.mark.parametrize("twice", [False, True])
def test_stopping_fails_what_takes_too_long(twice: bool) -> None:
    """The timeout, or a second signal, ends running streams with an error; the exit code is still 0."""
    server = Server("--shutdown-timeout", "3600" if twice else "0", module=FAKE)
    try:
        server.wait_ready()
        with server.http.stream("POST", "/v1/completions", json=FOREVER) as response:
            parts = response.iter_text()
            first = next(parts)
            server.process.send_signal(signal.SIGINT)
            if twice:
                while server.http.get("/ready").status_code == 200:  # until the first signal has been acted on
                    pass
                server.process.send_signal(signal.SIGINT)
            chunks = events(first + "".join(parts))
        assert chunks[-1]["error"]["message"] == "the server is shutting down"
        assert chunks[-1]["error"]["code"] == 503
        assert server.stop() == 0
        assert "Traceback" not in server.log
    finally:
        server.kill()


@pytest.mark.parametrize(
    ("word", "reason"), [("BREAK", "the device is lost"), ("RAISE", "ZeroDivisionError: a bug"), (None, "signal 9")]
)
def test_engine_death(word: str | None, reason: str) -> None:
    """In-flight requests get an error, /health says why, new requests are refused, the process exits 1."""
    server = Server(module=FAKE)
    try:
        server.wait_ready()
        with server.http.stream("POST", "/v1/completions", json=FOREVER) as response:
            parts = response.iter_text()
            first = next(parts)
            if word is None:
                os.kill(engine_pid(server), signal.SIGKILL)
            else:
                server.post("/v1/completions", {"prompt": word}, 500)
            chunks = events(first + "".join(parts))
        assert chunks[-1]["error"]["type"] == "InternalServerError"
        health = server.http.get("/health")
        assert health.status_code == 503
        assert reason in health.json()["reason"]
        server.post("/v1/completions", {"prompt": "hi"}, 500)
        assert server.process.wait(PATIENCE) == 1
        assert reason in server.log
    finally:
        server.kill()


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="waiting for another's child needs pidfd_open")
def test_the_engine_follows_its_parent() -> None:
    server = Server(module=FAKE)
    try:
        server.wait_ready()
        engine = os.pidfd_open(engine_pid(server))
        server.process.kill()
        assert select.select([engine], [], [], PATIENCE)[0]
        os.close(engine)
    finally:
        server.kill()


def test_requests_that_come_while_loading_wait(tmp_path: Path) -> None:
    """The port is open before the model is there: alive, not ready, and early requests are answered when it is."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    server = Server(f"gate:{gate}", module=FAKE, port=port)
    try:
        wait_loading(server)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE) as client, ThreadPoolExecutor(1) as pool:
            assert client.get("/health").status_code == 200
            assert client.get("/ready").status_code == 503
            early = pool.submit(client.post, "/v1/completions", json={"prompt": "hi", "max_tokens": 2})
            gate.write_bytes(b"open")
            assert early.result().status_code == 200
            assert client.get("/ready").status_code == 200
    finally:
        server.kill()


def test_a_full_queue() -> None:
    """Four run, one may wait: the sixth is told to come back."""
    with running("--max-num-queued-reqs", "1", "--max-num-seqs", "4") as server:
        forever = {"prompt": "hi", "max_tokens": 900, "ignore_eos": True, "stream": True}
        with server.http.stream("POST", "/v1/completions", json={**forever, "n": 5}):
            error = server.post("/v1/completions", {"prompt": "hi"}, 503)
            assert error["type"] == "ServiceUnavailableError"
            assert "1 requests may wait" in error["message"]
            assert server.metrics()["sparkrt:admission_rejections_total{queue_full}"] == 1
        while server.stats()["running"]:
            pass
        server.check_alive()


def test_a_request_that_takes_too_long_ends_with_an_error(fake: Server) -> None:
    """What the engine says of a deadline reaches the client, streamed or not; its clock is tested with the engine."""
    assert parse(["--request-timeout", "1"]).engine.request_timeout == 1.0
    assert "not done within 1 s" in fake.post("/v1/completions", {"prompt": "LATE"}, 503)["message"]
    chunks = fake.stream("/v1/completions", prompt="LATE")
    assert "not done within 1 s" in chunks[-1]["error"]["message"]
    fake.check_alive()


def test_fewer_chunks_on_request() -> None:
    with running("--stream-interval", "10", module=FAKE) as server:
        chunks = server.stream("/v1/completions", prompt="hi", max_tokens=100, return_token_ids=True)
        sizes = [len(chunk["choices"][0]["token_ids"]) for chunk in chunks]
        assert sizes[0] == 1  # the first comes at once
        assert all(size >= 10 for size in sizes[1:-1])
        whole = server.complete(prompt="hi", max_tokens=100)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"]


def test_flags_without_effect_say_so() -> None:
    with running("--trust-remote-code", "--enable-prefix-caching", "--swap-space", "4", module=FAKE) as server:
        assert "--trust-remote-code has no effect: code from a checkpoint is never run" in server.summary
        assert "--swap-space has no effect" in server.summary


def test_cors() -> None:
    with running("--allowed-origins", '["http://a.example"]', module=FAKE) as server:
        response = server.http.get("/health", headers={"origin": "http://a.example"})
        assert response.headers["access-control-allow-origin"] == "http://a.example"
