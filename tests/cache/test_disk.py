"""Records on disk: whole or not there, within the budget, whoever dies and whatever is done to the files."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from sparkrt.cache import disk as module
from sparkrt.cache.disk import HEADER_BYTES, DiskCache
from sparkrt.errors import LoadError

ROOT = Path(__file__).parents[2]


def key(i: int) -> bytes:
    return i.to_bytes(33, "big")


def record(i: int, nbytes: int = 150) -> np.ndarray:
    return np.random.default_rng(i).integers(0, 256, nbytes, np.uint8)


def put(cache: DiskCache, i: int, nbytes: int = 150) -> bool:
    """Write a record, in two parts."""
    values = record(i, nbytes)
    future = cache.put(key(i), [values[:50], values[50:]])
    there = future is not None and future.result()
    if future is not None:
        cache.wrote(key(i), there)
    return there


def get(cache: DiskCache, i: int, nbytes: int = 150) -> bool:
    """Read it, in parts cut elsewhere; if it is said to be right, it must be."""
    into = np.zeros(nbytes, np.uint8)
    right = cache.get(key(i), [into[:7], into[7:]]).result()
    cache.read(key(i), right)
    assert not right or (into == record(i, nbytes)).all()
    return right


def sizes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.name != "lock")


def test_a_record_comes_back_after_a_restart(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path / "a" / "b", 1000)
    assert put(cache, 1)
    assert cache.put(key(1), [record(1)]) is None  # it is there
    cache.close()
    again = DiskCache(tmp_path / "a" / "b", 1000)
    assert get(again, 1)
    assert key(2) not in again
    again.close()


def test_the_budget_holds_to_the_byte(tmp_path: Path) -> None:
    each = 150 + HEADER_BYTES
    cache, rng = DiskCache(tmp_path, 4 * each + 10), random.Random(0)
    for i in range(60):
        size = rng.choice([150, 150, 51, 400, 4 * each])
        put(cache, i, size)
        assert sizes(tmp_path) == cache.used <= cache.budget
        if rng.random() < 0.3 and (old := next(iter(cache._files))):
            get(cache, int.from_bytes(old, "big"), cache._files[old] - HEADER_BYTES)
    cache.close()
    smaller = DiskCache(tmp_path, each)  # of a new start
    assert sizes(tmp_path) == smaller.used <= each
    smaller.close()


def test_the_least_recently_used_goes_first_across_restarts(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 3 * (150 + HEADER_BYTES))
    for i in (1, 0, 2):
        assert put(cache, i)
    cache.touch(key(2))
    assert get(cache, 0)
    cache.close()
    again = DiskCache(tmp_path, 3 * (150 + HEADER_BYTES))
    assert put(again, 3)
    assert [i for i in range(4) if key(i) in again] == [0, 2, 3]
    again.close()


@pytest.mark.parametrize("at", range(0, 150 + HEADER_BYTES, 3))
def test_a_flipped_bit_is_found_and_the_file_removed(tmp_path: Path, at: int) -> None:
    cache = DiskCache(tmp_path, 1000)
    assert put(cache, 1)
    path = tmp_path / key(1).hex()
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << at % 8
    path.write_bytes(content)
    assert not get(cache, 1)
    assert key(1) not in cache
    cache.close()
    assert not path.exists()
    assert (cache.corrupt, cache.used) == (1, 0)


@pytest.mark.parametrize("length", [*range(0, HEADER_BYTES + 1, 5), HEADER_BYTES + 1, HEADER_BYTES + 149, HEADER_BYTES + 151])
def test_a_file_of_another_length_is_not_read(tmp_path: Path, length: int) -> None:
    cache = DiskCache(tmp_path, 1000)
    assert put(cache, 1)
    content = (tmp_path / key(1).hex()).read_bytes() + b"x"
    (tmp_path / key(1).hex()).write_bytes(content[:length])
    cache.close()
    again = DiskCache(tmp_path, 1000)
    assert not get(again, 1)
    again.close()


def test_a_record_under_another_s_name_is_not_read(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 1000)
    assert put(cache, 1)
    assert put(cache, 2)
    os.replace(tmp_path / key(1).hex(), tmp_path / key(2).hex())
    assert not get(cache, 2)
    assert not get(cache, 1)
    cache.close()


def test_a_full_disk_costs_records_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """W03: said once, counted always; what was half written is gone, and later writes go on."""
    cache, sync = DiskCache(tmp_path, 1000), os.fsync

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    assert put(cache, 0)
    monkeypatch.setattr(module.os, "fsync", full)
    assert not put(cache, 1)
    assert not put(cache, 2)
    monkeypatch.setattr(module.os, "fsync", sync)
    assert sizes(tmp_path) == cache.used == 150 + HEADER_BYTES
    assert (cache.failures, caplog.text.count("cannot be written")) == (2, 1)
    assert get(cache, 0)
    assert put(cache, 1)
    cache.close()


def test_a_folder_belongs_to_one_process_and_strangers_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "README").write_text("mine")
    cache = DiskCache(tmp_path, 1000)
    with pytest.raises(LoadError, match=r"kv_offloading_dir .* is in use by another process"):
        DiskCache(tmp_path, 1000)
    assert put(cache, 1)
    cache.clear()
    cache.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["README", "lock"]
    with pytest.raises(LoadError, match=r"cannot be used: (Not a directory|File exists)"):
        DiskCache(tmp_path / "README", 1000)


def test_records_beyond_the_budget_and_beyond_the_backlog_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = DiskCache(tmp_path, 1000)
    assert not put(cache, 1, 1000)
    monkeypatch.setattr(module, "_BACKLOG", 1)
    first = cache.put(key(1), [record(1)])
    assert first is not None
    assert cache.put(key(2), [record(2)]) is None
    cache.wrote(key(1), first.result())
    assert put(cache, 2)
    cache.close()


def test_a_record_dropped_while_it_is_written_is_gone(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 1000)
    future = cache.put(key(1), [record(1)])
    cache.drop(key(1))
    assert cache.put(key(1), [record(1)]) is None  # not before the first one is done with
    assert future is not None
    cache.wrote(key(1), future.result())
    assert put(cache, 1)
    cache.close()
    assert sizes(tmp_path) == cache.used > 0


# Forks a process for every moment: it writes three records over two older ones, and is killed at its n-th call of the system.
_KILLED = """
import os, signal, sys
from pathlib import Path
from tests.cache import test_disk as t
from sparkrt.cache import disk

