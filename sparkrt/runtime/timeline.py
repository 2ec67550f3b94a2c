"""`Timeline`: the order of work on the host backend: streams, events, captures and graphs.

Work runs at once, in the order it was issued, which is one legal order of what CUDA might do. With `deferred`, it waits until
something synchronizes with it, which is another: a plan buffer overwritten too early then gives wrong values here too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, NamedTuple, TypeVar

from sparkrt.errors import EngineFatal
from sparkrt.runtime.backend import CaptureError, Event, Graph, GraphExec, Stream
from sparkrt.runtime.ledger import Traffic

DEFAULT_STREAM = Stream(0, "default")
_Handle = TypeVar("_Handle", Stream, Event, Graph, GraphExec)


class Work(NamedTuple):
    """One piece of work, `run(*args)`, and as what it counts."""

    run: Callable[..., object]
    args: tuple[Any, ...]
    name: str  # of the operator, or the kind of copy
    nbytes: int | None = None  # None: a launch


class _Capture:
    """A capture under way. `loose` are the streams that joined it with something the origin has not waited for."""

    def __init__(self, origin: Stream) -> None:
        self.origin = origin
        self.work: list[Work] = []
        self.last: dict[int, int] = {origin.handle: -1}  # by stream that takes part: index of its last piece of work
        self.loose: dict[int, Stream] = {}
        self.broken = ""  # by what, if it is

    def touch(self, stream: Stream) -> None:
        """`stream` takes part and has something new."""
        self.last[stream.handle] = len(self.work) - 1
        if stream != self.origin:
            self.loose[stream.handle] = stream


class _Mark(NamedTuple):
    """Where an event was recorded: after `position` pieces of work (those of the capture, if it was recorded in one)."""

    stream: Stream
    position: int
    capture: _Capture | None


class Timeline:
    """The part of the host backend that is about order. Misuse of a handle is EngineFatal: a bug in sparkrt."""

    def __init__(self, deferred: bool) -> None:
        self.traffic = Traffic()
        self._deferred = deferred
        self._direct = not deferred  # work may simply be run: nothing is captured, nothing waits
        self._handles = count(1)
        self._known: dict[int, Any] = {0: None}  # by handle: of an event its mark, of a graph its work
        self._capture: _Capture | None = None
        self._waiting: deque[Work] = deque()
        self._done = 0  # pieces of work that waited and were run; `_done + len(_waiting)` were issued

    def create_stream(self, name: str = "") -> Stream:
        return self._add(Stream(next(self._handles), name), None)

    def destroy_stream(self, stream: Stream) -> None:
        """The stream's work is finished first, as CUDA would."""
        if stream == DEFAULT_STREAM:
            raise EngineFatal("the default stream cannot be destroyed")
        self._find(stream)
        self._forbid_capture(f"destroying {stream}")
        self._run_waiting()
        del self._known[stream.handle]

    def create_event(self) -> Event:
        return self._add(Event(next(self._handles)), None)  # not recorded yet

    def destroy_event(self, event: Event) -> None:
        self._find(event)
        del self._known[event.handle]

    def record_event(self, event: Event, stream: Stream) -> None:
        self._find(event)
        capture = self._capture_of(stream)
        position = len(capture.work) if capture else self._done + len(self._waiting)
        self._known[event.handle] = _Mark(stream, position, capture)

    def stream_wait_event(self, stream: Stream, event: Event) -> None:
        """Order `stream` after `event`. Issue order already does so; what is checked is that a device would allow it.

        A stream that waits for an event of the capture joins it, as on CUDA, and must be waited for before the end. An event
        that was never recorded is EngineFatal: CUDA would let it pass, and the order would be a matter of luck.
        """
        mark = self._mark(event)
        capture = self._capture_of(stream)
        if mark.capture is None:
            if capture:
                self._forbid_capture(f"waiting for {event}, which was recorded outside,")
            return
        if mark.capture is not self._capture:
            raise CaptureError(f"{event} was recorded in a capture that is over: it cannot be waited for")
        if mark.capture.last[mark.stream.handle] < mark.position:
            mark.capture.loose.pop(mark.stream.handle, None)
        mark.capture.touch(stream)

    def event_query(self, event: Event) -> bool:
        position = self._mark(event, asking=True).position
        done = position <= self._done
        self._run_waiting(position)  # whoever polls must see it happen, the next time
        return done

    def event_synchronize(self, event: Event) -> None:
        mark = self._mark(event, asking=True)
        self._forbid_capture("waiting on the host")
        self._run_waiting(mark.position)
        self.traffic.syncs["event", mark.stream] += 1

    def synchronize(self, stream: Stream | None = None) -> None:
        """Wait for a stream, or for the device. Deferred work of other streams runs with it: issue order is kept."""
        self._forbid_capture("waiting on the host")
        if stream is not None:
            self._find(stream)
        self._run_waiting()
        self.traffic.syncs["device" if stream is None else "stream", stream] += 1

    def begin_capture(self, stream: Stream) -> None:
        self._find(stream)
        self._forbid_capture("a second capture")
        self._capture = _Capture(stream)
        self._direct = False

    def end_capture(self, stream: Stream) -> Graph:
        """Close the capture. A broken one raises CaptureError here too, and leaves nothing behind."""
        capture = self._capture
        if capture is None or capture.origin != stream:
            raise CaptureError(f"no capture began on {stream}")
        self._capture = None
        self._direct = not self._deferred
        if capture.broken:
            raise CaptureError(f"the capture was broken by {capture.broken}")
        if capture.loose:
            raise CaptureError(f"{stream} never waited for what it captured from {list(capture.loose.values())}")
        return self._add(Graph(next(self._handles), len(capture.work)), capture.work)

    def is_capturing(self, stream: Stream) -> bool:
        return self._capture_of(stream) is not None

    def instantiate(self, graph: Graph) -> GraphExec:
        return self._add(GraphExec(next(self._handles), graph.nodes), self._find(graph))

    def launch_graph(self, graph: GraphExec, stream: Stream) -> None:
        work = self._find(graph)
        self.traffic.graph_launches += self._capture_of(stream) is None  # else it becomes part of another
        self._issue(work, stream)

    def destroy_graph(self, graph: Graph | GraphExec) -> None:
        self._find(graph)
        del self._known[graph.handle]

    def _issue(self, work: Sequence[Work], stream: Stream) -> None:
        """Run it, let it wait, or record it when the stream is capturing."""
        if capture := self._capture_of(stream):
            capture.work.extend(work)
            capture.touch(stream)
            return
        for piece in work:
            if piece.nbytes is None:
                self.traffic.launches[piece.name] += 1
            else:
                self.traffic.transfer(piece.name, piece.nbytes, stream)
        if self._deferred:
            self._waiting.extend(work)
        else:
            for piece in work:
                piece.run(*piece.args)

    def _run_waiting(self, position: int | None = None) -> None:
        """Run deferred work, all of it or the first `position` pieces ever issued."""
        while self._waiting and (position is None or self._done < position):
            piece = self._waiting.popleft()
            self._done += 1
            piece.run(*piece.args)

    def _forbid_capture(self, what: str) -> None:
        """Raise CaptureError if a capture is under way: `what` would end it on a device too."""
        if self._capture:
            self._capture.broken = self._capture.broken or what
            raise CaptureError(f"{what} is not possible while {self._capture.origin} is capturing")

    def _capture_of(self, stream: Stream) -> _Capture | None:
        """The capture that `stream` takes part in."""
        self._find(stream)
        return self._capture if self._capture and stream.handle in self._capture.last else None

    def _add(self, thing: _Handle, what: Any) -> _Handle:
        self._known[thing.handle] = what
        return thing

    def _find(self, thing: Stream | Event | Graph | GraphExec) -> Any:
        if thing.handle not in self._known:
            raise EngineFatal(f"{thing} does not exist")
        return self._known[thing.handle]

    def _mark(self, event: Event, asking: bool = False) -> _Mark:
        """Where `event` was recorded; `asking` on the host, which cannot be done of one recorded in a capture."""
        mark: _Mark | None = self._find(event)
        if mark is None:
            raise EngineFatal(f"{event} was never recorded")
        if asking and mark.capture:
            if mark.capture is self._capture:
                self._forbid_capture(f"asking for {event} of the capture")
            raise CaptureError(f"{event} was recorded in a capture: only streams of that capture can wait for it")
        return mark
