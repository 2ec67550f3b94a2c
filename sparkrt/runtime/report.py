"""What `sparkrt info` prints: the machine, what is installed for its GPUs, and what is missing to use them."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

from sparkrt.errors import LoadError
from sparkrt.runtime import machine
from sparkrt.runtime.driver import CudaUnavailable, Driver, LibCuda, preflight
from sparkrt.runtime.kernels import KernelBuild

_PACKAGES = ("numpy", "ml_dtypes", "tokenizers", "safetensors", "cuda-bindings", "cupy-cuda12x", "cupy-cuda13x")


def report(driver: Driver | None = None) -> list[tuple[str, str]]:
    """(what, how it is) pairs. Asks and changes nothing, and never fails for what a machine lacks."""
    driver = driver or LibCuda()
    lines = [("python", f"{platform.python_version()} on {platform.platform()}")]
    lines += [("host", f"{machine.usable_cores()} cores, {machine.total_memory() / 2**30:.1f} GiB")]
    supported = driver.version()
    lines += [("driver", "none" if supported is None else f"supports CUDA {supported // 1000}.{supported % 1000 // 10}")]
    try:
        cards = [] if supported is None else driver.cards()
    except CudaUnavailable:  # said below
        cards = []
    lines += [("card", card) for card in cards] or [("card", "none")]
    try:
        build = KernelBuild.find()
        archs = "" if build is None else ", ".join(f"sm_{arch}" for arch in build.archs)
        lines += [("kernels", f"{archs}, by CUDA {build.cuda[0]}.{build.cuda[1]}" if build else "not built")]
    except LoadError as error:
        lines += [("kernels", str(error))]
    found = [(name, _version(name)) for name in _PACKAGES]
    lines += [("packages", ", ".join(f"{name} {number}" for name, number in found if number))]
    try:
        preflight(0, driver)
        return [*lines, ("missing", "nothing: models run on the GPU")]
    except CudaUnavailable as error:
        return [*lines, ("missing", str(error))]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
