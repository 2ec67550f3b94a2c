"""Safetensors folders: what is sound loads without a copy, what is not is refused by file and tensor (C01 to C05)."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from sparkrt.errors import LoadError
from sparkrt.model.checkpoint import open_checkpoint
from sparkrt.model.loading.safetensors import SafetensorsStore, read_header
from tests import miniatures, rigs

Header = dict[str, Any]


def raw_file(path: Path, header: Header | str | bytes, data: bytes = b"", length: int | None = None) -> Path:
    """A safetensors file by hand: anything may be wrong with it."""
    text = header if isinstance(header, bytes) else (header if isinstance(header, str) else json.dumps(header)).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(shape: list[Any], start: Any, stop: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return miniatures.write("llama3", tmp_path / "model")


def shard(folder: Path) -> Path:
    """Splits the single file of `folder` into three shards with an index; returns the index."""
    store = SafetensorsStore(folder)
    weight_map: dict[str, str] = {}
    for i in range(3):
        part = {name: store.read(name) for name in sorted(store.tensors)[i::3]}
        file = f"model-{i + 1:05}-of-00003.safetensors"
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors").unlink()
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return index


def test_reads_views_of_the_file(folder: Path) -> None:
    tensors, _ = miniatures.build("llama3")
    source = open_checkpoint(folder).source
    embed = source.get("embed")
    assert embed.base is not None
    assert not embed.flags.writeable
    np.testing.assert_array_equal(embed, tensors["model.embed_tokens.weight"])
    np.testing.assert_array_equal(source.get("embed", slice(3, 7)), tensors["model.embed_tokens.weight"][3:7])
    np.testing.assert_array_equal(source.get("embed", slice(250, 999)), tensors["model.embed_tokens.weight"][250:])
    source.close()
    np.testing.assert_array_equal(embed, tensors["model.embed_tokens.weight"])


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_dtypes_are_kept(tmp_path: Path, dtype: Any) -> None:
    tensors, config = miniatures.build("llama3")
    del config["dtype"]
    rigs.save(tmp_path, {name: tensor.astype(dtype) for name, tensor in tensors.items()}, config)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.source.get("layers.0.attn.q").dtype == dtype
    assert checkpoint.config.dtype == ("bfloat16" if dtype is ml_dtypes.bfloat16 else np.dtype(dtype).name)


def test_shards_load_like_one_file(folder: Path) -> None:
    whole = open_checkpoint(folder).source
    expected = {name: whole.get(name).copy() for name in whole.names()}
    shard(folder)
    source = open_checkpoint(folder).source
    assert source.names() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(source.get(name), values)


def test_missing_shard_is_named(folder: Path) -> None:
    shard(folder)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(LoadError, match=r"model-00002-of-00003\.safetensors: missing"):
        open_checkpoint(folder)


def test_tensor_missing_from_its_shard_is_named(folder: Path) -> None:
    index = shard(folder)
    weight_map = json.loads(index.read_text())["weight_map"]
    weight_map["model.extra.weight"] = "model-00001-of-00003.safetensors"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(LoadError, match=r"model-00001-of-00003\.safetensors: lacks tensor model\.extra\.weight"):
        open_checkpoint(folder)


def test_tensor_in_two_shards_is_refused(folder: Path) -> None:
    shard(folder)
    shutil.copy(folder / "model-00001-of-00003.safetensors", folder / "model-00002-of-00003.safetensors")
    with pytest.raises(LoadError, match=r"model-00002-of-00003\.safetensors: tensor .* is also in model-00001"):
        open_checkpoint(folder)


@pytest.mark.parametrize("keep", [-1, -100, 2, 8, 0])
def test_truncated_file_is_refused(folder: Path, keep: int) -> None:
    file = folder / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:keep])
    with pytest.raises(LoadError, match=r"model\.safetensors: truncated") as error:
        open_checkpoint(folder)
    assert str(len(content[:keep])) in str(error.value)


def test_truncation_tells_expected_size(folder: Path) -> None:
    file = folder / "model.safetensors"
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(LoadError, match=rf"{size - 1} bytes, but tensor .* ends at {size}"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        (f'{{"a": {json.dumps(entry([1], 0, 4))}, "a": {json.dumps(entry([1], 0, 4))}}}', "a occurs twice"),
        ('{"a": {"dtype":"F32","shape":[1],"shape":[1],"data_offsets":[0,4]}}', "shape occurs twice"),
        ({"a": entry([2], 0, 8), "b": entry([1], 4, 8)}, "tensor b overlaps a"),
        ({"a": entry([1], 0, 4), "b": entry([1], 0, 4), "c": entry([1], 4, 8)}, "overlaps"),
        ({"a": entry([1], 0, 4)}, "4 trailing bytes after a"),
        ({"a": entry([1], 4, 8)}, "tensor a leaves a hole after the header"),
        ({}, "8 trailing bytes"),
        ({"a": entry([2**40, 2**40], 0, 8)}, "tensor a of shape"),
        ({"a": entry([2**62, 4, 0], 0, 0), "b": entry([2], 0, 8)}, "tensor a of shape"),
        ({"a": entry([2**32, 2**32], 0, 8)}, "tensor a of shape"),
        ({"a": entry([2], 0, 8, "F99")}, "tensor a has unknown dtype F99"),
        ({"a": entry([2], 8, 0)}, "tensor a"),
        ({"a": entry([2], -8, 0)}, "tensor a"),
        ({"a": entry([-2], 0, 8)}, "tensor a"),
        ({"a": entry([2.0], 0, 8)}, "tensor a"),
        ({"a": entry([True, 2], 0, 8)}, "tensor a"),
        ({"a": entry([1] * 40, 0, 4), "b": entry([1], 4, 8)}, "tensor a"),
        ({"a": entry([3], 0, 12)}, "truncated: .* tensor a ends at"),
        ({"a": entry([3], 0, 6, "F4")}, "tensor a"),
        ({"a": {"dtype": "F32", "shape": [2]}}, "tensor a needs exactly"),
        ({"a": entry([2], 0, 8) | {"strides": [1]}}, "tensor a needs exactly"),
        ({"a": [1]}, "tensor a needs exactly"),
        ("[]", "must be a JSON object"),
        ("{,", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ('{"a": ' + "9" * 5000 + "}", "not valid JSON"),
        (b"\xff\xfe{}", "not valid JSON"),
    ],
)  # fmt: skip
def test_broken_header_is_refused(tmp_path: Path, header: Header | str | bytes, problem: str) -> None:
    file = raw_file(tmp_path / "broken.safetensors", header, bytes(8))
    with pytest.raises(LoadError, match=rf"broken\.safetensors: .*{problem}"):
        read_header(file)


@pytest.mark.parametrize("length", [2**40, 2**63, 2**64 - 1, 0, 1, 11])
def test_header_length_is_not_believed(tmp_path: Path, length: int) -> None:
    file = raw_file(tmp_path / "broken.safetensors", "{}", bytes(8), length)
    with pytest.raises(LoadError, match=r"broken\.safetensors: .*header length"):
        read_header(file)


def test_zero_size_tensors_load(tmp_path: Path) -> None:
    tensors, config = miniatures.build("llama3")
    tensors |= {"model.layers.0.self_attn.empty": np.zeros((0, 4), np.float32)}
    rigs.save(tmp_path, tensors, config)
    open_checkpoint(tmp_path)
    header = {"a": entry([0, 4], 0, 0), "b": entry([1], 0, 4), "c": entry([4, 0], 4, 4), "d": entry([], 4, 8)}
    assert read_header(raw_file(tmp_path / "x.safetensors", header, bytes(8))).keys() == header.keys()


PLACES = [
    "../other/model.safetensors",
    "/etc/x.safetensors",
    "..\\x.safetensors",
    "C:x.safetensors",
    "sub/x.safetensors",
    "..",
    "",
    3,
]


@pytest.mark.parametrize("place", PLACES)
def test_index_cannot_leave_the_folder(folder: Path, tmp_path: Path, place: object) -> None:
    (tmp_path / "other").mkdir()
    shutil.move(folder / "model.safetensors", tmp_path / "other" / "model.safetensors")
    names = read_header(tmp_path / "other" / "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(names, place)}))
    with pytest.raises(LoadError, match=r"index\.json: weight_map places"):
        open_checkpoint(folder)


def test_hub_cache_links_load(folder: Path, tmp_path: Path) -> None:
    shard(folder)
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0123"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for i, file in enumerate(sorted(folder.iterdir())):
        shutil.move(file, blobs / f"{i:040}")
        (snapshot / file.name).symlink_to(f"../../blobs/{i:040}")
    assert "embed" in open_checkpoint(snapshot).source.names()


@pytest.mark.parametrize("index", [{}, {"weight_map": {}}, {"weight_map": []}, []])
def test_unusable_index_is_refused(folder: Path, index: object) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(LoadError, match=r"model\.safetensors\.index\.json"):
        open_checkpoint(folder)


def test_folder_without_weights_tells_what_it_found(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(LoadError, match=r"no weights.*found pytorch_model\.bin"):
        open_checkpoint(folder)


def test_one_oddly_named_file_loads_and_two_do_not(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    assert "embed" in open_checkpoint(folder).source.names()
    shutil.copy(folder / "weights.safetensors", folder / "more.safetensors")
    with pytest.raises(LoadError, match="2 safetensors files"):
        open_checkpoint(folder)


def zeros(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


@pytest.mark.parametrize(
    ("name", "tensor", "problem"),
    [
        ("model.layers.1.mlp.up_proj.weight", None, "is missing"),
        ("model.embed_tokens.weight", None, "is missing"),
        ("model.layers.3.mlp.up_proj.weight", zeros(2, 2), "belongs to no layer"),
        ("model.layers.0.mlp.up_proj.bias", zeros(12), "belongs to no layer"),
        ("model.norm.weight", zeros(8), "has shape [8], expected [64]"),
        ("model.norm.weight", zeros(1, 64), "has shape [1, 64], expected [64]"),
        ("model.norm.weight", zeros(64, dtype=np.int32), "has dtype I32, expected F32, F16, BF16"),
        ("model.norm.weight", zeros(64, dtype=ml_dtypes.float8_e4m3fn), "has dtype F8_E4M3, expected F32, F16, BF16"),
    ],
)
def test_tensor_faults_name_file_and_tensor(tmp_path: Path, name: str, tensor: np.ndarray | None, problem: str) -> None:
    tensors, config = miniatures.build("llama3")
    tensors = {key: value for key, value in (tensors | {name: tensor}).items() if value is not None}
    rigs.save(tmp_path, tensors, config)
    with pytest.raises(LoadError, match=re.escape(f"model.safetensors: tensor {name} {problem}")):
        open_checkpoint(tmp_path)


_leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
_json = st.recursive(_leaves, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)
_number = st.integers(-8, 40) | st.integers(2**31, 2**66) | st.floats() | st.booleans()
_entries = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "F16", "BF16", "F4", "I64", "BOOL", "X"]) | _json,
        "shape": st.lists(_number, max_size=4) | _json,
        "data_offsets": st.lists(_number, min_size=1, max_size=3) | _json,
    },
)


@settings(max_examples=300, deadline=None)
@given(header=st.dictionaries(st.text(max_size=4), _entries, max_size=3) | _json, data=st.binary(max_size=32))
def test_any_header_loads_or_is_a_load_error(tmp_path_factory: pytest.TempPathFactory, header: Any, data: bytes) -> None:
    folder = tmp_path_factory.getbasetemp() / "fuzz"
    folder.mkdir(exist_ok=True)
    raw_file(folder / "model.safetensors", json.dumps(header), data)
    try:
        store = SafetensorsStore(folder)
    except LoadError:
        return
    covered = sum(tensor.data.nbytes for tensor in store.tensors.values())
    assert covered == len(data)
    for name, tensor in store.tensors.items():
        if tensor.kind in store.kinds:
            assert store.read(name).nbytes == tensor.data.nbytes


@settings(max_examples=200, deadline=None)
@given(position=st.integers(0), byte=st.integers(0, 255), cut=st.none() | st.integers(0))
def test_any_corrupted_byte_loads_or_is_a_load_error(
    tmp_path_factory: pytest.TempPathFactory, position: int, byte: int, cut: int | None
) -> None:
    folder = tmp_path_factory.getbasetemp() / "corrupt"
    if not folder.exists():
        miniatures.write("llama3", folder)
        (folder / "model.safetensors").rename(folder / "sound")
    content = bytearray((folder / "sound").read_bytes())
    header = 8 + int.from_bytes(content[:8], "little")
    content[position % header] = byte
    (folder / "model.safetensors").write_bytes(content if cut is None else content[: cut % len(content)])
    with contextlib.suppress(LoadError):
        open_checkpoint(folder).source.close()
