"""Llama and what is built like it (SmolLM2, Llama 3): plain attention and SwiGLU, no biases unless the configuration says so."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from sparkrt.model.config import ModelConfig
from sparkrt.model.families.family import Family, LayerNames
from sparkrt.model.families.reading import ConfigLevels, read_attention, read_decoder, read_layers
from sparkrt.model.families.tables import ATTENTION, GGUF_ATTENTION, GGUF_MLP, MLP
from sparkrt.model.loading.recipes import PickedRows, Recipe


def _config(levels: ConfigLevels) -> ModelConfig:
    text = levels.text
    text.only("mlp_bias", (False,), "the feed-forward layers have no biases")
    attention, limit = read_attention(text)
    return read_decoder(levels, "llama", read_layers(text, hybrid=False, moe=None), attention, max_position=limit)


def _rotated_halves(suffix: str, key: bool) -> Callable[[LayerNames], Recipe]:
    """GGUF stores each head's q and k rows for a rotation of neighbours (2i, 2i + 1); ours rotates (i, i + D/2)."""

    def recipe(names: LayerNames) -> Recipe:
        attention = names.config.attention
        heads = attention.num_kv_heads if key else attention.num_heads
        rows = np.arange(heads * attention.head_dim)
        return PickedRows(names(suffix), rows.reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1), rows.size)

    return recipe


FAMILY = Family(
    name="llama",
    architectures=("LlamaForCausalLM",),
    model_types=("llama",),
    read_config=_config,
    tensors=ATTENTION | MLP,
    gguf_architectures=("llama",),
    gguf_tensors=GGUF_ATTENTION
    | GGUF_MLP
    | {
        "attn.q": _rotated_halves("attn_q.weight", key=False),
        "attn.k": _rotated_halves("attn_k.weight", key=True),
        "attn.q_bias": _rotated_halves("attn_q.bias", key=False),
        "attn.k_bias": _rotated_halves("attn_k.bias", key=True),
    },
)
