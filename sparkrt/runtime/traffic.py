"""`Traffic`: what went through a backend, counted by kind, so that tests can assert its shape."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

from sparkrt.runtime.backend import Stream


class Transfer(NamedTuple):
    """One class of copies. `kind` ∈ h2d | d2h | d2d | 2d | memset; blocking ones belong to no stream.

    `blocking` says what the copy costs on a device: an asynchronous copy from or to memory that is not pinned counts as
    blocking, because CUDA makes the caller wait for it.
    """

    kind: str
    blocking: bool
    stream: Stream | None


class Sync(NamedTuple):
    """One class of waits. `kind` ∈ stream | device | event; of an event, `stream` is the one it was recorded on."""

    kind: str
    stream: Stream | None


@dataclass(slots=True)
class Traffic:
    """Counts since a backend was made, or of one `with backend.count() as traffic:` block (filled when it ends).

    A graph replay counts the launches and copies that its nodes make, besides itself in `graph_launches`.
    """

    launches: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    transfers: defaultdict[Transfer, int] = field(default_factory=lambda: defaultdict(int))
    transferred: defaultdict[Transfer, int] = field(default_factory=lambda: defaultdict(int))  # bytes
    syncs: defaultdict[Sync, int] = field(default_factory=lambda: defaultdict(int))
    allocations: int = 0
    frees: int = 0
    graph_launches: int = 0

    def copies(self, kind: str | None = None, *, blocking: bool | None = None, stream: Stream | None = None) -> int:
        """How many copies match; an argument left out matches everything."""
        return sum(n for key, n in self.transfers.items() if _matches(key, kind, blocking, stream))

    def nbytes(self, kind: str | None = None, *, blocking: bool | None = None, stream: Stream | None = None) -> int:
        """How many bytes the matching copies moved."""
        return sum(n for key, n in self.transferred.items() if _matches(key, kind, blocking, stream))

    def synchronizations(self, kind: str | None = None, *, stream: Stream | None = None) -> int:
        """How often the host waited."""
        return sum(n for key, n in self.syncs.items() if kind in (None, key.kind) and stream in (None, key.stream))

    def launched(self, name: str | None = None) -> int:
        """How many operators ran, or how often the one called `name` did."""
        return sum(self.launches.values()) if name is None else self.launches.get(name, 0)

    def transfer(self, kind: str, blocking: bool, stream: Stream | None, nbytes: int) -> None:
        key = Transfer(kind, blocking, None if blocking else stream)
        self.transfers[key] += 1
        self.transferred[key] += nbytes

    def snapshot(self) -> Traffic:
        copy = Traffic()
        copy.set_difference(self, Traffic())
        return copy

    def set_difference(self, after: Traffic, before: Traffic) -> None:
        """Become what was counted between two snapshots."""
        for name in ("launches", "transfers", "transferred", "syncs"):
            old = getattr(before, name)
            changed = {key: n - old.get(key, 0) for key, n in getattr(after, name).items() if n != old.get(key, 0)}
            setattr(self, name, defaultdict(int, changed))
        for name in ("allocations", "frees", "graph_launches"):
            setattr(self, name, getattr(after, name) - getattr(before, name))


def _matches(key: Transfer, kind: str | None, blocking: bool | None, stream: Stream | None) -> bool:
    return kind in (None, key.kind) and blocking in (None, key.blocking) and stream in (None, key.stream)
