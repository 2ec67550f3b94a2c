"""Safetensors files (8 bytes header length, a JSON header, data): a header is believed only if it describes exactly its file."""

from __future__ import annotations

import json
import re
from collections import Counter
from math import prod
from pathlib import Path

import numpy as np

from sparkrt.errors import LoadError
from sparkrt.model.keys import read_json
from sparkrt.model.source import StoredTensor, TensorStore, map_file

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_MAX_HEADER, _MAX_AXES = 100_000_000, 32  # the first is the reference library's own limit
_FLOATS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F6_E2M3", "F6_E3M2", "F4")
_OTHERS = ("C64", "I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL")
_BITS = {kind: int("".join(re.findall(r"^[A-Z]+(\d+)", kind)) or 8) for kind in (*_FLOATS, *_OTHERS)}


class SafetensorsStore(TensorStore):
    """The tensors of a folder: `model.safetensors`, the shards of its index, or the only `*.safetensors` there is."""

    def __init__(self, folder: Path) -> None:
        origin, shards = _find_shards(folder)
        super().__init__(origin)
        for file, listed in shards.items():
            found = read_header(file)
            if twice := found.keys() & self.tensors.keys():
                raise LoadError(f"{file}: tensor {min(twice)} is also in {self.tensors[min(twice)].file.name}")
            if absent := listed - found.keys():
                raise LoadError(f"{file}: lacks tensor {min(absent)}, which {origin.name} places there")
            self.tensors |= found


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of one file. Raises LoadError unless the header is sound and its tensors fill the file exactly."""
    data = map_file(file)
    size, length = data.size, int.from_bytes(data[:8].tobytes(), "little")
    begin = 8 + length
    if size < 8 or length < 2 or length > _MAX_HEADER or begin > size:
        raise LoadError(f"{file}: truncated or not a safetensors file: {size} bytes, with a header length of {length}")
    try:
        header = json.loads(data[8:begin].tobytes().decode("utf-8"), object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise LoadError(f"{file}: header is not valid JSON: {error}") from error
    if not isinstance(header, dict):
        raise LoadError(f"{file}: header must be a JSON object")
    header.pop("__metadata__", None)
    entries = [_read_entry(file, name, entry, data, begin) for name, entry in header.items()]
    position, previous = begin, "the header"
    for start, tensor in sorted(entries, key=lambda e: (e[0], e[1].data.size)):  # overlaps and holes mix up tensors' bytes
        if start != position:
            problem = "overlaps" if start < position else "leaves a hole after"
            raise LoadError(f"{file}: tensor {tensor.name} {problem} {previous} (at byte {start}, expected {position})")
        position, previous = start + tensor.data.size, tensor.name
    if position != size:
        raise LoadError(f"{file}: {size} bytes, expected {position}: {size - position} trailing bytes after {previous}")
    return {tensor.name: tensor for _, tensor in entries}


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError(f"{Counter(key for key, _ in pairs).most_common(1)[0][0]} occurs twice")
    return values


def _read_entry(file: Path, name: str, entry: object, data: np.ndarray, begin: int) -> tuple[int, StoredTensor]:
    """`(first byte, tensor)` of a header entry, proven to fit its shape. Python integers: no shape can overflow."""
    match entry:
        case {"dtype": str(kind), "shape": list(shape), "data_offsets": [start, stop], **rest} if not rest:
            pass
        case _:
            raise LoadError(f"{file}: tensor {name} needs exactly dtype, shape and data_offsets [begin, end] in the header")
    if kind not in _BITS:
        raise LoadError(f"{file}: tensor {name} has unknown dtype {kind}")
    if len(shape) > _MAX_AXES or not all(type(n) is int and 0 <= n < 2**63 for n in (*shape, start, stop)):
        raise LoadError(f"{file}: tensor {name} has shape {shape} and data_offsets {[start, stop]}: integers from 0 expected")
    if prod(shape) * _BITS[kind] != (stop - start) * 8 or prod(n for n in shape if n) >= 2**63:
        raise LoadError(f"{file}: tensor {name} of shape {shape} and dtype {kind} cannot lie in {stop - start} bytes")
    if begin + stop > data.size:
        raise LoadError(f"{file}: truncated: {data.size} bytes, but tensor {name} ends at {begin + stop}")
    return begin + start, StoredTensor(name, file, kind, tuple(shape), data[begin + start : begin + stop])


def _find_shards(folder: Path) -> tuple[Path, dict[Path, set[str]]]:
    """`(the file that lists the tensors, what an index says that each file holds)`."""
    single, index, files = folder / SINGLE, folder / INDEX, sorted(folder.glob("*.safetensors"))
    if single.is_file() or (len(files) == 1 and not index.is_file()):
        only = single if single.is_file() else files[0]
        return only, {only: set()}
    if not index.is_file() and files:
        raise LoadError(f"{folder}: {len(files)} safetensors files, but no {SINGLE} or {INDEX} to say which belong together")
    if not index.is_file():
        other = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".gguf"))
        found = f"; found {other[0]}, name a GGUF file itself or convert to safetensors" if other else ""
        raise LoadError(f"{folder}: no weights: neither {SINGLE} nor {INDEX}{found}")
    weight_map, shards = read_json(index).get("weight_map"), dict[Path, set[str]]()
    if not isinstance(weight_map, dict) or not weight_map:
        raise LoadError(f"{index}: weight_map must be an object that is not empty")
    for name, value in weight_map.items():
        # a plain name only: the link a hub cache keeps under that name may point anywhere, the index may not
        if not isinstance(value, str) or not re.fullmatch(r"[^/\\\0:]+\.safetensors", value):
            raise LoadError(f"{index}: weight_map places {name} in {value!r}; only a *.safetensors file beside it is allowed")
        shards.setdefault(folder / value, set()).add(name)
    for file, names in shards.items():
        if not file.is_file():
            raise LoadError(f"{file}: missing; {INDEX} places {len(names)} tensors there, {min(names)} for one")
    return index, dict(sorted(shards.items()))
