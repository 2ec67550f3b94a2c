"""`Comm`: what ranks say to each other, and the world of one. Tests have a fake of several (tests/runtime/fake_world.py)."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from sparkrt.errors import EngineFatal
from sparkrt.runtime.array import DeviceArray
from sparkrt.runtime.backend import GpuBackend, Stream


class CommError(EngineFatal):
    """Ranks lost each other: one did not come in time, or came with another operation or shape."""


@runtime_checkable
class Comm(Protocol):
    """One rank's end. All ranks call the same collectives, issued on a stream, in the same order with equal shapes and dtypes.

    `all_reduce` sums over ranks in place, added in rank order, so that every rank gets the same bits. `all_gather` brings
    every rank's array into out [world, *array.shape]; `broadcast` makes everyone's array root's. `barrier` waits on the host.
    """

    @property
    def rank(self) -> int: ...
    @property
    def world(self) -> int: ...
    def all_reduce(self, array: DeviceArray, stream: Stream) -> None: ...
    def all_gather(self, out: DeviceArray, array: DeviceArray, stream: Stream) -> None: ...
    def broadcast(self, array: DeviceArray, root: int, stream: Stream) -> None: ...
    def send(self, array: DeviceArray, peer: int, stream: Stream) -> None: ...
    def recv(self, array: DeviceArray, peer: int, stream: Stream) -> None: ...
    def barrier(self) -> None: ...


class SoloComm:
    """The world of one rank: nothing to reduce, nobody to send to or to wait for."""

    rank, world = 0, 1

    def __init__(self, backend: GpuBackend) -> None:
        self._backend = backend

    def all_reduce(self, array: DeviceArray, stream: Stream) -> None:
        pass

    def all_gather(self, out: DeviceArray, array: DeviceArray, stream: Stream) -> None:
        check_gather(out, array, self.world)
        self._backend.copy_d2d(out.ptr, array.ptr, array.nbytes, stream)

    def broadcast(self, array: DeviceArray, root: int, stream: Stream) -> None:
        check_rank(root, self.world)

    def send(self, array: DeviceArray, peer: int, stream: Stream) -> None:
        raise ValueError("a world of one rank has no peer")

    recv = send

    def barrier(self) -> None:
        pass


def check_gather(out: DeviceArray, array: DeviceArray, world: int) -> None:
    if out.dtype != array.dtype or out.size != world * array.size:
        raise ValueError(f"all_gather of {array.dtype}{list(array.shape)} over {world} ranks into {out.dtype}{list(out.shape)}")


def check_rank(rank: int, world: int) -> None:
    if not 0 <= rank < world:
        raise ValueError(f"rank {rank} of a world of {world}")
