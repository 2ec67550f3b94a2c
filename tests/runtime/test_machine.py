"""What the process may use: cgroup limits of both versions, and BLAS threads set before NumPy is loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from sparkrt.runtime import machine

GIB = 1 << 30


def _cgroup(tmp_path: Path, membership: str, files: dict[str, str]) -> dict[str, Path]:
    root = tmp_path / "cgroup"
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (tmp_path / "self").write_text(membership)
    return {"root": root, "membership": tmp_path / "self"}


@pytest.mark.parametrize(
    ("membership", "files", "cores"),
    [
        ("0::/\n", {"cpu.max": "250000 100000\n"}, 2.5),
        ("0::/\n", {"cpu.max": "max 100000\n"}, None),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "100000 100000\n", "cpu.max": "300000 100000\n"}, 1.0),
        ("0::/not/mounted/here\n", {"cpu.max": "50000 100000\n"}, 0.5),
        ("2:cpu,cpuacct:/x\n0::/\n", {"cpu/x/cpu.cfs_quota_us": "400000\n", "cpu/x/cpu.cfs_period_us": "100000\n"}, 4.0),
        ("2:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ("", {}, None),
    ],
)
def test_cpu_quota(tmp_path: Path, membership: str, files: dict[str, str], cores: float | None) -> None:
    assert machine.cgroup_cpu_quota(**_cgroup(tmp_path, membership, files)) == cores


@pytest.mark.parametrize(
    ("membership", "files", "memory"),
    [
        (
            "0::/a\n",
            {"a/memory.max": f"{4 * GIB}\n", "a/memory.current": f"{3 * GIB}", "a/memory.stat": f"anon 1\ninactive_file {GIB}\n"},
            (4 * GIB, 2 * GIB),
        ),
        ("0::/\n", {"memory.max": "max\n", "memory.current": "5\n"}, None),
        (
            "0::/a\n",  # the outer one has less room left
            {"a/memory.max": "100", "a/memory.current": "10", "memory.max": "200", "memory.current": "190"},
            (200, 190),
        ),
        (
            "4:memory:/x\n0::/\n",
            {
                "memory/x/memory.limit_in_bytes": f"{2 * GIB}",
                "memory/x/memory.usage_in_bytes": f"{GIB}",
                "memory/x/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB // 2}",
            },
            (2 * GIB, GIB // 2),
        ),
        ("4:memory:/\n", {"memory/memory.limit_in_bytes": "9223372036854771712"}, None),
        ("", {}, None),
    ],
)
def test_memory_limit(tmp_path: Path, membership: str, files: dict[str, str], memory: tuple[int, int] | None) -> None:
    assert machine.cgroup_memory(**_cgroup(tmp_path, membership, files)) == memory


def test_limits_cut_what_the_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cgroup_memory", lambda: None)
    monkeypatch.setattr(machine, "cgroup_cpu_quota", lambda: None)
    total, cores = machine.total_memory(), machine.usable_cores()
    assert total > machine.available_memory() > 0
    assert cores >= 1
    monkeypatch.setattr(machine, "cgroup_memory", lambda: (1000, 900))
    monkeypatch.setattr(machine, "cgroup_cpu_quota", lambda: 0.5)
    assert (machine.total_memory(), machine.available_memory(), machine.usable_cores()) == (1000, 100, 1)


def test_a_system_without_proc_or_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(machine, "_read", lambda path: None)
    monkeypatch.setattr(machine, "_sysconf", lambda name: 1000 if name == "SC_PHYS_PAGES" else 0)
    assert machine.usable_cores() == os.cpu_count()
    assert machine.available_memory() == machine.total_memory() // 2 == 500 * os.sysconf("SC_PAGE_SIZE")
    assert machine.l2_bytes() >= 0


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Two cores usable of eight, nothing chosen by the user."""
    monkeypatch.setattr(machine, "usable_cores", lambda: 2)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    for name in machine._BLAS_VARIABLES:
        monkeypatch.setenv(name, "")
    return monkeypatch


def test_before_numpy_the_environment_is_set(limited: pytest.MonkeyPatch) -> None:
    limited.delitem(sys.modules, "numpy", raising=False)
    assert machine.limit_blas_threads(spare=0) == 2
    assert {os.environ[name] for name in machine._BLAS_VARIABLES} == {"2"}


def test_after_numpy_the_library_is_told(limited: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, object]] = []
    limited.setitem(sys.modules, "numpy", SimpleNamespace())
    limited.setitem(sys.modules, "threadpoolctl", SimpleNamespace(threadpool_limits=lambda **kw: calls.append(kw)))
    assert machine.limit_blas_threads() == 1
    assert calls == [{"limits": 1, "user_api": "blas"}]
    limited.setitem(sys.modules, "threadpoolctl", None)  # not installed
    assert machine.limit_blas_threads() is None
    assert os.environ["OPENBLAS_NUM_THREADS"] == ""


def test_the_users_number_stands(limited: pytest.MonkeyPatch) -> None:
    limited.delitem(sys.modules, "numpy", raising=False)
    limited.setenv("OMP_NUM_THREADS", "5")
    assert machine.limit_blas_threads() is None
    assert os.environ["OPENBLAS_NUM_THREADS"] == ""


def test_a_core_is_spared_for_neighbours(limited: pytest.MonkeyPatch) -> None:
    limited.delitem(sys.modules, "numpy", raising=False)
    for usable, spare, threads in ((2, 1, 1), (2, 5, 1), (8, 1, 7), (1, 1, 1)):
        limited.setattr(machine, "usable_cores", lambda usable=usable: usable)
        for name in machine._BLAS_VARIABLES:
            limited.setenv(name, "")
        assert machine.limit_blas_threads(spare) == threads
        assert {os.environ[name] for name in machine._BLAS_VARIABLES} == {str(threads)}


def test_importing_the_package_loads_no_numpy() -> None:
    program = "import sys, sparkrt.runtime; print('numpy' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


def test_importing_sparkrt_sets_threads_before_numpy_is_loaded() -> None:
    program = "import os; os.cpu_count = lambda: 4096; import sparkrt.runtime; print(os.environ.get('OPENBLAS_NUM_THREADS'))"
    clean = {k: v for k, v in os.environ.items() if k not in machine._BLAS_VARIABLES}
    run = subprocess.run([sys.executable, "-c", program], env=clean, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == str(max(1, machine.usable_cores() - 1))  # the other way, through threadpoolctl, leaves it unset
