"""Qwen3.5 and Qwen3.6, dense and mixture of experts, and the text part of their vision-language wrapping.

Gated delta net and gated attention with zero-centred norms. The checkpoint's row order q | k | v is the canonical one.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from sparkrt.model.config import GdnConfig, ModelConfig
from sparkrt.model.families.family import Entry, Family, LayerNames
from sparkrt.model.families.reading import ConfigLevels, read_attention, read_decoder, read_gdn, read_layers, read_moe
from sparkrt.model.families.tables import ATTENTION, GGUF_ATTENTION, GGUF_MLP, GGUF_MOE, MLP, MOE
from sparkrt.model.loading.recipes import Computed, PickedColumns, PickedRows, Recipe, Reshaped


def _config(levels: ConfigLevels) -> ModelConfig:
    text = levels.text
    moe = read_moe(text, renormalize=True)
    attention, limit = read_attention(text, head_dim=256, rotary_fraction=0.25, gated=True, qk_norm=True)
    layers = read_layers(text, hybrid=True, moe=moe)
    return read_decoder(levels, "qwen3_5", layers, attention, max_position=limit, norm_offset=1.0, gdn=read_gdn(text), moe=moe)


GDN: dict[str, Entry] = {
    "gdn.qkv": "linear_attn.in_proj_qkv.weight",
    "gdn.z": "linear_attn.in_proj_z.weight",
    "gdn.b": "linear_attn.in_proj_b.weight",
    "gdn.a": "linear_attn.in_proj_a.weight",
    "gdn.conv": lambda names: Reshaped(names("linear_attn.conv1d.weight"), lambda shape: (shape[0], 1, shape[1])),
    "gdn.A_log": "linear_attn.A_log",
    "gdn.dt_bias": "linear_attn.dt_bias",
    "gdn.norm": "linear_attn.norm.weight",
    "gdn.out": "linear_attn.out_proj.weight",
}


def log_decay(recipe: Recipe) -> Recipe:
    """GGUF's `ssm_a` is -exp(A_log)."""
    return Computed(recipe, lambda a: np.log(-a))


def _grouped(c: GdnConfig, width: int, before: int = 0) -> np.ndarray:
    """The stored row of each of ours after `before` rows in place: GGUF tiles value heads, our head g·r + j lies at j·HK + g."""
    heads = np.arange(c.num_v_heads).reshape(-1, c.num_k_heads).T.reshape(-1)
    rows = before + (heads[:, None] * width + np.arange(width)).reshape(-1)
    return np.concatenate([np.arange(before), rows])


def _untiled(
    suffix: str, width: Callable[[GdnConfig], int], before: Callable[[GdnConfig], int] = lambda c: 0
) -> Callable[[LayerNames], Recipe]:
    def recipe(names: LayerNames) -> Recipe:
        assert names.config.gdn is not None
        index = _grouped(names.config.gdn, width(names.config.gdn), before(names.config.gdn))
        return PickedRows(names(suffix), index, index.size)

    return recipe


def _untiled_out(names: LayerNames) -> Recipe:
    assert names.config.gdn is not None
    return PickedColumns(names("ssm_out.weight"), _grouped(names.config.gdn, names.config.gdn.v_dim))


GGUF_GDN: dict[str, Entry] = {
    "post_norm": "post_attention_norm.weight",
    "gdn.qkv": _untiled("attn_qkv.weight", lambda c: c.v_dim, lambda c: 2 * c.key_size),
    "gdn.z": _untiled("attn_gate.weight", lambda c: c.v_dim),
    "gdn.b": _untiled("ssm_beta.weight", lambda c: 1),
    "gdn.a": _untiled("ssm_alpha.weight", lambda c: 1),
    "gdn.conv": _untiled("ssm_conv1d.weight", lambda c: c.v_dim, lambda c: 2 * c.key_size),
    "gdn.A_log": lambda names: log_decay(_untiled("ssm_a", lambda c: 1)(names)),
    "gdn.dt_bias": _untiled("ssm_dt.bias", lambda c: 1),
    "gdn.norm": "ssm_norm.weight",
    "gdn.out": _untiled_out,
}

FAMILY = Family(
    name="qwen3_5",
    architectures=(
        "Qwen3_5ForCausalLM",
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForConditionalGeneration",
    ),
    model_types=("qwen3_5_text", "qwen3_5_moe_text", "qwen3_5", "qwen3_5_moe"),
    read_config=_config,
    tensors=ATTENTION | MLP | MOE | GDN,
    gguf_architectures=("qwen35", "qwen35moe"),
    gguf_tensors=GGUF_ATTENTION | GGUF_MLP | GGUF_MOE | GGUF_GDN,
)
