"""The engine process: loads the model, then drains messages, steps, sends what came out. Idle, it sleeps on the socket.

Also what it and the API process say to each other: msgpack of `ToEngine` and `FromEngine`, one per ZeroMQ message.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import shutil
import signal
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
import zmq

from sparkrt.engine.config import EngineConfig, Progress
from sparkrt.engine.messages import EngineOutput, EngineRequest, EngineStats, ModelInfo
from sparkrt.errors import CapacityError, RequestError, SparkrtError

if TYPE_CHECKING:
    from sparkrt.engine.core import EngineCore

log = logging.getLogger("sparkrt.engine")


class ToEngine(msgspec.Struct, omit_defaults=True):
    """One with nothing in it asks: are you there?"""

    add: list[EngineRequest] = []  # the sequences of one HTTP request: all are admitted, or none; answered by a verdict
    abort: list[str] = []
    stop: bool = False  # let go of everything and exit 0


class Verdict(msgspec.Struct):
    """Status 200: taken. Else a RequestError, or with 503 a CapacityError, and nothing of it runs."""

    request_ids: list[str]
    status: int = 200
    message: str = ""
    param: str | None = None
    code: str | None = None


class FromEngine(msgspec.Struct, omit_defaults=True):
    loading: tuple[str, int, int] | None = None  # a phase of start-up; units done, in all (bytes, tensors, ...)
    loaded: ModelInfo | None = None
    verdict: Verdict | None = None
    outputs: list[EngineOutput] = []  # of a step
    stats: EngineStats | None = None  # after it
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
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    threading.Thread(target=_die_with_parent, args=(address,), daemon=True).start()
    with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        socket.set_hwm(0)
        socket.linger = 1000  # ms: last words must arrive
        socket.connect(address)
        try:
            from sparkrt.runtime import limit_blas_threads

            limit_blas_threads(spare=1)  # before NumPy is loaded: one core is for the API process
            core, _, info = loader(config, lambda *phase: socket.send(encode(FromEngine(loading=phase))))
        except Exception as error:
            _fail(socket, error, "loading failed", bool(config.debug))
        gc.collect()
        gc.freeze()  # what is loaded lives as long as the process: not worth walking again
        socket.send(encode(FromEngine(loaded=info)))
        try:
            _loop(socket, core)
        except Exception as error:
            log.critical("the engine stopped", exc_info=error)
            _fail(socket, error, "the engine failed", False)
        core.close()


def _loop(socket: zmq.Socket[bytes], core: EngineCore) -> None:
    while True:
        told = False
        while True:
            try:
                message = decode_to_engine(socket.recv(zmq.NOBLOCK if core.has_work or told else 0))
            except zmq.Again:
                break
            if message.stop:
                return
            if message.add:
                socket.send(encode(FromEngine(verdict=_add(core, message.add))))
            core.abort(message.abort)
            told = True
        outputs = core.step() if core.has_work else []
        if outputs or told:
            socket.send(encode(FromEngine(outputs=outputs, stats=core.stats())))


def _add(core: EngineCore, requests: list[EngineRequest]) -> Verdict:
    verdict = Verdict([request.request_id for request in requests])
    try:
        for request in requests:
            core.add(request)
    except (RequestError, CapacityError) as error:
        core.abort(verdict.request_ids)
        verdict.status, verdict.message = getattr(error, "status", 503), str(error)
        verdict.param, verdict.code = getattr(error, "param", None), getattr(error, "code", None)
    return verdict


def _fail(socket: zmq.Socket[bytes], error: Exception, what: str, debug: bool) -> NoReturn:
    """Say in one line why, and exit 1. What is not ours is named with its class, and shown in full only when debugging."""
    ours = isinstance(error, SparkrtError)
    if debug and not ours:
        traceback.print_exception(error)
    message = str(error) if ours else f"{what}: {type(error).__name__}: {error}"
    socket.send(encode(FromEngine(failed=" ".join(message.split()))))
    raise SystemExit(1)


def _die_with_parent(address: str) -> None:
    """A killed API process cannot say stop: its end is seen here, and nothing is left behind, the socket's folder included."""
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        shutil.rmtree(Path(address.removeprefix("ipc://")).parent, ignore_errors=True)
        os._exit(1)
