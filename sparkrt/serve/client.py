"""The API side of the engine process: starts it, sends it requests, hands its news to whoever waits for them.

Everything here runs on the event loop's thread. The ZeroMQ socket is read from a plain file-descriptor callback: one wake-up
per engine step, whatever the number of requests in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterable
from multiprocessing import resource_tracker
from typing import Protocol

import zmq

from sparkrt.engine.config import EngineConfig
from sparkrt.engine.messages import EngineOutput, EngineRequest, EngineStats, ModelInfo
from sparkrt.errors import CapacityError, EngineFatal, LoadError, RequestError
from sparkrt.serve.worker import FromEngine, Loader, ToEngine, decode_from_engine, encode, run

SILENCE = 60.0  # s without an answer from a process that lives: it is stuck, /health says 503
PING_INTERVAL = 2.0  # s


class Listener(Protocol):
    """One HTTP request waiting for the engine; what it is told must not take long."""

    def admit(self) -> None: ...
    def take(self, output: EngineOutput) -> None: ...
    def close(self, error: Exception | None = None) -> None: ...


class EngineClient:
    """One engine process. `start` may run before there is an event loop; everything else belongs to the loop's thread."""

    def __init__(self, config: EngineConfig, loader: Loader) -> None:
        self.stats = EngineStats()
        self.error: EngineFatal | LoadError | None = None  # why there is no engine (any more)
        self.draining = False
        self.max_requests: int | None = None  # sequences that may run or wait; None: any number
        self.on_loading: Callable[[str, int, int], object] = lambda what, done, total: None
        self._listeners: dict[str, Listener] = {}
        self._heard = time.monotonic()
        self._dir = tempfile.mkdtemp(prefix="sparkrt-")  # mode 0700: the socket is ours alone
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._fd = int(self._socket.getsockopt(zmq.FD))
        address = f"ipc://{self._dir}/engine"
        self._socket.bind(address)
        spawn = multiprocessing.get_context("spawn")
        self._process = spawn.Process(target=run, args=(address, config, loader), name="sparkrt-engine")

    def start(self) -> None:
        """Start the process. Ctrl-C and SIGTERM are held back meanwhile: the child must not be hit before it ignores them."""
        resource_tracker.ensure_running()  # it would unblock the signals in the middle
        numbers = (signal.SIGINT, signal.SIGTERM)
        signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)

    def attach(self) -> None:
        """From now on the running event loop reads the engine's messages and watches its life."""
        self._loop = asyncio.get_running_loop()
        self._loaded: asyncio.Future[ModelInfo] = self._loop.create_future()
        self._ended = asyncio.Event()
        self._loop.add_reader(self._fd, self._read)
        self._loop.add_reader(self._process.sentinel, self._on_death)
        self._pinger = self._loop.create_task(self._ping())
        self._read()  # the descriptor tells of changes only

    async def loaded(self) -> ModelInfo:
        """Wait for the model. Raises LoadError with the engine's reason."""
        return await asyncio.shield(self._loaded)

    async def ended(self) -> None:
        """Wait for the end of the process; `error` says why it ended."""
        await self._ended.wait()

    @property
    def silent_for(self) -> float:
        """Seconds since the loaded engine last said anything; it is asked every few."""
        return time.monotonic() - self._heard if self._loaded.done() and self.error is None else 0.0

    def submit(self, requests: list[EngineRequest], listener: Listener) -> None:
        """Send the sequences of one HTTP request. Raises CapacityError when shutting down or full, EngineFatal without engine."""
        busy, most = len(self._listeners), self.max_requests
        if self.error is not None:
            raise EngineFatal("the engine has stopped")
        if self.draining:
            raise CapacityError("the server is shutting down")
        if most is not None and busy + len(requests) > most:
            raise CapacityError(f"the queue is full: {busy} sequences run or wait, {most} may")
        self._listeners |= {request.request_id: listener for request in requests}
        self._send(ToEngine(add=requests))

    def forget(self, ids: Iterable[str]) -> None:
        """Stop these sequences, news of which goes nowhere from now on."""
        if live := [request_id for request_id in ids if self._listeners.pop(request_id, None) is not None]:
            self._send(ToEngine(abort=live))

    def fail_all(self, error: Exception) -> None:
        """Every request in flight ends with `error`."""
        for listener in set(self._listeners.values()):
            listener.close(error)

    # the socket

    def _send(self, message: ToEngine) -> None:
        with contextlib.suppress(zmq.Again):  # no peer: its death is being noticed, or it is not born yet
            self._socket.send(encode(message), zmq.NOBLOCK)
        self._loop.call_soon(self._read)  # sending may swallow the descriptor's edge

    def _read(self) -> None:
        with contextlib.suppress(zmq.Again):
            while not self._socket.closed:
                message = decode_from_engine(self._socket.recv(zmq.NOBLOCK))
                self._heard = time.monotonic()
                self._on_message(message)

    def _on_message(self, message: FromEngine) -> None:
        self.stats = message.stats or self.stats
        for output in message.outputs:
            found = self._listeners.get if output.finish_reason is None else self._listeners.pop
            if (listener := found(output.request_id, None)) is not None:
                listener.take(output)
        if (verdict := message.verdict) is not None and (listener := self._listeners.get(verdict.request_ids[0])) is not None:
            if verdict.status == 200:
                listener.admit()
            else:
                listener.close(RequestError(verdict.message, param=verdict.param, code=verdict.code, status=verdict.status))
        if message.loading is not None:
            self.on_loading(*message.loading)
        if message.loaded is not None:
            self._loaded.set_result(message.loaded)
        if message.failed is not None:
            self._on_failure(message.failed)

    async def _ping(self) -> None:
        await asyncio.wait([self._loaded])
        while True:
            self._send(ToEngine())
            await asyncio.sleep(PING_INTERVAL)

    def _on_death(self) -> None:
        self._loop.remove_reader(self._process.sentinel)
        self._read()  # its last words
        self._process.join()
        code = self._process.exitcode or 0
        self._on_failure(f"the engine process {f'was killed by signal {-code}' if code < 0 else f'exited with {code}'}")
        self._ended.set()

    def _on_failure(self, reason: str) -> None:
        if self.error is not None:
            return
        self.error = EngineFatal(reason) if self._loaded.done() else LoadError(reason)
        if not self._loaded.done():
            self._loaded.set_exception(self.error)
            self._loaded.exception()  # whoever waits gets it; nobody need wait
        self.fail_all(EngineFatal("the engine has stopped"))

    # the end

    async def stop(self, patience: float = 5.0) -> None:
        """Ask the process to end and wait for it, `patience` seconds at most."""
        self._pinger.cancel()
        if self.error is None:
            self._send(ToEngine(stop=True))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), patience if self._loaded.done() else 0)
        self._loop.remove_reader(self._process.sentinel)
        self._loop.remove_reader(self._fd)

    def close(self) -> None:
        """Leave nothing behind: neither process nor socket nor folder. Idempotent; needs no event loop."""
        if self._process.pid is not None and self._process.exitcode is None:
            self._process.kill()
            self._process.join()
        self._context.destroy(linger=0)
        shutil.rmtree(self._dir, ignore_errors=True)
