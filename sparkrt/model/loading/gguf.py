"""GGUF files: the header read with bounds checks, plain tensors as views, quantized ones dequantized as they are read.

The `gguf` package dequantizes for us, but its reader takes 3 s for a vocabulary of 49,152 (a NumPy array a token; this takes
0.1 s) and follows lengths and offsets without asking whether the file is that long.
"""

from __future__ import annotations

import struct
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from sparkrt.errors import LoadError
from sparkrt.model.loading.store import PLAIN, StoredTensor, TensorStore

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_AXES = 4
_MIN_KEY, _MIN_TENSOR = 8 + 4 + 1, 8 + 4 + 8  # bytes that the shortest entry takes


class GgufStore(TensorStore):
    """One file: its `metadata` as plain Python values, its tensors with shapes in NumPy's axis order.

    Raises LoadError, naming the file, unless every tensor lies inside the file and none in another.
    """

    kinds = (*PLAIN, "Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K")

    def __init__(self, path: Path) -> None:
        super().__init__(path, [path])
        header = _Header(path, self._maps[path].data)
        if bytes(header.take(4)) != b"GGUF":
            header.fail("not a GGUF file")
        if (version := header.scalar("I")) not in (2, 3):
            header.fail(f"GGUF version {version} (or big-endian) cannot be read, only little-endian 2 and 3")
        num_tensors, num_keys = header.count(_MIN_TENSOR), header.count(_MIN_KEY)
        self.metadata: dict[str, object] = {}
        for _ in range(num_keys):
            key = header.string()
            if key in self.metadata:
                header.fail(f"key {key} occurs twice")
            self.metadata[key] = header.value(key)
        tensors = [header.tensor() for _ in range(num_tensors)]  # their offsets count from what comes next
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            header.fail(f"general.alignment must be a power of two, not {alignment!r}")
        position = begin = -(-header.at // alignment) * alignment
        for tensor in sorted(tensors, key=lambda t: (t.start, t.stop)):
            start, stop = begin + tensor.start, begin + tensor.stop
            if stop > header.size:
                header.fail(f"truncated: {header.size} bytes, but tensor {tensor.name} ends at {stop}")
            if start < position or tensor.name in self.tensors:
                header.fail(f"tensor {tensor.name} overlaps the one before it, or occurs twice")
            self.tensors[tensor.name] = replace(tensor, start=start, stop=stop)
            position = stop

    def read(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        """Rows along axis 0; a view of the mapped file where the tensor is not quantized."""
        tensor = self.tensors[name]
        if tensor.kind in PLAIN:
            return super().read(name, rows)
        kind = GGMLQuantizationType[tensor.kind]
        block, block_bytes = GGML_QUANT_SIZES[kind]
        packed = self._bytes(name).reshape(*tensor.shape[:-1], tensor.shape[-1] // block * block_bytes)[rows]
        return dequantize(packed, kind) if packed.size else np.empty((*packed.shape[:-1], tensor.shape[-1]), np.float32)


class _Header:
    """A cursor in a file; nothing that it reads is believed to fit into the file."""

    def __init__(self, path: Path, content: memoryview) -> None:
        self._path, self._content, self.size, self.at = path, content, len(content), 0

    def fail(self, problem: str) -> NoReturn:
        raise LoadError(f"{self._path}: {problem}")

    def take(self, count: int) -> memoryview:
        self.at += count
        if self.at > self.size:
            self.fail(f"truncated: {self.size} bytes, but the header goes on")
        return self._content[self.at - count : self.at]

    def scalar(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def count(self, item_bytes: int) -> int:
        """A number of items to follow, believed only if so many fit into the rest of the file."""
        count = int(self.scalar("Q"))
        if count * item_bytes > self.size - self.at:
            self.fail(f"truncated: {count} entries announced at byte {self.at}, but the file has {self.size}")
        return count

    def string(self) -> str:
        return str(self.take(self.count(1)), "utf-8", "replace")

    def value(self, key: str) -> object:
        kind = self.scalar("I")
        item = self.scalar("I") if kind == _ARRAY else kind
        if item == _STRING:
            return [self.string() for _ in range(self.count(8))] if kind == _ARRAY else self.string()
        if (code := _SCALARS.get(item)) is None:
            self.fail(f"key {key} has a value of unknown type {item}")
        if kind != _ARRAY:
            return self.scalar(code)
        count, size = self.count(struct.calcsize(code)), struct.calcsize(code)
        return list(struct.unpack(f"<{count}{code}", self.take(count * size)))

    def tensor(self) -> StoredTensor:
        """An entry of the list of tensors, with bytes counted from the beginning of the data."""
        name, axes = self.string(), self.scalar("I")
        if axes > _MAX_AXES:
            self.fail(f"tensor {name} has {axes} axes")
        shape = tuple(self.scalar("Q") for _ in range(axes))[::-1]
        code, start = self.scalar("I"), self.scalar("Q")
        if code not in list(GGMLQuantizationType):
            self.fail(f"tensor {name} has unknown element type {code}")
        kind = GGMLQuantizationType(code)
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if shape and shape[-1] % block:
            self.fail(f"tensor {name}: rows of {shape[-1]} elements do not divide into {kind.name} blocks of {block}")
        return StoredTensor(name, self._path, kind.name, shape, start, start + prod(shape) // block * block_bytes)
