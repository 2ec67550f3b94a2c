"""The tensors of a GGUF file: plain ones as views, quantized ones dequantized row by row when they are read."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from sparkrt.model.loading.gguf_file import GgufFile
from sparkrt.model.loading.store import SERVED, Rows

_PLAIN: dict[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


class GgufStore:
    """A `TensorStore` over a file that was opened and checked; quantized tensors are read as float32."""

    kinds = (*SERVED, "Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K")

    def __init__(self, file: GgufFile) -> None:
        self.tensors = file.tensors
        self.metadata = file.metadata
        self._data: np.ndarray | None = file.data
        self.origin: Path = file.path

    def dtype(self, name: str) -> np.dtype:
        return _PLAIN.get(self.tensors[name].kind, _PLAIN["F32"])

    def read(self, name: str, rows: Rows = slice(None)) -> np.ndarray:
        assert self._data is not None, "the store is closed"
        tensor = self.tensors[name]
        data = self._data[tensor.start : tensor.stop]
        if tensor.kind in _PLAIN:
            return data.view(_PLAIN[tensor.kind]).reshape(tensor.shape)[rows]
        kind = GGMLQuantizationType[tensor.kind]
        block, block_bytes = GGML_QUANT_SIZES[kind]
        packed = data.reshape(*tensor.shape[:-1], tensor.shape[-1] // block * block_bytes)[rows]
        if packed.size == 0:
            return np.empty((*packed.shape[:-1], tensor.shape[-1]), np.float32)
        return dequantize(packed, kind)

    def close(self) -> None:
        self._data = None
