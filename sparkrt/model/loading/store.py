"""`TensorStore`: the tensors of a checkpoint as its files name and lay them out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from sparkrt.errors import LoadError

PLAIN: dict[str, np.dtype] = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """What a file's header says of one tensor. `kind` is the file's own name of the element type, BF16 or Q4_K say."""

    name: str
    file: Path
    kind: str
    shape: tuple[int, ...]
    start: int  # bytes from the beginning of the file
    stop: int


class TensorStore:
    """Opened and checked files: every tensor lies wholly inside its file. `origin` is the file that lists the tensors."""

    kinds: tuple[str, ...] = tuple(PLAIN)  # the element types that `read` can deliver

    def __init__(self, origin: Path, files: Iterable[Path]) -> None:
        self.origin, self.tensors = origin, dict[str, StoredTensor]()
        self._maps = {file: map_file(file) for file in files}

    def dtype(self, name: str) -> np.dtype:
        """What `read` delivers for a tensor of one of `kinds`: float32 for quantized ones."""
        return PLAIN.get(self.tensors[name].kind, PLAIN["F32"])

    def read(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        """Rows along axis 0: a view of the mapped file."""
        return self._bytes(name).view(self.dtype(name)).reshape(self.tensors[name].shape)[rows]

    def close(self) -> None:
        self._maps.clear()

    def _bytes(self, name: str) -> np.ndarray:
        tensor = self.tensors[name]
        return self._maps[tensor.file][tensor.start : tensor.stop]


def map_file(path: Path) -> np.ndarray:
    """The bytes of a file, mapped read-only; unmapped when the last view of it goes. Raises LoadError naming the file."""
    try:
        return np.memmap(path, np.uint8, mode="r").view(np.ndarray) if path.stat().st_size else np.empty(0, np.uint8)
    except OSError as error:
        raise LoadError(f"{path}: cannot be read: {error.strerror}") from error
