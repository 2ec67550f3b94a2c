"""One CUDA backend for all tests here; without a usable GPU they skip and say why.

A fault that CUDA calls sticky leaves the process without its device. Under xdist the worker ends and another takes its place (the
test that was next counts as crashed with it); otherwise the session ends.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from sparkrt.errors import LoadError
from sparkrt.runtime import open_backend
from sparkrt.runtime.cuda import CudaBackend, CudaError

lost = ""


def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    global lost
    if call.excinfo and isinstance(call.excinfo.value, CudaError):
        lost = lost or f"the device was lost in {item.nodeid}: {call.excinfo.value}"


@pytest.fixture(scope="session")
def opened() -> Iterator[CudaBackend]:
    try:
        backend = open_backend("cuda")
    except LoadError as error:
        pytest.skip(str(error))
    assert isinstance(backend, CudaBackend)
    yield backend
    backend.close()


@pytest.fixture
def backend(opened: CudaBackend) -> CudaBackend:
    if lost and "PYTEST_XDIST_WORKER" in os.environ:
        os._exit(3)
    if lost:
        pytest.exit(lost, returncode=3)
    return opened
