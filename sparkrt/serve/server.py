"""`sparkrt serve`: the API process, from its command line to its exit code.

The engine process is started first and loads while this one imports its web stack; the port is open from the beginning, and
requests that come early wait for the model.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import sys
import time
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from sparkrt.engine.config import load_engine, load_text
from sparkrt.errors import CapacityError, LoadError, SparkrtError
from sparkrt.serve.args import ServeArgs, parse
from sparkrt.serve.client import EngineClient

if TYPE_CHECKING:
    from sparkrt.serve.serving import OpenText
    from sparkrt.serve.worker import Loader

log = logging.getLogger("sparkrt.serve")

LINGER = 1.0  # s that a server without engine goes on answering 503, so that who probes it sees why
UNWINDING = 2.0  # s that failed requests get to say so
STATS_INTERVAL = 10.0  # s


def serve(argv: list[str]) -> int:
    """Exit codes: 0 stopped by Ctrl-C or SIGTERM, 1 cannot serve (any more), 2 wrong command line."""
    return run(parse(argv), load_engine, load_text)


def run(args: ServeArgs, loader: Loader, open_text: OpenText) -> int:
    """Serve until told to stop. `loader` runs in the engine process, `open_text` in a thread of this one."""
    began = time.monotonic()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C, until the event loop takes both over
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S", level=logging.INFO)
    client: EngineClient | None = None
    try:
        listener = _listen(args.host, args.port)
        client = EngineClient(args.engine, loader)
        client.start()
        import uvloop

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_serve(args, client, listener, open_text, began))
    except KeyboardInterrupt:
        return 0
    except SparkrtError as error:
        print(f"sparkrt: error: {error}", file=sys.stderr)
        return 1
    finally:
        if client is not None:
            client.close()


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket; LoadError says why there is none."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=2048)
    except OSError as error:
        raise LoadError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None


async def _serve(args: ServeArgs, client: EngineClient, listener: socket.socket, open_text: OpenText, began: float) -> int:
    stop, again = _signals()
    client.attach()
    from sparkrt.serve.app import build_app  # the web stack comes in while the engine loads
    from sparkrt.serve.listener import HttpServer
    from sparkrt.serve.serving import Serving
    from sparkrt.serve.startup import LoadingView, print_summary

    serving = Serving(args, client)
    http = HttpServer(build_app(serving), args.uvicorn_log_level)
    served = asyncio.ensure_future(http.serve(sockets=[listener]))
    try:
        with LoadingView(client):
            await _first(serving.open(open_text), stop)
        if not stop.done():
            print_summary(serving, _url(args.host, listener), time.monotonic() - began)
            gc.collect()
            gc.freeze()  # what is loaded stays: not worth walking again
            await _first(client.ended(), stop, *([] if args.disable_log_stats else [_log_stats(client)]))
        if not stop.done():
            log.critical("%s", client.error)
            await asyncio.wait([stop], timeout=LINGER)
            return 1
        client.draining = True
        http.should_exit = True
        await asyncio.wait([served, again], timeout=args.shutdown_timeout, return_when=asyncio.FIRST_COMPLETED)
        return 0
    finally:
        http.should_exit = True
        serving.close(CapacityError("the server is shutting down"))
        await asyncio.wait([served], timeout=UNWINDING)
        served.cancel()
        await client.stop()


def _signals() -> tuple[asyncio.Future[None], asyncio.Future[None]]:
    """Futures of the first Ctrl-C or SIGTERM, and of the second, which ends the patience of the first."""
    loop = asyncio.get_running_loop()
    first, second = loop.create_future(), loop.create_future()

    def on_signal() -> None:
        if not first.done():
            first.set_result(None)
        elif not second.done():
            second.set_result(None)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    return first, second


async def _first(*things: Coroutine[Any, Any, Any] | asyncio.Future[Any]) -> None:
    """Wait until one of them is done; raise what it raised. Coroutines that are not done by then are cancelled."""
    futures = [asyncio.ensure_future(thing) for thing in things]
    try:
        done, _ = await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for thing, future in zip(things, futures, strict=True):
            if thing is not future:
                future.cancel()
    for future in done:
        future.result()


def _url(host: str, listener: socket.socket) -> str:
    port = listener.getsockname()[1]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def _log_stats(client: EngineClient) -> None:
    """A line of throughput every STATS_INTERVAL in which something happened."""
    before, at = client.stats, time.monotonic()
    while True:
        await asyncio.sleep(STATS_INTERVAL)
        now, later = client.stats, time.monotonic()
        prompt, generated = now.prompt_tokens - before.prompt_tokens, now.generation_tokens - before.generation_tokens
        if prompt or generated:
            used = 1 - now.free_blocks / now.total_blocks if now.total_blocks else 0.0
            log.info(
                "Avg prompt throughput: %.1f tokens/s, Avg generation throughput: %.1f tokens/s, Running: %d reqs, "
                "Waiting: %d reqs, KV cache usage: %.1f%%",
                prompt / (later - at),
                generated / (later - at),
                now.running,
                now.waiting,
                100 * used,
            )
        before, at = now, later
