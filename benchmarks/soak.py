"""Many streams at once for a while, a third of them dropped half-way: a server must come out of it as it went in.

    python -m benchmarks.soak --seconds 120 --streams 64 [server arguments]

Starts a server on this machine, and exits non-zero on any error, leaked block or slot, growth of memory, or answer that changed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from threading import Timer
from time import perf_counter, sleep
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
GROWTH = 64 << 20  # bytes that the server's processes together may take on after the first fifth of the time
HELLO = {"messages": [{"role": "user", "content": "Hello!"}], "temperature": 0, "max_tokens": 32}


class Client:
    """Plain requests to one port; each has a connection of its own."""

    def __init__(self, port: int) -> None:
        self._port = port

    def open(self, path: str, body: dict[str, Any] | None = None) -> tuple[HTTPConnection, HTTPResponse]:
        connection = HTTPConnection("127.0.0.1", self._port, timeout=60)
        headers = {"Content-Type": "application/json"} if body else {}
        connection.request("POST" if body else "GET", path, json.dumps(body) if body else None, headers)
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {response.read()[:300]!r}")
        return connection, response

    def read(self, path: str, body: dict[str, Any] | None = None) -> str:
        connection, response = self.open(path, body)
        with closing(connection):
            return response.read().decode()

    def hello(self) -> str:
        return str(json.loads(self.read("/v1/chat/completions", HELLO))["choices"][0]["message"]["content"])

    def busy(self) -> float:
        """Requests that run or wait."""
        found = re.findall(r"^sparkrt:num_requests_\w+\{.*\} (\S+)$", self.read("/metrics"), re.MULTILINE)
        assert found, "no gauge of requests in /metrics"
        return sum(map(float, found))

    def one(self, rng: random.Random) -> bool:
        """A streamed request of random shape; returns whether it was dropped on the way."""
        content = "Tell me a story. " * rng.randrange(1, 60)
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": rng.randrange(1, 300)}
        body |= {"temperature": rng.choice([0.0, 0.8]), "ignore_eos": True, "stream": True}
        keep = rng.randrange(1, 40) if rng.random() < 0.33 else None
        connection, response = self.open("/v1/chat/completions", body)
        with closing(connection):
            chunks, ended = 0, False
            for line in response:
                if b'"error"' in line:
                    raise RuntimeError(line.decode())
                chunks += line.startswith(b"data: ")
                ended |= line.startswith(b"data: [DONE]")
                if chunks == keep:
                    return True
        if not ended:
            raise RuntimeError("a stream ended without [DONE]")
        return False


def resident(root: int) -> int:
    """Bytes of main memory of a process and its children."""
    total = 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if root in (int(folder.name), int(fields[1])):
                total += int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
        except (OSError, IndexError):  # it ended meanwhile
            continue
    return total


def soak(client: Client, pid: int, seconds: float, streams: int) -> list[str]:
    """What went wrong."""
    faults: list[str] = []
    counts, settled = {False: 0, True: 0}, [0]
    before, end = client.hello(), perf_counter() + seconds

    def stream(seed: int) -> None:
        rng = random.Random(seed)
        while perf_counter() < end:
            try:
                counts[client.one(rng)] += 1
            except Exception as error:  # whatever it is, it is what we look for
                faults.append(repr(error))

    timer = Timer(seconds / 5, lambda: settled.append(resident(pid)))
    timer.start()
    with ThreadPoolExecutor(streams) as pool:
        list(pool.map(stream, range(streams)))
    timer.join()
    grown = resident(pid) - settled[-1]
    print(f"{counts[False]} answers, {counts[True]} dropped, memory {grown / 2**20:+.1f} MiB", flush=True)
    if grown > GROWTH:
        faults.append(f"memory grew by {grown:,} bytes")
    if (after := client.hello()) != before:
        faults.append(f"the answer to Hello! was {before!r} and is {after!r}")
    for _ in range(50):  # what was dropped last ends within a step or two
        if not client.busy():
            return faults
        sleep(0.1)
    return [*faults, "requests are left that nobody waits for"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--streams", type=int, default=64)
    args, rest = parser.parse_known_args()
    command = [sys.executable, "-m", "sparkrt.serve", "--port", "0", "--max-num-seqs", str(args.streams), *rest]
    # with SPARKRT_DEBUG the engine checks free + owned = total whenever it is idle, and ends if it is not
    server = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"SPARKRT_DEBUG": "1"}, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        ready = next((found for line in server.stdout if (found := re.search(r"http://127\.0\.0\.1:(\d+)", line))), None)
        faults = soak(Client(int(ready[1])), server.pid, args.seconds, args.streams) if ready else ["the server did not start"]
    finally:
        server.send_signal(signal.SIGINT)
        code = server.wait(30)
    faults += [f"the server ended with {code}"] if code else []
    print(*(faults[:10] or ["no fault"]), sep="\n")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
