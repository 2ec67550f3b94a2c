"""Qwen2 and Qwen2.5: attention with q, k and v biases, and SwiGLU."""

from __future__ import annotations

from sparkrt.model.config import ModelConfig
from sparkrt.model.families.family import Family
from sparkrt.model.families.reading import ConfigLevels, read_attention, read_decoder, read_layers, refuse_sliding_window
from sparkrt.model.families.tables import ATTENTION, GGUF_ATTENTION, GGUF_MLP, MLP


def _config(levels: ConfigLevels) -> ModelConfig:
    layers = read_layers(levels.text, hybrid=False, moe=None)
    refuse_sliding_window(levels.text, len(layers))
    attention, limit = read_attention(levels.text, qkv_bias=True)
    return read_decoder(levels, "qwen2", layers, attention, max_position=limit)


FAMILY = Family(
    name="qwen2",
    architectures=("Qwen2ForCausalLM",),
    model_types=("qwen2",),
    read_config=_config,
    tensors=ATTENTION | MLP,
    gguf_architectures=("qwen2",),
    gguf_tensors=GGUF_ATTENTION | GGUF_MLP,
)
