"""Qwen3, dense and mixture of experts: attention with norms of q and k, no shared expert."""

from __future__ import annotations

from sparkrt.model.config import ModelConfig
from sparkrt.model.families.family import Family
from sparkrt.model.families.reading import (
    ConfigLevels,
    read_attention,
    read_decoder,
    read_layers,
    read_moe,
    refuse_sliding_window,
)
from sparkrt.model.families.tables import ATTENTION, GGUF_ATTENTION, GGUF_MLP, GGUF_MOE, MLP, MOE


def _config(levels: ConfigLevels) -> ModelConfig:
    moe = read_moe(levels.text, default_renormalize=False)
    layers = read_layers(levels.text, hybrid=False, moe=moe)
    refuse_sliding_window(levels.text, len(layers))
    attention, limit = read_attention(levels.text, head_dim=128, qk_norm=True)
    return read_decoder(levels, "qwen3", layers, attention, max_position=limit, moe=moe)


FAMILY = Family(
    name="qwen3",
    architectures=("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"),
    model_types=("qwen3", "qwen3_moe"),
    read_config=_config,
    tensors=ATTENTION | MLP | MOE,
    gguf_architectures=("qwen3", "qwen3moe"),
    gguf_tensors=GGUF_ATTENTION | GGUF_MLP | GGUF_MOE,
)
