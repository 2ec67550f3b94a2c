"""Where a model's weights come from: the tensors stored in files, and recipes that make the canonical ones of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod, sqrt
from pathlib import Path
from typing import Protocol
from zlib import crc32

import ml_dtypes
import numpy as np

from sparkrt.errors import LoadError
from sparkrt.model.config import ModelConfig
from sparkrt.model.spec import Recipe, Shape, expected_tensors

_POOL = 1 << 24  # elements of dummy weights; more tensors overlap themselves the smaller it is
_SLACK = 1 << 12  # room to begin at an offset of the tensor's own
PLAIN: dict[str, np.dtype] = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """What a file's header says of one tensor. `kind` is the file's own name of the element type, BF16 or Q4_K say."""

    name: str
    file: Path
    kind: str
    shape: tuple[int, ...]
    data: np.ndarray  # its bytes, mapped read-only


class TensorStore:
    """Opened and checked files: every tensor lies wholly inside its file. `origin` is the file that lists them."""

    kinds: tuple[str, ...] = tuple(PLAIN)  # the element types that `read` can deliver
    metadata: dict[str, object] | None = None

    def __init__(self, origin: Path) -> None:
        self.origin, self.tensors = origin, dict[str, StoredTensor]()

    def dtype(self, name: str) -> np.dtype:
        """What `read` delivers for a tensor of one of `kinds`: float32 for quantized ones."""
        return PLAIN.get(self.tensors[name].kind, PLAIN["F32"])

    def read(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        """Rows along axis 0: a view of the mapped file."""
        return self.tensors[name].data.view(self.dtype(name)).reshape(self.tensors[name].shape)[rows]


def map_file(path: Path) -> np.ndarray:
    """The bytes of a file, mapped read-only; unmapped when the last view of it goes. Raises LoadError naming the file."""
    try:
        return np.memmap(path, np.uint8, mode="r").view(np.ndarray) if path.stat().st_size else np.empty(0, np.uint8)
    except OSError as error:
        raise LoadError(f"{path}: cannot be read: {error.strerror}") from error


class WeightSource(Protocol):
    """Weights by canonical name (see `spec.py`), in canonical row order and stored dtype; quantized ones are dequantized.

    `shapes` has all of `expected_tensors(config)`, and of `mtp_tensors(config)` where the checkpoint has them. They were checked
    when the source was opened, so that reading cannot fail for a fault of the files.
    """

    shapes: Mapping[str, Shape]

    def names(self) -> set[str]:
        return set(self.shapes)

    def get(self, name: str, rows: slice | None = None) -> np.ndarray:
        """The tensor or its `rows` along axis 0 (step 1), in float32, float16 or bfloat16; no copy where the file allows it."""
        ...

    def identity(self) -> object:
        """Something whose `repr` tells these weights from others, without reading them all."""
        ...

    def close(self) -> None:
        """Let go of the files. Arrays handed out stay valid."""
        return


class CheckpointSource(WeightSource):
    """A `WeightSource` over a store. Raises LoadError, naming file and tensor, where it is not what the recipes need.

    Stored tensors that `known` matches, and empty ones, may be there without being used; any other is a fault.
    """

    def __init__(self, store: TensorStore, recipes: Mapping[str, Recipe], known: re.Pattern[str]) -> None:
        self.shapes = {name: recipe.shape for name, recipe in recipes.items()}
        self._store, self._recipes = store, recipes
        for recipe in recipes.values():
            if missing := [name for name in recipe.names if name not in store.tensors]:
                raise LoadError(f"{store.origin}: tensor {missing[0]} is missing (1 of {len(missing)})")
            for t in map(store.tensors.__getitem__, recipe.names):
                if t.shape != recipe.stored:
                    raise LoadError(f"{t.file}: tensor {t.name} has shape {list(t.shape)}, expected {list(recipe.stored)}")
                if t.kind not in store.kinds:
                    raise LoadError(f"{t.file}: tensor {t.name} has dtype {t.kind}, expected {', '.join(store.kinds)}")
        unused = store.tensors.keys() - {name for recipe in recipes.values() for name in recipe.names}
        if extra := sorted(name for name in unused if not known.search(name) and 0 not in store.tensors[name].shape):
            first = store.tensors[extra[0]]
            raise LoadError(f"{first.file}: tensor {first.name} belongs to no layer of this configuration (1 of {len(extra)})")

    def get(self, name: str, rows: slice | None = None) -> np.ndarray:
        store, recipe, shape = self._store, self._recipes[name], self.shapes[name]
        start, stop, step = (rows or slice(None)).indices(shape[0])
        assert step == 1, "rows are a range"
        rows = slice(start, max(start, stop))
        if recipe.change is not None:
            return recipe.change(store.read(recipe.names[0]))[rows]
        experts = len(recipe.stored) < len(shape)
        if len(recipe.names) == 1 and not experts:
            return store.read(recipe.names[0], rows)
        parts = len(recipe.names) // (shape[0] if experts else 1)
        out = np.empty((rows.stop - start, *shape[1:]), np.result_type(*{store.dtype(name) for name in recipe.names}))
        for i, part in enumerate(np.split(out, parts, axis=1)):  # views
            if experts:
                for matrix, name in zip(part, recipe.names[i::parts][rows], strict=True):
                    matrix[...] = store.read(name)
            else:
                part[...] = store.read(recipe.names[i], rows)
        return out

    def identity(self) -> object:
        """Of every file its name, size and time, of every tensor what the header says, and of some their first bytes."""
        stored = sorted(self._store.tensors.values(), key=lambda tensor: tensor.name)
        files = sorted({tensor.file for tensor in stored})
        known = [(file.name, (status := file.stat()).st_size, status.st_mtime_ns) for file in files]
        some = stored[:: max(len(stored) // 64, 1)]  # each is a read from somewhere else on the disk
        return known, [(t.name, t.kind, t.shape) for t in stored], [t.data[:64].tobytes() for t in some]

    def close(self) -> None:
        self._store.tensors.clear()


class DummySource(WeightSource):
    """Random weights of the configuration's dtype, for speed tests of shapes whose weights are not at hand.

    A pool of random numbers is drawn once from the seed; every matrix is a view of it with overlapping rows: 70 GB take as long
    to make as 64 MB. Rows and experts differ (each is the pool from another offset), which spreads the routing.
    """

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        self.shapes, self._seed, self._dtype = expected_tensors(config), seed, np.dtype(config.dtype)
        self._norm = 1.0 - config.norm_offset  # what makes the effective weight 1
        largest, widest = max(map(prod, self.shapes.values())), max(shape[-1] for shape in self.shapes.values())
        pool = np.random.default_rng(seed).standard_normal(max(min(largest, _POOL), 2 * widest) + _SLACK, np.float32)
        self._pool = (pool * np.float32(1 / sqrt(config.hidden_size))).astype(self._dtype)  # projections keep the variance

    def get(self, name: str, rows: slice | None = None) -> np.ndarray:
        """Random numbers of one scale, but for norms, and for gates that must let the state remember."""
        shape, kind, rng = self.shapes[name], name.rpartition(".")[2], np.random.default_rng((self._seed, crc32(name.encode())))
        if kind.endswith("norm"):
            values = np.ones(shape, np.float32) if ".gdn." in name else np.full(shape, self._norm, self._dtype)
        elif kind == "A_log":  # a half-life of tens to hundreds of tokens
            values = rng.uniform(-6, -3, shape).astype(np.float32)
        elif kind == "conv":
            values = rng.normal(0, 0.5, shape).astype(self._dtype)
        else:
            values = np.full(shape, -1, self._dtype) if kind == "dt_bias" else self._window(name, shape)
        return values[rows or slice(None)]

    def identity(self) -> object:
        return "dummy", self._seed, str(self._dtype)

    def _window(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """A view of the pool of this shape: contiguous where it fits, with rows (and experts) overlapping where it does not."""
        strides, extent = [1], shape[-1]
        for axis in range(len(shape) - 2, -1, -1):
            room = (self._pool.size - _SLACK) >> axis  # an inner axis leaves half of the pool to the one outside it
            strides.insert(0, min(extent, max(room - extent, 0) // max(shape[axis] - 1, 1)))
            extent += strides[0] * (shape[axis] - 1)
        pool, item = self._pool[crc32(name.encode()) % _SLACK :], self._pool.itemsize
        return np.lib.stride_tricks.as_strided(pool, shape, [s * item for s in strides], writeable=False)
