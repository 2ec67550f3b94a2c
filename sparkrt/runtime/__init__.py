"""The device, and nothing above it: memory, streams, graphs, launches, and talk between ranks.

Importing this package loads no NumPy, so that a process can still say how many threads its BLAS gets (`limit_blas_threads`).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from sparkrt.errors import LoadError
from sparkrt.runtime.array import DeviceArray
from sparkrt.runtime.backend import CaptureError, GpuBackend, OutOfMemory
from sparkrt.runtime.driver import CudaUnavailable
from sparkrt.runtime.machine import limit_blas_threads

if TYPE_CHECKING:
    from sparkrt.runtime.host import HostBackend

__all__ = ["CaptureError", "DeviceArray", "GpuBackend", "HostBackend", "OutOfMemory", "limit_blas_threads", "open_backend"]

limit_blas_threads()


def open_backend(device: str = "auto", sleepable: bool = False) -> GpuBackend:
    """The backend "host", "cuda" (LoadError says what it lacks) or "auto": CUDA, else the host, logging why a GPU goes unused.

    sleepable: allocations can be suspended.
    """
    if device not in ("auto", "host", "cuda"):
        raise LoadError(f"device {device!r} is unknown; expected 'auto', 'host' or 'cuda'")
    if device != "host":
        from sparkrt.runtime.cuda import CudaBackend

        try:
            return CudaBackend(sleepable=sleepable)
        except CudaUnavailable as error:
            if device == "cuda":
                raise LoadError(f"device 'cuda': {error}") from error
            if error.gpu:
                logging.getLogger("sparkrt").warning("running on the host: %s", error)
    backend: GpuBackend = __getattr__("HostBackend")()
    return backend


def __getattr__(name: str) -> Any:
    if name != "HostBackend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from sparkrt.runtime.host import HostBackend

    return HostBackend