def arm(moment):
    calls = 0
    def counted(call):
        def wrapped(*arguments, **more):
            nonlocal calls
            calls += 1
            if calls == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **more)
        return wrapped
    class File:
        def __init__(self, *arguments, **more): self.file = open(*arguments, **more)
        def __enter__(self): return self
        def __exit__(self, *error): self.file.close()
        fileno = lambda self: self.file.fileno()
        write = counted(lambda self, view: self.file.write(view[:40]))
    disk.open = counted(File)
    os.fsync, os.rename, os.unlink = counted(os.fsync), counted(os.rename), counted(os.unlink)

moment = 0
while True:
    moment += 1
    folder = Path(sys.argv[1]) / str(moment)
    if not os.fork():
        cache = disk.DiskCache(folder, 2 * (150 + disk.HEADER_BYTES))
        t.put(cache, 0), t.put(cache, 1)
        arm(moment)
        t.put(cache, 2), t.put(cache, 3), t.put(cache, 0)
        cache.close()
        os._exit(0)
    if not os.wait()[1]:
        break
print(moment)
"""


def test_killed_at_any_moment_it_is_empty_or_right(tmp_path: Path) -> None:
    """W01, W05: kill -9 at every call of the system that writing makes; the next start takes what is whole, removes the rest."""
    run = subprocess.run(
        [sys.executable, "-c", _KILLED, tmp_path], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    moments = int(run.stdout)
    assert moments > 20
    found = set[int]()
    for folder in tmp_path.iterdir():
        for _ in range(3):  # a server that is restarted over and over
            cache = DiskCache(folder, 2 * (150 + HEADER_BYTES))
            there = [i for i in range(4) if key(i) in cache]
            assert [i for i in there if not get(cache, i)] == []
            assert sizes(folder) == cache.used <= cache.budget
            found |= {len(there)}
            cache.close()
        assert not list(folder.glob("*.part"))
    assert found == {1, 2}
