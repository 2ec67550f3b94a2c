"""The device, and nothing above it: memory, streams, graphs, launches, and talk between ranks."""
# ruff: noqa: E402 - BLAS must hear of its threads before the imports below load NumPy

from __future__ import annotations

import logging

from sparkrt.runtime.threads import limit_blas_threads

limit_blas_threads()

from sparkrt.errors import LoadError
from sparkrt.runtime.arena import Arena, ArenaPlan
from sparkrt.runtime.array import DeviceArray
from sparkrt.runtime.backend import (
    NULL,
    CaptureError,
    DeviceProperties,
    DevicePtr,
    Event,
    GpuBackend,
    Graph,
    GraphExec,
    Launchable,
    MemoryFault,
    MemoryInfo,
    OutOfMemory,
    Stream,
)
from sparkrt.runtime.comm import Comm, CommError, SoloComm, fake_world
from sparkrt.runtime.driver import CudaUnavailable
from sparkrt.runtime.dtypes import DType
from sparkrt.runtime.host import HostBackend
from sparkrt.runtime.traffic import Traffic

__all__ = [
    "NULL",
    "Arena",
    "ArenaPlan",
    "CaptureError",
    "Comm",
    "CommError",
    "CudaUnavailable",
    "DType",
    "DeviceArray",
    "DeviceProperties",
    "DevicePtr",
    "Event",
    "GpuBackend",
    "Graph",
    "GraphExec",
    "HostBackend",
    "Launchable",
    "MemoryFault",
    "MemoryInfo",
    "OutOfMemory",
    "SoloComm",
    "Stream",
    "Traffic",
    "fake_world",
    "limit_blas_threads",
    "open_backend",
]


def open_backend(device: str = "auto") -> GpuBackend:
    """The backend called `device`: "host", "cuda", or "auto": CUDA where it can be used, else the host.

    Raises LoadError saying what is missing. "auto" never raises; where there is a GPU that it cannot use, it logs why.
    """
    if device not in ("auto", "host", "cuda"):
        raise LoadError(f"device {device!r} is unknown; expected 'auto', 'host' or 'cuda'")
    if device == "host":
        return HostBackend()
    from sparkrt.runtime.cuda import CudaBackend

    try:
        return CudaBackend()
    except CudaUnavailable as error:
        if device == "cuda":
            raise LoadError(f"device 'cuda': {error}") from error
        if error.gpu:
            logging.getLogger("sparkrt").warning("running on the host: %s", error)
        return HostBackend()
