"""Request ids, the access log, ending requests from outside, sleep; and the server behind sockets, certificates and proxies."""

from __future__ import annotations

import json
import re
import socket
import ssl
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.serve.harness import PATIENCE, Server, events, running, strict
from tests.serve.test_disconnects import LONG, wait_running
from tests.serve.test_lifecycle import FAKE, fails

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def sleeper() -> Iterator[Server]:
    with running("--enable-sleep-mode", "--max-num-seqs", "8") as server:
        yield server


# --- request ids and the access log ---------------------------------------------------------------------------------------


def test_request_ids(fake: Server) -> None:
    for path in ("/health", "/v1/models", "/nothing"):
        assert fake.http.get(path, headers={"x-request-id": "trace-1:a/b"}).headers["x-request-id"] == "trace-1:a/b"
    ours = [fake.http.get("/health").headers["x-request-id"] for _ in range(2)]
    assert len({*ours}) == 2
    for strange in ("", "x" * 129, "a b", "ä", "<script>"):
        found = fake.http.get("/health", headers={b"x-request-id": strange.encode()}).headers["x-request-id"]
        assert re.fullmatch("[0-9a-f]{32}", found)
    with openai.OpenAI(base_url=f"{fake.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as client:
        completion = client.completions.create(model=fake.model, prompt="hi", extra_headers={"X-Request-Id": "mine"})
        assert completion._request_id == "mine"


def test_the_access_log(tmp_path: Path) -> None:
    """A line for every request, refused and broken-off ones too; no prompt, answer, key or query in any of them."""
    path = tmp_path / "access.jsonl"
    path.write_text('{"id": "from before"}\n', encoding="utf-8")
    with running("--access-log", str(path), "--api-key", "s3cret", module=FAKE, key="s3cret") as server:
        body = {"prompt": "a very private matter", "max_tokens": 5, "n": 2, "stop": "private"}
        server.http.post(COMPLETIONS, json=body, headers={"x-request-id": "whole"})
        server.http.post(COMPLETIONS, json={**body, "stream": True}, headers={"x-request-id": "stream"})
        server.http.post(COMPLETIONS, json={**body, "n": 0}, headers={"x-request-id": "refused"})
        server.http.get("/v1/models?private=1", headers={"x-request-id": "models"})
        httpx.get(f"{server.url}/v1/models", headers={"x-request-id": "stranger", "authorization": "Bearer private"})
        with server.http.stream("POST", COMPLETIONS, json={"prompt": "FOREVER", "max_tokens": 3000, "stream": True}) as response:
            gone = response.headers["x-request-id"]
            next(response.iter_text())
        while gone not in path.read_text(encoding="utf-8"):
            pass
    text = path.read_text(encoding="utf-8")
    assert not re.search("private|s3cret|One two", text)
    lines = {line["id"]: line for line in map(json.loads, text.splitlines())}
    assert "from before" in lines
    for name, stream in (("whole", False), ("stream", True)):
        line = lines[name]
        assert line["path"] == COMPLETIONS
        assert (line["method"], line["status"], line["client"], line["stream"]) == ("POST", 200, "127.0.0.1", stream)
        assert line["prompt_tokens"] > 0
        assert (line["completion_tokens"], line["cached_tokens"], line["finish_reasons"]) == (10, 0, ["length"] * 2)
        assert 0 < line["first_token_seconds"] <= line["seconds"]
        assert line["answer"].startswith("cmpl-")
        assert re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", line["time"])
    assert [lines[name]["status"] for name in ("refused", "models", "stranger")] == [400, 200, 401]
    assert lines[gone]["finish_reasons"] == [None]
    assert 0 < lines[gone]["completion_tokens"] < 3000


def test_an_access_log_on_stdout_and_one_that_cannot_be() -> None:
    with running("--access-log", "-", module=FAKE) as server:
        server.http.get("/version", headers={"x-request-id": "here"})
        assert server.process.stdout is not None
        for text in server.process.stdout:
            if strict(text.encode())["id"] == "here":
                break
    assert fails(1, "--access-log", "/no/such/folder", module=FAKE).endswith(
        "--access-log /no/such/folder: No such file or directory"
    )


# --- ending requests ------------------------------------------------------------------------------------------------------


def ended(server: Server, stream: bool, **how: Any) -> list[Any]:
    """The choices of two long answers, ended from outside once they run; `how` may be told their id."""
    body = {**LONG, "n": 2, "stream": stream}
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(server.http.post, COMPLETIONS, json=body, headers={"x-request-id": "long-1"})
        wait_running(server, 2)
        assert server.post("/abort_request", how) == {"aborted": 1}
        response = future.result()
    assert response.status_code == 200
    if stream:
        chunks = events(response.text)
        assert chunks[-1]["choices"][0]["finish_reason"] == "abort"
        return [choice for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
    found: list[Any] = strict(response.content)["choices"]
    return found


@pytest.mark.parametrize("stream", [False, True])
def test_requests_can_be_ended(tiny: Server, stream: bool) -> None:
    for how in ({"rid": "long-1"}, {"request_ids": ["nobody", "long-1"]}, {"abort_all": True}):
        choices = ended(tiny, stream, **how)
        assert [choice["finish_reason"] for choice in choices] == ["abort", "abort"]
        tiny.wait_idle()
    tiny.check_alive()


def test_requests_can_be_ended_by_the_id_of_their_answer(fake: Server) -> None:
    forever = {"messages": [{"role": "user", "content": "FOREVER"}], "max_tokens": 3000, "stream": True}
    with fake.http.stream("POST", CHAT, json=forever) as response:
        parts = response.iter_text()
        first = next(parts)
        name = strict(first.split("\n\n")[0].removeprefix("data: ").encode())["id"]
        assert fake.post("/abort_request", {"rid": name}) == {"aborted": 1}
        assert events(first + "".join(parts))[-1]["choices"][0]["finish_reason"] == "abort"
    assert fake.post("/abort_request", {"rid": name}) == {"aborted": 0}


def test_what_ending_needs(fake: Server) -> None:
    for body in ({}, {"abort_all": False}, {"request_ids": []}):
        assert fake.post("/abort_request", body, 400)["param"] == "rid"
    assert fake.post("/abort_request", {"rid": 5}, 400)["param"] == "rid"


# --- sleep ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [1, 2])
def test_sleep(sleeper: Server, level: int) -> None:
    """503 while it sleeps, alive but not ready; answers are the same afterwards, and what was cached is forgotten."""
    body = {"prompt": list(range(100, 300)), "max_tokens": 5, "temperature": 0}
    wanted = sleeper.complete(**body)["choices"]
    assert sleeper.post(f"/sleep?level={level}", None) == {"is_sleeping": True}
    assert sleeper.post("/sleep", None) == {"is_sleeping": True}
    assert sleeper.get("/is_sleeping") == {"is_sleeping": True}
    assert sleeper.get("/health") == {"status": "ok"}
    assert sleeper.http.get("/ready").status_code == 503
    assert sleeper.http.get("/ready").json() == {"status": "asleep"}
    assert sleeper.metrics()["sparkrt:engine_sleep_state"] == level
    for stream in (False, True):
        error = sleeper.post(COMPLETIONS, {**body, "stream": stream}, 503)
        assert "asleep" in error["message"]
        assert error["type"] == "ServiceUnavailableError"
    assert sleeper.metrics()["sparkrt:admission_rejections_total{asleep}"] >= 2
    assert sleeper.post("/tokenize", {"prompt": "still here"})["count"] > 0
    assert sleeper.post("/wake_up", None) == {"is_sleeping": False}
    assert sleeper.post("/wake_up", None) == {"is_sleeping": False}
    assert sleeper.get("/ready") == {"status": "ready"}
    answer = sleeper.complete(**body)
    assert answer["choices"] == wanted
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    sleeper.check_alive()
    sleeper.wait_idle()


def test_sleep_waits_for_what_runs(sleeper: Server) -> None:
    with ThreadPoolExecutor(2) as pool:
        answer = pool.submit(sleeper.post, COMPLETIONS, {**LONG, "max_tokens": 300})
        wait_running(sleeper, 1)
        asleep = pool.submit(sleeper.post, "/sleep", None)
        while sleeper.http.get("/ready").status_code == 200:
            pass
        sleeper.post(COMPLETIONS, {"prompt": "hi"}, 503)
        assert answer.result()["choices"][0]["finish_reason"] == "length"
        assert asleep.result() == {"is_sleeping": True}
    sleeper.post("/wake_up", None)
    sleeper.check_alive()


def test_sleep_may_end_what_runs(sleeper: Server) -> None:
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(sleeper.post, COMPLETIONS, {**LONG, "n": 3})
        wait_running(sleeper, 3)
        sleeper.post("/sleep?level=2&mode=abort", None)
        assert [choice["finish_reason"] for choice in answer.result()["choices"]] == ["abort"] * 3
    sleeper.post("/wake_up", None)
    sleeper.check_alive()


def test_what_sleep_needs(sleeper: Server, tiny: Server) -> None:
    for query in ("level=0", "level=3", "level=x", "level=", "mode=now"):
        assert sleeper.post(f"/sleep?{query}", None, 400)["param"] == query.partition("=")[0]
    assert sleeper.post("/wake_up?tags=weights", None, 400)["param"] == "tags"
    assert "--enable-sleep-mode" in tiny.post("/sleep", None, 400)["message"]
    assert tiny.post("/wake_up", None) == {"is_sleeping": False}
    for server in (sleeper, tiny):
        assert server.get("/is_sleeping") == {"is_sleeping": False}
        server.check_alive()


def test_a_server_can_be_stopped_in_its_sleep() -> None:
    with running("--enable-sleep-mode", "--max-num-seqs", "2") as server:
        server.post("/sleep?level=2", None)


# --- where it listens -----------------------------------------------------------------------------------------------------


def test_a_unix_socket(tmp_path: Path) -> None:
    """One that was left behind is replaced, one in use is not; it is gone at the end."""
    path = tmp_path / "sparkrt.sock"
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(path))
    server = Server("--uds", str(path), module=FAKE)
    try:
        assert server.process.stdout is not None
        while f"at unix:{path}:/v1" not in (line := server.process.stdout.readline()):
            assert line, server.log
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://localhost", timeout=PATIENCE) as client:
            assert client.post(COMPLETIONS, json={"prompt": "hi", "max_tokens": 3}).status_code == 200
        assert fails(1, "--uds", str(path), module=FAKE).endswith(f"cannot listen on {path}: another server listens there")
        assert path.exists()
        assert server.stop() == 0
        assert not path.exists()
    finally:
        server.kill()
    file = tmp_path / "file"
    file.touch()
    assert "cannot listen on" in fails(1, "--uds", str(file), module=FAKE)
    assert file.exists()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("tls")
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", cert]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except OSError:
        pytest.skip("openssl is not installed")
    return cert, key


def test_tls(certificate: tuple[str, str]) -> None:
    cert, key = certificate
    server = Server("--ssl-certfile", cert, "--ssl-keyfile", key, module=FAKE)
    try:
        assert server.process.stdout is not None
        for line in server.process.stdout:
            if found := re.search(r"at (https://127\.0\.0\.1:\d+)/v1", line):
                break
        assert found, server.log
        with httpx.Client(verify=ssl.create_default_context(cafile=cert), base_url=found[1], timeout=PATIENCE) as client:
            assert client.get("/ready").status_code == 200
            with client.stream("POST", COMPLETIONS, json={"prompt": "hi", "max_tokens": 3, "stream": True}) as response:
                assert events("".join(response.iter_text()))[-1]["choices"][0]["finish_reason"] == "length"
        assert server.stop() == 0
    finally:
        server.kill()


def test_certificates_that_are_none(certificate: tuple[str, str], tmp_path: Path) -> None:
    cert, key = certificate
    (tmp_path / "rubbish").write_text("x", encoding="utf-8")
    for pair in ((cert, "/nowhere"), ("/nowhere", key), (str(tmp_path / "rubbish"), key), (key, cert)):
        line = fails(1, "--ssl-certfile", pair[0], "--ssl-keyfile", pair[1], module=FAKE)
        assert line.startswith(f"sparkrt: error: --ssl-certfile {pair[0]} --ssl-keyfile {pair[1]}: ")


def test_under_a_path_with_usage_always() -> None:
    """A proxy strips the path; keys are asked for all the same, and the document says where it all is."""
    argv = ["--root-path", "/llm", "--api-key", "k", "--enable-force-include-usage"]
    with running(*argv, module=FAKE, key="k") as server:
        assert "/llm/v1" in server.summary
        server.check_alive()
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert httpx.get(f"{server.url}/ready").status_code == 200
        assert httpx.get(f"{server.url}/v1/models").status_code == 401
        assert server.get("/openapi.json")["servers"] == [{"url": "/llm"}]
        chunks = server.stream(COMPLETIONS, prompt="hi", max_tokens=3)
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"]["completion_tokens"] == 3


def test_cors_says_what_pages_may_do() -> None:
    argv = ["--allowed-origins", '["http://a.example"]', "--allowed-methods", '["POST"]', "--allowed-headers", '["x-own"]']
    with running(*argv, "--allow-credentials", module=FAKE) as server:
        ours, foreign = ({"origin": origin} for origin in ("http://a.example", "http://example.org"))
        response = server.http.get("/health", headers=ours)
        assert response.headers["access-control-allow-credentials"] == "true"
        assert response.headers["access-control-expose-headers"].lower() == "x-request-id"
        assert "access-control-allow-origin" not in server.http.get("/health", headers=foreign).headers
        asking = {"access-control-request-method": "POST", "access-control-request-headers": "x-own"}
        assert server.http.options(CHAT, headers=ours | asking).status_code == 200
        assert server.http.options(CHAT, headers=foreign | asking).status_code == 400
        for wrong in ({"access-control-request-method": "DELETE"}, {"access-control-request-headers": "x-other"}):
            assert server.http.options(CHAT, headers=ours | asking | wrong).status_code == 400
