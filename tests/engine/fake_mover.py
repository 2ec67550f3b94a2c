"""The fake model's bus: like a real one it copies late, and says so when it did.

Outward, contents are taken when the copy is issued (a device gathers in the order of its steps) and arrive when a ticket is done;
inward, they are read and written only then. What runs on a page or a state that is not there yet, fails in the model.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sparkrt.cache.shuttle import Kind, Piece
from sparkrt.cache.spill import Costs, Spill

ALWAYS = Costs(1.0)  # a second a token: everything is worth its copy


class FakeMover:
    """An arena of `chunks` pages; a state takes two. `patience`: how often at most a ticket is asked for before it is done."""

    def __init__(self, model: Any, chunks: int, patience: int = 3, seed: int = 0) -> None:
        self.model, self.chunks = model, chunks
        self.chunk_bytes = 4 * model.options.page_size
        self.arena = np.zeros(chunks * self.chunk_bytes, np.uint8)
        self.closed = False
        self._rng, self._patience = random.Random(seed), patience
        self._late: deque[tuple[int, int, Callable[[], None]]] = deque()  # ticket, how often it will be asked for, what it does
        self._tickets = 0

    def nbytes(self, kind: Kind) -> int:
        return self.chunk_bytes if kind is Kind.PAGE else (self.chunk_bytes + 16) * self.model.recurrent

    def views(self, kind: Kind, chunks: Sequence[int]) -> list[np.ndarray]:
        left, parts = self.nbytes(kind), []
        for chunk in chunks:
            start = chunk * self.chunk_bytes
            parts.append(self.arena[start : start + min(left, self.chunk_bytes)])
            left -= len(parts[-1])
        assert not left, "too few chunks"
        return parts

    def out(self, pieces: Sequence[Piece]) -> int:
        taken = [(piece, self._take(piece)) for piece in pieces]
        return self._issue(lambda: [self._put(piece, content) for piece, content in taken])

    def into(self, pieces: Sequence[Piece]) -> int:
        return self._issue(lambda: [self._give(piece) for piece in pieces])

    def done(self, ticket: int) -> bool:
        while self._late and self._late[0][0] <= ticket:
            number, asked, run = self._late[0]
            if asked:
                self._late[0] = number, asked - 1, run
                return False
            self._late.popleft()
            run()
        return True

    def wait(self, ticket: int) -> None:
        while not self.done(ticket):
            pass

    def close(self) -> None:
        assert not self._late, "closed with copies under way"
        self.closed = True

    def _issue(self, run: Callable[[], Any]) -> int:
        self._tickets += 1
        self._late.append((self._tickets, self._rng.randint(0, self._patience), run))
        return self._tickets

    def _take(self, piece: Piece) -> bytes:
        if piece.kind is Kind.PAGE:
            return np.array(self.model.kv[piece.place], np.int32).tobytes()
        live = self.model.live.get(piece.place)
        length, state = (live.length, live.state) if live is not None else self.model.states[piece.place]
        return np.array([length, state], np.int64).tobytes().ljust(self.nbytes(Kind.STATE), b"s")

    def _put(self, piece: Piece, content: bytes) -> None:
        for view in self.views(piece.kind, piece.chunks):
            view[:], content = np.frombuffer(content[: len(view)], np.uint8), content[len(view) :]

    def _give(self, piece: Piece) -> None:
        content = b"".join(view.tobytes() for view in self.views(piece.kind, piece.chunks))
        owners = [seq for seq in self.model.live.values() if not seq.released]
        if piece.kind is Kind.PAGE:
            tokens = np.frombuffer(content, np.int32).tolist()
            (owner,) = [seq for seq in owners if piece.place in seq.blocks.blocks]  # fresh blocks have one
            at = owner.blocks.blocks.index(piece.place) * len(tokens)
            there = min(owner.length - at, len(tokens))
            assert there > 0, "a page nobody asked for"
            assert tokens[:there] == owner.history[at : at + there], "another page than was asked for"
            self.model.kv[piece.place] = tokens
        else:
            length, state = np.frombuffer(content[:16], np.int64).tolist()
            (owner,) = [seq for seq in owners if seq.slot == piece.place]
            assert length == owner.length, "a state of another place"
            owner.state = state


def spilling(
    chunks: int = 64, disk: Any = None, costs: Costs = ALWAYS, model: bytes = b"m", **more: Any
) -> Callable[[Any], Spill]:
    """What a `FakeModel` makes its `spill` with."""
    return lambda fake: Spill(FakeMover(fake, chunks, **more), model, costs, disk() if callable(disk) else disk)
