"""What many streaming clients cost the engine: the same rows once as streams of as many clients, once as whole answers of two.

    python -m benchmarks.streams --streams 256 --tokens 200

Starts a server of a model that recites; engine, API process and clients share the cores. Times of a step and between steps are
the engine's own; processor time is that of /proc, which others on the machine do not change.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from random import Random
from string import ascii_letters
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from sparkrt.bench.client import Client
from sparkrt.bench.dataset import Sample
from sparkrt.bench.load import arrivals, body_of, encode, run
from sparkrt.bench.report import Outcome, spread
from tests.rigs import r1

ROOT = Path(__file__).resolve().parent.parent
PATH = "/v1/completions"


def seconds(pid: int) -> float:
    """Of a processor, that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def engine_of(pid: int) -> int:
    """The child that computes: the one that has used most."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return max(map(int, children), key=seconds)


async def ask(url: str, bodies: list[dict[str, Any]]) -> tuple[list[Outcome], dict[str, float]]:
    """The answers, and by how much the engine's counters grew meanwhile."""
    client = Client(url)
    requests = [(Sample("", 1, 0), encode(body)) for body in bodies]

    async def stats() -> dict[str, float]:
        found: dict[str, float] = msgspec.json.decode((await client.send("GET", "/server_info")).body)["stats"]
        return found

    before = await stats()
    outcomes, _ = await run(client, PATH, requests, arrivals(len(requests), float("inf"), 1.0, 0))
    after = await stats()
    client.close()
    return outcomes, {name: after[name] - before[name] for name in ("steps", "step_seconds", "gap_seconds", "generation_tokens")}


def measure(url: str, pid: int, what: str, bodies: list[dict[str, Any]]) -> list[Outcome]:
    pids = engine_of(pid), pid, os.getpid()
    before = [seconds(p) for p in pids]
    outcomes, grown = asyncio.run(ask(url, bodies))
    engine, api, clients = (seconds(p) - began for p, began in zip(pids, before, strict=True))
    steps, tokens = grown["steps"], grown["generation_tokens"]
    times = f"step {1e3 * grown['step_seconds'] / steps:.2f} ms, between steps {1e3 * grown['gap_seconds'] / steps:.3f} ms"
    each = f"API {1e6 * api / tokens:.1f} and clients {1e6 * clients / tokens:.1f} µs a token"
    print(f"{what}: {steps:.0f} steps, {times}; of a processor: engine {1e3 * engine / steps:.2f} ms a step, {each}", flush=True)
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=200)
    args = parser.parse_args()
    with TemporaryDirectory() as folder:
        r1(folder, ["".join(Random(1).choices(ascii_letters, k=380))])
        command = [sys.executable, "-m", "sparkrt.serve", folder, "--port", "0", "--max-num-seqs", str(args.streams)]
        server = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            url = next(found[0] for line in server.stdout if (found := re.search(r"http://127\.0\.0\.1:\d+", line)))
            more = {"temperature": 0, "ignore_eos": True}
            body = body_of("openai", Sample("\n", 1, args.tokens), more)
            whole = {"prompt": "\n", "max_tokens": args.tokens, "n": args.streams // 2, **more}
            measure(url, server.pid, "warm-up", [body])
            outcomes = measure(url, server.pid, f"{args.streams} streams", [body] * args.streams)
            measure(url, server.pid, "2 whole answers", [whole] * 2)
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(30)
    faults = [outcome.error for outcome in outcomes if outcome.error]
    gap = spread(outcomes, ["itl"], [])["median_itl_ms"]
    print(f"{len(faults)} errors, {len({outcome.text for outcome in outcomes})} texts, {gap:.1f} ms between tokens")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
