"""Where a model's weights come from: the tensors stored in files, and recipes that make the canonical ones of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import ml_dtypes
import numpy as np

from sparkrt.errors import LoadError

Shape = tuple[int, ...]
Change = Callable[[np.ndarray], np.ndarray]
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


class WeightSource(Protocol):
    """Weights by canonical name (see `spec.py`), in canonical row order and stored dtype; quantized ones are dequantized.

    There is everything in `expected_tensors(config)`, and in `mtp_tensors(config)` where the checkpoint has it. Shapes and dtypes
    were checked when the source was opened, so that reading cannot fail for a fault of the files. `get` gives the tensor or its
    `rows` along axis 0 (step 1), in float32, float16 or bfloat16: read-only and without a copy where the file allows it; rows are
    read alone unless the file has them in another order. Arrays handed out stay valid after `close`.
    """

    def names(self) -> set[str]: ...
    def shape(self, name: str) -> Shape: ...
    def get(self, name: str, rows: slice | None = None) -> np.ndarray: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a canonical tensor of `shape` is made of the tensors `names`, each of the shape `stored`.

    One is taken as it is or with a `change`. Several lie one after another along axis 1, expert by expert if they have no axis 0.
    """

    shape: Shape
    names: tuple[str, ...]
    stored: Shape
    change: Change | None = None

    def read(self, store: TensorStore, rows: slice) -> np.ndarray:
        if self.change is not None:
            return self.change(store.read(self.names[0]))[rows]
        experts = len(self.stored) < len(self.shape)
        if len(self.names) == 1 and not experts:
            return store.read(self.names[0], rows)
        parts = len(self.names) // (self.shape[0] if experts else 1)
        out = np.empty((rows.stop - rows.start, *self.shape[1:]), np.result_type(*{store.dtype(name) for name in self.names}))
        for i, part in enumerate(np.split(out, parts, axis=1)):  # views
            if experts:
                for matrix, name in zip(part, self.names[i::parts][rows], strict=True):
                    matrix[...] = store.read(name)
            else:
                part[...] = store.read(self.names[i], rows)
        return out


class CheckpointSource:
    """A `WeightSource` over a store. Raises LoadError, naming file and tensor, where it is not what the recipes need.

    Stored tensors that `known` matches, and empty ones, may be there without being used; any other is a fault.
    """

    def __init__(self, store: TensorStore, recipes: Mapping[str, Recipe], known: re.Pattern[str]) -> None:
        self._store, self._recipes, used = store, recipes, set[str]()
        for recipe in recipes.values():
            if missing := [name for name in recipe.names if name not in store.tensors]:
                raise LoadError(f"{store.origin}: tensor {missing[0]} is missing{_more(missing)}")
            for tensor in map(store.tensors.__getitem__, recipe.names):
                fault = f"{tensor.file}: tensor {tensor.name} has"
                if tensor.shape != recipe.stored:
                    raise LoadError(f"{fault} shape {list(tensor.shape)}, expected {list(recipe.stored)}")
                if tensor.kind not in store.kinds:
                    raise LoadError(f"{fault} dtype {tensor.kind}, expected {', '.join(store.kinds)}")
            used.update(recipe.names)
        extra = sorted(
            name for name, t in store.tensors.items() if name not in used and not known.search(name) and 0 not in t.shape
        )
        if extra:
            file = store.tensors[extra[0]].file
            raise LoadError(f"{file}: tensor {extra[0]} belongs to no layer of this configuration{_more(extra)}")

    def names(self) -> set[str]:
        return set(self._recipes)

    def shape(self, name: str) -> Shape:
        return self._recipes[name].shape

    def get(self, name: str, rows: slice | None = None) -> np.ndarray:
        recipe = self._recipes[name]
        start, stop, step = (rows or slice(None)).indices(recipe.shape[0])
        assert step == 1, "rows are a range"
        return recipe.read(self._store, slice(start, max(start, stop)))

    def close(self) -> None:
        self._store.close()


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
