"""What this process may use of the machine: cores and memory, with the container's limits. Imports no NumPy.

Linux asks the scheduler and the cgroup (version 2 or 1), macOS asks sysctl. A limit that cannot be read does not exist.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path

_MACOS = bool(sys.platform == "darwin")
_CGROUP_ROOT = Path("/sys/fs/cgroup")
_CGROUP_SELF = Path("/proc/self/cgroup")


def debug_enabled() -> bool:
    """Whether SPARKRT_DEBUG asks for poisoned memory and checks that cost time."""
    return os.environ.get("SPARKRT_DEBUG", "") not in ("", "0")


def usable_cores() -> int:
    """Whole cores this process may keep busy: its CPU mask, cut by the cgroup's quota. At least 1.

    A quota of 2.5 cores counts as 2: threads that wait for each other, as those of BLAS do, stall together when one of
    them is throttled.
    """
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    quota = cgroup_cpu_quota()
    return cores if quota is None else max(1, min(cores, int(quota)))


def total_memory() -> int:
    """Bytes of main memory, or of the cgroup's limit where that is less."""
    pages = _sysconf("SC_PHYS_PAGES")
    total = pages * os.sysconf("SC_PAGE_SIZE") if pages > 0 else _sysctl("hw.memsize")
    limit = cgroup_memory()
    return total if limit is None else min(total, limit[0])


def available_memory() -> int:
    """Bytes that can be taken without swapping: free and reclaimable memory, cut by what the cgroup has left."""
    available = _meminfo("MemAvailable")
    if available is None and _MACOS:
        pages = sum(_sysctl(f"vm.page_{kind}_count") for kind in ("free", "speculative", "purgeable"))
        available = pages * os.sysconf("SC_PAGE_SIZE") or None
    if available is None:
        pages = _sysconf("SC_AVPHYS_PAGES")
        # A system that does not say: half is a guess that leaves room for everybody else.
        available = pages * os.sysconf("SC_PAGE_SIZE") if pages > 0 else total_memory() // 2
    limit = cgroup_memory()
    return available if limit is None else max(0, min(available, limit[0] - limit[1]))


def l2_bytes() -> int:
    """Bytes of one core's second-level cache; 0 where the system does not say."""
    return max(0, _sysconf("SC_LEVEL2_CACHE_SIZE")) or _sysctl("hw.l2cachesize")


def cgroup_cpu_quota(root: Path = _CGROUP_ROOT, membership: Path = _CGROUP_SELF) -> float | None:
    """Cores granted by the tightest quota on the way from this process's cgroup up to the root; None without one."""
    found: list[float] = []
    for folder in _cgroup_folders("cpu", root, membership):
        words = (_read(folder / "cpu.max") or "").split()
        if not words:
            words = [_read(folder / "cpu.cfs_quota_us") or "max", _read(folder / "cpu.cfs_period_us") or ""]
        quota, period = _number(words[0]), _number(words[-1])
        if quota is not None and period and quota > 0:
            found.append(quota / period)
    return min(found, default=None)


def cgroup_memory(root: Path = _CGROUP_ROOT, membership: Path = _CGROUP_SELF) -> tuple[int, int] | None:
    """(limit, bytes used that cannot be reclaimed) of the cgroup with the least room left; None without a limit."""
    found: list[tuple[int, int]] = []
    for folder in _cgroup_folders("memory", root, membership):
        limit = _number(_read(folder / "memory.max") or _read(folder / "memory.limit_in_bytes"))
        if limit is None or limit >= 1 << 60:  # version 1 writes "no limit" as a huge number
            continue
        used = _number(_read(folder / "memory.current") or _read(folder / "memory.usage_in_bytes")) or 0
        stat = dict(line.split(" ", 1) for line in (_read(folder / "memory.stat") or "").splitlines() if " " in line)
        cached = _number(stat.get("total_inactive_file", stat.get("inactive_file"))) or 0
        found.append((limit, max(0, used - cached)))
    return min(found, key=lambda pair: pair[0] - pair[1], default=None)


def _cgroup_folders(controller: str, root: Path, membership: Path) -> Iterator[Path]:
    """The folders whose limits bind this process, innermost first.

    Inside a container the path in /proc may be the host's and missing here; the mount's root is then the container's own.
    """
    base, inner = root, ""
    for line in (_read(membership) or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):  # version 1 wins: a hybrid mount has no controllers in version 2
            base, inner = root / controller, path
            break
        if not controllers:
            inner = path
    folder = base / inner.strip("/")
    while folder != base:
        yield folder
        folder = folder.parent
    yield base


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _number(text: str | None) -> int | None:
    try:
        return int(text or "")
    except ValueError:  # "max", or nothing
        return None


def _meminfo(key: str) -> int | None:
    for line in (_read(Path("/proc/meminfo")) or "").splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024
    return None


def _sysconf(name: str) -> int:
    try:
        return os.sysconf(name)
    except (ValueError, OSError):
        return 0


def _sysctl(name: str) -> int:
    """An integer from macOS's sysctl, 0 where there is none."""
    if not _MACOS:
        return 0
    value, size = ctypes.c_uint64(0), ctypes.c_size_t(8)
    status: int = ctypes.CDLL(None).sysctlbyname(name.encode(), ctypes.byref(value), ctypes.byref(size), None, 0)
    return value.value if status == 0 else 0
