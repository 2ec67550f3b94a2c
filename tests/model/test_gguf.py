"""GGUF files: every architecture equals the safetensors checkpoint it was converted from; broken files are refused by name."""

from __future__ import annotations

import contextlib
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkrt.errors import LoadError
from sparkrt.model.checkpoint import open_checkpoint
from sparkrt.model.loading.gguf import GgufStore
from tests import miniatures, rigs
from tests.model import gguf_files
from tests.model.test_families import mtp
from tests.text.inputs import need

NAMES = ["llama", "qwen2", "qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe", "qwen3_next", "qwen3_next_uneven"]


@pytest.mark.parametrize("name", NAMES)
def test_gguf_equals_the_checkpoint_it_was_made_of(name: str, tmp_path: Path) -> None:
    tensors, config = miniatures.build(name)
    if name in ("qwen3_5_moe", "qwen3_5"):
        tensors |= mtp(tensors, "mtp.")
    rigs.save(tmp_path / name, tensors, config)
    plain = open_checkpoint(tmp_path / name)
    packed = open_checkpoint(gguf_files.write(tmp_path / "model.gguf", tensors, config))
    assert packed.folder is None
    assert packed.gguf is not None
    assert packed.config.norm_offset == 0.0
    same = {"norm_offset": 0.0, "architecture": "", "rms_norm_eps": 0.0}
    assert replace(packed.config, **same) == replace(plain.config, **same)
    assert packed.config.rms_norm_eps == pytest.approx(config["rms_norm_eps"])
    assert packed.source.names() == plain.source.names()
    for tensor in plain.source.names():
        values = plain.source.get(tensor)
        if tensor.endswith("norm") and ".gdn." not in tensor:
            values = values + np.float32(plain.config.norm_offset)
        exact = not tensor.endswith("A_log")  # log(exp(x)) rounds
        np.testing.assert_allclose(packed.source.get(tensor), values, rtol=0 if exact else 1e-6, err_msg=tensor)
        rows = slice(1, 1 + len(values) // 2)
        np.testing.assert_array_equal(packed.source.get(tensor, rows), packed.source.get(tensor)[rows], err_msg=tensor)


def test_next_with_separate_projections(tmp_path: Path) -> None:
    """Newer files hold q | k | v and z apart, in the canonical order."""
    tensors, config = miniatures.build("qwen3_next")
    rigs.save(tmp_path / "plain", tensors, config)
    source = open_checkpoint(tmp_path / "plain").source
    layers = range(3)
    for i in layers:
        del tensors[f"model.layers.{i}.linear_attn.in_proj_qkvz.weight"]
    extra = {f"blk.{i}.attn_qkv.weight": source.get(f"layers.{i}.gdn.qkv") for i in layers}
    extra |= {f"blk.{i}.attn_gate.weight": source.get(f"layers.{i}.gdn.z") for i in layers}
    packed = open_checkpoint(gguf_files.write(tmp_path / "model.gguf", tensors, config, extra)).source
    for name in ("layers.2.gdn.qkv", "layers.2.gdn.z", "layers.2.gdn.b"):
        np.testing.assert_array_equal(packed.get(name), source.get(name))


def test_fused_expert_tensor(tmp_path: Path) -> None:
    tensors, config = miniatures.build("qwen3_5_moe")
    _, converted = gguf_files.convert(tensors, config)
    fused = {f"blk.{i}.ffn_gate_up_exps.weight": tensors[f"model.layers.{i}.mlp.experts.gate_up_proj"] for i in range(4)}
    parts = {name: tensor for name, tensor in converted.items() if "ffn_gate_exps" not in name and "ffn_up_exps" not in name}
    metadata = gguf_files.keys(config, "qwen35moe", mtp=False)
    path = gguf_files.quantized(
        tmp_path / "model.gguf", {n: (t, Kind.F32) for n, t in (parts | fused).items()}, "qwen35moe", **metadata
    )
    np.testing.assert_array_equal(
        open_checkpoint(path).source.get("layers.3.moe.gate_up"), tensors["model.layers.3.mlp.experts.gate_up_proj"]
    )


def test_rope_freqs_divide_the_frequencies(tmp_path: Path) -> None:
    tensors, config = miniatures.build("llama")
    divisors = np.linspace(1, 8, 8, dtype=np.float32)  # head_dim 16
    config_of = open_checkpoint(gguf_files.write(tmp_path / "a.gguf", tensors, config, {"rope_freqs.weight": divisors})).config
    assert config_of.attention.rope.freq_divisors == tuple(divisors.tolist())
    with pytest.raises(LoadError, match=r"b\.gguf: tensor rope_freqs\.weight is F32 \[3\], expected F32 \[8\]"):
        open_checkpoint(gguf_files.write(tmp_path / "b.gguf", tensors, config, {"rope_freqs.weight": divisors[:3]}))


def test_metadata_becomes_configuration(tmp_path: Path) -> None:
    tensors, config = miniatures.build("llama")
    metadata: dict[str, Any] = {
        "tokenizer.ggml.eot_token_id": 7,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.tokens": ["a", "é", ""],
        "general.sampling.temp": 0.5,
        "general.sampling.top_k": 20,
    }
    checkpoint = open_checkpoint(gguf_files.write(tmp_path / "model.gguf", tensors, config, **metadata))
    assert checkpoint.config.eos_token_ids == (config["eos_token_id"], 7)
    assert checkpoint.config.bos_token_id == 1
    assert checkpoint.config.vocab_size == miniatures.PADDED_VOCAB
    assert checkpoint.generation_config == {"temperature": 0.5, "top_k": 20}
    assert checkpoint.gguf is not None
    assert checkpoint.gguf["tokenizer.ggml.tokens"] == ["a", "é", ""]


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.attention.head_count": 0}, r"llama\.attention\.head_count must be an integer from 1"),
        ({"llama.attention.head_count": "4"}, r"llama\.attention\.head_count must be an integer"),
        ({"llama.block_count": 2**31}, r"llama\.block_count must be an integer from 1 to 4096"),
        ({"llama.rope.scaling.type": "longrope"}, "longrope"),
        ({"llama.attention.layer_norm_rms_epsilon": 0.0}, r"llama\.attention\.layer_norm_rms_epsilon must be"),
        ({"split.count": 3}, "split"),
    ],
)
def test_metadata_faults_name_the_key(tmp_path: Path, metadata: dict[str, Any], message: str) -> None:
    tensors, config = miniatures.build("llama")
    with pytest.raises(LoadError, match=rf"model\.gguf: .*{message}"):
        open_checkpoint(gguf_files.write(tmp_path / "model.gguf", tensors, config, **metadata))


