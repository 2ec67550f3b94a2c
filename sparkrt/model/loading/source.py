"""The weights of a checkpoint under canonical names: recipes over a store, checked as a whole before anything is read."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from sparkrt.errors import LoadError
from sparkrt.model.loading.recipes import Recipe, Shape
from sparkrt.model.loading.store import TensorStore


class CheckpointSource:
    """A `WeightSource`. Raises LoadError, naming file and tensor, where the checkpoint is not what its configuration says."""

    def __init__(
        self, store: TensorStore, recipes: Mapping[str, Recipe], shapes: Mapping[str, Shape], known: re.Pattern[str]
    ) -> None:
        """`recipes` and `shapes` by canonical name.

        Stored tensors that `known` matches, and empty ones, may be there without being used; any other is a fault.
        """
        self._store = store
        self._recipes = dict(recipes)
        self._shapes = dict(shapes)
        used = {stored for name in shapes for stored in _checked(store, recipes[name], shapes[name])}
        extra = sorted(n for n in store.tensors.keys() - used if not known.search(n) and 0 not in store.tensors[n].shape)
        if extra:
            tensor = store.tensors[extra[0]]
            raise LoadError(f"{tensor.file}: tensor {extra[0]} belongs to no layer of this configuration{_more(extra)}")

    def names(self) -> set[str]:
        return set(self._shapes)

    def shape(self, name: str) -> Shape:
        return self._shapes[name]

    def get(self, name: str, rows: slice | None = None) -> np.ndarray:
        shape = self._shapes[name]
        start, stop, step = (rows or slice(None)).indices(shape[0])
        assert step == 1, "rows are a range"
        return self._recipes[name].read(self._store, shape, slice(start, max(start, stop)))

    def close(self) -> None:
        self._store.close()


def is_complete(store: TensorStore, recipes: Mapping[str, Recipe], shapes: Mapping[str, Shape]) -> bool:
    """Whether every stored tensor that the recipes need is there, whatever its shape."""
    return all(stored in store.tensors for name, shape in shapes.items() for stored, _ in recipes[name].needs(shape))


def _checked(store: TensorStore, recipe: Recipe, shape: Shape) -> list[str]:
    """The names of the stored tensors of one recipe, every one of them found, of its shape and readable."""
    needs = list(recipe.needs(shape))
    missing = [name for name, _ in needs if name not in store.tensors]
    if missing:
        raise LoadError(f"{store.origin}: tensor {missing[0]} is missing{_more(missing)}")
    for name, expected in needs:
        tensor = store.tensors[name]
        if tensor.shape != expected:
            raise LoadError(f"{tensor.file}: tensor {name} has shape {list(tensor.shape)}, expected {list(expected)}")
        if tensor.kind not in store.kinds:
            raise LoadError(f"{tensor.file}: tensor {name} has dtype {tensor.kind}, expected {', '.join(store.kinds)}")
    return [name for name, _ in needs]


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
