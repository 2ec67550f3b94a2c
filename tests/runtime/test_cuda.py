"""What decides whether CUDA is used, and that the CUDA backend keeps the protocol: no GPU needed."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from sparkrt.errors import LoadError
from sparkrt.runtime import GpuBackend, open_backend
from sparkrt.runtime.cuda import CudaBackend
from sparkrt.runtime.driver import CudaUnavailable, Installed, preflight
from sparkrt.runtime.kernels import KernelBuild

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
