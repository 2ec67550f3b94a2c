"""Writes miniatures as GGUF files: what the converter of llama.cpp makes of each family's checkpoint, in a few lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter

Config = dict[str, Any]
Tensors = dict[str, np.ndarray]

ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "qwen3_next": "qwen3next",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
}
_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.in_proj_qkvz": "ssm_in",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}
_MTP = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "shared_head_norm"}


def write(path: Path, tensors: Tensors, config: Config, extra: Tensors | None = None, **metadata: Any) -> Path:
    """Converts a checkpoint (float32 tensors) to a GGUF file; `extra` tensors go in as they are."""
    arch, converted = convert(tensors, config)
    writer = GGUFWriter(path, arch)
    for key, value in (keys(config, arch, any(name.startswith("mtp.") for name in tensors)) | metadata).items():
        add(writer, key, value)
    for name, tensor in (converted | (extra or {})).items():
        writer.add_tensor(name, np.ascontiguousarray(tensor))
    return finish(writer)


def finish(writer: GGUFWriter) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert isinstance(writer.path, Path)
    return writer.path


def add(writer: GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)


def keys(config: Config, arch: str, mtp: bool) -> dict[str, Any]:
    head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    rope = config.get("rope_parameters", {}) | (config.get("rope_scaling") or {})
    fraction = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    found: dict[str, Any] = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"] + mtp,
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": rope.get("rope_theta", config.get("rope_theta")),
        "rope.dimension_count": int(head_dim * fraction),
    }
    if rope.get("rope_type") == "yarn":
        found |= {"rope.scaling.type": "yarn", "rope.scaling.factor": rope["factor"]}
        found["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if mtp:
        found["nextn_predict_layers"] = 1
    if "num_experts" in config:
        found |= {"expert_count": config["num_experts"], "expert_used_count": config["num_experts_per_tok"]}
        found["expert_feed_forward_length"] = config["moe_intermediate_size"]
        found["expert_weights_norm"] = config.get("norm_topk_prob", True)
    if "shared_expert_intermediate_size" in config:
        found["expert_shared_feed_forward_length"] = config["shared_expert_intermediate_size"]
    if "linear_num_key_heads" in config:
        found |= {
            "ssm.conv_kernel": config["linear_conv_kernel_dim"],
            "ssm.state_size": config["linear_key_head_dim"],
            "ssm.group_count": config["linear_num_key_heads"],
            "ssm.time_step_rank": config["linear_num_value_heads"],
            "ssm.inner_size": config["linear_num_value_heads"] * config["linear_value_head_dim"],
        }
    return {f"{arch}.{key}": value for key, value in found.items()} | {"tokenizer.ggml.eos_token_id": config["eos_token_id"]}


def convert(tensors: Tensors, config: Config) -> tuple[str, Tensors]:
    """The architecture, and the tensors under GGUF names with the converter's changes made to them."""
    arch = ARCHITECTURES[config["model_type"]]
    out: Tensors = {}
    experts: dict[str, list[np.ndarray]] = {}
    for name, tensor in tensors.items():
        if (config["model_type"].startswith(("qwen3_next", "qwen3_5")) and name.endswith("norm.weight")) or "pre_fc_norm" in name:
            tensor = tensor if name.endswith("linear_attn.norm.weight") else tensor + 1
        if name in _TOP:
            out[_TOP[name]] = tensor
            continue
        if name.startswith("mtp.") and not name.startswith("mtp.layers."):
            block, part, kind = config["num_hidden_layers"], f"nextn.{_MTP[name.split('.')[1]]}", "weight"
            out[f"blk.{block}.{part}.{kind}"] = tensor
            continue
        head, _, tail = name.partition("layers.")
        index, _, part = tail.partition(".")
        prefix = f"blk.{int(index) + (config['num_hidden_layers'] if head == 'mtp.' else 0)}."
        if ".experts." in name:
            pieces = part.removeprefix("mlp.experts.").split(".")
            if pieces[0] == "gate_up_proj":
                out[prefix + "ffn_gate_exps.weight"], out[prefix + "ffn_up_exps.weight"] = np.split(tensor, 2, axis=1)
            elif pieces[0] == "down_proj":
                out[prefix + "ffn_down_exps.weight"] = tensor
            else:
                experts.setdefault(f"{prefix}ffn_{pieces[1].removesuffix('_proj')}_exps.weight", []).append(tensor)
            continue
        out |= {prefix + key: value for key, value in _layer_tensor(part, tensor, config).items()}
    return arch, out | {name: np.stack(parts) for name, parts in experts.items()}


def _layer_tensor(part: str, tensor: np.ndarray, config: Config) -> Tensors:
    stem, _, kind = part.rpartition(".")
    if config["model_type"] == "llama" and stem in ("self_attn.q_proj", "self_attn.k_proj"):
        heads = config["num_attention_heads"] if stem.endswith("q_proj") else config["num_key_value_heads"]
        tensor = tensor.reshape(heads, 2, -1, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
    if "linear_attn." in part:
        tensor = _delta_net_tensor(part, tensor, config)
    match part:
        case "linear_attn.A_log":
            return {"ssm_a": -np.exp(tensor)}
        case "linear_attn.dt_bias":
            return {"ssm_dt.bias": tensor}
        case "linear_attn.conv1d.weight":
            return {"ssm_conv1d.weight": tensor[:, 0]}
        case "mlp.shared_expert_gate.weight":
            return {"ffn_gate_inp_shexp.weight": tensor[0]}
        case "post_attention_layernorm.weight":
            hybrid = "linear_num_key_heads" in config
            return {"post_attention_norm.weight" if hybrid else "ffn_norm.weight": tensor}
        case _:
            return {f"{_LAYER[stem]}.{kind}": tensor}


def _delta_net_tensor(part: str, tensor: np.ndarray, config: Config) -> np.ndarray:
    """Qwen3.5's value heads from grouped (head g·r + j) to tiled (j·HK + g), wherever they are rows or columns."""
    if config["model_type"] == "qwen3_next" or part.endswith(".norm.weight"):
        return tensor
    groups, width = config["linear_num_key_heads"], config["linear_value_head_dim"]
    ratio = config["linear_num_value_heads"] // groups
    keys = 2 * groups * config["linear_key_head_dim"]

    def tile(rows: np.ndarray) -> np.ndarray:
        per_head = rows.shape[0] // (groups * ratio)
        return rows.reshape(groups, ratio, per_head, *rows.shape[1:]).swapaxes(0, 1).reshape(rows.shape)

    if part.endswith(("in_proj_qkv.weight", "conv1d.weight")):
        return np.concatenate([tensor[:keys], tile(tensor[keys:])])
    if part.endswith("out_proj.weight"):
        return tile(np.ascontiguousarray(tensor.T)).T
    assert tensor.shape[0] in (groups * ratio, groups * ratio * width)
    return tile(tensor)


def quantized(
    path: Path, tensors: dict[str, tuple[np.ndarray, GGMLQuantizationType]], arch: str = "llama", **metadata: Any
) -> Path:
    """A file of packed tensors as they are: uint8 blocks of the given types."""
    writer = GGUFWriter(path, arch)
    for key, value in metadata.items():
        add(writer, key, value)
    for name, (packed, kind) in tensors.items():
        writer.add_tensor(name, packed, raw_dtype=kind)
    return finish(writer)
