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
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any

from sparkrt.engine.flags import ENGINE_OPTIONS
from sparkrt.errors import SparkrtError
from sparkrt.limits import raise_file_limit
from sparkrt.serve.cli import VERSION, ServeArgs
from sparkrt.serve.engine import SIGNALS, EngineClient, Loader
from sparkrt.serve.foreign import WITHOUT_EFFECT
from sparkrt.serve.listening import address, listening

if TYPE_CHECKING:
    from sparkrt.serve.http import HttpServer
    from sparkrt.serve.serving import OpenText, Serving

log = logging.getLogger("sparkrt.serve")

LINGER = 1.0  # s that a server without engine goes on answering 503, so that who probes it sees why
UNWINDING = 2.0  # s that failed requests get to say so
STATS_INTERVAL = 10.0  # s


def run(args: ServeArgs, loader: Loader, open_text: OpenText) -> int:
    """Serve until told to stop (0) or unable to (1). `loader` runs in the engine process, `open_text` in a thread of this one."""
    began, loading = time.monotonic(), _Loading()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C, until the event loop takes both over
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S", level=logging.INFO)
    raise_file_limit()
    try:
        with listening(args) as listener, contextlib.closing(EngineClient(args.engine, loader, loading)) as client:
            client.start()
            import uvloop

            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                return runner.run(_serve(args, client, listener, open_text, began, loading))
    except KeyboardInterrupt:
        return 0
    except SparkrtError as error:
        print(f"sparkrt: error: {error}", file=sys.stderr)
        return 1


async def _serve(
    args: ServeArgs, client: EngineClient, listener: socket.socket, open_text: OpenText, began: float, loading: _Loading
) -> int:
    loop = asyncio.get_running_loop()
    stop, again = asyncio.Event(), asyncio.Event()  # the first Ctrl-C or SIGTERM, and one that ends the patience of the first
    for number in SIGNALS:
        loop.add_signal_handler(number, lambda: (again if stop.is_set() else stop).set())
    client.attach()
    from sparkrt.serve.access import access_log
    from sparkrt.serve.app import build_app  # the web stack comes in while the engine loads
    from sparkrt.serve.http import HttpServer
    from sparkrt.serve.serving import Serving

    serving, cleanup = Serving(args, client), contextlib.ExitStack()
    app = build_app(serving, cleanup.enter_context(access_log(args.access_log)))
    options = {"root_path": args.root_path, "ssl_certfile": args.ssl_certfile, "ssl_keyfile": args.ssl_keyfile}
    http = HttpServer(app, args.uvicorn_log_level, **options)
    served = asyncio.ensure_future(http.serve(sockets=[listener]))
    try:
        await _first(serving.open(open_text), stop.wait())
        if not stop.is_set():
            took = time.monotonic() - began
            serving.metrics.started(loading.end() | {"total": took}, serving.info)
            _print_summary(serving, f"in {took:.1f} s at {address(args, listener)}/v1")
            gc.collect()
            gc.freeze()  # what is loaded stays: not worth walking again
            await _first(client.ended.wait(), stop.wait(), *([] if args.disable_log_stats else [_log_stats(client)]))
        if not stop.is_set():
            log.critical("%s", client.error)
            await _first(stop.wait(), asyncio.sleep(LINGER))
            return 1
        client.draining = True  # /ready says so at once; what runs goes on, and /health answers until it is done
        await _first(_drain(client, http, served), again.wait(), asyncio.sleep(args.shutdown_timeout))
        return 0
    finally:
        http.should_exit = True
        serving.close()
        await asyncio.wait([served], timeout=UNWINDING)
        served.cancel()
        await client.stop()
        cleanup.close()


async def _drain(client: EngineClient, http: HttpServer, served: asyncio.Future[None]) -> None:
    await client.idle()
    http.should_exit = True
    await asyncio.shield(served)


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


class _Loading:
    """Shows progress on stderr: a line that changes on a terminal, a line per phase elsewhere; and times the phases."""

    def __init__(self) -> None:
        self.phases: dict[str, float] = {}  # s
        self._phase, self._began = "", time.monotonic()

    def __call__(self, what: str, done: int, total: int) -> None:
        first = what not in self.phases
        self.end()
        self._phase = what
        if sys.stderr.isatty():
            share = "" if done == total > 0 else f"{what} {100 * done // total} %" if total else f"{what} ..."
            print(f"\x1b[K{share}", end="\r", file=sys.stderr, flush=True)
        elif first:
            print(f"{what} ...", file=sys.stderr, flush=True)
        self.phases.setdefault(what, 0.0)

    def end(self) -> dict[str, float]:
        """All phases; the current one is over."""
        now = time.monotonic()
        if self._phase:
            self.phases[self._phase] += now - self._began
        self._phase, self._began = "", now
        return self.phases


def _print_summary(serving: Serving, ready: str) -> None:
    """To stdout, ending with the URL: scripts read it there, since the port may have been chosen here."""
    args, info = serving.args, serving.info
    config = " ".join(f"{name}={value}" for name, value in info.lines if name in ENGINE_OPTIONS)
    lines = [
        ("model", f"{info.name} ({info.architecture}), answering to {', '.join(args.names)}"),
        ("dtype", f"{info.dtype} on {info.device}"),
        *((what, value) for what, value in info.lines if what not in ENGINE_OPTIONS),
        ("options", textwrap.fill(config, 110, subsequent_indent=" " * 15, break_long_words=False)),
        *(("note", warning) for warning in info.warnings),
        *(("note", f"{flag} has no effect: {WITHOUT_EFFECT[flag][1]}") for flag in dict.fromkeys(args.without_effect)),
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
            rates = f"Avg prompt throughput: {prompt / STATS_INTERVAL:.1f} tokens/s, "
            rates += f"Avg generation throughput: {generated / STATS_INTERVAL:.1f} tokens/s"
            busy = f"Running: {now.running} reqs, Waiting: {now.waiting} reqs"
            usage, hits = 1 - now.free_blocks / max(now.total_blocks, 1), now.prefix_cache_hits / max(now.prefix_cache_queries, 1)
            log.info("%s, %s, KV cache usage: %.1f%%, Prefix cache hit rate: %.1f%%", rates, busy, 100 * usage, 100 * hits)
        before = now