def test_unsupported_architecture_is_named(tmp_path: Path) -> None:
    path = gguf_files.quantized(
        tmp_path / "model.gguf", {"token_embd.weight": (np.zeros((4, 4), np.float32), Kind.F32)}, "gemma3"
    )
    with pytest.raises(LoadError, match=r"general\.architecture is 'gemma3'.*Supported: .*qwen35moe"):
        open_checkpoint(path)


SERVED = [Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q8_0, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K]


@pytest.mark.parametrize("kind", SERVED)
def test_quantized_rows_are_dequantized(kind: Kind, tmp_path: Path) -> None:
    """Random blocks: the same as the package gives for the whole tensor, read whole, in ranges and by index, in 2-D and 3-D."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    packed = np.random.default_rng(0).integers(0, 60, (3, 10, 2 * size), np.uint8)  # below 60: finite fp16 scales
    store = GgufStore(gguf_files.quantized(tmp_path / "m.gguf", {"a": (packed, kind), "b": (packed[0], kind)}))
    whole = gguf.dequantize(packed, kind)
    assert store.tensors["a"].shape == (3, 10, 2 * block)
    assert store.dtype("a") == np.float32
    np.testing.assert_array_equal(store.read("a"), whole)
    np.testing.assert_array_equal(store.read("a", slice(1, 2)), whole[1:2])
    np.testing.assert_array_equal(store.read("b", np.array([7, 0, 3])), whole[0][[7, 0, 3]])
    assert store.read("b", slice(4, 4)).shape == (0, 2 * block)


def test_plain_tensors_are_views(tmp_path: Path) -> None:
    values = np.arange(64, dtype=np.float32).reshape(4, 16)
    bf16 = values.astype(ml_dtypes.bfloat16)
    tensors = {"f": (values, Kind.F32), "h": (values.astype(np.float16), Kind.F16), "b": (bf16.view(np.uint8), Kind.BF16)}
    store = GgufStore(gguf_files.quantized(tmp_path / "m.gguf", tensors))
    for name, dtype in (("f", np.float32), ("h", np.float16), ("b", ml_dtypes.bfloat16)):
        found = store.read(name, slice(1, 3))
        assert found.dtype == dtype == store.dtype(name)
        assert not found.flags.writeable
        np.testing.assert_array_equal(found.astype(np.float32), values[1:3])


def test_quantized_checkpoint_is_close_to_its_origin(tmp_path: Path) -> None:
    tensors, config = miniatures.build("llama")
    _, converted = gguf_files.convert(tensors, config)
    packed = {n: (gguf.quantize(t, Kind.Q8_0), Kind.Q8_0) if t.ndim == 2 else (t, Kind.F32) for n, t in converted.items()}
    path = gguf_files.quantized(tmp_path / "m.gguf", packed, **gguf_files.keys(config, "llama", mtp=False))
    checkpoint = open_checkpoint(path)
    assert checkpoint.config.dtype == "bfloat16"
    rigs.save(tmp_path / "plain", tensors, config)
    plain = open_checkpoint(tmp_path / "plain").source
    for name in plain.names():
        np.testing.assert_allclose(checkpoint.source.get(name), plain.get(name), atol=0.02 * float(np.abs(plain.get(name)).max()))


def test_unsupported_quantization_is_named(tmp_path: Path) -> None:
    tensors, config = miniatures.build("llama")
    _, converted = gguf_files.convert(tensors, config)
    packed = {n: (t, Kind.F32) for n, t in converted.items()}
    packed["blk.1.ffn_up.weight"] = (gguf.quantize(converted["blk.1.ffn_up.weight"], Kind.Q5_1), Kind.Q5_1)
    path = gguf_files.quantized(tmp_path / "m.gguf", packed, **gguf_files.keys(config, "llama", mtp=False))
    with pytest.raises(LoadError, match=r"m\.gguf: tensor blk\.1\.ffn_up\.weight has dtype Q5_1, expected F32, .*Q4_K"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("name", "tensor", "problem"),
    [
        ("blk.1.ffn_up.weight", None, "tensor blk.1.ffn_up.weight is missing"),
        ("token_embd.weight", None, "tensor token_embd.weight is missing"),
        ("blk.9.ffn_up.weight", np.zeros((2, 2), np.float32), "tensor blk.9.ffn_up.weight belongs to no layer"),
        ("output_norm.weight", np.zeros(8, np.float32), "tensor output_norm.weight has shape [8], expected [64]"),
    ],
)
def test_tensor_faults_name_file_and_tensor(tmp_path: Path, name: str, tensor: np.ndarray | None, problem: str) -> None:
    tensors, config = miniatures.build("llama")
    _, converted = gguf_files.convert(tensors, config)
    packed = {n: (t, Kind.F32) for n, t in (converted | {name: tensor}).items() if t is not None}
    path = gguf_files.quantized(tmp_path / "m.gguf", packed, **gguf_files.keys(config, "llama", mtp=False))
    with pytest.raises(LoadError) as error:
        open_checkpoint(path)
    assert f"m.gguf: {problem}" in str(error.value)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    values = np.zeros((2, 32), np.float32)
    packed = {"a": (values, Kind.F32), "b": (gguf.quantize(values, Kind.Q8_0), Kind.Q8_0)}
    return gguf_files.quantized(path, packed, **{"tokenizer.ggml.tokens": ["x", "y"], "general.alignment": 32}).read_bytes()


@pytest.mark.parametrize("keep", [0, 2, 4, 10, 40, -1])
def test_truncated_file_is_refused(small: bytes, keep: int, tmp_path: Path) -> None:
    path = tmp_path / "small.gguf"
    path.write_bytes(small[: len(small) - 32 + keep] if keep < 0 else small[:keep])  # the writer pads the end by less than 32
    with pytest.raises(LoadError, match=r"small\.gguf: .*(truncated|not a GGUF)"):
        GgufStore(path)


@pytest.mark.parametrize(("offset", "value"), [(8, 2**62), (16, 2**62), (24, 2**63)])
def test_announced_counts_are_not_believed(small: bytes, offset: int, value: int, tmp_path: Path) -> None:
    path = tmp_path / "small.gguf"
    path.write_bytes(small[:offset] + struct.pack("<Q", value) + small[offset + 8 :])
    with pytest.raises(LoadError, match=r"small\.gguf: truncated"):
        GgufStore(path)


@settings(max_examples=300, deadline=None)
@given(position=st.integers(0), byte=st.integers(0, 255), cut=st.none() | st.integers(0))
def test_any_corrupted_byte_loads_or_is_a_load_error(
    small: bytes, tmp_path_factory: pytest.TempPathFactory, position: int, byte: int, cut: int | None
) -> None:
    content = bytearray(small)
    content[position % len(content)] = byte
    path = tmp_path_factory.getbasetemp() / "corrupt.gguf"
    path.write_bytes(content if cut is None else content[: cut % len(content)])
    with contextlib.suppress(LoadError):
        store = GgufStore(path)
        for name, tensor in store.tensors.items():
            if tensor.kind in store.kinds:
                store.read(name)
    with contextlib.suppress(LoadError):
        open_checkpoint(path)


@pytest.mark.inputs
def test_smollm2_loads() -> None:
    checkpoint = open_checkpoint(need("smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf")
    config = checkpoint.config
    assert (config.num_layers, config.hidden_size, config.intermediate_size, config.vocab_size) == (30, 576, 1536, 49152)
    assert (config.attention.num_heads, config.attention.num_kv_heads, config.attention.head_dim) == (9, 3, 64)
    assert config.tie_word_embeddings
    assert config.attention.rope.theta == 1e5
    assert config.max_position == 8192
    assert checkpoint.source.get("layers.29.mlp.down").shape == (576, 1536)
    spread = float(checkpoint.source.get("layers.0.attn.q").std())
    assert 0.01 < spread < 1
