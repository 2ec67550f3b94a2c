"""Launches, traffic, events, captures and replays, and the deferred order that shows hazards."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from sparkrt.errors import EngineFatal
from sparkrt.ops.operator import Operator
from sparkrt.runtime import CaptureError, DeviceArray, HostBackend, dtypes
from sparkrt.runtime.backend import MemoryFault


def scale(out: np.ndarray, x: np.ndarray, factor: float) -> None:
    np.multiply(x, factor, out=out)


SCALE = Operator(scale, lambda x, factor: x * factor)


def add(out: np.ndarray, amount: float) -> None:
    out += amount


ADD = Operator(add, lambda out, amount: out + amount)


class Rig:
    """A backend with a stream, a pinned and a device array of four floats."""

    def __init__(self, deferred: bool = False, debug: bool = False) -> None:
        self.backend = HostBackend(deferred=deferred, debug=debug)
        self.stream = self.backend.create_stream("compute")
        self.pinned_ptr = self.backend.alloc_pinned(16, "plan")
        self.pinned = self.backend.pinned_view(self.pinned_ptr, 16).view(np.float32)
        self.pinned[:] = [1, 2, 3, 4]
        self.x = self.device()
        self.y = self.device()

    def device(self) -> DeviceArray:
        array = self.backend.empty((4,), dtypes.float32)
        self.backend.memset(array.ptr, 0, 16)
        return array

    def read(self, array: DeviceArray) -> list[float]:
        out = np.empty(array.shape, array.dtype.np)
        self.backend.copy_d2h(out, array.ptr)
        return out.tolist()


# --- launches and traffic -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("debug", [False, True])
def test_launch_passes_views_and_scalars(deferred: bool, debug: bool) -> None:
    rig = Rig(deferred, debug)
    rig.backend.copy_h2d(rig.x.ptr, rig.pinned, rig.stream)
    rig.backend.launch(SCALE, (rig.y, rig.x, 3.0), rig.stream)
    assert rig.read(rig.y) == [3, 6, 9, 12]


def test_a_step_has_a_shape_that_tests_can_assert() -> None:
    rig = Rig()
    backend, other = rig.backend, rig.backend.create_stream("copy")
    back_ptr = backend.alloc_pinned(16)
    back = backend.pinned_view(back_ptr, 16).view(np.float32)
    done = backend.create_event()
    with backend.count() as step:
        backend.copy_h2d(rig.x.ptr, rig.pinned, rig.stream)
        for _ in range(3):
            backend.launch(ADD, (rig.x, 1.0), rig.stream)
        backend.launch(SCALE, (rig.y, rig.x, 2.0), rig.stream)
        backend.record_event(done, rig.stream)
        backend.stream_wait_event(other, done)
        backend.copy_d2h(back, rig.y.ptr, other)
        backend.event_synchronize(done)
    assert back.tolist() == [8, 10, 12, 14]
    assert step.copies() == 2
    assert step.copies("h2d") == step.copies("h2d", stream=rig.stream) == step.copies(blocking=False, stream=rig.stream) == 1
    assert step.copies("d2h", blocking=True) == 0
    assert step.copies("d2h", stream=other) == 1
    assert step.copies("d2h", stream=rig.stream) == 0
    assert step.nbytes() == 32
    assert step.nbytes("h2d") == 16
    assert (step.launched(), step.launched("add"), step.launched("scale"), step.launched("none")) == (4, 3, 1, 0)
    assert step.synchronizations() == step.synchronizations("event", stream=rig.stream) == 1
    assert step.synchronizations("device") == 0
    assert step.allocations == step.frees == step.graph_launches == 0


def test_every_kind_is_counted_apart() -> None:
    rig = Rig()
    b = rig.backend
    out = np.empty(4, np.float32)
    with b.count() as outer:
        with b.count() as inner:
            b.copy_h2d(rig.x.ptr, rig.pinned)
            b.copy_d2h(out, rig.x.ptr)
            b.copy_d2d(rig.y.ptr, rig.x.ptr, 8)
            b.copy_d2d_2d(rig.y.ptr, 4, rig.x.ptr, 8, 4, 2)
            b.memset(rig.y.ptr, 1, 4)
        b.synchronize()
        b.synchronize(rig.stream)
        b.free(b.alloc(8))
    assert set(inner.transfers) == {(kind, True, None) for kind in ("h2d", "d2h", "d2d", "2d", "memset")}
    assert inner.nbytes() == 16 + 16 + 8 + 8 + 4
    assert outer.copies() == 5
    assert (inner.synchronizations(), outer.synchronizations("device"), outer.synchronizations("stream")) == (0, 1, 1)
    assert (outer.allocations, outer.frees) == (1, 1)


def test_an_async_copy_of_pageable_memory_counts_as_blocking() -> None:
    rig = Rig()
    pageable = np.ones(4, np.float32)
    with rig.backend.count() as traffic:
        rig.backend.copy_h2d(rig.x.ptr, pageable, rig.stream)
        rig.backend.copy_d2h(pageable, rig.x.ptr, rig.stream)
    assert traffic.copies("h2d", blocking=True) == traffic.copies("d2h", blocking=True) == 1
    assert traffic.copies(blocking=False) == 0


def test_debug_launches_check_arguments() -> None:
    rig = Rig(debug=True)
    with pytest.raises(EngineFatal, match="scale argument 1 is ndarray"):
        rig.backend.launch(SCALE, (rig.y, rig.x.view, 1.0), rig.stream)
    with pytest.raises(EngineFatal, match="argument 2 is float32"):
        rig.backend.launch(SCALE, (rig.y, rig.x, np.float32(1)), rig.stream)
    rig.backend.free(rig.x.ptr)
    with pytest.raises(MemoryFault, match="scale argument 1"):
        rig.backend.launch(SCALE, (rig.y, rig.x, 1.0), rig.stream)


# --- streams and events -------------------------------------------------------------------------------------------------------
def test_events_are_ordered() -> None:
    b = HostBackend()
    event, stream = b.create_event(), b.create_stream("s")
    for use in (lambda: b.stream_wait_event(stream, event), lambda: b.event_synchronize(event), lambda: b.event_query(event)):
        with pytest.raises(EngineFatal, match="never recorded"):
            use()
    b.record_event(event, stream)
    b.stream_wait_event(b.default_stream, event)
    assert b.event_query(event)
    b.destroy_event(event)
    for use in (lambda: b.record_event(event, stream), lambda: b.event_synchronize(event), lambda: b.destroy_event(event)):
        with pytest.raises(EngineFatal, match="does not exist"):
            use()


def test_destroyed_streams_are_refused() -> None:
    rig = Rig()
    b, gone = rig.backend, rig.backend.create_stream("gone")
    b.destroy_stream(gone)
    for use in (
        lambda: b.launch(ADD, (rig.x, 1.0), gone),
        lambda: b.copy_h2d(rig.x.ptr, rig.pinned, gone),
        lambda: b.synchronize(gone),
        lambda: b.record_event(b.create_event(), gone),
        lambda: b.begin_capture(gone),
        lambda: b.destroy_stream(gone),
    ):
        with pytest.raises(EngineFatal, match=r"'gone'.*does not exist"):
            use()
    with pytest.raises(EngineFatal, match="default stream"):
        b.destroy_stream(b.default_stream)
    assert rig.read(rig.x) == [0, 0, 0, 0]


# --- deferred -----------------------------------------------------------------------------------------------------------------
def test_deferred_work_waits_for_a_synchronization() -> None:
    rig = Rig(deferred=True)
    b, back = rig.backend, rig.backend.pinned_view(rig.backend.alloc_pinned(16), 16).view(np.float32)
    back[:] = -1
    first, second = b.create_event(), b.create_event()
    b.copy_h2d(rig.x.ptr, rig.pinned, rig.stream)
    b.copy_d2h(back, rig.x.ptr, rig.stream)
    b.record_event(first, rig.stream)
    b.launch(ADD, (rig.x, 1.0), rig.stream)
    b.copy_d2h(back, rig.x.ptr, rig.stream)
    b.record_event(second, rig.stream)
    assert back.tolist() == [-1] * 4
    b.event_synchronize(first)
    assert back.tolist() == [1, 2, 3, 4]
    assert b.event_query(first)
    assert not b.event_query(second)
    assert b.event_query(second)  # who polls gets there
    assert back.tolist() == [2, 3, 4, 5]


def test_deferred_shows_a_plan_buffer_overwritten_too_early() -> None:
    results = []
    for deferred in (False, True):
        rig = Rig(deferred)
        rig.backend.copy_h2d(rig.x.ptr, rig.pinned, rig.stream)
        rig.pinned[:] = 9  # the next step's plan, before this one's copy is known to be done
        rig.backend.synchronize(rig.stream)
        results.append(rig.read(rig.x))
    assert results == [[1, 2, 3, 4], [9, 9, 9, 9]]


@pytest.mark.parametrize("finish", ["synchronize", "blocking copy", "free", "close", "destroy stream"])
def test_what_waits_for_the_device_runs_deferred_work(finish: str) -> None:
    rig = Rig(deferred=True)
    b, spare = rig.backend, rig.backend.alloc(8)
    b.launch(ADD, (rig.x, 1.0), rig.stream)
    assert rig.x.view.tolist() == [0] * 4
    {
        "synchronize": b.synchronize,
        "blocking copy": lambda: b.memset(spare, 0, 8),
        "free": lambda: b.free(spare),
        "close": b.close,
        "destroy stream": lambda: b.destroy_stream(rig.stream),
    }[finish]()
    assert rig.x.view.tolist() == [1] * 4


# --- capture ------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("deferred", [False, True])
def test_capture_records_and_replays_with_fresh_inputs(deferred: bool) -> None:
    rig = Rig(deferred)
    b = rig.backend
    with b.count() as captured:
        b.begin_capture(rig.stream)
        assert b.is_capturing(rig.stream)
        assert not b.is_capturing(b.default_stream)
        b.copy_h2d(rig.x.ptr, rig.pinned, rig.stream)
        b.launch(SCALE, (rig.y, rig.x, 10.0), rig.stream)
        b.launch(ADD, (rig.y, 1.0), rig.stream)
        b.memset(rig.x.ptr, 0, 16, rig.stream)
        graph = b.end_capture(rig.stream)
        run = b.instantiate(graph)
    assert graph.nodes == run.nodes == 4
    assert captured.copies() == captured.launched() == 0
    assert rig.read(rig.y) == [0] * 4

    b.destroy_graph(graph)
    for values in ([1, 2, 3, 4], [5, 6, 7, 8]):
        rig.pinned[:] = values
        with b.count() as replay:
            b.launch_graph(run, rig.stream)
        assert rig.read(rig.y) == [10 * v + 1 for v in values]
        assert (replay.graph_launches, replay.launched("scale"), replay.launched()) == (1, 1, 2)
        assert replay.copies("h2d", blocking=False, stream=rig.stream) == replay.copies("memset") == 1
        assert replay.nbytes() == 32
    b.destroy_graph(run)
    for use in (lambda: b.launch_graph(run, rig.stream), lambda: b.destroy_graph(run), lambda: b.instantiate(graph)):
        with pytest.raises(EngineFatal, match="does not exist"):
            use()


def test_other_streams_run_during_a_capture() -> None:
    rig = Rig()
    b, other = rig.backend, rig.backend.create_stream("other")
    b.begin_capture(rig.stream)
    b.launch(ADD, (rig.x, 1.0), other)
    b.launch(ADD, (rig.y, 1.0), rig.stream)
    b.end_capture(rig.stream)
    assert (rig.read(rig.x), rig.read(rig.y)) == ([1] * 4, [0] * 4)


def test_a_graph_within_a_graph() -> None:
    rig = Rig()
    b = rig.backend
    b.begin_capture(rig.stream)
    b.launch(ADD, (rig.x, 1.0), rig.stream)
    inner = b.instantiate(b.end_capture(rig.stream))
    b.begin_capture(rig.stream)
    b.launch_graph(inner, rig.stream)
    b.launch_graph(inner, rig.stream)
    outer = b.instantiate(b.end_capture(rig.stream))
    b.destroy_graph(inner)
    with b.count() as traffic:
        b.launch_graph(outer, rig.stream)
    assert (outer.nodes, traffic.launched("add"), traffic.graph_launches) == (2, 2, 1)
    assert rig.read(rig.x) == [2] * 4


FORBIDDEN: dict[str, Callable[[Rig], object]] = {
    "blocking h2d": lambda r: r.backend.copy_h2d(r.x.ptr, r.pinned),
    "pageable h2d": lambda r: r.backend.copy_h2d(r.x.ptr, np.zeros(4, np.float32), r.stream),
    "blocking d2h": lambda r: r.backend.copy_d2h(r.pinned, r.x.ptr),
    "blocking d2d": lambda r: r.backend.copy_d2d(r.x.ptr, r.y.ptr, 16),
    "blocking memset": lambda r: r.backend.memset(r.x.ptr, 1, 16),
    "alloc": lambda r: r.backend.alloc(8),
    "alloc pinned": lambda r: r.backend.alloc_pinned(8),
    "empty": lambda r: r.backend.empty((2,), dtypes.int32),
    "free": lambda r: r.backend.free(r.x.ptr),
    "synchronize": lambda r: r.backend.synchronize(),
    "synchronize stream": lambda r: r.backend.synchronize(r.stream),
    "destroy stream": lambda r: r.backend.destroy_stream(r.stream),
    "second capture": lambda r: r.backend.begin_capture(r.backend.default_stream),
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_what_a_graph_cannot_hold_breaks_the_capture_and_nothing_else(what: str) -> None:
    rig = Rig()
    b = rig.backend
    b.begin_capture(rig.stream)
    with pytest.raises(CaptureError, match="capturing"), b.count() as traffic:
        FORBIDDEN[what](rig)
    assert traffic.copies() == traffic.allocations == traffic.frees == traffic.synchronizations() == 0
    with pytest.raises(CaptureError, match="broken by"):
        b.end_capture(rig.stream)
    assert not b.is_capturing(rig.stream)
    b.launch(ADD, (rig.x, 1.0), rig.stream)  # the eager path still works
    assert rig.read(rig.x) == [1] * 4


def test_capture_ends_where_it_began() -> None:
    b = HostBackend()
    s, t = b.create_stream("s"), b.create_stream("t")
    with pytest.raises(CaptureError, match="no capture"):
        b.end_capture(s)
    b.begin_capture(s)
    with pytest.raises(CaptureError, match="no capture"):
        b.end_capture(t)
    assert b.end_capture(s).nodes == 0


def test_fork_and_join_within_a_capture() -> None:
    rig = Rig()
    b, side = rig.backend, rig.backend.create_stream("side")
    forked, joined = b.create_event(), b.create_event()
    b.begin_capture(rig.stream)
    b.launch(ADD, (rig.x, 1.0), rig.stream)
    b.record_event(forked, rig.stream)
    b.stream_wait_event(side, forked)
    assert b.is_capturing(side)
    b.launch(ADD, (rig.y, 2.0), side)
    b.record_event(joined, side)
    b.stream_wait_event(rig.stream, joined)
    run = b.instantiate(b.end_capture(rig.stream))
    assert not b.is_capturing(side)
    assert (rig.read(rig.x), rig.read(rig.y)) == ([0] * 4, [0] * 4)
    b.launch_graph(run, rig.stream)
    assert (rig.read(rig.x), rig.read(rig.y)) == ([1] * 4, [2] * 4)
    for use in (lambda: b.event_synchronize(joined), lambda: b.event_query(joined), lambda: b.stream_wait_event(side, joined)):
        with pytest.raises(CaptureError, match="recorded in a capture"):
            use()


@pytest.mark.parametrize("late", [False, True])
def test_a_branch_that_nobody_waits_for_is_an_error(late: bool) -> None:
    rig = Rig()
    b, side = rig.backend, rig.backend.create_stream("side")
    forked, joined = b.create_event(), b.create_event()
    b.begin_capture(rig.stream)
    b.record_event(forked, rig.stream)
    b.stream_wait_event(side, forked)
    if late:  # joined, and then more work behind the event
        b.record_event(joined, side)
        b.launch(ADD, (rig.y, 2.0), side)
        b.stream_wait_event(rig.stream, joined)
    with pytest.raises(CaptureError, match=r"never waited for .*side"):
        b.end_capture(rig.stream)


def test_events_do_not_cross_the_border_of_a_capture() -> None:
    b = HostBackend()
    stream, outside, inside = b.create_stream("s"), b.create_event(), b.create_event()
    b.record_event(outside, stream)
    b.begin_capture(stream)
    with pytest.raises(CaptureError, match="recorded outside"):
        b.stream_wait_event(stream, outside)
    with pytest.raises(CaptureError, match="broken by waiting"):
        b.end_capture(stream)
    for ask in (b.event_query, b.event_synchronize):
        b.begin_capture(stream)
        b.record_event(inside, stream)
        with pytest.raises(CaptureError):
            ask(inside)
        with pytest.raises(CaptureError, match="broken by asking"):
            b.end_capture(stream)


def test_the_default_stream_can_be_captured() -> None:
    rig = Rig()
    b = rig.backend
    b.begin_capture(b.default_stream)
    b.launch(ADD, (rig.x, 1.0), b.default_stream)
    run = b.instantiate(b.end_capture(b.default_stream))
    b.launch_graph(run, b.default_stream)
    assert rig.read(rig.x) == [1] * 4
