"""`WeightSource`: where a model's weights come from, under canonical names, whatever file they lie in."""

from __future__ import annotations

from typing import Protocol

import numpy as np


class WeightSource(Protocol):
    """Weights by canonical name (see `spec.py`), in canonical row order and stored dtype; quantized ones are dequantized.

    Shapes and dtypes were checked when the source was opened, so that reading cannot fail for a fault of the files.
    """

    def names(self) -> set[str]:
        """Every tensor to be had: `expected_tensors(config)`, and `mtp_tensors(config)` where the checkpoint has them."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """The whole tensor's shape. Raises KeyError on an unknown name."""
        ...

    def get(self, name: str, rows: slice | None = None) -> np.ndarray:
        """The tensor, or its `rows` along axis 0 (step 1): read-only and without a copy where the file allows it.

        float32, float16 or bfloat16. Rows are read alone: a rank that wants half of them touches half of the file.
        """
        ...

    def close(self) -> None:
        """Let go of the files. Arrays handed out stay valid."""
        ...
