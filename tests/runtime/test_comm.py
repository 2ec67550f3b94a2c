"""Ranks in one process: every rank a thread, every wait bounded."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from typing import TypeVar

import numpy as np
import pytest

from sparkrt.runtime import DeviceArray, HostBackend, dtypes
from sparkrt.runtime.comm import Comm, CommError, SoloComm
from tests.runtime.fake_world import FakeComm, fake_world

T = TypeVar("T")


def run_ranks(world: list[FakeComm], body: Callable[[FakeComm], T]) -> list[T]:
    """Run `body` on every rank at once; results in rank order."""
    with ThreadPoolExecutor(len(world)) as pool:
        return [future.result() for future in [pool.submit(body, comm) for comm in world]]


def device(comm: FakeComm, values: np.ndarray) -> DeviceArray:
    array = comm.backend.empty(values.shape, dtypes.from_numpy(values.dtype))
    comm.backend.copy_h2d(array.ptr, values)
    return array


def values(rank: int, dtype: dtypes.DType = dtypes.float32) -> np.ndarray:
    scaled = np.random.default_rng(rank).normal(size=(3, 4)) * 10.0 ** (3 * rank)
    return (scaled if dtype.is_float else np.full((3, 4), rank)).astype(dtype.np)


def test_comms_are_comms() -> None:
    assert isinstance(SoloComm(HostBackend()), Comm)
    assert all(isinstance(comm, Comm) for comm in fake_world(2))


@pytest.mark.parametrize("dtype", [dtypes.float32, dtypes.float64, dtypes.bfloat16, dtypes.int32], ids=str)
def test_all_reduce_adds_in_rank_order(dtype: dtypes.DType) -> None:
    def body(comm: FakeComm) -> np.ndarray:
        array = device(comm, values(comm.rank, dtype))
        for _ in range(20):
            comm.backend.copy_h2d(array.ptr, values(comm.rank, dtype))
            comm.all_reduce(array, comm.backend.default_stream)
        return array.view.copy()

    wide = np.float32 if dtype.itemsize < 4 else dtype.np
    expected = reduce(np.add, [values(r, dtype).astype(wide) for r in range(4)]).astype(dtype.np)
    for got in run_ranks(fake_world(4), body):
        np.testing.assert_array_equal(got, expected)  # the same bits on every rank, every time


def test_gather_broadcast_and_barrier() -> None:
    def body(comm: FakeComm) -> tuple[np.ndarray, np.ndarray]:
        stream = comm.backend.default_stream
        mine, out = device(comm, values(comm.rank)), comm.backend.empty((4, 3, 4), dtypes.float32)
        comm.all_gather(out, mine, stream)
        comm.barrier()
        comm.broadcast(mine, 2, stream)
        return out.view.copy(), mine.view.copy()

    for gathered, broadcast in run_ranks(fake_world(4), body):
        np.testing.assert_array_equal(gathered, np.stack([values(r) for r in range(4)]))
        np.testing.assert_array_equal(broadcast, values(2))


def test_send_and_recv_around_a_ring_keep_order() -> None:
    def body(comm: FakeComm) -> list[float]:
        stream, got = comm.backend.default_stream, comm.backend.empty((1,), dtypes.float32)
        seen = []
        for i in range(5):
            message = device(comm, np.array([10 * comm.rank + i], np.float32))
            comm.send(message, (comm.rank + 1) % comm.world, stream)
            comm.backend.memset(message.ptr, 0, 4)  # what was sent is a copy
        for _ in range(5):
            comm.recv(got, (comm.rank - 1) % comm.world, stream)
            seen.append(float(got.view[0]))
        return seen

    assert run_ranks(fake_world(4), body) == [[10 * ((r - 1) % 4) + i for i in range(5)] for r in range(4)]


@pytest.mark.parametrize("deferred", [False, True])
def test_collectives_are_captured_and_replayed(deferred: bool) -> None:
    def body(comm: FakeComm) -> tuple[float, float, int]:
        b, array = comm.backend, device(comm, np.array([comm.rank + 1.0], np.float32))
        stream = b.create_stream("compute")
        b.begin_capture(stream)
        comm.all_reduce(array, stream)
        run = b.instantiate(b.end_capture(stream))
        before = float(array.view[0])
        with b.count() as traffic:
            b.launch_graph(run, stream)
            b.launch_graph(run, stream)
        b.synchronize(stream)
        return before, float(array.view[0]), traffic.launched("comm.all_reduce")

    backends = [HostBackend(deferred=deferred) for _ in range(3)]
    assert run_ranks(fake_world(3, backends), body) == [(r + 1.0, 18.0, 2) for r in range(3)]


def test_a_missing_rank_is_named_and_nobody_hangs() -> None:
    world = fake_world(3, timeout=0.05)

    def body(comm: FakeComm) -> str:
        if comm.rank == 1:
            return "absent"
        with pytest.raises(CommError) as error:
            comm.all_reduce(device(comm, values(0)), comm.backend.default_stream)
        return str(error.value)

    messages = run_ranks(world, body)
    assert messages[0] == messages[2]
    assert "missing: rank 1" in messages[0]
    assert "all_reduce of float32[3, 4]" in messages[0]
    with pytest.raises(CommError, match="missing: rank 1"):
        world[1].barrier()  # whoever comes late learns of it at once


@pytest.mark.parametrize("difference", ["operation", "shape", "dtype"])
def test_ranks_that_do_different_things_all_fail(difference: str) -> None:
    def body(comm: FakeComm) -> str:
        stream, odd = comm.backend.default_stream, comm.rank == 2
        array = comm.backend.empty((3 if odd and difference == "shape" else 2,), dtypes.float32)
        if odd and difference == "dtype":
            array = comm.backend.empty((2,), dtypes.int32)
        with pytest.raises(CommError, match="different things") as error:
            comm.broadcast(array, 0, stream) if odd and difference == "operation" else comm.all_reduce(array, stream)
        return str(error.value)

    messages = run_ranks(fake_world(3), body)
    assert len(set(messages)) == 1
    assert "rank 2: " in messages[0]


def test_recv_checks_what_arrives_and_gives_up() -> None:
    a, b = fake_world(2, timeout=0.05)
    a.send(device(a, np.zeros(3, np.float32)), 1, a.backend.default_stream)
    with pytest.raises(CommError, match=r"expects int32\[3\] from rank 0, which sent float32\[3\]"):
        b.recv(b.backend.empty((3,), dtypes.int32), 0, b.backend.default_stream)
    with pytest.raises(CommError, match=r"rank 1 waited 0\.05 s for something from rank 0"):
        b.recv(b.backend.empty((3,), dtypes.float32), 0, b.backend.default_stream)


def test_wrong_arguments() -> None:
    a, _ = fake_world(2)
    stream, x = a.backend.default_stream, a.backend.empty((2,), dtypes.float32)
    for call, message in (
        (lambda: a.send(x, 0, stream), "itself"),
        (lambda: a.recv(x, 2, stream), "rank 2 of a world of 2"),
        (lambda: a.broadcast(x, -1, stream), "rank -1"),
        (lambda: a.all_gather(x, x, stream), "all_gather of float32"),
        (lambda: fake_world(0), "0 ranks"),
        (lambda: fake_world(2, [HostBackend()]), "1 backends"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_a_world_of_one() -> None:
    backend = HostBackend()
    comm, stream = SoloComm(backend), backend.default_stream
    x, out = backend.empty((2,), dtypes.float32), backend.empty((1, 2), dtypes.float32)
    backend.copy_h2d(x.ptr, np.array([1, 2], np.float32))
    with backend.count() as traffic:
        comm.all_reduce(x, stream)
        comm.broadcast(x, 0, stream)
        comm.barrier()
    assert traffic.copies() == traffic.launched() == 0
    comm.all_gather(out, x, stream)
    assert out.view.tolist() == [[1, 2]]
    for call in (lambda: comm.send(x, 0, stream), lambda: comm.recv(x, 0, stream), lambda: comm.broadcast(x, 1, stream)):
        with pytest.raises(ValueError, match="rank"):
            call()
