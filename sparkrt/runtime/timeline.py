"""`Timeline`: the order of work on the host backend: streams, events, captures and graphs.

A piece of work is a `Node`, a function and its arguments. Work runs at once, in the order it was issued, which is one legal
order of what CUDA might do. With `deferred`, it waits in that order until something synchronizes with it, which is another:
a plan buffer overwritten too early, or a result read before its event, then gives wrong values here as it would on a device.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sparkrt.errors import EngineFatal
from sparkrt.runtime.backend import CaptureError, Event, Graph, GraphExec, Stream
from sparkrt.runtime.traffic import Traffic

Node = tuple[Callable[..., object], tuple[Any, ...]]
DEFAULT_STREAM = Stream(0, "default")


@dataclass(slots=True)
class Recording:
    """What a capture recorded: the nodes in issue order, and what each replay adds to the traffic."""

    nodes: list[Node] = field(default_factory=list)
    launches: Counter[str] = field(default_factory=Counter)
    copies: list[tuple[str, int]] = field(default_factory=list)  # (kind, bytes)


class _Capture:
    """A capture under way. `loose` are the streams that joined it with something the origin has not waited for."""

    def __init__(self, origin: Stream) -> None:
        self.origin = origin
        self.recording = Recording()
        self.last_node: dict[int, int] = {origin.handle: -1}  # by stream that takes part: index of its last node
        self.loose: dict[int, Stream] = {}
        self.broken = ""  # by what, if it is

    def touch(self, stream: Stream) -> None:
        """`stream` takes part and has something new."""
        self.last_node[stream.handle] = len(self.recording.nodes) - 1
        if stream != self.origin:
            self.loose[stream.handle] = stream


@dataclass(frozen=True, slots=True)
class _Mark:
    """Where an event was recorded: after `position` pieces of work (nodes of the capture, if it was recorded in one)."""

    stream: Stream
    position: int
    capture: _Capture | None


class Timeline:
    """Streams, events and graphs of one host backend. Misuse of a handle is EngineFatal: a bug in sparkrt.

    `direct` is True while work may simply be run: nothing is captured and nothing is deferred.
    """

    def __init__(self, traffic: Traffic, deferred: bool) -> None:
        self.direct = not deferred
        self.streams: dict[int, Stream] = {0: DEFAULT_STREAM}
        self._traffic = traffic
        self._deferred = deferred
        self._handles = 0
        self._events: dict[int, _Mark | None] = {}
        self._graphs: dict[int, Recording] = {}
        self._capture: _Capture | None = None
        self._pending: deque[Node] = deque()
        self._done = 0  # pieces of deferred work run so far; `_done + len(_pending)` were issued

    # work
    def launch(self, name: str, node: Node, stream: Stream) -> None:
        """Issue an operator, or record it when the stream is capturing."""
        capture = self._capture_of(stream)
        if capture is None:
            self._traffic.launches[name] += 1
            self._issue([node])
        else:
            capture.recording.nodes.append(node)
            capture.recording.launches[name] += 1
            capture.touch(stream)

    def copy(self, kind: str, nbytes: int, node: Node, stream: Stream | None, pageable: bool = False) -> None:
        """Issue a copy or memset, or record it. Without a stream, or from memory that is not pinned, the host waits for it."""
        if stream is None or pageable:
            self.forbid_capture(f"a blocking {kind} copy" + (" (its host memory is not pinned)" if pageable and stream else ""))
            self.run_pending()
            self._traffic.transfer(kind, True, None, nbytes)
            node[0](*node[1])
            return
        capture = self._capture_of(stream)
        if capture is None:
            self._traffic.transfer(kind, False, stream, nbytes)
            self._issue([node])
        else:
            capture.recording.nodes.append(node)
            capture.recording.copies.append((kind, nbytes))
            capture.touch(stream)

    def run_pending(self, position: int | None = None) -> None:
        """Run deferred work, all of it or the first `position` pieces ever issued."""
        while self._pending and (position is None or self._done < position):
            function, args = self._pending.popleft()
            self._done += 1
            function(*args)

    def forbid_capture(self, what: str) -> None:
        """Raise CaptureError if a capture is under way: `what` would end it on a device too."""
        if self._capture is not None:
            self._capture.broken = self._capture.broken or what
            raise CaptureError(f"{what} is not possible while {self._capture.origin} is capturing")

    # streams and events
    def create_stream(self, name: str) -> Stream:
        stream = Stream(self._next_handle(), name)
        self.streams[stream.handle] = stream
        return stream

    def destroy_stream(self, stream: Stream) -> None:
        """The stream's work is finished first, as CUDA would."""
        self.check_stream(stream)
        if stream.handle == 0:
            raise EngineFatal("the default stream cannot be destroyed")
        self.forbid_capture(f"destroying {stream}")
        self.run_pending()
        del self.streams[stream.handle]

    def create_event(self) -> Event:
        event = Event(self._next_handle())
        self._events[event.handle] = None
        return event

    def destroy_event(self, event: Event) -> None:
        self._check_event(event)
        del self._events[event.handle]

    def record_event(self, event: Event, stream: Stream) -> None:
        self._check_event(event)
        capture = self._capture_of(stream)
        issued = self._done + len(self._pending) if capture is None else len(capture.recording.nodes)
        self._events[event.handle] = _Mark(stream, issued, capture)

    def wait_event(self, stream: Stream, event: Event) -> None:
        """Order `stream` after `event`. Issue order already does so; what is checked is that a device would allow it.

        A stream that waits for an event of the capture joins it, as on CUDA, and must be waited for before the end.
        """
        mark = self._mark(event)
        capture = self._capture_of(stream)
        if mark.capture is None:
            if capture is not None:
                self.forbid_capture(f"waiting for {event}, which was recorded outside,")
            return
        if mark.capture is not self._capture:
            raise CaptureError(f"{event} was recorded in a capture that is over: it cannot be waited for")
        if mark.capture.last_node[mark.stream.handle] < mark.position:
            mark.capture.loose.pop(mark.stream.handle, None)
        mark.capture.touch(stream)

    def query_event(self, event: Event) -> bool:
        mark = self._outside_capture(event)
        if mark.position <= self._done:
            return True
        self.run_pending(mark.position)  # whoever polls must see it happen; this time it had not
        return False

    def synchronize_event(self, event: Event) -> Stream:
        """Wait for the event; returns the stream it was recorded on."""
        mark = self._outside_capture(event)
        self.forbid_capture("waiting on the host")
        self.run_pending(mark.position)
        return mark.stream

    # graphs
    def begin_capture(self, stream: Stream) -> None:
        self.check_stream(stream)
        self.forbid_capture("a second capture")
        self._capture = _Capture(stream)
        self.direct = False

    def end_capture(self, stream: Stream) -> Graph:
        """Close the capture. A broken one raises CaptureError here too, and leaves nothing behind."""
        capture = self._capture
        if capture is None or capture.origin != stream:
            raise CaptureError(f"no capture began on {stream}")
        self._capture = None
        self.direct = not self._deferred
        if capture.broken:
            raise CaptureError(f"the capture was broken by {capture.broken}")
        if capture.loose:
            raise CaptureError(f"{stream} never waited for what it captured from {list(capture.loose.values())}")
        return Graph(self._keep(capture.recording), len(capture.recording.nodes))

    def is_capturing(self, stream: Stream) -> bool:
        return self._capture_of(stream) is not None

    def instantiate(self, graph: Graph) -> GraphExec:
        return GraphExec(self._keep(self._recording(graph)), graph.nodes)

    def launch_graph(self, graph: GraphExec, stream: Stream) -> None:
        recording = self._recording(graph)
        capture = self._capture_of(stream)
        if capture is not None:  # a graph within a graph
            capture.recording.nodes.extend(recording.nodes)
            capture.recording.launches.update(recording.launches)
            capture.recording.copies.extend(recording.copies)
            capture.touch(stream)
            return
        traffic = self._traffic
        traffic.graph_launches += 1
        for name, n in recording.launches.items():
            traffic.launches[name] += n
        for kind, nbytes in recording.copies:
            traffic.transfer(kind, False, stream, nbytes)
        self._issue(recording.nodes)

    def destroy_graph(self, graph: Graph | GraphExec) -> None:
        self._recording(graph)
        del self._graphs[graph.handle]

    def check_stream(self, stream: Stream) -> None:
        if stream.handle not in self.streams:
            raise EngineFatal(f"{stream} does not exist")

    def _issue(self, nodes: list[Node]) -> None:
        if self._deferred:
            self._pending.extend(nodes)
        else:
            for function, args in nodes:
                function(*args)

    def _capture_of(self, stream: Stream) -> _Capture | None:
        """The capture that `stream` takes part in."""
        self.check_stream(stream)
        capture = self._capture
        return capture if capture is not None and stream.handle in capture.last_node else None

    def _check_event(self, event: Event) -> None:
        if event.handle not in self._events:
            raise EngineFatal(f"{event} does not exist")

    def _mark(self, event: Event) -> _Mark:
        self._check_event(event)
        mark = self._events[event.handle]
        if mark is None:
            raise EngineFatal(f"{event} was never recorded")
        return mark

    def _outside_capture(self, event: Event) -> _Mark:
        mark = self._mark(event)
        if mark.capture is not None:
            if mark.capture is self._capture:
                self.forbid_capture(f"asking for {event} of the capture")
            raise CaptureError(f"{event} was recorded in a capture: only streams of that capture can wait for it")
        return mark

    def _recording(self, graph: Graph | GraphExec) -> Recording:
        if graph.handle not in self._graphs:
            raise EngineFatal(f"{graph} does not exist")
        return self._graphs[graph.handle]

    def _keep(self, recording: Recording) -> int:
        handle = self._next_handle()
        self._graphs[handle] = recording
        return handle

    def _next_handle(self) -> int:
        self._handles += 1
        return self._handles
