"""What this process may use of the machine: cores, memory and BLAS threads, with the limits of a container (cgroup 2 or 1).

A limit that cannot be read does not exist. Imports no NumPy.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_CGROUP_SELF = Path("/proc/self/cgroup")
_BLAS_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")


def debug_enabled() -> bool:
    """Whether SPARKRT_DEBUG asks for poisoned memory and checks that cost time."""
    return os.environ.get("SPARKRT_DEBUG", "") not in ("", "0")


def limit_blas_threads(spare: int = 1) -> int | None:
    """Hold BLAS to the usable cores less `spare`, at least one. Returns the number set, None where nothing was changed.

    BLAS counts the machine's cores, not a container's quota, and its threads wait for each other: 64 on 2 cores are slower
    than one, and beside a busy process all stall for whole time slices (docs/adr/0007: 1.4 tokens a second instead of 21).

    BLAS reads its environment once, when NumPy loads it, so `sparkrt.runtime` calls this when it is imported. Where NumPy is
    already there, the library is told through `threadpoolctl`, if that is installed. Child processes inherit the variables.
    A number that the user chose stands.
    """
    threads = max(1, usable_cores() - spare)
    if any(os.environ.get(name) for name in _BLAS_VARIABLES) or threads >= (os.cpu_count() or 1):
        return None
    if "numpy" in sys.modules:
        try:
            threadpoolctl = importlib.import_module("threadpoolctl")
        except ImportError:
            return None
        threadpoolctl.threadpool_limits(limits=threads, user_api="blas")  # takes effect at once and stays
    else:
        os.environ.update(dict.fromkeys(_BLAS_VARIABLES, str(threads)))
    return threads


def usable_cores() -> int:
    """Whole cores this process may keep busy: its CPU mask, cut by the cgroup's quota; 2.5 count as 2. At least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cgroup_cpu_quota()
    return cores if quota is None else max(1, min(cores, int(quota)))


def total_memory() -> int:
    """Bytes of main memory, or of the cgroup's limit where that is less."""
    total, limit = _sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), cgroup_memory()
    return min(total, limit[0]) if limit else total


def available_memory() -> int:
    """Bytes that can be taken without swapping, cut by what the cgroup has left. Half of all, where the system does not say."""
    meminfo, limit = _table(Path("/proc/meminfo"), ":"), cgroup_memory()
    available = int(meminfo["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in meminfo else total_memory() // 2
    return available if limit is None else max(0, min(available, limit[0] - limit[1]))


def l2_bytes() -> int:
    """Bytes of one core's second-level cache; 0 where the system does not say."""
    return max(0, _sysconf("SC_LEVEL2_CACHE_SIZE"))


def cgroup_cpu_quota(root: Path = _CGROUP_ROOT, membership: Path = _CGROUP_SELF) -> float | None:
    """Cores granted by the tightest quota on the way from this process's cgroup up to the root; None without one."""
    found: list[float] = []
    for folder in _cgroup_folders("cpu", root, membership):
        version1 = f"{_read(folder / 'cpu.cfs_quota_us')} {_read(folder / 'cpu.cfs_period_us')}"
        quota, period = map(_number, (_read(folder / "cpu.max") or version1).split())
        if quota and period and quota > 0:
            found.append(quota / period)
    return min(found, default=None)


def cgroup_memory(root: Path = _CGROUP_ROOT, membership: Path = _CGROUP_SELF) -> tuple[int, int] | None:
    """(limit, bytes used that cannot be reclaimed) of the cgroup with the least room left; None without a limit."""
    found: list[tuple[int, int]] = []
    for folder in _cgroup_folders("memory", root, membership):
        limit = _number(_read(folder / "memory.max") or _read(folder / "memory.limit_in_bytes"))
        if limit is not None and limit < 1 << 60:  # version 1 writes "no limit" as a huge number
            used = _number(_read(folder / "memory.current") or _read(folder / "memory.usage_in_bytes")) or 0
            stat = _table(folder / "memory.stat", " ")
            cached = _number(stat.get("total_inactive_file", stat.get("inactive_file"))) or 0
            found.append((limit, max(0, used - cached)))
    return min(found, key=lambda pair: pair[0] - pair[1], default=None)


def _cgroup_folders(controller: str, root: Path, membership: Path) -> list[Path]:
    """The folders whose limits bind this process, innermost first; of those that a container hides, the mount's root remains."""
    base, inner = root, ""
    for line in (_read(membership) or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):  # version 1 wins: a hybrid mount has no controllers in version 2
            base, inner = root / controller, path
            break
        if not controllers:
            inner = path
    folder = base / inner.strip("/")
    folders = [folder, *folder.parents]
    return folders[: folders.index(base) + 1]


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _table(path: Path, separator: str) -> dict[str, str]:
    """A file of lines of a name and a value."""
    return dict(line.split(separator, 1) for line in (_read(path) or "").splitlines() if separator in line)


def _number(text: str | None) -> int | None:
    try:
        return int(text or "")
    except ValueError:  # "max", or nothing
        return None


def _sysconf(name: str) -> int:
    try:
        return os.sysconf(name)
    except (ValueError, OSError):
        return 0
