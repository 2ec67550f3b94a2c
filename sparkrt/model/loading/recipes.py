"""How one canonical tensor is made of stored ones: renamed, rows permuted, stacked, joined.

A recipe says which stored tensors of which shapes it needs for a canonical shape, so that a checkpoint is checked before
anything of it is read, and reads a range of rows without reading the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from sparkrt.model.loading.store import TensorStore

Shape = tuple[int, ...]


class Recipe(Protocol):
    def needs(self, shape: Shape) -> Iterator[tuple[str, Shape]]:
        """The stored tensors, with their shapes, that make a canonical tensor of `shape`."""
        ...

    def read(self, store: TensorStore, shape: Shape, rows: slice) -> np.ndarray:
        """Rows [rows.start, rows.stop) of the canonical tensor whose whole shape is `shape`."""
        ...


@dataclass(frozen=True, slots=True)
class Stored:
    """A stored tensor as it is."""

    name: str

    def needs(self, shape: Shape) -> Iterator[tuple[str, Shape]]:
        yield self.name, shape

    def read(self, store: TensorStore, shape: Shape, rows: slice) -> np.ndarray:
        return store.read(self.name, rows)


@dataclass(frozen=True, slots=True)
class Reshaped:
    """A small stored tensor of another shape with the same elements; `stored` computes it from the canonical one."""

    name: str
    stored: Callable[[Shape], Shape]

    def needs(self, shape: Shape) -> Iterator[tuple[str, Shape]]:
        yield self.name, self.stored(shape)

    def read(self, store: TensorStore, shape: Shape, rows: slice) -> np.ndarray:
        return store.read(self.name).reshape(shape)[rows]


@dataclass(frozen=True, slots=True)
class PickedRows:
    """Rows `index` of a stored tensor of `total` rows, in that order."""

    name: str
    index: np.ndarray
    total: int

    def needs(self, shape: Shape) -> Iterator[tuple[str, Shape]]:
        yield self.name, (self.total, *shape[1:])

    def read(self, store: TensorStore, shape: Shape, rows: slice) -> np.ndarray:
        return store.read(self.name, self.index[rows])


@dataclass(frozen=True, slots=True)
class PickedColumns:
    """A stored matrix with its columns in the order of `index`."""

    name: str
    index: np.ndarray

    def needs(self, shape: Shape) -> Iterator[tuple[str, Shape]]:
        yield self.name, shape

    def read(self, store: TensorStore, shape: Shape, rows: slice) -> np.ndarray:
        return store.read(self.name, rows)[:, self.index]


@dataclass(frozen=True, slots=True)
class Computed:
    """Another recipe's result with `function` applied to its elements, in float32."""

    recipe: Recipe
    function: Callable[[np.ndarray], np.ndarray]

    def needs(self, shape: Shape) -> Iterator[tuple[str, Shape]]:
        return self.recipe.needs(shape)

    def read(self, store: TensorStore, shape: Shape, rows: slice) -> np.ndarray:
        return self.function(self.recipe.read(store, shape, rows).astype(np.float32))


@dataclass(frozen=True, slots=True)
class Stacked:
    """[E, parts·N, K] of E times `parts` stored matrices [N, K]; each name has an `{e}` for the number of the expert."""

    names: tuple[str, ...]

    def needs(self, shape: Shape) -> Iterator[tuple[str, Shape]]:
        part = (shape[1] // len(self.names), *shape[2:])
        for e in range(shape[0]):
            for name in self.names:
                yield _of(name, e), part

    def read(self, store: TensorStore, shape: Shape, rows: slice) -> np.ndarray:
        experts = range(rows.start, rows.stop)
        dtype = _common_dtype(store, [_of(name, e) for e in experts for name in self.names])
        out = np.empty((len(experts), *shape[1:]), dtype)
        step = shape[1] // len(self.names)
        for row, e in enumerate(experts):
            for part, name in enumerate(self.names):
                out[row, part * step : (part + 1) * step] = store.read(_of(name, e))
        return out


@dataclass(frozen=True, slots=True)
class Joined:
    """[E, parts·N, K] of one stored [E, N, K] a part."""

    names: tuple[str, ...]

    def needs(self, shape: Shape) -> Iterator[tuple[str, Shape]]:
        for name in self.names:
            yield name, (shape[0], shape[1] // len(self.names), *shape[2:])

    def read(self, store: TensorStore, shape: Shape, rows: slice) -> np.ndarray:
        out = np.empty((rows.stop - rows.start, *shape[1:]), _common_dtype(store, self.names))
        step = shape[1] // len(self.names)
        for part, name in enumerate(self.names):
            out[:, part * step : (part + 1) * step] = store.read(name, rows)
        return out


def _of(name: str, expert: int) -> str:
    return name.replace("{e}", str(expert))


def _common_dtype(store: TensorStore, names: list[str] | tuple[str, ...]) -> np.dtype:
    """The dtype the named tensors share, float32 where they do not."""
    dtypes = {store.dtype(name) for name in names}
    return dtypes.pop() if len(dtypes) == 1 else np.dtype(np.float32)
