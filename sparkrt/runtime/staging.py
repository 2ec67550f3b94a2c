"""`Staging`: host arrays to the device at the speed of the bus: threads read and convert, copies follow behind."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod
from typing import NamedTuple

import numpy as np

from sparkrt.runtime.array import DeviceArray
from sparkrt.runtime.backend import DevicePtr, GpuBackend
from sparkrt.runtime.machine import usable_cores
from sparkrt.runtime.owner import Owner

CHUNK = 8 << 20  # bytes of a pinned buffer
READERS = 8  # on an H200's host 60 GB/s into pinned memory, of which its bus takes 50; one thread alone fills 6


class _Read(NamedTuple):
    done: Future[None]
    buffer: int
    view: np.ndarray
    target: DevicePtr


class Staging:
    """A ring of pinned buffers, each filled by a thread and sent on a stream of its own. Used and closed by one thread."""

    def __init__(self, backend: GpuBackend, chunk: int = CHUNK, readers: int | None = None) -> None:
        self._owner, self._backend, self._chunk = Owner(backend), backend, -(-chunk // 4) * 4
        self._readers = readers or min(READERS, usable_cores())
        self._reads: deque[_Read] = deque()
        self._turn = 0
        self._sent = [False] * (2 * self._readers)  # half of the ring is read into while the other half is sent
        try:
            self._buffers = [self._owner.pinned(self._chunk // 4, "staging").view(np.uint8) for _ in self._sent]
            self._events = [self._owner.event() for _ in self._sent]
            self._stream = backend.create_stream("staging")
        except BaseException:
            self._owner.close()
            raise
        self._pool = ThreadPoolExecutor(self._readers, "staging")

    def copy(self, target: DeviceArray, values: np.ndarray) -> None:
        """Bring `values` (any strides, any float or integer type) to `target` of the same shape, by the next `flush`."""
        assert values.shape == target.shape, f"{values.shape} into {target}"
        row = prod(values.shape[1:]) * target.dtype.itemsize
        if not target.nbytes:
            return
        if row > self._chunk:
            for i, part in enumerate(values):
                self.copy(target.rows(i, i + 1).reshape(*part.shape), part)
            return
        step = self._chunk // row
        for start in range(0, len(values), step):
            self._read(target.rows(start, min(start + step, len(values))), values[start : start + step])

    def _read(self, target: DeviceArray, values: np.ndarray) -> None:
        while len(self._reads) >= self._readers or (self._reads and self._reads[0].done.done()):
            self._send()
        i = self._turn
        self._turn = (i + 1) % len(self._sent)
        if self._sent[i]:
            self._backend.event_synchronize(self._events[i])
        view = self._buffers[i][: target.nbytes].view(target.dtype.np).reshape(values.shape)
        self._reads.append(_Read(self._pool.submit(np.copyto, view, values, "unsafe"), i, view, target.ptr))

    def _send(self) -> None:
        """Wait for the oldest read, and copy what it brought."""
        done, i, view, target = self._reads.popleft()
        done.result()
        self._backend.copy_h2d(target, view, self._stream)
        self._backend.record_event(self._events[i], self._stream)
        self._sent[i] = True

    def fetch(self, target: np.ndarray, source: DevicePtr) -> None:
        """The way back, for bytes: from the device to `target` [n] uint8. Returns when they are there."""
        taken: list[Future[None] | None] = [None] * len(self._sent)  # by buffer: its last contents are on their way to `target`
        arriving = deque[tuple[int, int]]()
        self.flush()
        for start in range(0, len(target), self._chunk):
            if len(arriving) == self._readers:
                self._land(target, *arriving.popleft(), taken)
            i = self._turn
            self._turn = (i + 1) % len(self._sent)
            if (busy := taken[i]) is not None:
                busy.result()
            size = min(self._chunk, len(target) - start)
            self._backend.copy_d2h(self._buffers[i][:size], source.offset(start), self._stream)
            self._backend.record_event(self._events[i], self._stream)
            arriving.append((i, start))
        for i, start in arriving:
            self._land(target, i, start, taken)
        for busy in filter(None, taken):
            busy.result()

    def _land(self, target: np.ndarray, i: int, start: int, taken: list[Future[None] | None]) -> None:
        """Let a thread copy what has arrived in a buffer: fresh memory is slow to touch, 1.7 GB/s by one of them."""
        self._backend.event_synchronize(self._events[i])
        part = target[start : start + self._chunk]
        taken[i] = self._pool.submit(np.copyto, part, self._buffers[i][: len(part)])

    def flush(self) -> None:
        """Return when everything is on the device."""
        while self._reads:
            self._send()
        self._backend.synchronize(self._stream)

    def close(self) -> None:
        """Free the ring, whatever is under way."""
        self._pool.shutdown(cancel_futures=True)
        self._backend.destroy_stream(self._stream)
        self._owner.close()
