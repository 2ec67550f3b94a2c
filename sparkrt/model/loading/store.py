"""`TensorStore`: the tensors of a checkpoint as its files name and lay them out."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

Rows = slice | np.ndarray  # a range of rows, or their indices in the order wanted

SERVED = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """What a file's header says of one tensor. `kind` is the file's own name of the element type, BF16 or Q4_K say."""

    name: str
    file: Path
    kind: str
    shape: tuple[int, ...]
    start: int  # bytes from the beginning of the file
    stop: int


class TensorStore(Protocol):
    """Opened and checked files: every tensor lies wholly inside its file."""

    @property
    def tensors(self) -> Mapping[str, StoredTensor]: ...

    @property
    def origin(self) -> Path:
        """The file to name when a tensor is missing: the one that lists them."""
        ...

    @property
    def kinds(self) -> Collection[str]:
        """The element types that `read` can deliver."""
        ...

    def dtype(self, name: str) -> np.dtype:
        """What `read` delivers for a tensor of one of `kinds`."""
        ...

    def read(self, name: str, rows: Rows = slice(None)) -> np.ndarray:
        """Rows along axis 0; a view of the mapped file where element type and rows allow it."""
        ...

    def close(self) -> None: ...


def map_file(path: Path) -> np.ndarray:
    """The bytes of a file that is not empty, mapped read-only; unmapped when the last view of it goes."""
    return np.memmap(path, np.uint8, mode="r").view(np.ndarray)
