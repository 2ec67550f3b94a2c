"""The engine process, and the API side of it. What they say to each other is msgpack over one ZeroMQ socket.

The engine process loads the model, then drains messages, steps, sends what came out; idle, it sleeps on the socket. The API side
lives on the event loop's thread and reads the socket in a file-descriptor callback: one wake-up per step, whatever is in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from sparkrt.engine.config import EngineConfig, Progress
from sparkrt.engine.messages import EngineOutput, EngineRequest, EngineStats, ModelInfo
from sparkrt.errors import CapacityError, EngineFatal, LoadError, RequestError, SparkrtError

if TYPE_CHECKING:
    from sparkrt.engine.core import EngineCore
    from sparkrt.serve.generation import Generation

log = logging.getLogger("sparkrt.engine")

SILENCE = 60.0  # s without an answer from a process that lives: it is stuck, /health says 503
PING_INTERVAL = 2.0  # s
PATIENCE = 5.0  # s
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class ToEngine(msgspec.Struct, omit_defaults=True):
    """One with nothing in it asks: are you there?"""

    add: list[EngineRequest] = []  # the sequences of one HTTP request: all are admitted, or none
    abort: list[str] = []
    reset_prefix_cache: bool = False
    sleep: int | None = None  # to this level; 0: wake up
    stop: bool = False  # let go of everything and exit 0


class FromEngine(msgspec.Struct, omit_defaults=True):
    loading: tuple[str, int, int] | None = None  # a phase of start-up; units done, in all (bytes, tensors, ...)
    loaded: ModelInfo | None = None
    judged: list[str] = []  # what was added: admitted, unless there is a refusal
    refusal: dict[str, Any] | None = None  # the arguments of a RequestError, or with status 503 a CapacityError: nothing runs
    outputs: list[EngineOutput] = []  # of a step
    stats: EngineStats | None = None  # after it
    slept: dict[str, Any] | None = None  # `sleep` was done: nothing, or the arguments of the error that stood in its way
    failed: str | None = None  # one line meant for the user, the last words: the process exits 1


encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
Loader = Callable[[EngineConfig, Progress], tuple[Any, Any, ModelInfo]]
"""`load_engine`, or a test's stand-in. Pickled by name into the engine process."""


def run(address: str, config: EngineConfig, loader: Loader) -> None:
    """Body of the engine process. `address` is the ipc address that the API process has bound; returns when told to stop.

    The API process decides about Ctrl-C and SIGTERM, which reach the whole process group; only its death ends us unasked.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    threading.Thread(target=_die_with_parent, args=(address,), daemon=True).start()
    with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        socket.set_hwm(0)
        socket.linger = 1000  # ms: last words must arrive
        socket.connect(address)
        what = "loading failed"
        try:
            core, _, info = loader(config, lambda *phase: socket.send(encode(FromEngine(loading=phase))))
            gc.collect()
            gc.freeze()  # what is loaded lives as long as the process: not worth walking again
            socket.send(encode(FromEngine(loaded=info)))
            what = "the engine failed"
            _loop(socket, core)
            core.close()
        except Exception as error:  # in one line; what is not ours is named with its class
            ours, loading = isinstance(error, SparkrtError), what == "loading failed"
            if not loading or (config.debug and not ours):
                log.critical(what, exc_info=error)
            message = str(error) if ours else f"{what}: {type(error).__name__}: {error}"
            socket.send(encode(FromEngine(failed=" ".join(message.split()))))
            raise SystemExit(1) from None


def _loop(socket: zmq.Socket[bytes], core: EngineCore) -> None:
    compiling, between, ended = Compiling(), 0.0, None  # s between steps that had work to do; when the last of them ended
    while True:
        told = False
        while socket.poll(0 if core.has_work or told else compiling.patience):
            message = decode_to_engine(socket.recv())
            if message.stop:
                return
            if message.add and not compiling.take(message.add, core):
                socket.send(encode(_add(core, message.add)))
            core.abort(message.abort)
            if message.sleep is not None:
                socket.send(encode(_sleep(core, message.sleep, lambda *phase: socket.send(encode(FromEngine(loading=phase))))))
            if message.reset_prefix_cache:
                core.reset_prefix_cache()
            compiling.abort(message.abort)
            told = True
        for requests in compiling.done():
            socket.send(encode(_add(core, requests)))
            told = True
        if not core.has_work:
            outputs, ended = [], None
        else:
            between += 0.0 if ended is None else time.perf_counter() - ended
            outputs = core.step()
            ended = time.perf_counter()
        if outputs or told:
            stats = core.stats()
            stats.gap_seconds = between
            socket.send(encode(FromEngine(outputs=outputs, stats=stats)))


class Compiling:
    """Requests whose grammars are being compiled beside the loop, where a mistake would stall everybody's tokens."""

    def __init__(self) -> None:
        self._pool, self._jobs = ThreadPoolExecutor(1, "grammars"), list[tuple[Future[Any], list[EngineRequest]]]()

    @property
    def patience(self) -> int | None:
        """How long an idle loop may sleep, in ms."""
        return 1 if self._jobs else None

    def take(self, requests: list[EngineRequest], core: EngineCore) -> bool:
        """Compile what these need, unless it is nothing."""
        grammar = requests[0].grammar  # the sequences of one HTTP request share it
        if grammar is None or core.grammars is None:
            return False
        self._jobs.append((self._pool.submit(core.grammars.compile, *grammar), requests))
        return True

    def done(self) -> list[list[EngineRequest]]:
        """Those that can be added now. What is no grammar is found to be none again, and refused, when they are."""
        ready, self._jobs = [j for j in self._jobs if j[0].done()], [j for j in self._jobs if not j[0].done()]
        return [requests for _, requests in ready]

    def abort(self, request_ids: list[str]) -> None:
        self._jobs = [(job, requests) for job, requests in self._jobs if requests[0].request_id not in request_ids]


