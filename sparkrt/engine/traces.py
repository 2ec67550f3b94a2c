"""Traces for the simulator: who comes when, with which prompt, and how many tokens are answered.

A prompt is a chain of parts, `(name, tokens)`: equal chains are equal prompts, so that a million of them need no token. A file
holds one JSON object a line, `{"at": 0.25, "prompt": [[17, 900], [4, 60]], "answer": 128}`, `at` in seconds. The part named 0 is
an answer of the model, whatever it said. The synthetic ones come from a seed alone.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from heapq import heappush, heappushpop
from itertools import count
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sparkrt.errors import LoadError

VOCAB, ANSWER = 50_000, 7  # the model answers this token and nothing else; no other part has it
_Part = tuple[int, int]


class Arrival(NamedTuple):
    """A request. `at`: seconds since the start."""

    at: float
    prompt: tuple[_Part, ...]
    answer: int

    @property
    def tokens(self) -> int:
        return sum(n for _, n in self.prompt)

    def ids(self) -> np.ndarray:
        """The prompt, token by token: the same for the same parts."""
        return np.concatenate([np.full(n, ANSWER) if name == 0 else _text(name, n) for name, n in self.prompt])


def _text(name: int, tokens: int) -> np.ndarray:
    return np.random.default_rng(name).integers(ANSWER + 1, VOCAB, tokens)


def read(path: str | Path) -> list[Arrival]:
    """A trace file, in order of arrival. Raises LoadError with the line that is wrong."""
    arrivals = []
    for number, line in enumerate(Path(path).read_text().splitlines(), 1):
        try:
            record = json.loads(line)
            parts = tuple((int(name), int(n)) for name, n in record["prompt"])
            arrival = Arrival(float(record["at"]), parts, int(record["answer"]))
        except (ValueError, KeyError, TypeError) as error:
            expected = '{"at": seconds, "prompt": [[name, tokens], …], "answer": tokens}'
            raise LoadError(f"{path}, line {number}: expected {expected} ({error!r})") from None
        if not arrival.prompt or min(n for _, n in parts) < 1 or min(name for name, _ in parts) < 0 or arrival.answer < 1:
            raise LoadError(f"{path}, line {number}: parts and answers have at least one token, and names are not negative")
        arrivals.append(arrival)
    return sorted(arrivals, key=lambda arrival: arrival.at)


def write(arrivals: list[Arrival], path: str | Path) -> None:
    """The file that `read` reads."""
    Path(path).write_text("".join(json.dumps(arrival._asdict()) + "\n" for arrival in arrivals))


def chat(n: int, rate: float, seed: int = 0) -> list[Arrival]:
    """`n` requests, `rate` a second: conversations of 1 to 12 turns about a minute apart, each turn on top of all before."""
    return _sessions(n, rate, seed, lambda rng: (rng.randint(1, 12), 300, (20, 400), (50, 500), 60.0))


def agent(n: int, rate: float, seed: int = 0) -> list[Arrival]:
    """Tool loops of 5 to 40 turns: a long prompt, short calls, and results of up to 2,000 tokens some seconds later."""
    return _sessions(n, rate, seed, lambda rng: (rng.randint(5, 40), 4000, (50, 2000), (20, 150), 5.0))


def shared(n: int, rate: float, seed: int = 0) -> list[Arrival]:
    """Ten system prompts of 1,000 to 3,000 tokens, each request with one of them and a question of its own."""
    rng, names = random.Random(seed), count(1)
    systems = [(next(names), rng.randint(1000, 3000)) for _ in range(10)]
    at, arrivals = 0.0, []
    for _ in range(n):
        at += rng.expovariate(rate)
        arrivals.append(Arrival(at, (rng.choice(systems), (next(names), rng.randint(10, 300))), rng.randint(20, 300)))
    return arrivals


def _sessions(
    n: int, rate: float, seed: int, draw: Callable[[random.Random], tuple[int, int, _Part, _Part, float]]
) -> list[Arrival]:
    """The `n` earliest requests. `draw` gives a session's turns, system prompt, bounds of turns and answers, and pause in s."""
    rng, names, start = random.Random(seed), count(2), 0.0
    turns_each = sum(draw(random.Random(i))[0] for i in range(200)) / 200
    arrivals: list[Arrival] = []
    latest: list[float] = []  # minus the times of the n earliest, as a heap: a session that begins behind them adds nothing
    while len(latest) < n or start < -latest[0]:
        start += rng.expovariate(rate / turns_each)
        turns, system, heard, said, pause = draw(rng)
        at: float = start
        chain: tuple[_Part, ...] = ((1, system),)
        for _ in range(turns):
            answer = rng.randint(*said)
            chain = (*chain, (next(names), rng.randint(*heard)))
            arrivals.append(Arrival(at, chain, answer))
            heappush(latest, -at) if len(latest) < n else heappushpop(latest, -at)
            chain, at = (*chain, (0, answer)), at + answer * 0.02 + rng.expovariate(1 / pause)
    return sorted(arrivals)[:n]


SYNTHETIC = {"chat": chat, "agent": agent, "shared": shared}
