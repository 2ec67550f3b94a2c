"""GGUF files: tensors, quantized ones dequantized as they are read, and metadata under the keys of a configuration.

The reader of the `gguf` package takes 3 s for 49,152 tokens (this: 0.1 s), and believes every length that a file states.
"""

from __future__ import annotations

import re
import struct
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from sparkrt.errors import LoadError
from sparkrt.model.config import ModelConfig
from sparkrt.model.families import MAX_LAYERS, family_of, read_config
from sparkrt.model.keys import ConfigKeys
from sparkrt.model.source import PLAIN, StoredTensor, TensorStore, map_file

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY, _MAX_AXES = 8, 9, 4
_MIN_KEY, _MIN_TENSOR = 8 + 4 + 1, 8 + 4 + 8  # bytes that the shortest entry takes
# Configuration keys and their names in the metadata, after the architecture's.
_KEYS = {"hidden_size": "embedding_length", "num_hidden_layers": "block_count", "intermediate_size": "feed_forward_length"}
_KEYS |= {"max_position_embeddings": "context_length", "rms_norm_eps": "attention.layer_norm_rms_epsilon"}
_KEYS |= {"num_attention_heads": "attention.head_count", "num_key_value_heads": "attention.head_count_kv"}
_KEYS |= {"head_dim": "attention.key_length", "mtp_layers": "nextn_predict_layers"}
_KEYS |= {"rope_theta": "rope.freq_base", "partial_rotary_factor": "rope.dimension_count"}  # the latter in channels
_KEYS |= {"num_experts": "expert_count", "num_experts_per_tok": "expert_used_count", "norm_topk_prob": "expert_weights_norm"}
_KEYS |= {
    f"{x}_intermediate_size": f"{y}_feed_forward_length" for x, y in (("moe", "expert"), ("shared_expert", "expert_shared"))
}
_KEYS |= {"linear_num_key_heads": "ssm.group_count", "linear_num_value_heads": "ssm.time_step_rank"}
_KEYS |= {"linear_key_head_dim": "ssm.state_size", "linear_conv_kernel_dim": "ssm.conv_kernel"}
_KEYS |= {"linear_value_head_dim": "ssm.inner_size"}  # of all value heads together
_ROPE = {"rope_type": "type", "factor": "factor", "original_max_position_embeddings": "original_context_length"}
_ROPE |= {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
_SAMPLING = {"temperature": "temp", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "repetition_penalty": "penalty_repeat"}


class GgufStore(TensorStore):
    """One file, checked: its `metadata` as plain Python values, its tensors with shapes in NumPy's axis order."""

    metadata: dict[str, object]
    kinds = (*PLAIN, "Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K")

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        data = map_file(path)
        header = _Header(path, data.data)
        if bytes(header.take(4)) != b"GGUF":
            header.fail("not a GGUF file")
        if (version := header.scalar("I")) not in (2, 3):
            header.fail(f"GGUF version {version} (or big-endian) cannot be read, only little-endian 2 and 3")
        num_tensors, num_keys = header.count(_MIN_TENSOR), header.count(_MIN_KEY)
        self.metadata = {}
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
        for offset, size, name, kind, shape in sorted(tensors):
            start, stop = begin + offset, begin + offset + size
            if stop > header.size:
                header.fail(f"truncated: {header.size} bytes, but tensor {name} ends at {stop}")
            if start < position or name in self.tensors:
                header.fail(f"tensor {name} overlaps the one before it, or occurs twice")
            self.tensors[name], position = StoredTensor(name, path, kind, shape, data[start:stop]), stop

    def read(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        tensor = self.tensors[name]
        if tensor.kind in PLAIN:
            return super().read(name, rows)
        kind = GGMLQuantizationType[tensor.kind]
        block, block_bytes = GGML_QUANT_SIZES[kind]
        packed = tensor.data.reshape(*tensor.shape[:-1], tensor.shape[-1] // block * block_bytes)[rows]
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
        size = struct.calcsize(code)
        count = self.count(size) if kind == _ARRAY else 1
        values = struct.unpack(f"<{count}{code}", self.take(count * size))
        return list(values) if kind == _ARRAY else values[0]

    def tensor(self) -> tuple[int, int, str, str, tuple[int, ...]]:
        """`(offset in the data, bytes, name, element type, shape)`."""
        name, axes = self.string(), self.scalar("I")
        if axes > _MAX_AXES:
            self.fail(f"tensor {name} has {axes} axes")
        shape = tuple(self.scalar("Q") for _ in range(axes))[::-1]
        code, offset = self.scalar("I"), self.scalar("Q")
        if code not in list(GGMLQuantizationType):
            self.fail(f"tensor {name} has unknown element type {code}")
        kind = GGMLQuantizationType(code)
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if shape and shape[-1] % block:
            self.fail(f"tensor {name}: rows of {shape[-1]} elements do not divide into {kind.name} blocks of {block}")
        return offset, prod(shape) // block * block_bytes, name, kind.name, shape


def read_gguf(path: Path) -> tuple[ModelConfig, dict[str, object], GgufStore]:
    """`(configuration, sampling defaults under the names of generation_config.json, tensors)` of a file."""
    store = GgufStore(path)
    config = read_config(_config_keys(store))
    rope = config.attention.rope
    if tensor := store.tensors.get("rope_freqs.weight"):  # what llama3 scaling comes to
        found, expected = f"{tensor.kind} {list(tensor.shape)}", f"F32 [{rope.rotary_dim // 2}]"
        if found != expected:
            raise LoadError(f"{path}: tensor {tensor.name} is {found}, expected {expected}")
        rope = replace(rope, freq_divisors=tuple(store.read(tensor.name).tolist()))
    # converters add the 1 of zero-centred norms to the weights
    config = replace(config, norm_offset=0.0, attention=replace(config.attention, rope=rope))
    sampling = {ours: store.metadata.get(f"general.sampling.{name}") for ours, name in _SAMPLING.items()}
    return config, {key: value for key, value in sampling.items() if value is not None}, store


def _config_keys(store: GgufStore) -> ConfigKeys:
    """The metadata under the names that configurations use; faults are told in the file's own."""
    meta, arch = store.metadata, str(store.metadata.get("general.architecture"))
    aliases = {key: f"{arch}.{name}" for key, name in _KEYS.items()} | {"architectures": "general.architecture"}
    found = {key: meta.get(aliases[key]) for key in _KEYS} | {"architectures": [arch]}
    keys = ConfigKeys(found, str(store.origin), aliases=aliases)
    values = keys.values
    family_of(keys)  # before anything is missed that other kinds of files do not have
    if ConfigKeys(meta, keys.file).integer("split.count", 0, minimum=0) > 1:
        raise LoadError(f"{store.origin}: is one part of a split GGUF, which cannot be served; merge the parts first")
    if not (embedding := store.tensors.get("token_embd.weight")) or not embedding.shape:
        raise LoadError(f"{store.origin}: tensor token_embd.weight is missing or a scalar")
    values["vocab_size"] = embedding.shape[0]  # the padded vocabulary; the token list may be shorter
    values["attention_bias"] = any(name.endswith(".attn_output.bias") for name in store.tensors)
    values.setdefault("norm_topk_prob", True)
    mtp = keys.integer("mtp_layers", 0, minimum=0)
    values["num_hidden_layers"] = layers = keys.integer("num_hidden_layers", minimum=mtp + 1, maximum=MAX_LAYERS) - mtp
    # what the metadata does not always tell: which layers are recurrent, and which are dense among experts
    blocks = {(int(m[1]), m[2]) for name in store.tensors if (m := re.match(r"blk\.([0-9]{1,6})\.(ssm|ffn_gate_inp)[._]", name))}
    if any(part == "ssm" for _, part in blocks):
        values["layer_types"] = ["linear_attention" if (i, "ssm") in blocks else "full_attention" for i in range(layers)]
    if any(part != "ssm" for _, part in blocks):
        values["mlp_only_layers"] = [i for i in range(layers) if (i, "ffn_gate_inp") not in blocks]
    if isinstance(kv_heads := values.get("num_key_value_heads"), list):  # one a layer, 0 where the layer is recurrent
        values["num_key_value_heads"] = max(kv_heads, default=0)
    if "linear_num_value_heads" in values:
        inner, heads = keys.integer("linear_value_head_dim"), keys.integer("linear_num_value_heads")
        if inner % heads:
            raise keys.fault("linear_value_head_dim", f"of {inner} is no multiple of {heads} value heads")
        values["linear_value_head_dim"] = inner // heads
    rope = {key: meta.get(f"{arch}.rope.scaling.{name}") for key, name in _ROPE.items()}
    values["rope_parameters"] = {key: value for key, value in rope.items() if value != "none"}
    values["tie_word_embeddings"] = "output.weight" not in store.tensors
    if rotary_dim := keys.integer("partial_rotary_factor", 0, minimum=0):
        head_dim = keys.integer("head_dim", keys.integer("hidden_size") // keys.integer("num_attention_heads"))
        values["partial_rotary_factor"] = rotary_dim / head_dim
    for ours, names in (("eos", ("eos", "eot", "eom")), ("bos", ("bos",)), ("pad", ("padding",))):
        values[f"{ours}_token_id"] = [meta[key] for name in names if (key := f"tokenizer.ggml.{name}_token_id") in meta]
    return keys