def _add(core: EngineCore, requests: list[EngineRequest]) -> FromEngine:
    answer = FromEngine(judged=[request.request_id for request in requests])
    try:
        for request in requests:
            core.add(request)
    except (RequestError, CapacityError) as error:
        core.abort(answer.judged)
        answer.refusal = _refusal(error)
    return answer


def _sleep(core: EngineCore, level: int, progress: Progress) -> FromEngine:
    try:
        if level:
            core.sleep(level)
        else:
            core.wake_up(progress)
    except EngineFatal:
        raise
    except SparkrtError as error:
        return FromEngine(slept=_refusal(error))
    return FromEngine(slept={}, stats=core.stats())


def _refusal(error: SparkrtError) -> dict[str, Any]:
    details = {name: getattr(error, name) for name in ("param", "code", "status") if hasattr(error, name)}
    return {"message": str(error), "status": 503, **details}


def _die_with_parent(address: str) -> None:
    """A killed API process cannot say stop: its end is seen here, and nothing is left behind, the socket's folder included."""
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        shutil.rmtree(Path(address.removeprefix("ipc://")).parent, ignore_errors=True)
        os._exit(1)


class EngineClient:
    """One engine process. `start` may run before there is an event loop; everything else belongs to the loop's thread."""

    def __init__(self, config: EngineConfig, loader: Loader, on_loading: Progress) -> None:
        self.stats = EngineStats()
        self.error: EngineFatal | LoadError | None = None  # why there is no engine (any more)
        self.ended = asyncio.Event()  # the process has; `error` says why
        self.draining = self.asleep = False
        self.refused = dict.fromkeys(("queue_full", "shutting_down", "asleep"), 0)  # how many requests were, for now
        self._on_loading = on_loading
        self._running: dict[str, Generation] = {}
        self._idle = asyncio.Event()  # nothing of `_running` is left
        self._idle.set()
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
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def attach(self) -> None:
        """From now on the running event loop reads the engine's messages and watches its life."""
        self._loop = asyncio.get_running_loop()
        self._changing = asyncio.Lock()  # one change of its sleep at a time
        self._slept: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._slept.set_result({})
        self.loaded: asyncio.Future[ModelInfo] = self._loop.create_future()  # fails with LoadError
        self._loop.add_reader(self._fd, self._read)
        self._loop.add_reader(self._process.sentinel, self._on_death)
        self._pinger = self._loop.create_task(self._ping())
        self._read()  # the descriptor tells of changes only

    @property
    def silent_for(self) -> float:
        """Seconds since the loaded engine last said anything; it is asked every few."""
        return time.monotonic() - self._heard if self.loaded.done() and self.error is None else 0.0

    def submit(self, requests: list[EngineRequest], generation: Generation) -> None:
        """Send the sequences of one HTTP request. Raises CapacityError when shutting down, EngineFatal without engine."""
        if self.error is not None:
            raise EngineFatal("the engine has stopped")
        if self.draining:
            self.refused["shutting_down"] += 1
            raise CapacityError("the server is shutting down")
        if self.asleep:
            self.refused["asleep"] += 1
            raise CapacityError("the model is asleep: POST /wake_up first")
        self._running |= {request.request_id: generation for request in requests}
        self._idle.clear()
        self._send(ToEngine(add=requests))

    def reset_prefix_cache(self) -> None:
        """Requests sent from now on find nothing that was cached before."""
        self._send(ToEngine(reset_prefix_cache=True))

    async def sleep(self, level: int) -> None:
        """Put the model to sleep once nothing runs, nothing new being taken from now on; level 0 wakes it up.

        Raises what stands in the way (RequestError, CapacityError); it is as awake as it was then.
        """
        async with self._changing:
            before, self.asleep = self.asleep, True
            try:
                if level:
                    await self.idle()
                self._slept = self._loop.create_future()
                self._send(ToEngine(sleep=level))
                if error := await self._slept:
                    raise RequestError(**error)
            except BaseException:
                self.asleep = before
                raise
            self.asleep = bool(level)

    def abort(self, names: set[str] | None) -> int:
        """End the requests of these ids, theirs or ours, or all; how many that were."""
        found = {generation for generation in self._running.values() if names is None or names & generation.names}
        for generation in found:
            generation.abort()
        return len(found)

    def forget(self, ids: Iterable[str]) -> None:
        """Stop these sequences, news of which goes nowhere from now on."""
        if live := [request_id for request_id in ids if self._running.pop(request_id, None) is not None]:
            self._send(ToEngine(abort=live))
            self._note_idle()

    async def idle(self) -> None:
        """Wait until nothing runs or waits."""
        await self._idle.wait()

    def _note_idle(self) -> None:
        if not self._running:
            self._idle.set()

    def fail_all(self, error: Exception) -> None:
        """Every request in flight ends with `error`."""
        for generation in set(self._running.values()):
            generation.close(error)

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
            found = self._running.get if output.finish_reason is None else self._running.pop
            if (generation := found(output.request_id, None)) is not None:
                generation.take(output)
        self._note_idle()
        if message.judged and (generation := self._running.get(message.judged[0])) is not None:
            if message.refusal is None:
                generation.admit()
            else:
                self.refused["queue_full"] += message.refusal["status"] == 503
                generation.close(RequestError(**message.refusal))
        if message.slept is not None and not self._slept.done():
            self._slept.set_result(message.slept)
        if message.loading is not None:
            self._on_loading(*message.loading)
        if message.loaded is not None:
            self.loaded.set_result(message.loaded)
        if message.failed is not None:
            self._on_failure(message.failed)

    async def _ping(self) -> None:
        await asyncio.wait([self.loaded])
        while True:
            self._send(ToEngine())
            await asyncio.sleep(PING_INTERVAL)

    def _on_death(self) -> None:
        self._loop.remove_reader(self._process.sentinel)
        self._read()  # its last words
        self._process.join()
        code = self._process.exitcode or 0
        self._on_failure(f"the engine process {f'was killed by signal {-code}' if code < 0 else f'exited with {code}'}")
        self.ended.set()

    def _on_failure(self, reason: str) -> None:
        if self.error is None:
            self.error = EngineFatal(reason) if self.loaded.done() else LoadError(reason)
            if not self.loaded.done():
                self.loaded.set_exception(self.error)
                self.loaded.exception()  # whoever waits gets it; nobody need wait
            self.fail_all(EngineFatal("the engine has stopped"))
            if not self._slept.done():
                self._slept.set_exception(EngineFatal("the engine has stopped"))

    async def stop(self) -> None:
        """Ask the process to end and wait for it, PATIENCE seconds at most."""
        self._pinger.cancel()
        if self.error is None:
            self._send(ToEngine(stop=True))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.ended.wait(), PATIENCE if self.loaded.done() else 0)
        self._loop.remove_reader(self._process.sentinel)
        self._loop.remove_reader(self._fd)

    def close(self) -> None:
        """Leave nothing behind: neither process nor socket nor folder. Idempotent; needs no event loop."""
        if self._process.pid is not None and self._process.exitcode is None:
            self._process.kill()
            self._process.join()
        self._context.destroy(linger=0)
        shutil.rmtree(self._dir, ignore_errors=True)
