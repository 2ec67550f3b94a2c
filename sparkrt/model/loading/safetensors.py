"""Safetensors files, opened with distrust: a header is believed only after it has been found to describe exactly its file.

The format: 8 bytes little-endian header length, a JSON header, then the data. The reference library accepts a key that
occurs twice; here that, too, is an error, and every message names the file and the tensor.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from math import prod
from pathlib import Path

import ml_dtypes
import numpy as np

from sparkrt.errors import LoadError
from sparkrt.model.keys import read_json
from sparkrt.model.loading.store import SERVED, Rows, StoredTensor, map_file

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_MAX_HEADER = 100_000_000  # the reference library's own limit
_MAX_AXES = 32
_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I8", "U8", "BOOL"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
_DTYPES: dict[str, np.dtype] = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}


class SafetensorsStore:
    """The tensors of a folder: `model.safetensors`, the shards of its index, or the only `*.safetensors` there is."""

    kinds = SERVED

    def __init__(self, folder: Path) -> None:
        self.origin, shards = _find_shards(folder)
        self.tensors: dict[str, StoredTensor] = {}
        for file, listed in shards.items():
            found = read_header(file)
            for name in found:
                if name in self.tensors:
                    raise LoadError(f"{file}: tensor {name} is also in {self.tensors[name].file.name}")
            if absent := listed - found.keys():
                raise LoadError(f"{file}: lacks tensor {min(absent)}, which {self.origin.name} places there")
            self.tensors |= found
        self._maps = {file: map_file(file) for file in shards}

    def dtype(self, name: str) -> np.dtype:
        return _DTYPES[self.tensors[name].kind]

    def read(self, name: str, rows: Rows = slice(None)) -> np.ndarray:
        tensor = self.tensors[name]
        data = self._maps[tensor.file][tensor.start : tensor.stop]
        return data.view(self.dtype(name)).reshape(tensor.shape)[rows]

    def close(self) -> None:
        self._maps.clear()


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of one file. Raises LoadError unless the header is sound and its tensors fill the file exactly."""
    try:
        with file.open("rb") as stream:
            size = stream.seek(0, 2)
            stream.seek(0)
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or not 2 <= length <= min(size - 8, _MAX_HEADER):
                raise LoadError(f"{file}: truncated or not a safetensors file: {size} bytes, with a header length of {length}")
            raw = stream.read(length)
    except OSError as error:
        raise LoadError(f"{file}: cannot be read: {error.strerror}") from error
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise LoadError(f"{file}: header is not valid JSON: {error}") from error
    if not isinstance(header, dict):
        raise LoadError(f"{file}: header must be a JSON object")
    header.pop("__metadata__", None)
    begin = 8 + length
    tensors = [_read_entry(file, name, entry, begin, size) for name, entry in header.items()]
    _check_coverage(file, tensors, begin, size)
    return {tensor.name: tensor for tensor in tensors}


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    values: dict[str, object] = {}
    for key, value in pairs:
        if key in values:
            raise ValueError(f"{key} occurs twice")
        values[key] = value
    return values


def _read_entry(file: Path, name: str, entry: object, begin: int, size: int) -> StoredTensor:
    """One header entry, with its byte range proven to fit its shape. Python integers: no shape can overflow."""
    match entry:
        case {"dtype": str(kind), "shape": list(shape), "data_offsets": [start, stop], **rest} if not rest:
            pass
        case _:
            raise LoadError(f"{file}: tensor {name} needs exactly dtype, shape and data_offsets [begin, end] in the header")
    if kind not in _BITS:
        raise LoadError(f"{file}: tensor {name} has unknown dtype {kind}")
    numbers = [*shape, start, stop]
    if len(shape) > _MAX_AXES or not all(type(n) is int and 0 <= n < 2**63 for n in numbers):
        raise LoadError(f"{file}: tensor {name} has shape {shape} and data_offsets {[start, stop]}: integers from 0 expected")
    bits = prod(shape) * _BITS[kind]
    if bits % 8 or stop - start != bits // 8 or prod(n for n in shape if n) >= 2**63:
        raise LoadError(f"{file}: tensor {name} of shape {shape} and dtype {kind} cannot lie in {stop - start} bytes")
    if begin + stop > size:
        raise LoadError(f"{file}: truncated: {size} bytes, but tensor {name} ends at {begin + stop}")
    return StoredTensor(name, file, kind, tuple(shape), begin + start, begin + stop)


def _check_coverage(file: Path, tensors: list[StoredTensor], begin: int, size: int) -> None:
    """Refuse overlaps, holes and trailing bytes: they are how one tensor's bytes become another's."""
    position, previous = begin, "the header"
    for tensor in sorted(tensors, key=lambda t: (t.start, t.stop)):
        if tensor.start != position:
            problem = "overlaps" if tensor.start < position else "leaves a hole after"
            raise LoadError(f"{file}: tensor {tensor.name} {problem} {previous} (at byte {tensor.start}, expected {position})")
        position, previous = tensor.stop, tensor.name
    if position != size:
        raise LoadError(f"{file}: {size} bytes, expected {position}: {size - position} trailing bytes after {previous}")


def _find_shards(folder: Path) -> tuple[Path, dict[Path, set[str]]]:
    """`(the file that lists the tensors, what an index says that each file holds)`."""
    if (single := folder / SINGLE).is_file():
        return single, {single: set()}
    if (index := folder / INDEX).is_file():
        return index, _read_index(index)
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 1:
        return files[0], {files[0]: set()}
    if files:
        raise LoadError(
            f"{folder}: {len(files)} safetensors files, but neither {SINGLE} nor {INDEX} to say which belong together"
        )
    other = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for path in folder.glob(pattern))
    found = f"; found {other[0]}, name a GGUF file itself or convert to safetensors" if other else ""
    raise LoadError(f"{folder}: no weights: neither {SINGLE} nor {INDEX}{found}")


def _read_index(index: Path) -> dict[Path, set[str]]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, Mapping) or not weight_map:
        raise LoadError(f"{index}: weight_map must be an object that is not empty")
    listed: dict[str, set[str]] = {}
    for name, value in weight_map.items():
        # a plain name only: the link a hub cache keeps under that name may point anywhere, the index may not
        if not isinstance(value, str) or not re.fullmatch(r"[^/\\\0:]+\.safetensors", value):
            raise LoadError(
                f"{index}: weight_map places {name} in {value!r}; only a *.safetensors file beside the index is allowed"
            )
        listed.setdefault(value, set()).add(name)
    shards = {index.parent / value: names for value, names in sorted(listed.items())}
    for file, names in shards.items():
        if not file.is_file():
            raise LoadError(f"{file}: missing; {index.name} places {len(names)} tensors there, {min(names)} for one")
    return shards
