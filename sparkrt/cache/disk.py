"""`DiskCache`: records in a folder, a file each, under a byte budget. It outlives the process, and it never lies.

A file is written under a temporary name, synced and renamed; its header has its key, its length and a checksum of everything.
What a crash left half written is removed at the next start, what was damaged later when it is read. The folder belongs to one
process at a time: a lock that ends with the process, however that ends.

The index is used by one thread. Files are written by one worker, in the order they were asked for (so that what makes room goes
before what needs it), and read by others. A disk that fails costs hits and never an answer.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from struct import Struct
from time import time_ns
from zlib import crc32

import numpy as np

from sparkrt.errors import LoadError

log = logging.getLogger(__name__)
_MAGIC = b"sparkrt\x01"  # the last byte is the version of the format
_HEADER = Struct("<8sQI")  # magic, bytes of the payload, crc32 of key and payload; the key is the file's name
HEADER_BYTES = _HEADER.size
_NAME, _TEMPORARY = re.compile(r"[0-9a-f]{66}"), ".part"
_READERS = 4  # a crc32 takes 3 GB/s of a core, about what an NVMe drive delivers
_BACKLOG = 256  # writes that may wait; a disk that is slower than what is spilled gets only a part of it


class DiskCache:
    """See the module. Keys are 33 bytes; the least recently used record goes first, across restarts and models."""

    def __init__(self, folder: Path, budget: int) -> None:
        """Raises LoadError where the folder cannot be used, or another process uses it."""
        self.folder, self.budget, self.used = folder, budget, 0
        self.corrupt = 0  # files that were not what was written
        self.failures = 0  # writes that the disk refused
        self._files: dict[bytes, int] = {}  # bytes by key, the least recently used first
        self._writing = set[bytes]()
        try:
            folder.mkdir(0o700, parents=True, exist_ok=True)  # prompts can be told from what lies there
            self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise LoadError(f"kv_offloading_dir {folder}: cannot be used: {error.strerror}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._scan()
        except OSError as error:
            os.close(self._lock)
            text = "is in use by another process" if isinstance(error, BlockingIOError) else f"cannot be used: {error.strerror}"
            raise LoadError(f"kv_offloading_dir {folder}: {text}") from None
        self._writer, self._readers = ThreadPoolExecutor(1, "disk-write"), ThreadPoolExecutor(_READERS, "disk-read")

    def __contains__(self, key: bytes) -> bool:
        return key in self._files

    def __len__(self) -> int:
        return len(self._files)

    def put(self, key: bytes, parts: Sequence[np.ndarray]) -> Future[bool] | None:
        """Write a record; it counts as there at once. `parts` must stay as they are until the future is done.

        None where it cannot be: too large, or too many wait. The future says whether it is there; tell `wrote`.
        """
        nbytes = HEADER_BYTES + sum(part.nbytes for part in parts)
        if key in self._files or key in self._writing or nbytes > self.budget or len(self._writing) >= _BACKLOG:
            return None
        self._make_room(nbytes)
        self._files[key] = nbytes
        self.used += nbytes
        self._writing.add(key)
        return self._writer.submit(_write, self._path(key), key, parts)

    def wrote(self, key: bytes, there: bool) -> None:
        """What came of a `put`. The first failure is logged, all are counted."""
        self._writing.discard(key)
        if not there:
            if not self.failures:
                log.warning("%s: cannot be written: prefixes that do not fit in memory are lost", self.folder)
            self.failures += 1
            self._forget(key)

    def get(self, key: bytes, parts: Sequence[np.ndarray]) -> Future[bool]:
        """Read a record into `parts`, of the sizes it was written with; tell `read` what the future says."""
        self.touch(key)
        return self._readers.submit(_read, self._path(key), key, parts)

    def read(self, key: bytes, right: bool) -> None:
        """What came of a `get`: a record that is not what was written is removed."""
        if not right and key in self._files:
            self.corrupt += 1
            log.warning("%s: removed, it is not what was written", self._path(key))
            self.drop(key)

    def touch(self, key: bytes) -> None:
        """It counts as used just now, if it is there."""
        if (nbytes := self._files.pop(key, None)) is not None:
            self._files[key] = nbytes

    def drop(self, key: bytes) -> None:
        """Remove a record."""
        self._forget(key)
        self._writer.submit(_remove, self._path(key))

    def clear(self) -> None:
        """Remove all records."""
        paths = [self._path(key) for key in self._files]
        self._files.clear()
        self.used = 0
        self._writer.submit(_remove, *paths)

    def close(self) -> None:
        """Finish what was asked for; the files stay, with times that tell their order."""
        self._readers.shutdown()
        self._writer.shutdown()
        now = time_ns() - len(self._files)
        for i, key in enumerate(self._files):
            with suppress(OSError):
                os.utime(self._path(key), ns=(now + i, now + i))
        os.close(self._lock)

    def _path(self, key: bytes) -> Path:
        return self.folder / key.hex()

    def _make_room(self, nbytes: int) -> None:
        while self.used + nbytes > self.budget:
            self.drop(next(iter(self._files)))

    def _forget(self, key: bytes) -> None:
        self.used -= self._files.pop(key, 0)

    def _scan(self) -> None:
        """Take up what an earlier process left; what it did not finish is removed."""
        found = list[tuple[int, str, int]]()
        with os.scandir(self.folder) as entries:
            for entry in entries:
                if entry.name.endswith(_TEMPORARY):
                    _remove(self.folder / entry.name)
                elif _NAME.fullmatch(entry.name):
                    status = entry.stat(follow_symlinks=False)
                    found.append((status.st_mtime_ns, entry.name, status.st_size))
        for _, name, size in sorted(found):
            self._files[bytes.fromhex(name)] = size
            self.used += size
        while self.used > self.budget:
            key = next(iter(self._files))
            self._forget(key)
            _remove(self._path(key))


def _write(path: Path, key: bytes, parts: Sequence[np.ndarray]) -> bool:
    temporary = path.with_name(path.name + _TEMPORARY)
    try:
        with open(temporary, "wb", buffering=0) as file:
            for view in (memoryview(_header(key, parts)), *(part.data for part in parts)):
                while view:  # a raw write may take less than it was given
                    view = view[file.write(view) :]
            os.fsync(file.fileno())
        os.rename(temporary, path)  # on a crash of the machine the name may be lost, but never leads to half a file
    except OSError as error:
        log.debug("%s: %s", path, error)
        _remove(temporary)
        return False
    return True


def _read(path: Path, key: bytes, parts: Sequence[np.ndarray]) -> bool:
    """Whether the file is there, whole and right."""
    try:
        with open(path, "rb", buffering=0) as file:
            header = file.read(HEADER_BYTES)
            if os.fstat(file.fileno()).st_size != HEADER_BYTES + sum(part.nbytes for part in parts):
                return False
            for part in parts:
                view = part.data
                while view:
                    if not (got := file.readinto(view)):
                        return False
                    view = view[got:]
        with suppress(OSError):  # it was used: that is its place in the order, after a restart too
            os.utime(path)
    except OSError:
        return False
    return header == _header(key, parts)


def _header(key: bytes, parts: Sequence[np.ndarray]) -> bytes:
    check = crc32(key)
    for part in parts:
        check = crc32(part.data, check)
    return _HEADER.pack(_MAGIC, sum(part.nbytes for part in parts), check)


def _remove(*paths: Path) -> None:
    for path in paths:
        with suppress(OSError):
            path.unlink(missing_ok=True)
