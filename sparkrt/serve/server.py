"""`sparkrt serve`: the API process, from its command line to its exit code.

The engine process is started first and loads while this one imports its web stack; the port is open from the beginning, and
requests that come early wait for the model.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import sys
import textwrap
import time
from collections.abc import Awaitable, Iterator
from typing import TYPE_CHECKING, Any

from sparkrt.engine.config import load_engine, load_text
from sparkrt.errors import LoadError, SparkrtError
from sparkrt.serve.args import ENGINE_OPTIONS, ServeArgs, parse
from sparkrt.serve.cli import VERSION
from sparkrt.serve.client import EngineClient

if TYPE_CHECKING:
    from sparkrt.serve.serving import OpenText, Serving
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
    with contextlib.ExitStack() as stack:
        try:
            listener = _listen(args.host, args.port)
            client = EngineClient(args.engine, loader)
            stack.callback(client.close)
            client.start()
            import uvloop

            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                return runner.run(_serve(args, client, listener, open_text, began))
        except KeyboardInterrupt:
            return 0
        except SparkrtError as error:
            print(f"sparkrt: error: {error}", file=sys.stderr)
            return 1


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket; LoadError says why there is none."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=2048)
    except OSError as error:
        raise LoadError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None


async def _serve(args: ServeArgs, client: EngineClient, listener: socket.socket, open_text: OpenText, began: float) -> int:
    loop = asyncio.get_running_loop()
    stop, again = asyncio.Event(), asyncio.Event()  # the first Ctrl-C or SIGTERM, and one that ends the patience of the first
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, lambda: (again if stop.is_set() else stop).set())
    client.attach()
    from sparkrt.serve.app import build_app  # the web stack comes in while the engine loads
    from sparkrt.serve.http import HttpServer
    from sparkrt.serve.serving import Serving

    serving = Serving(args, client)
    http = HttpServer(build_app(serving), args.uvicorn_log_level)
    served = asyncio.ensure_future(http.serve(sockets=[listener]))
    try:
        with _loading_shown(client):
            await _first(serving.open(open_text), stop.wait())
        if not stop.is_set():
            port = listener.getsockname()[1]
            where = f"[{args.host}]:{port}" if ":" in args.host else f"{args.host}:{port}"
            _print_summary(serving, f"in {time.monotonic() - began:.1f} s at http://{where}/v1")
            gc.collect()
            gc.freeze()  # what is loaded stays: not worth walking again
            await _first(client.ended(), stop.wait(), *([] if args.disable_log_stats else [_log_stats(client)]))
        if not stop.is_set():
            log.critical("%s", client.error)
            await _first(stop.wait(), asyncio.sleep(LINGER))
            return 1
        client.draining = http.should_exit = True
        await _first(asyncio.shield(served), again.wait(), asyncio.sleep(args.shutdown_timeout))
        return 0
    finally:
        http.should_exit = True
        serving.close()
        await asyncio.wait([served], timeout=UNWINDING)
        served.cancel()
        await client.stop()


async def _first(*things: Awaitable[Any]) -> None:
    """Wait until one of them is done, and raise what it raised; cancel the others."""
    futures = [asyncio.ensure_future(thing) for thing in things]
    try:
        done, _ = await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for future in futures:
            future.cancel()
    for future in done:
        future.result()


@contextlib.contextmanager
def _loading_shown(client: EngineClient) -> Iterator[None]:
    """A progress bar on a terminal, a line per phase elsewhere; on stderr."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("starting", total=None)
            client.on_loading = lambda what, done, total: bar.update(task, description=what, completed=done, total=total or None)
            yield
        return
    phases: list[str] = []

    def show(what: str, done: int, total: int) -> None:
        if phases[-1:] != [what]:
            print(f"{what} ...", file=sys.stderr, flush=True)
        phases.append(what)

    client.on_loading = show
    yield


def _print_summary(serving: Serving, ready: str) -> None:
    """To stdout, ending with the URL: scripts read it there, since the port may have been chosen here."""
    args, info = serving.args, serving.info
    config = " ".join(f"{name}={value}" for name, value in info.lines if name in ENGINE_OPTIONS)
    lines = [
        ("model", f"{info.name} ({info.architecture}), answering to {', '.join(args.names)}"),
        ("dtype", f"{info.dtype} on {info.device}"),
        *((what, value) for what, value in info.lines if what not in ENGINE_OPTIONS),
        ("options", textwrap.fill(config, 110, subsequent_indent=" " * 15, break_long_words=False)),
        *(("note", note) for note in (*info.warnings, *args.notes)),
        ("ready", ready),
    ]
    print(f"sparkrt {VERSION}", *(f"  {what:<12} {value}" for what, value in lines), sep="\n", flush=True)


async def _log_stats(client: EngineClient) -> None:
    """A line of throughput every STATS_INTERVAL in which something happened."""
    before = client.stats
    while True:
        await asyncio.sleep(STATS_INTERVAL)
        now = client.stats
        prompt, generated = now.prompt_tokens - before.prompt_tokens, now.generation_tokens - before.generation_tokens
        if prompt or generated:
            busy = f"Running: {now.running} reqs, Waiting: {now.waiting} reqs"
            used = 100 * (1 - now.free_blocks / max(now.total_blocks, 1))
            speeds = ((kind, tokens / STATS_INTERVAL) for kind, tokens in (("prompt", prompt), ("generation", generated)))
            rates = ", ".join(f"Avg {kind} throughput: {speed:.1f} tokens/s" for kind, speed in speeds)
            log.info("%s, %s, KV cache usage: %.1f%%", rates, busy, used)
        before = now
