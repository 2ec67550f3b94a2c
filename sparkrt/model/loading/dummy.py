"""Random weights from a configuration alone: for speed tests of shapes whose weights are not at hand.

A pool of random numbers is drawn once; every matrix is a view of it with overlapping rows, so that 70 GB of weights take as
long to make as 64 MB. Rows and experts differ (each is the pool from another offset), which spreads the routing.
"""

from __future__ import annotations

from math import prod, sqrt
from zlib import crc32

import numpy as np

from sparkrt.model.config import ModelConfig
from sparkrt.model.spec import expected_tensors
from sparkrt.runtime import dtypes

_POOL = 1 << 24  # elements; more tensors overlap themselves the smaller it is
_SLACK = 1 << 12  # room to begin at an offset of the tensor's own


class DummySource:
    """A `WeightSource` of seeded random weights: the same seed gives the same weights, in the configuration's dtype."""

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        self._shapes, self._seed = expected_tensors(config), seed
        self._norm = 1.0 - config.norm_offset  # what makes the effective weight 1
        self._dtype = dtypes.by_name(config.dtype).np
        largest, widest = max(map(prod, self._shapes.values())), max(shape[-1] for shape in self._shapes.values())
        pool = np.random.default_rng(seed).standard_normal(max(min(largest, _POOL), 2 * widest) + _SLACK, np.float32)
        # unit variance in gives unit variance out of a projection of the hidden size
        self._pool = (pool * np.float32(1 / sqrt(config.hidden_size))).astype(self._dtype)

    def names(self) -> set[str]:
        return set(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def get(self, name: str, rows: slice | None = None) -> np.ndarray:
        """Random numbers of one scale, but for norms, and for gates that must let the state remember."""
        shape, kind, rng = self._shapes[name], name.rpartition(".")[2], np.random.default_rng((self._seed, crc32(name.encode())))
        if kind.endswith("norm"):
            values = np.ones(shape, np.float32) if ".gdn." in name else np.full(shape, self._norm, self._dtype)
        elif kind == "A_log":  # a half-life of tens to hundreds of tokens
            values = rng.uniform(-6, -3, shape).astype(np.float32)
        elif kind == "conv":
            values = rng.normal(0, 0.5, shape).astype(self._dtype)
        else:
            values = np.full(shape, -1, self._dtype) if kind == "dt_bias" else self._window(name, shape)
        return values[rows or slice(None)]

    def close(self) -> None:
        self._shapes = {}

    def _window(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """A view of the pool of this shape: contiguous where it fits, with rows (and experts) overlapping where it does not."""
        strides, extent = [1], shape[-1]
        for axis in range(len(shape) - 2, -1, -1):
            room = (self._pool.size - _SLACK) >> axis  # an inner axis leaves half of the pool to the one outside it
            strides.insert(0, min(extent, max(room - extent, 0) // max(shape[axis] - 1, 1)))
            extent += strides[0] * (shape[axis] - 1)
        pool, item = self._pool[crc32(name.encode()) % _SLACK :], self._pool.itemsize
        return np.lib.stride_tricks.as_strided(pool, shape, [s * item for s in strides], writeable=False)
