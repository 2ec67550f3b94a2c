"""The engine process: loads the model, then drains messages, steps, sends what came out. Idle, it sleeps on the socket."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import shutil
import signal
import threading
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import zmq

from sparkrt.engine.config import EngineConfig, Progress
from sparkrt.engine.messages import Abort, EngineOutput, EngineRequest, EngineStats, ModelInfo
from sparkrt.errors import CapacityError, RequestError, SparkrtError
from sparkrt.serve import wire

log = logging.getLogger("sparkrt.engine")


class Engine(Protocol):
    """What the worker asks of `EngineCore`; the tests' fake has no more than this."""

    def add(self, request: EngineRequest) -> None: ...
    def abort(self, request_ids: Iterable[str]) -> None: ...
    def step(self) -> list[EngineOutput]: ...
    @property
    def has_work(self) -> bool: ...
    def stats(self) -> EngineStats: ...
    def close(self) -> None: ...


Loader = Callable[[EngineConfig, Progress], tuple[Engine, Any, ModelInfo]]
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
            core, _, info = loader(config, lambda what, done, total: socket.send(wire.encode(wire.Loading(what, done, total))))
        except Exception as error:
            _fail(socket, error, "loading failed", bool(config.debug))
        gc.collect()
        gc.freeze()  # what is loaded lives as long as the process: not worth walking again
        socket.send(wire.encode(wire.Loaded(info)))
        try:
            _loop(socket, core)
        except Exception as error:
            log.critical("the engine stopped", exc_info=error)
            _fail(socket, error, "the engine failed", False)
        core.close()


def _loop(socket: zmq.Socket[bytes], core: Engine) -> None:
    while True:
        told = False
        while True:
            try:
                data = socket.recv(zmq.NOBLOCK if core.has_work or told else 0)
            except zmq.Again:
                break
            message = wire.decode_to_engine(data)
            if isinstance(message, wire.Add):
                socket.send(wire.encode(_add(core, message.requests)))
            elif isinstance(message, Abort):
                core.abort(message.request_ids)
            elif isinstance(message, wire.Stop):
                return
            told = True
        outputs = core.step() if core.has_work else []
        if outputs or told:
            socket.send(wire.encode(wire.News(outputs, core.stats())))


def _add(core: Engine, requests: list[EngineRequest]) -> wire.Admitted | wire.Refused:
    ids = [request.request_id for request in requests]
    try:
        for request in requests:
            core.add(request)
    except RequestError as error:
        refusal = wire.Refused(ids, error.message, error.param, error.code, error.status)
    except CapacityError as error:
        refusal = wire.Refused(ids, str(error), None, None, 503)
    else:
        return wire.Admitted(ids)
    core.abort(ids)
    return refusal


def _fail(socket: zmq.Socket[bytes], error: Exception, what: str, debug: bool) -> None:
    """Say in one line why, and exit 1. What is not ours is named with its class, and shown in full only when debugging."""
    if isinstance(error, SparkrtError):
        message = str(error)
    else:
        message = f"{what}: {type(error).__name__}: {error}"
        if debug:
            traceback.print_exception(error)
    socket.send(wire.encode(wire.Failed(" ".join(message.split()))))
    raise SystemExit(1)


def _die_with_parent(address: str) -> None:
    """A killed API process cannot say Stop: its end is seen here, and nothing is left behind, the socket's folder included."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        shutil.rmtree(Path(address.removeprefix("ipc://")).parent, ignore_errors=True)
        os._exit(1)
