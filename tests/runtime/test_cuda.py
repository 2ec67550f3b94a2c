"""What decides whether CUDA is used, and that the CUDA backend keeps the protocol: no GPU needed."""

from __future__ import annotations

import ctypes
import inspect
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from sparkrt.errors import LoadError
from sparkrt.runtime import GpuBackend, open_backend
from sparkrt.runtime.cuda import CudaBackend
from sparkrt.runtime.driver import CudaUnavailable, Installed, LibCuda, preflight
from sparkrt.runtime.kernels import KernelBuild
from sparkrt.runtime.report import report
from sparkrt.serve.cli import main

BUILD = KernelBuild((13, 0), ("80", "90a"))
METHODS = [name for name, member in vars(GpuBackend).items() if inspect.isfunction(member) and not name.startswith("_")]


@dataclass
class FakeDriver:
    supports: int | None = 13000
    devices: list[tuple[int, int]] = field(default_factory=lambda: [(9, 0)])

    def version(self) -> int | None:
        return self.supports

    def capabilities(self) -> list[tuple[int, int]]:
        return self.devices

    def cards(self) -> list[str]:
        return [f"Fake {number}" for number in self.devices]


@pytest.mark.parametrize("name", METHODS)
def test_same_parameters_and_defaults(name: str) -> None:
    def shape(owner: type) -> list[tuple[str, object]]:
        return [(p.name, p.default) for p in inspect.signature(getattr(owner, name)).parameters.values()]

    assert shape(CudaBackend) == shape(GpuBackend)


def test_preflight_passes_when_everything_is_there() -> None:
    preflight(0, FakeDriver(), lambda: Installed(BUILD, True, True))
    preflight(1, FakeDriver(13010, [(7, 5), (8, 6)]), lambda: Installed(BUILD, True, True))


@pytest.mark.parametrize(
    ("driver", "installed", "says", "gpu"),
    [
        (FakeDriver(None), Installed(BUILD, True, True), "no NVIDIA driver", False),
        (FakeDriver(devices=[]), Installed(BUILD, True, True), "sees 0 GPUs", False),
        (FakeDriver(), Installed(None, True, True), "kernels are not built.*SPARKRT_CUDA_ARCHS=90a pip install", True),
        (FakeDriver(12080), Installed(BUILD, True, True), r"supports CUDA 12\.8.*built with 13\.0.*branch 580", True),
        (FakeDriver(devices=[(12, 1)]), Installed(BUILD, True, True), "sm_80, sm_90a.*this GPU is sm_121a", True),
        (FakeDriver(), Installed(BUILD, False, True), "binding.*build_kernels.py --binding", True),
        (FakeDriver(), Installed(BUILD, True, False), r"cuda-python.*sparkrt\[cuda13\]", True),
    ],
)
def test_preflight_names_what_is_missing(driver: FakeDriver, installed: Installed, says: str, gpu: bool) -> None:
    with pytest.raises(CudaUnavailable, match=says) as caught:
        preflight(0, driver, lambda: installed)
    assert caught.value.gpu == gpu


