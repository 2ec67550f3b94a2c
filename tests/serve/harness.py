"""Server processes for tests, and clients that look closely. Everything stays on the loopback."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.serve import ROOT

PATIENCE = 60.0  # s, of any single wait
CONTROL = {"prompt": "\nOnce upon a time", "max_tokens": 12, "temperature": 0}


class Server:
    """A running `python -m MODULE *argv --port PORT`; port 0 is any free one, known once it is ready."""

    def __init__(self, *argv: str, module: str = "sparkrt.serve", port: int = 0, key: str = "") -> None:
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._log = tempfile.NamedTemporaryFile(prefix="sparkrt-server-", suffix=".log")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *argv, "--port", str(port)],
            cwd=ROOT,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # several servers and tests share few cores
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self.summary = ""

    def wait_ready(self) -> Server:
        """Wait until it can answer."""
        self.wait_listening()
        self.model = self.get("/v1/models")["data"][0]["id"]
        self._control = self.control()
        return self

    def wait_listening(self) -> None:
        """Read what it prints until it says where it is."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.summary += line
            if found := re.search(r"at http://127\.0\.0\.1:(\d+)[\w/]*/v1", line):
                self.port = int(found[1])
                self.url = f"http://127.0.0.1:{self.port}"
                self.http = httpx.Client(base_url=self.url, timeout=PATIENCE, headers=self._headers)
                return
        raise AssertionError(f"exit {self.process.wait()} instead of a server:\n{self.summary}\n{self.log}")

    @property
    def log(self) -> str:
        return Path(self._log.name).read_text(encoding="utf-8")

    def metrics(self) -> dict[str, float]:
        """The samples of /metrics, by name with the labels that are not the same everywhere."""
        response = self.http.get("/metrics")
        assert response.status_code == 200
        found = dict[str, float]()
        for family in text_string_to_metric_families(response.text):
            for sample in family.samples:
                labels = {name: value for name, value in sample.labels.items() if name not in ("model_name", "engine")}
                found[sample.name + "".join(f"{{{value}}}" for value in labels.values())] = sample.value
        return found

    def get(self, path: str) -> Any:
        response = self.http.get(path)
        assert response.status_code == 200, response.text
        return strict(response.content)

    def post(self, path: str, body: Any, status: int = 200) -> Any:
        """The decoded answer, or with another `status` the `error` object in it."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return checked(self.http.post(path, content=content), status)

    def complete(self, **body: Any) -> Any:
        return self.post("/v1/completions", body)

    def chat(self, text: str = "Hello!", **body: Any) -> Any:
        return self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **body})

    def stream(self, path: str, **body: Any) -> list[Any]:
        """All events of a stream, checked to end with [DONE]."""
        with self.http.stream("POST", path, json={**body, "stream": True}) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            return events("".join(response.iter_text()))

    def control(self) -> str:
        """The text of a request that nothing may change."""
        return str(self.complete(**CONTROL)["choices"][0]["text"])

    def check_alive(self) -> None:
        """Healthy, and as good as at the start."""
        assert self.http.get("/health").status_code == 200
        assert self.control() == self._control

    def stats(self) -> dict[str, Any]:
        found: dict[str, Any] = self.get("/server_info")["stats"]
        return found

    def wait_idle(self) -> dict[str, Any]:
        """Wait until nothing runs or waits; every block and slot must be free then."""
        for _ in range(2000):
            stats = self.stats()
            if stats["running"] == stats["waiting"] == 0:
                assert stats["free_blocks"] == stats["total_blocks"]
                assert stats["free_slots"] == stats["total_slots"]
                return stats
        raise AssertionError(f"still busy: {stats}")

    def stop(self, number: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(PATIENCE)
        if hasattr(self, "http"):
            self.http.close()
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code

    def kill(self) -> None:
        """The last resort of a failed test."""
        if self.process.poll() is None:
            self.process.kill()
        self.stop()
        self._log.close()


@contextmanager
def running(*argv: str, module: str = "sparkrt.serve", key: str = "") -> Iterator[Server]:
    server = Server(*argv, module=module, key=key)
    try:
        yield server.wait_ready()
    finally:
        server.kill()


def strict(content: bytes) -> Any:
    """Parsed by the letter of RFC 8259: Python's parser would take NaN and Infinity."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(content.decode("utf-8"), parse_constant=refuse)


def checked(response: httpx.Response, status: int = 200) -> Any:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = strict(response.content)
    if status == 200:
        return body
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert not re.search(r"Traceback|\.py\b|[A-Z][a-z]+Error", error["message"]), error["message"]
    return error


def events(text: str) -> list[Any]:
    """The data of server-sent events; the last one is [DONE]."""
    blocks = text.split("\n\n")
    assert blocks.pop() == ""
    assert blocks.pop() == "data: [DONE]"
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    return [strict(block.removeprefix("data: ").encode()) for block in blocks]


def exchange(server: Server, request: bytes, parts: Sequence[bytes] = ()) -> tuple[int, bytes]:
    """(status, body) of raw bytes sent over a socket; the server may answer before it has read them all."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as connection:
        connection.sendall(request)
        for part in parts:
            try:
                connection.sendall(part)
            except (BrokenPipeError, ConnectionResetError):
                break
        answer = b""
        while b"\r\n\r\n" not in answer:
            data = connection.recv(65536)
            assert data, "connection dropped"
            answer += data
        head, body = answer.split(b"\r\n\r\n", 1)
        length = int(re.search(rb"content-length: (\d+)", head)[1])  # type: ignore[index]
        while len(body) < length:
            body += connection.recv(65536)
        return int(head.split()[1]), body


def raw_post(server: Server, path: str, body: bytes) -> Any:
    """The `error` of a body sent byte by byte as it is; the status must be 400."""
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    status, answer = exchange(server, head.encode() + body)
    error = strict(answer)["error"]
    assert status == 400, error
    return error
