"""The header of a GGUF file, read with bounds checks.

The `gguf` package dequantizes for us, but its reader takes 3 s for a vocabulary of 49,152 (a NumPy array a token; this takes
0.1 s) and follows lengths and offsets without asking whether the file is that long.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import NoReturn

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from sparkrt.errors import LoadError
from sparkrt.model.loading.store import StoredTensor, map_file

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_AXES = 4
_MIN_ENTRY = 8 + 4 + 8  # bytes that the shortest metadata or tensor entry takes


class GgufFile:
    """`metadata` as plain Python values, `tensors` with shapes in NumPy's axis order, `data` the mapped bytes.

    Raises LoadError, naming the file, unless every tensor lies inside the file and none in another.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._size = path.stat().st_size
            self.data = map_file(path) if self._size else np.empty(0, np.uint8)
        except OSError as error:
            raise LoadError(f"{path}: cannot be read: {error.strerror}") from error
        self._bytes = self.data.data
        self._at = 0
        self.metadata: dict[str, object] = {}
        self.tensors: dict[str, StoredTensor] = {}
        self._read_header()

    def _read_header(self) -> None:
        if bytes(self._take(4)) != b"GGUF":
            self._fail("not a GGUF file")
        version = self._scalar("I")
        if version not in (2, 3):
            self._fail(f"GGUF version {version} (or big-endian) cannot be read, only little-endian 2 and 3")
        num_tensors, num_keys = self._count(_MIN_ENTRY), self._count(_MIN_ENTRY - 7)
        for _ in range(num_keys):
            key = self._string()
            if key in self.metadata:
                self._fail(f"key {key} occurs twice")
            self.metadata[key] = self._value(key, self._scalar("I"))
        entries = [self._tensor_entry() for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            self._fail(f"general.alignment must be a power of two, not {alignment!r}")
        begin = -(-self._at // alignment) * alignment
        for name, kind, shape, offset in entries:
            self._place(name, kind, shape, begin + offset)
        self._check_overlap(begin)

    def _tensor_entry(self) -> tuple[str, int, tuple[int, ...], int]:
        name = self._string()
        axes = self._scalar("I")
        if axes > _MAX_AXES:
            self._fail(f"tensor {name} has {axes} axes")
        shape = tuple(reversed([self._scalar("Q") for _ in range(axes)]))
        return name, self._scalar("I"), shape, self._scalar("Q")

    def _place(self, name: str, code: int, shape: tuple[int, ...], start: int) -> None:
        if name in self.tensors:
            self._fail(f"tensor {name} occurs twice")
        try:
            kind = GGMLQuantizationType(code)
        except ValueError:
            self._fail(f"tensor {name} has unknown element type {code}")
        block, block_bytes = GGML_QUANT_SIZES[kind]
        elements = 1
        for n in shape:
            elements *= n
        if shape and shape[-1] % block:
            self._fail(f"tensor {name}: rows of {shape[-1]} elements do not divide into {kind.name} blocks of {block}")
        stop = start + elements // block * block_bytes
        if stop > self._size:
            self._fail(f"truncated: {self._size} bytes, but tensor {name} ends at {stop}")
        self.tensors[name] = StoredTensor(name, self.path, kind.name, shape, start, stop)

    def _check_overlap(self, position: int) -> None:
        for tensor in sorted(self.tensors.values(), key=lambda t: (t.start, t.stop)):
            if tensor.start < position:
                self._fail(f"tensor {tensor.name} overlaps the one before it")
            position = tensor.stop

    def _value(self, key: str, code: int) -> object:
        if code == _STRING:
            return self._string()
        if code != _ARRAY:
            return self._scalar(self._format(key, code))
        item = self._scalar("I")
        if item == _STRING:
            return [self._string() for _ in range(self._count(8))]
        format = self._format(key, item)
        count = self._count(struct.calcsize(format))
        return list(struct.unpack(f"<{count}{format}", self._take(count * struct.calcsize(format))))

    def _format(self, key: str, code: int) -> str:
        if code not in _SCALARS:
            self._fail(f"key {key} has a value of unknown type {code}")
        return _SCALARS[code]

    def _scalar(self, format: str) -> int:
        """One number; floats and bools, too, come this way, as metadata values only."""
        value: int = struct.unpack(f"<{format}", self._take(struct.calcsize(f"<{format}")))[0]
        return value

    def _count(self, item_bytes: int) -> int:
        """A number of items to follow, believed only if so many fit into the rest of the file."""
        count = self._scalar("Q")
        if count * item_bytes > self._size - self._at:
            self._fail(f"truncated: {count} entries announced at byte {self._at}, but the file has {self._size}")
        return count

    def _string(self) -> str:
        return str(self._take(self._count(1)), "utf-8", "replace")

    def _take(self, count: int) -> memoryview:
        end = self._at + count
        if end > self._size:
            self._fail(f"truncated: {self._size} bytes, but the header goes on")
        taken = self._bytes[self._at : end]
        self._at = end
        return taken

    def _fail(self, problem: str) -> NoReturn:
        raise LoadError(f"{self.path}: {problem}")