@pytest.fixture
def old_libcuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LibCuda:
    """The driver of a machine whose libcuda is a stub: one sm_90 device, and nothing newer than CUDA 12.8."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    source, library = tmp_path / "stub.c", tmp_path / "libcuda.so.1"
    source.write_text(
        """#include <stddef.h>
        #include <string.h>
        int cuInit(unsigned f) { return 0; }
        int cuDriverGetVersion(int* v) { *v = 12080; return 0; }
        int cuDeviceGetCount(int* n) { *n = 1; return 0; }
        int cuDeviceGetAttribute(int* v, int attribute, int device) { *v = attribute == 75 ? 9 : 0; return 0; }
        int cuDeviceGetName(char* name, int size, int device) { strcpy(name, "Stub"); return 0; }
        int cuDeviceTotalMem_v2(size_t* bytes, int device) { *bytes = (size_t)3 << 30; return 0; }"""
    )
    subprocess.run([compiler, "-shared", "-fPIC", "-w", "-o", library, source], check=True)
    opened = ctypes.CDLL
    monkeypatch.setattr(ctypes, "CDLL", lambda name: opened(str(library) if name == library.name else name))
    return LibCuda()


def test_a_driver_too_old_is_named_with_the_one_that_is_needed(old_libcuda: LibCuda) -> None:
    with pytest.raises(CudaUnavailable, match=r"driver supports CUDA 12\.8, .* built with 13\.0: install driver branch 580"):
        preflight(0, old_libcuda, lambda: Installed(BUILD, True, True))
    lines = dict(report(old_libcuda))
    assert lines["card"] == "Stub, sm_90, 3.0 GiB"
    assert lines["driver"] == "supports CUDA 12.8"


def test_a_report_of_a_machine_without_anything() -> None:
    lines = dict(report(FakeDriver(None)))
    assert lines["card"] == lines["driver"] == "none"
    assert "no NVIDIA driver is installed" in lines["missing"]


def test_the_info_command_answers_anywhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0
    said = capsys.readouterr().out
    assert all(word in said for word in ("python", "card", "kernels", "missing"))
    assert main(["info", "more"]) == 2


def test_a_device_that_is_not_there() -> None:
    with pytest.raises(CudaUnavailable, match=r"device 2 is not there.*sees 1 GPUs"):
        preflight(2, FakeDriver(), lambda: Installed(BUILD, True, True))


@pytest.mark.parametrize(
    ("arch", "runs_on", "not_on"),
    [
        ("80", [(8, 0), (8, 6), (8, 9)], [(7, 5), (9, 0)]),
        ("86", [(8, 6), (8, 9)], [(8, 0)]),
        ("90a", [(9, 0)], [(8, 0), (10, 0)]),
        ("120f", [(12, 0), (12, 1)], [(11, 0)]),
        ("121a", [(12, 1)], [(12, 0)]),
    ],
)
def test_architectures_cover_devices(arch: str, runs_on: list[tuple[int, int]], not_on: list[tuple[int, int]]) -> None:
    build = KernelBuild((13, 0), (arch,))
    assert all(build.covers(capability) for capability in runs_on)
    assert not any(build.covers(capability) for capability in not_on)


def test_a_build_says_what_it_is(tmp_path: Path) -> None:
    assert KernelBuild.parse("cuda=12.9 archs=80,90a") == KernelBuild((12, 9), ("80", "90a"))
    assert KernelBuild.find(tmp_path / "none.so") is None
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"not a library")
    with pytest.raises(LoadError, match="build the kernels again"):
        KernelBuild.find(broken)


def test_kernels_that_cannot_be_opened_are_looked_at_only_beside_a_gpu() -> None:
    def broken() -> Installed:
        raise LoadError("undefined symbol")

    with pytest.raises(CudaUnavailable, match="no NVIDIA driver"):
        preflight(0, FakeDriver(None), broken)
    with pytest.raises(CudaUnavailable, match="undefined symbol") as caught:
        preflight(0, FakeDriver(), broken)
    assert caught.value.gpu


def test_auto_runs_on_the_host_and_says_why_where_a_gpu_goes_unused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(gpu: bool) -> None:
        def preflight(*_: object) -> None:
            raise CudaUnavailable("the kernels are not built", gpu=gpu)

        monkeypatch.setattr("sparkrt.runtime.cuda.preflight", preflight)

    refuse(gpu=False)
    assert open_backend("auto").properties.kind == "host"
    assert not caplog.records
    with pytest.raises(LoadError, match="device 'cuda': the kernels are not built"):
        open_backend("cuda")
    refuse(gpu=True)
    assert open_backend("auto").properties.kind == "host"
    assert "running on the host: the kernels are not built" in caplog.text
