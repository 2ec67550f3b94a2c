"""A client that goes away takes its requests along (S03, O01)."""

from __future__ import annotations

import json
import socket
from contextlib import closing
from typing import Any

import pytest

from tests.serve.harness import PATIENCE, Server

LONG: dict[str, Any] = {"prompt": "Once upon a time", "ignore_eos": True, "max_tokens": 4000, "temperature": 0}


def send(server: Server, body: dict[str, Any], path: str = "/v1/completions") -> socket.socket:
    """A connection over which `body` was sent, and nothing read."""
    content = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE)
    connection.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content)
    return connection


def wait_running(server: Server, count: int) -> None:
    for _ in range(5000):
        if server.stats()["running"] == count:
            return
    raise AssertionError(f"never saw {count} running: {server.stats()}")


@pytest.mark.parametrize("more", [{"stream": True}, {"stream": True, "n": 2}, {}, {"n": 3}], ids=json.dumps)
def test_closing_frees_the_request(tiny: Server, more: dict[str, Any]) -> None:
    before = tiny.wait_idle()["generation_tokens"]
    with closing(send(tiny, {**LONG, **more})) as connection:
        wait_running(tiny, more.get("n", 1))
        if "stream" in more:
            while b'"text"' not in connection.recv(65536):
                pass
    after = tiny.wait_idle()["generation_tokens"]
    assert after - before < LONG["max_tokens"]  # it was cut short
    assert tiny.stats()["generation_tokens"] == after  # and nothing goes on
    tiny.check_alive()


def test_everybody_goes_at_once(tiny: Server) -> None:
    connections = [send(tiny, {**LONG, "stream": i % 2 == 0, "prompt": "word " * (i * 20 + 1)}) for i in range(12)]
    wait_running(tiny, 12)
    for connection in connections:
        connection.close()
    tiny.wait_idle()
    tiny.check_alive()


def test_going_before_the_answer_begins(tiny: Server) -> None:
    """While the body is still coming, and in the middle of the prefill."""
    with closing(socket.create_connection(("127.0.0.1", tiny.port), timeout=PATIENCE)) as connection:
        connection.sendall(b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"prompt"')
    for stream in (False, True):
        with closing(send(tiny, {**LONG, "prompt": "word " * 3000, "max_tokens": 500, "stream": stream})):
            wait_running(tiny, 1)
    tiny.wait_idle()
    tiny.check_alive()


def test_a_slow_reader_delays_nobody(tiny: Server) -> None:
    """A stream that is not read piles up in the API process; the engine and other clients go on."""
    with closing(send(tiny, {**LONG, "stream": True, "logprobs": 20, "n": 4})):
        wait_running(tiny, 4)
        tiny.check_alive()
    tiny.wait_idle()
