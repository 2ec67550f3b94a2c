"""Miniature checkpoints of every family: a pure function from a name to tensors and config, no file and no PyTorch behind it.

The golden tool and the tests build the same bytes from the same seed; `digest` names them, so that a changed recipe is seen.
Weights are uniform from raw generator bits (whose stream NumPy guarantees), scaled by powers and products exact in float32.

The recipe makes faults visible: gated-delta-net outputs ×8, attention outputs ×3, head ×6, and gates that keep the state for long
in one half of the heads (A_log −5) and forget within tens of tokens in the other (−3). On plain random weights a wiped recurrent
state changes next to no token. The vocabulary is padded by nine rows that must never be sampled.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from tests import rigs

VOCAB = 256 + len(rigs.SPECIAL) + len(rigs.CONTROL)  # ids the tokenizer knows
PADDED_VOCAB = VOCAB + 9
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, DENSE_FFN = 64, 4, 2, 64, 96
EXPERTS, TOP_K, EXPERT_FFN = 8, 2, 32

Config = dict[str, Any]
Tensors = dict[str, np.ndarray]


class Draw:
    """Weights from a named seed, float32."""

    def __init__(self, name: str) -> None:
        self.bits = np.random.PCG64(crc32(name.encode()))

    def uniform(self, *shape: int, scale: float = 1.0, center: float = 0.0) -> np.ndarray:
        """Uniform in [center − scale, center + scale)."""
        raw = np.asarray(self.bits.random_raw(math.prod(shape)) >> np.uint64(40), np.float32)  # 24 bits: exact
        values = (raw * np.float32(2.0**-23) - np.float32(1)) * np.float32(scale) + np.float32(center)
        return values.reshape(shape)

    def matrix(self, *shape: int, gain: float = 1.0) -> np.ndarray:
        """A projection [..., out, in] of standard deviation gain / sqrt(in)."""
        return self.uniform(*shape, scale=gain * math.sqrt(3.0 / shape[-1]))


def _attention(draw: Draw, prefix: str, config: Config, gated: bool, center: float) -> Tensors:
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    dim = config.get("head_dim", HIDDEN // heads)
    sharp = 1 if gated else 1.5  # without a delta net beside it, flat attention would answer with one token for ever
    tensors = {
        "q_proj.weight": draw.matrix(heads * dim * (2 if gated else 1), HIDDEN, gain=sharp),
        "k_proj.weight": draw.matrix(kv_heads * dim, HIDDEN, gain=sharp),
        "v_proj.weight": draw.matrix(kv_heads * dim, HIDDEN),
        "o_proj.weight": draw.matrix(HIDDEN, heads * dim, gain=3),
    }
    family = config["model_type"]
    if family.startswith("qwen3"):
        tensors |= {f"{part}_norm.weight": draw.uniform(dim, scale=0.5, center=center * sharp) for part in "qk"}
    if config.get("attention_bias") or family == "qwen2":
        biased = "qkvo" if config.get("attention_bias") else "qkv"
        tensors |= {f"{p}_proj.bias": draw.uniform(len(tensors[f"{p}_proj.weight"]), scale=0.5) for p in biased}
    return {f"{prefix}self_attn.{name}": tensor for name, tensor in tensors.items()}


def _gdn(draw: Draw, prefix: str, config: Config) -> Tensors:
    k_heads, v_heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    k_dim, v_dim = config["linear_key_head_dim"], config["linear_value_head_dim"]
    keys, values = k_heads * k_dim, v_heads * v_dim
    half = np.arange(v_heads) % 2 == 0
    tensors = {
        "conv1d.weight": draw.uniform(2 * keys + values, 1, config["linear_conv_kernel_dim"], scale=0.85),
        "A_log": np.where(half, -5, -3).astype(np.float32) + draw.uniform(v_heads, scale=0.2),
        "dt_bias": draw.uniform(v_heads, scale=0.5, center=-1),
        "norm.weight": draw.uniform(v_dim, scale=0.3, center=1),
        "out_proj.weight": draw.matrix(HIDDEN, values, gain=8),
    }
    if config["model_type"] == "qwen3_next":  # rows grouped by key head
        tensors["in_proj_qkvz.weight"] = draw.matrix(2 * keys + 2 * values, HIDDEN)
        tensors["in_proj_ba.weight"] = draw.matrix(2 * v_heads, HIDDEN)
    else:
        tensors["in_proj_qkv.weight"] = draw.matrix(2 * keys + values, HIDDEN)
        tensors["in_proj_z.weight"] = draw.matrix(values, HIDDEN)
        tensors["in_proj_b.weight"] = draw.matrix(v_heads, HIDDEN)
        tensors["in_proj_a.weight"] = draw.matrix(v_heads, HIDDEN)
    return {f"{prefix}linear_attn.{name}": tensor for name, tensor in tensors.items()}


def _swiglu(draw: Draw, prefix: str, width: int) -> Tensors:
    shapes = {"gate_proj": (width, HIDDEN), "up_proj": (width, HIDDEN), "down_proj": (HIDDEN, width)}
    return {f"{prefix}{name}.weight": draw.matrix(*shape) for name, shape in shapes.items()}


def _experts(draw: Draw, prefix: str, config: Config, fused: bool) -> Tensors:
    mlp, width = prefix + "mlp.", config["moe_intermediate_size"]
    tensors = {mlp + "gate.weight": draw.matrix(EXPERTS, HIDDEN, gain=2)}
    if fused:
        tensors[mlp + "experts.gate_up_proj"] = draw.matrix(EXPERTS, 2 * width, HIDDEN)
        tensors[mlp + "experts.down_proj"] = draw.matrix(EXPERTS, HIDDEN, width)
    else:
        for expert in range(EXPERTS):
            tensors |= _swiglu(draw, f"{mlp}experts.{expert}.", width)
    if shared := config.get("shared_expert_intermediate_size"):
        tensors |= _swiglu(draw, mlp + "shared_expert.", shared)
        tensors[mlp + "shared_expert_gate.weight"] = draw.matrix(1, HIDDEN)
    return tensors


def _decoder(name: str, config: Config, prefix: str = "model.", fused_experts: bool = False) -> Tensors:
    """All text tensors of a decoder described by its (flat) config, in checkpoint names."""
    draw, family = Draw(name), config["model_type"]
    hybrid = family.startswith(("qwen3_next", "qwen3_5"))
    center = 0.0 if hybrid else 1.0  # zero-centred norms store w of 1 + w

    def norm() -> np.ndarray:
        return draw.uniform(HIDDEN, scale=0.3, center=center)

    tied = config["tie_word_embeddings"]  # a small embedding then: a large one would answer every token with itself
    tensors = {f"{prefix}embed_tokens.weight": draw.uniform(PADDED_VOCAB, HIDDEN, scale=0.5 if tied else 1.7)}
    if not tied:
        tensors["lm_head.weight"] = draw.matrix(PADDED_VOCAB, HIDDEN, gain=6)
    for i in range(config["num_hidden_layers"]):
        layer = f"{prefix}layers.{i}."
        tensors[layer + "input_layernorm.weight"] = norm()
        tensors[layer + "post_attention_layernorm.weight"] = norm()
        if hybrid and config["layer_types"][i] == "linear_attention":
            tensors |= _gdn(draw, layer, config)
        else:
            tensors |= _attention(draw, layer, config, gated=hybrid, center=center)
        if config.get("num_experts") and i not in config.get("mlp_only_layers", ()):
            tensors |= _experts(draw, layer, config, fused_experts)
        else:
            tensors |= _swiglu(draw, layer + "mlp.", config["intermediate_size"])
    return tensors | {f"{prefix}norm.weight": norm()}


def _config(model_type: str, architecture: str, layers: int, **keys: Any) -> Config:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": PADDED_VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": DENSE_FFN,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "eos_token_id": VOCAB - 5,  # <|im_end|>
        "dtype": "float32",
    } | keys


HYBRID: Config = {
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}
MOE: Config = {
    "num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "moe_intermediate_size": EXPERT_FFN,
    "norm_topk_prob": True,
}
SHARED: Config = {"shared_expert_intermediate_size": EXPERT_FFN}
ROPE: Config = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}}


def qwen3_next(name: str) -> tuple[Tensors, Config]:
    """Grouped projections, two value heads per key head, per-expert tensors, rope keys beside the dict."""
    rope = {"rope_theta": 10000.0, "partial_rotary_factor": 0.25, "rope_scaling": None}
    config = _config("qwen3_next", "Qwen3NextForCausalLM", 4, **HYBRID, **MOE, **SHARED, **rope)
    return _decoder(name, config), config


def qwen3_next_uneven(name: str) -> tuple[Tensors, Config]:
    """Value heads wider than key heads, three to each; a dense layer among the expert layers; biases; router not renormalized."""
    uneven = {"linear_num_value_heads": 6, "linear_value_head_dim": 48, "mlp_only_layers": [1], "norm_topk_prob": False}
    rope = {"rope_theta": 10000.0, "partial_rotary_factor": 0.25, "attention_bias": True, "decoder_sparse_step": 1}
    config = _config("qwen3_next", "Qwen3NextForCausalLM", 4, **(HYBRID | MOE | SHARED | uneven | rope))
    return _decoder(name, config), config


def qwen3_5(name: str) -> tuple[Tensors, Config]:
    """Dense, text only, tied, with an attention layer first and the interval left out of the config."""
    hybrid = HYBRID | {"layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"]}
    config = _config("qwen3_5_text", "Qwen3_5ForCausalLM", 4, **hybrid, **ROPE, tie_word_embeddings=True)
    return _decoder(name, config), config


def qwen3_5_moe(name: str) -> tuple[Tensors, Config]:
    """Experts fused into two tensors, text only."""
    moe = {key: value for key, value in MOE.items() if key != "norm_topk_prob"}
    config = _config("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", 4, **HYBRID, **moe, **SHARED, **ROPE)
    return _decoder(name, config, fused_experts=True), config


def qwen3_5_vision(name: str) -> tuple[Tensors, Config]:
    """The text part of a vision-wrapped checkpoint: nested config, long prefix, vision tensors beside; M-RoPE under yarn."""
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
    mrope = {"mrope_section": [3, 3, 2], "mrope_interleaved": True, "partial_rotary_factor": 0.25}
    text = _config("qwen3_5_text", "", 4, **HYBRID, rope_parameters=rope | mrope)
    del text["architectures"], text["tie_word_embeddings"]
    vision = {"model_type": "qwen3_5_vision", "depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32}
    config: Config = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "tie_word_embeddings": False,
        "text_config": text,
        "vision_config": vision | {"out_hidden_size": HIDDEN, "patch_size": 4, "num_position_embeddings": 16},
        "image_token_id": VOCAB - 1,
        "video_token_id": VOCAB - 2,
        "vision_start_token_id": VOCAB - 3,
        "vision_end_token_id": VOCAB - 4,
    }
    tensors = _decoder(name, text | {"tie_word_embeddings": False}, prefix="model.language_model.")
    draw = Draw(name + " vision")
    tensors["model.visual.pos_embed.weight"] = draw.matrix(16, 32)
    tensors["model.visual.patch_embed.proj.weight"] = draw.uniform(32, 3, 2, 4, 4, scale=0.1)
    return tensors, config


def qwen3(name: str) -> tuple[Tensors, Config]:
    """Dense, heads wider than hidden/heads, yarn."""
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    config = _config("qwen3", "Qwen3ForCausalLM", 3, rope_theta=10000.0, rope_scaling=rope, attention_bias=False)
    return _decoder(name, config), config


def qwen3_moe(name: str) -> tuple[Tensors, Config]:
    """Per-expert tensors, no shared expert."""
    config = _config("qwen3_moe", "Qwen3MoeForCausalLM", 3, **MOE, rope_theta=10000.0, mlp_only_layers=[], decoder_sparse_step=1)
    return _decoder(name, config), config


def qwen2(name: str) -> tuple[Tensors, Config]:
    """Biases on q, k and v; four query heads to one key head; no head_dim in the config."""
    config = _config("qwen2", "Qwen2ForCausalLM", 3, num_key_value_heads=1, rope_theta=10000.0, tie_word_embeddings=True)
    del config["head_dim"]
    return _decoder(name, config), config


def llama(name: str) -> tuple[Tensors, Config]:
    """Tied, plain rope, no head_dim in the config, as SmolLM2."""
    config = _config("llama", "LlamaForCausalLM", 3, rope_theta=10000.0, tie_word_embeddings=True, rms_norm_eps=1e-5)
    del config["head_dim"]
    return _decoder(name, config), config


def llama3(name: str) -> tuple[Tensors, Config]:
    """Untied, llama3 scaling whose three bands all hold frequencies."""
    bands = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128}
    rope = {"rope_type": "llama3", "factor": 8.0, **bands}
    config = _config("llama", "LlamaForCausalLM", 3, rope_theta=10000.0, rope_scaling=rope)
    return _decoder(name, config), config


def llama_linear(name: str) -> tuple[Tensors, Config]:
    """Linear scaling, in the old spelling (`type`)."""
    config = _config("llama", "LlamaForCausalLM", 3, rope_theta=10000.0, rope_scaling={"type": "linear", "factor": 2.0})
    return _decoder(name, config), config


RECIPES: dict[str, Callable[[str], tuple[Tensors, Config]]] = {
    recipe.__name__: recipe
    for recipe in (
        qwen3_next,
        qwen3_next_uneven,
        qwen3_5,
        qwen3_5_moe,
        qwen3_5_vision,
        qwen3,
        qwen3_moe,
        qwen2,
        llama,
        llama3,
        llama_linear,
    )
}
NAMES = tuple(RECIPES)


def build(name: str) -> tuple[Tensors, Config]:
    """Tensors (float32, checkpoint names) and config.json of the miniature `name`."""
    return RECIPES[name](name)


def write(name: str, folder: str | Path) -> Path:
    """Writes the miniature as a model folder: weights, config, and a byte-level tokenizer of `VOCAB` ids."""
    rigs.save(folder, *build(name))
    return Path(folder)


def digest(name: str) -> str:
    """A digest of the config and every tensor's name, shape and bytes."""
    tensors, config = build(name)
    state = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for key in sorted(tensors):
        state.update(f"{key}{tensors[key].shape}".encode() + tensors[key].tobytes())
    return state.hexdigest()[:16]


def prompts(name: str) -> list[np.ndarray]:
    """Token ids [n] int32 of the miniature's three prompts: a few tokens, one past a chunk of 64, and two chunks and a tail."""
    bits = np.random.PCG64(crc32(f"prompts of {name}".encode()))
    return [(bits.random_raw(n) % np.uint64(VOCAB)).astype(np.int32) for n in (5, 65, 150)]
