"""Whether this process can use a CUDA device, asked of the driver itself: no package is needed to say what is missing."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Protocol

from sparkrt.errors import LoadError
from sparkrt.runtime.kernels import KernelBuild

_BRANCHES = {12: 525, 13: 580}  # the first driver branch of each CUDA major version
_NO_DEVICE = 100
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76  # CUdevice_attribute


class CudaUnavailable(LoadError):
    """CUDA cannot be used; the message says what to do. `gpu`: there is a GPU all the same, so the user should hear of it."""

    def __init__(self, message: str, *, gpu: bool) -> None:
        super().__init__(message)
        self.gpu = gpu


class Driver(Protocol):
    """What is asked of the driver."""

    def version(self) -> int | None:
        """The newest CUDA version it supports, 13010 for 13.1; None without a driver."""
        ...

    def capabilities(self) -> list[tuple[int, int]]:
        """Compute capability of each device. Raises CudaUnavailable when the driver does not work."""
        ...

    def cards(self) -> list[str]:
        """Each device in words; raises like `capabilities`."""
        ...


class LibCuda:
    """`Driver` by libcuda."""

    def __init__(self) -> None:
        self._library: ctypes.CDLL | None = None
        for name in ("libcuda.so.1", "nvcuda.dll"):
            try:
                self._library = ctypes.CDLL(name)
                break
            except OSError:
                continue

    def version(self) -> int | None:
        found = ctypes.c_int(0)
        if self._library is None or self._library.cuDriverGetVersion(ctypes.byref(found)) or not found.value:
            return None
        return found.value

    def capabilities(self) -> list[tuple[int, int]]:
        assert self._library is not None
        status, count = self._library.cuInit(0), ctypes.c_int(0)
        if status in (0, _NO_DEVICE):
            status = 0 if status == _NO_DEVICE else self._library.cuDeviceGetCount(ctypes.byref(count))
        if status:
            name = ctypes.c_char_p()
            self._library.cuGetErrorName(status, ctypes.byref(name))
            said = (name.value or b"").decode() or str(status)
            raise CudaUnavailable(f"the NVIDIA driver does not start ({said}): see nvidia-smi; use --device host", gpu=True)
        return [(self._attribute(_CAPABILITY_MAJOR, i), self._attribute(_CAPABILITY_MINOR, i)) for i in range(count.value)]

    def cards(self) -> list[str]:
        found, library = [], self._library
        for i, (major, minor) in enumerate(self.capabilities()):
            assert library is not None
            name, memory = ctypes.create_string_buffer(256), ctypes.c_size_t(0)
            library.cuDeviceGetName(name, len(name), i)
            library.cuDeviceTotalMem_v2(ctypes.byref(memory), i)
            found.append(f"{name.value.decode()}, sm_{major}{minor}, {memory.value / 2**30:.1f} GiB")
        return found

    def _attribute(self, attribute: int, device: int) -> int:
        assert self._library is not None
        value = ctypes.c_int(0)
        self._library.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        return value.value


@dataclass(frozen=True, slots=True)
class Installed:
    """What was found beside the driver."""

    build: KernelBuild | None  # the compiled kernels
    binding: bool  # sparkrt._kernels, for this Python
    cuda_python: bool

    @classmethod
    def find(cls) -> Installed:
        """Raises LoadError if the kernels cannot be opened."""
        return cls(KernelBuild.find(), find_spec("sparkrt._kernels") is not None, _cuda_python())


def preflight(device: int, driver: Driver, find: Callable[[], Installed] = Installed.find) -> None:
    """Raise CudaUnavailable, naming the one thing to do next, unless everything that a CUDA backend needs is there."""
    version = driver.version()
    if version is None:
        raise CudaUnavailable("no NVIDIA driver is installed: install one, or use --device host", gpu=False)
    devices = driver.capabilities()
    if device >= len(devices):
        found = f"the NVIDIA driver sees {len(devices)} GPUs"
        raise CudaUnavailable(f"CUDA device {device} is not there: {found} (CUDA_VISIBLE_DEVICES?)", gpu=bool(devices))
    try:
        installed = find()
    except LoadError as error:
        raise CudaUnavailable(str(error), gpu=True) from error
    major, minor = devices[device]
    arch, build = f"{major}{minor}" + ("a" if major >= 9 else ""), installed.build
    how = f"SPARKRT_CUDA_ARCHS={arch} pip install --no-build-isolation ."
    if build is None:
        message = f"a GPU (sm_{arch}) is here, but the CUDA kernels are not built: with the CUDA toolkit (nvcc) on PATH, {how}"
    elif version // 1000 < build.cuda[0]:
        has, wants = f"{version // 1000}.{version % 1000 // 10}", f"{build.cuda[0]}.{build.cuda[1]}"
        branch = _BRANCHES.get(build.cuda[0], "of that version")
        message = f"the NVIDIA driver supports CUDA {has}, the kernels were built with {wants}: install driver branch {branch}"
        message += " or newer, or build with an older toolkit"
    elif not build.covers((major, minor)):
        known = ", ".join(f"sm_{a}" for a in build.archs)
        message = f"the CUDA kernels were built for {known}, this GPU is sm_{arch}: {how}"
    elif not installed.binding:
        message = "the CUDA kernels are here, but not their binding for this Python: python build_kernels.py --binding"
    elif not installed.cuda_python:
        message = f"cuda-python is not installed: pip install 'sparkrt[cuda{build.cuda[0]}]'"
    else:
        return
    raise CudaUnavailable(f"{message}; or use --device host", gpu=True)


def _cuda_python() -> bool:
    try:
        return find_spec("cuda.bindings.runtime") is not None
    except ModuleNotFoundError:  # no `cuda` at all
        return False
