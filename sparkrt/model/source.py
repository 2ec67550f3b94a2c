"""`WeightSource`: where a model's weights come from, under canonical names, whatever file they lie in."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Protocol

import numpy as np

from sparkrt.errors import LoadError
from sparkrt.model.config import ModelConfig
from sparkrt.model.loading.store import TensorStore
from sparkrt.model.names import Recipe, Shape


class WeightSource(Protocol):
    """Weights by canonical name (see `spec.py`), in canonical row order and stored dtype; quantized ones are dequantized.

    Shapes and dtypes were checked when the source was opened, so that reading cannot fail for a fault of the files.
    """

    def names(self) -> set[str]:
        """Every tensor to be had: `expected_tensors(config)`, and `mtp_tensors(config)` where the checkpoint has them."""

    def shape(self, name: str) -> Shape:
        """The whole tensor's shape. Raises KeyError on an unknown name."""

    def get(self, name: str, rows: slice | None = None) -> np.ndarray:
        """The tensor, or its `rows` along axis 0 (step 1), in float32, float16 or bfloat16.

        Read-only and without a copy where the file allows it. Rows are read alone, unless the file has them in another order.
        """

    def close(self) -> None:
        """Let go of the files. Arrays handed out stay valid."""


class CheckpointSource:
    """A `WeightSource` over a store. Raises LoadError, naming file and tensor, where the two do not fit.

    `recipes` and `shapes` go by canonical name. Stored tensors that `known` matches, and empty ones, may be there without being
    used; any other is a fault.
    """

    def __init__(
        self,
        store: TensorStore,
        config: ModelConfig,
        recipes: Mapping[str, Recipe],
        shapes: Mapping[str, Shape],
        known: re.Pattern[str],
    ) -> None:
        self._store, self._config, self._recipes, self._shapes = store, config, recipes, shapes
        for recipe in recipes.values():
            _check(store, recipe)
        used = {name for recipe in recipes.values() for name in recipe.names}
        extra = sorted(n for n in store.tensors.keys() - used if not known.search(n) and 0 not in store.tensors[n].shape)
        if extra:
            file = store.tensors[extra[0]].file
            raise LoadError(f"{file}: tensor {extra[0]} belongs to no layer of this configuration{_more(extra)}")

    def names(self) -> set[str]:
        return set(self._shapes)

    def shape(self, name: str) -> Shape:
        return self._shapes[name]

    def get(self, name: str, rows: slice | None = None) -> np.ndarray:
        store, recipe, shape = self._store, self._recipes[name], self._shapes[name]
        start, stop, step = (rows or slice(None)).indices(shape[0])
        assert step == 1, "rows are a range"
        rows = slice(start, max(start, stop))
        if recipe.change is not None:
            return recipe.change(store.read(recipe.names[0]), self._config)[rows]
        if not recipe.stacked and recipe.parts == 1:
            return store.read(recipe.names[0], rows)
        out = np.empty((rows.stop - start, *shape[1:]), np.result_type(*{store.dtype(n) for n in recipe.names}))
        for i, part in enumerate(np.split(out, recipe.parts, axis=1)):  # views
            if recipe.stacked:
                for row, stored in zip(part, recipe.names[i :: recipe.parts][rows], strict=True):
                    row[...] = store.read(stored)
            else:
                part[...] = store.read(recipe.names[i], rows)
        return out

    def close(self) -> None:
        self._store.close()


def _check(store: TensorStore, recipe: Recipe) -> None:
    """Every stored tensor of a recipe must be there, of its shape and readable."""
    if missing := [name for name in recipe.names if name not in store.tensors]:
        raise LoadError(f"{store.origin}: tensor {missing[0]} is missing{_more(missing)}")
    for name in recipe.names:
        tensor = store.tensors[name]
        if tensor.shape != recipe.shape:
            raise LoadError(f"{tensor.file}: tensor {name} has shape {list(tensor.shape)}, expected {list(recipe.shape)}")
        if tensor.kind not in store.kinds:
            raise LoadError(f"{tensor.file}: tensor {name} has dtype {tensor.kind}, expected {', '.join(store.kinds)}")


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
