"""One CUDA backend for all tests here; without a usable GPU they skip and say why."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sparkrt.errors import LoadError
from sparkrt.runtime import open_backend
from sparkrt.runtime.cuda import CudaBackend


@pytest.fixture(scope="session")
def backend() -> Iterator[CudaBackend]:
    try:
        opened = open_backend("cuda")
    except LoadError as error:
        pytest.skip(str(error))
    assert isinstance(opened, CudaBackend)
    yield opened
    opened.close()
