"""Many at once, readers that do not read, clients that come and go: nobody waits for them, and what they cost comes back."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import resource
import signal
import socket
import struct
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request

from sparkrt.bench.client import Client
from sparkrt.bench.dataset import Sample
from sparkrt.bench.load import arrivals, run
from sparkrt.bench.report import figures
from sparkrt.engine.config import EngineConfig
from sparkrt.engine.messages import EngineOutput, EngineRequest, EngineStats, Logprob
from sparkrt.engine.params import SamplingParams
from sparkrt.serve.cli import parse
from sparkrt.serve.completions import CompletionGeneration
from sparkrt.serve.metrics import Metrics
from sparkrt.serve.protocol import CompletionBody
from tests.serve.conftest import SCRIPT, Reciter
from tests.serve.fake_engine import load
from tests.serve.harness import PATIENCE, Server, events

STREAMS = 256
COMPLETIONS = "/v1/completions"
needs_proc = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="file descriptors are counted in /proc")


def request(path: str = COMPLETIONS, **body: Any) -> bytes:
    content = json.dumps({"stream": True, **body}).encode()
    return b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (path.encode(), len(content)) + content


def connect(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE)


def descriptors(server: Server) -> int:
    return len(os.listdir(f"/proc/{server.process.pid}/fd"))


def wait_for(server: Server, holds: Callable[[], bool]) -> None:
    """The server is asked meanwhile: it must be able to answer."""
    for _ in range(5000):
        if holds():
            return
        server.stats()
    raise AssertionError("it never came to that")


def test_256_streams_at_once(reciter: Reciter) -> None:
    body = json.dumps({"prompt": "\n", "stream": True, "max_tokens": 64, "temperature": 0}).encode()
    requests = [(Sample("\n", 1, len(reciter.ids)), body)] * STREAMS

    async def load() -> Any:
        return await run(Client(reciter.server.url), COMPLETIONS, requests, arrivals(STREAMS, float("inf"), 1.0, 0))

    outcomes, seconds = asyncio.run(load())
    assert {outcome.error for outcome in outcomes} == {""}
    assert {outcome.text for outcome in outcomes} == {SCRIPT}
    assert figures(outcomes, seconds, {})["max_concurrent_requests"] == STREAMS
    reciter.server.wait_idle()
    reciter.server.check_alive()


def test_the_engine_goes_on_without_the_api_process(fake: Server, tmp_path: Path) -> None:
    """It waits for nothing: stopped in the middle, the API process delays no step, and finds all of them when it wakes."""
    os.mkfifo(pipe := tmp_path / "pipe")
    body = {"prompt": f"FOREVER TELL {pipe}", "max_tokens": 300, "n": 16, "logprobs": 2, "stream": True}  # 0.5 MB of news
    with fake.http.stream("POST", COMPLETIONS, json=body) as response:
        parts = response.iter_text()
        first = next(parts)
        fake.process.send_signal(signal.SIGSTOP)
        try:
            assert pipe.read_bytes() == b"ended"
        finally:
            fake.process.send_signal(signal.SIGCONT)
        chunks = events(first + "".join(parts))
    reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
    assert reasons.count("length") == 16
    tokens = sum(len(choice["logprobs"]["tokens"]) for chunk in chunks for choice in chunk["choices"])
    assert tokens == 16 * 300
    fake.check_alive()


@needs_proc
def test_readers_that_do_not_read(fake: Server) -> None:
    """Their answers end all the same, others are answered meanwhile, and when they go their connections do."""
    before, due = descriptors(fake), fake.stats()["generation_tokens"] + 2 * 300 * 64
    readers = [connect(fake) for _ in range(2)]
    for reader in readers:  # 6 MB each, more than the kernel holds for them
        reader.sendall(request(prompt="FOREVER", max_tokens=300, n=64, logprobs=2))
    wait_for(fake, lambda: fake.stats()["generation_tokens"] == due)
    assert descriptors(fake) >= before + 2
    fake.check_alive()
    for reader in readers:
        reader.close()
    wait_for(fake, lambda: descriptors(fake) <= before)


def test_an_answer_that_nobody_read_is_let_go() -> None:
    """Sending blocks, the answer grows, the client goes: nothing holds the request any more."""
    config = EngineConfig()
    _, tokenizer, info = load(config, lambda *phase: None)
    running = dict[str, Any]()

    def submit(requests: list[EngineRequest], generation: CompletionGeneration) -> None:
        running.update((request.request_id, generation) for request in requests)

    def forget(ids: Iterable[str]) -> None:
        for name in list(ids):
            running.pop(name, None)

    client = SimpleNamespace(submit=submit, forget=forget)
    metrics = Metrics("fake", EngineStats)
    serving: Any = SimpleNamespace(args=parse([]), client=client, tokenizer=tokenizer, info=info, metrics=metrics)

    async def answer() -> weakref.ref[CompletionGeneration]:
        gone, blocked = asyncio.Event(), asyncio.Event()
        body = CompletionBody(prompt="x", stream=True)
        generation = CompletionGeneration([], serving, body, [[1, 2]], SamplingParams(max_tokens=4000, logprobs=1))
        [name] = running

        async def receive() -> dict[str, Any]:
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                blocked.set()
                await gone.wait()

        scope: dict[str, Any] = {"type": "http", "access": {"id": "x"}}
        generation.admit()
        task = asyncio.create_task((await generation.respond(Request(scope, receive)))(scope, receive, send))
        row = Logprob(3, -1.0, 1, [3], [-1.0])
        for count in range(1000):
            generation.take(EngineOutput(request_id=name, token_ids=[3], logprobs=[row]))
            if count == 0:
                await blocked.wait()
        gone.set()
        await task
        return weakref.ref(generation)

    held = asyncio.run(answer())
    gc.collect()
    assert not running
    assert held() is None


@needs_proc
def test_more_connections_than_a_process_may_open_at_first() -> None:
    """The usual limit of 1,024 files is raised as far as it goes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        server = Server(module="tests.serve.fake_engine")  # inherits it
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    try:
        server.wait_ready()
        connections = [connect(server) for _ in range(300)]
        for connection in connections:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert all(connection.recv(12) == b"HTTP/1.1 200" for connection in connections)
        for connection in connections:
            connection.close()
    finally:
        server.kill()


@needs_proc
def test_a_thousand_come_and_go(fake: Server) -> None:
    whole = request(prompt="FOREVER", max_tokens=4000)
    before = descriptors(fake)
    for number in range(1000):
        connection, kind = connect(fake), number % 5
        with connection:
            if kind == 4:  # a reset, not an end
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.sendall((b"", whole[:20], whole[:-5], whole, whole)[kind])
            if kind == 3:
                assert connection.recv(12) == b"HTTP/1.1 200"
    fake.wait_idle()
    wait_for(fake, lambda: descriptors(fake) <= before)
    fake.check_alive()
