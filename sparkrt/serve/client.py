"""The API side of the engine process: starts it, sends it requests, hands its news to whoever waits for them.

Everything here runs on the event loop's thread. The ZeroMQ socket is read from a plain file-descriptor callback: one wake-up
per engine step, whatever the number of requests in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import shutil
import signal
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing import resource_tracker

import zmq

from sparkrt.engine.config import EngineConfig
from sparkrt.engine.messages import Abort, EngineOutput, EngineRequest, EngineStats, ModelInfo
from sparkrt.errors import CapacityError, EngineFatal, LoadError, RequestError, SparkrtError
from sparkrt.serve import wire, worker

log = logging.getLogger("sparkrt.serve")

SILENCE = 60.0  # s without an answer from a process that lives: it is stuck, /health says 503
PING_INTERVAL = 2.0  # s


class Answers:
    """The engine's news of the sequences of one HTTP request, in order of arrival.

    Iterate it for lists of (index, output): all that arrived since the last look, so that a slow reader catches up in one go.
    Ends when every sequence has finished; raises what `fail` was given, after the news that came before it.
    """

    def __init__(self, client: EngineClient, requests: Sequence[EngineRequest]) -> None:
        self._client = client
        self._index = {request.request_id: index for index, request in enumerate(requests)}
        self._news: deque[tuple[int, EngineOutput]] = deque()
        self._event = asyncio.Event()
        self._admitted = False
        self._error: SparkrtError | None = None

    async def admitted(self) -> None:
        """Wait until the engine has taken the request. Raises its refusal: before this, nothing may be sent to the client."""
        while not self._admitted and self._error is None:
            await self._event.wait()
            self._event.clear()
        if self._error is not None:
            raise self._error

    def __aiter__(self) -> Answers:
        return self

    async def __anext__(self) -> list[tuple[int, EngineOutput]]:
        while not self._news:
            if self._error is not None:
                raise self._error
            if not self._index:
                raise StopAsyncIteration
            await self._event.wait()
            self._event.clear()
        news = list(self._news)
        self._news.clear()
        return news

    def finish(self, index: int) -> None:
        """This sequence needs no more tokens (a stop string was found): the engine forgets it now."""
        self._drop([request_id for request_id, i in self._index.items() if i == index])

    def close(self) -> None:
        """Nobody listens any more: the engine forgets what still runs. Idempotent."""
        self._drop(list(self._index))
        self._news.clear()

    def disconnect(self) -> None:
        """The HTTP client has gone: as `close`, and whoever waits here is woken with `ClientGone`."""
        self.close()
        self.fail(ClientGone("the client closed the connection"))

    def _drop(self, ids: list[str]) -> None:
        for request_id in ids:
            del self._index[request_id]
        self._client.forget(ids)

    # called by EngineClient

    def on_admitted(self) -> None:
        self._admitted = True
        self._event.set()

    def on_output(self, output: EngineOutput) -> None:
        if output.finish_reason is None:
            index = self._index[output.request_id]
        else:
            index = self._index.pop(output.request_id)
        if output.finish_reason == "error":
            log.error("request %s failed in the engine: %s", output.request_id, output.error)
            self.close()
            self.fail(EngineFatal("the engine could not finish this request"))
        else:
            self._news.append((index, output))
            self._event.set()

    def fail(self, error: SparkrtError) -> None:
        if self._error is None:
            self._error = error
            self._index.clear()
        self._event.set()


class ClientGone(SparkrtError):
    """The HTTP client closed its connection: nothing can be answered."""


class EngineClient:
    """One engine process. `start` may run before there is an event loop; everything else belongs to the loop's thread."""

    def __init__(self, config: EngineConfig, loader: worker.Loader) -> None:
        self.stats = EngineStats()
        self.error: SparkrtError | None = None  # why there is no engine (any more)
        self.draining = False
        self.max_requests: int | None = None  # sequences that may run or wait; None: any number
        self.on_loading: Callable[[str, int, int], None] = lambda what, done, total: None
        self._answers: dict[str, Answers] = {}
        self._heard = time.monotonic()
        self._dir = tempfile.mkdtemp(prefix="sparkrt-")  # mode 0700: the socket is ours alone
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.linger = 0
        self._fd = int(self._socket.getsockopt(zmq.FD))
        address = f"ipc://{self._dir}/engine"
        self._socket.bind(address)
        self._process = multiprocessing.get_context("spawn").Process(
            target=worker.run, args=(address, config, loader), name="sparkrt-engine"
        )

    def start(self) -> None:
        """Start the process. Ctrl-C and SIGTERM are held back meanwhile: the child must not be hit before it ignores them."""
        resource_tracker.ensure_running()  # it would unblock the signals in the middle
        numbers = (signal.SIGINT, signal.SIGTERM)
        signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def attach(self) -> None:
        """From now on the running event loop reads the engine's messages and watches its life."""
        loop = asyncio.get_running_loop()
        self._loaded: asyncio.Future[ModelInfo] = loop.create_future()
        self._ended = asyncio.Event()
        loop.add_reader(self._fd, self._read)
        loop.add_reader(self._process.sentinel, self._on_death)
        self._pinger = loop.create_task(self._ping())
        self._read()  # the descriptor tells of changes only

    async def loaded(self) -> ModelInfo:
        """Wait for the model. Raises LoadError with the engine's reason."""
        return await asyncio.shield(self._loaded)

    async def ended(self) -> SparkrtError:
        """Wait for the end of the process; says why it ended."""
        await self._ended.wait()
        assert self.error is not None
        return self.error

    @property
    def ready(self) -> bool:
        return self._loaded.done() and self.error is None

    @property
    def silent_for(self) -> float:
        """Seconds since the loaded engine last said anything; it is asked every few."""
        return time.monotonic() - self._heard if self.ready else 0.0

    @property
    def in_flight(self) -> int:
        return len(self._answers)

    # requests

    def submit(self, requests: Sequence[EngineRequest]) -> Answers:
        """Send the sequences of one HTTP request. Raises CapacityError when shutting down or full, EngineFatal without engine."""
        if self.error is not None:
            raise EngineFatal("the engine has stopped")
        if self.draining:
            raise CapacityError("the server is shutting down")
        if self.max_requests is not None and self.in_flight + len(requests) > self.max_requests:
            raise CapacityError(f"the queue is full: {self.in_flight} sequences run or wait, {self.max_requests} may")
        answers = Answers(self, requests)
        for request in requests:
            self._answers[request.request_id] = answers
        self._send(wire.Add(list(requests)))
        return answers

    def forget(self, ids: list[str]) -> None:
        """Stop these sequences, news of which goes nowhere from now on."""
        live = [request_id for request_id in ids if self._answers.pop(request_id, None) is not None]
        if live:
            self._send(Abort(live))

    def fail_all(self, error: SparkrtError) -> None:
        """Every request in flight ends with `error`."""
        for answers in set(self._answers.values()):
            answers.close()
            answers.fail(error)

    # the socket

    def _send(self, message: wire.ToEngine) -> None:
        with contextlib.suppress(zmq.Again):  # no peer: its death is being noticed, or it is not born yet
            self._socket.send(wire.encode(message), zmq.NOBLOCK)
        asyncio.get_running_loop().call_soon(self._read)  # sending may swallow the descriptor's edge

    def _read(self) -> None:
        while not self._socket.closed:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._heard = time.monotonic()
            self._on_message(wire.decode_from_engine(data))

    def _on_message(self, message: wire.FromEngine) -> None:
        if isinstance(message, wire.News):
            self.stats = message.stats
            for output in message.outputs:
                answers = self._answers.get(output.request_id)
                if answers is not None:
                    if output.finish_reason is not None:
                        del self._answers[output.request_id]
                    answers.on_output(output)
        elif isinstance(message, wire.Admitted):
            if (answers := self._answers.get(message.request_ids[0])) is not None:
                answers.on_admitted()
        elif isinstance(message, wire.Refused):
            found = [self._answers.pop(request_id, None) for request_id in message.request_ids]
            refusal: SparkrtError = RequestError(message.message, param=message.param, code=message.code, status=message.status)
            for answers in filter(None, found[:1]):
                answers.fail(refusal)
        elif isinstance(message, wire.Loading):
            self.on_loading(message.what, message.done, message.total)
        elif isinstance(message, wire.Loaded):
            self._loaded.set_result(message.info)
        else:
            self._on_failure(message.message)

    async def _ping(self) -> None:
        await asyncio.wait([self._loaded])
        while True:
            self._send(wire.Ping())
            await asyncio.sleep(PING_INTERVAL)

    def _on_death(self) -> None:
        asyncio.get_running_loop().remove_reader(self._process.sentinel)
        self._read()  # its last words
        self._process.join()
        code = self._process.exitcode or 0
        self._on_failure(
            f"the engine process was killed by signal {-code}" if code < 0 else f"the engine process exited with {code}"
        )
        self._ended.set()

    def _on_failure(self, reason: str) -> None:
        if self.error is not None:
            return
        if self._loaded.done():
            self.error = EngineFatal(reason)
        else:
            self.error = LoadError(reason)
            self._loaded.set_exception(self.error)
            self._loaded.exception()  # whoever waits gets it; nobody need wait
        self.fail_all(EngineFatal("the engine has stopped"))

    # the end

    async def stop(self, patience: float = 5.0) -> None:
        """Ask the process to end, insist after `patience` seconds. Idempotent."""
        self._pinger.cancel()
        if self.error is None:
            self._send(wire.Stop())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), patience if self._loaded.done() else 0)
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._process.sentinel)
        loop.remove_reader(self._fd)

    def close(self) -> None:
        """Leave nothing behind: neither process nor socket nor folder. Idempotent; needs no event loop."""
        if self._process.pid is not None and self._process.exitcode is None:
            self._process.kill()
            self._process.join()
        self._context.destroy(linger=0)
        shutil.rmtree(self._dir, ignore_errors=True)
