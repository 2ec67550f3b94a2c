"""An in-process world of several ranks: threads that meet, with a host backend each.

Collectives are launched as operators, so a captured or deferred one behaves as an operator does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Condition
from typing import Any

import numpy as np

from sparkrt.runtime import DeviceArray, HostBackend
from sparkrt.runtime.backend import Stream
from sparkrt.runtime.comm import CommError, check_gather, check_rank


def fake_world(n: int, backends: Sequence[HostBackend] | None = None, timeout: float = 30.0) -> list[FakeComm]:
    """`n` ranks of one process, each to be driven by its own thread, each with its own HostBackend unless given.

    A rank that waits longer than `timeout` seconds raises CommError saying who is missing, and so does then every other.
    """
    if n < 1 or (backends is not None and len(backends) != n):
        raise ValueError(f"fake_world: {n} ranks with {'no' if backends is None else len(backends)} backends")
    meeting = _Meeting(n, timeout)
    return [FakeComm(rank, meeting, backends[rank] if backends else HostBackend()) for rank in range(n)]


class FakeComm:
    """One rank of a `fake_world`."""

    def __init__(self, rank: int, meeting: _Meeting, backend: HostBackend) -> None:
        self.rank = rank
        self.world = meeting.world
        self.backend = backend
        self._meeting = meeting

    def all_reduce(self, array: DeviceArray, stream: Stream) -> None:
        self._launch("all_reduce", self._all_reduce, (array,), stream)

    def all_gather(self, out: DeviceArray, array: DeviceArray, stream: Stream) -> None:
        check_gather(out, array, self.world)
        self._launch("all_gather", self._all_gather, (out, array), stream)

    def broadcast(self, array: DeviceArray, root: int, stream: Stream) -> None:
        check_rank(root, self.world)
        self._launch("broadcast", self._broadcast, (array, root), stream)

    def send(self, array: DeviceArray, peer: int, stream: Stream) -> None:
        """Leaves a copy for `peer` and goes on."""
        self._check_peer(peer)
        self._launch("send", self._send, (array, peer), stream)

    def recv(self, array: DeviceArray, peer: int, stream: Stream) -> None:
        self._check_peer(peer)
        self._launch("recv", self._recv, (array, peer), stream)

    def barrier(self) -> None:
        self._meeting.exchange(self.rank, "barrier", None)

    def _launch(self, name: str, function: Callable[..., None], args: tuple[Any, ...], stream: Stream) -> None:
        self.backend.launch(_Collective(f"comm.{name}", function), args, stream)

    def _all_reduce(self, array: np.ndarray) -> None:
        parts = self._meeting.exchange(self.rank, f"all_reduce of {_kind(array)}", array.copy())
        wide = array.dtype if array.dtype.itemsize >= 4 else np.float32  # half and bf16 add up in float32, rounded once
        total = parts[0].astype(wide)
        for part in parts[1:]:
            total += part.astype(wide)
        array[...] = total.astype(array.dtype)

    def _all_gather(self, out: np.ndarray, array: np.ndarray) -> None:
        parts = self._meeting.exchange(self.rank, f"all_gather of {_kind(array)}", array.copy())
        out.reshape(self.world, -1)[...] = [part.reshape(-1) for part in parts]

    def _broadcast(self, array: np.ndarray, root: int) -> None:
        mine = array.copy() if self.rank == root else None
        array[...] = self._meeting.exchange(self.rank, f"broadcast of {_kind(array)} from rank {root}", mine)[root]

    def _send(self, array: np.ndarray, peer: int) -> None:
        self._meeting.post(self.rank, peer, array.copy())

    def _recv(self, array: np.ndarray, peer: int) -> None:
        sent = self._meeting.fetch(peer, self.rank)
        if (sent.shape, sent.dtype) != (array.shape, array.dtype):
            raise CommError(f"rank {self.rank} expects {_kind(array)} from rank {peer}, which sent {_kind(sent)}")
        array[...] = sent

    def _check_peer(self, peer: int) -> None:
        check_rank(peer, self.world)
        if peer == self.rank:
            raise ValueError(f"rank {peer} cannot send to itself")


@dataclass(frozen=True, slots=True)
class _Collective:
    name: str
    host: Callable[..., None]
    cuda: str | None = None


class _Meeting:
    """Where the ranks of a fake world meet."""

    def __init__(self, world: int, timeout: float) -> None:
        self.world = world
        self._timeout = timeout
        self._changed = Condition()
        self._arrived: dict[int, tuple[str, Any]] = {}
        self._round = 0
        self._parts: list[Any] = []
        self._mail: dict[tuple[int, int], deque[np.ndarray]] = {}
        self._broken = ""

    def exchange(self, rank: int, what: str, part: Any) -> list[Any]:
        """Bring `part`, wait for everyone, take all parts in rank order. `what` must be the same for all."""
        with self._changed:
            self._check()
            mine = self._round
            self._arrived[rank] = what, part
            if len(self._arrived) == self.world:
                if any(other != what for other, _ in self._arrived.values()):
                    calls = "; ".join(f"rank {r}: {call}" for r, (call, _) in sorted(self._arrived.items()))
                    self._break(f"ranks do different things: {calls}")
                # Nobody overwrites these before all have read them: the next round needs every rank back here.
                self._parts = [self._arrived[r][1] for r in range(self.world)]
                self._arrived = {}
                self._round += 1
                self._changed.notify_all()
            elif not self._changed.wait_for(lambda: self._round != mine or self._broken, self._timeout):
                missing = ", ".join(str(r) for r in range(self.world) if r not in self._arrived)
                self._break(f"rank {rank} waited {self._timeout:g} s in {what}; missing: rank {missing}")
            if self._round == mine:
                self._check()
            return self._parts

    def post(self, source: int, target: int, array: np.ndarray) -> None:
        with self._changed:
            self._check()
            self._mail.setdefault((source, target), deque()).append(array)
            self._changed.notify_all()

    def fetch(self, source: int, target: int) -> np.ndarray:
        with self._changed:
            box = self._mail.setdefault((source, target), deque())
            if not self._changed.wait_for(lambda: box or self._broken, self._timeout):
                self._break(f"rank {target} waited {self._timeout:g} s for something from rank {source}")
            self._check()
            return box.popleft()

    def _break(self, why: str) -> None:
        self._broken = why
        self._changed.notify_all()
        self._check()

    def _check(self) -> None:
        if self._broken:
            raise CommError(self._broken)


def _kind(array: np.ndarray) -> str:
    return f"{array.dtype}{list(array.shape)}"
