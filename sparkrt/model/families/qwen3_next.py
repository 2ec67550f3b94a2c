"""Qwen3-Next: the layers of Qwen3.5 with the delta net's projections fused and grouped by key head.

`in_proj_qkvz` is, a key head, q(DK) k(DK) v(r·DV) z(r·DV), r value heads to a key head; `in_proj_ba` is b(r) a(r). Rows are
permuted into the order q | k | v, z, b, a, so that one set of kernels serves both families.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from sparkrt.model.config import GdnConfig, ModelConfig
from sparkrt.model.families.family import Entry, Family, LayerNames
from sparkrt.model.families.qwen3_5 import GDN, log_decay
from sparkrt.model.families.reading import ConfigLevels, read_attention, read_decoder, read_gdn, read_layers, read_moe
from sparkrt.model.families.tables import ATTENTION, GGUF_ATTENTION, GGUF_MLP, GGUF_MOE, MLP, MOE
from sparkrt.model.loading.recipes import PickedRows, Recipe, Stored


def _config(levels: ConfigLevels) -> ModelConfig:
    text = levels.text
    moe = read_moe(text)
    attention, limit = read_attention(text, head_dim=256, rotary_fraction=0.25, gated=True, qk_norm=True)
    layers = read_layers(text, hybrid=True, moe=moe)
    return read_decoder(levels, "qwen3_next", layers, attention, max_position=limit, norm_offset=1.0, gdn=read_gdn(text), moe=moe)


def _split(total: int, k_heads: int, widths: tuple[int, ...]) -> list[np.ndarray]:
    """The row indices of each part of a grouped projection, all key heads' rows of a part together."""
    groups = np.arange(total).reshape(k_heads, -1)
    return [part.reshape(-1) for part in np.split(groups, np.cumsum(widths)[:-1], axis=1)]


def _qkvz(c: GdnConfig) -> list[np.ndarray]:
    values = c.value_size // c.num_k_heads
    q, k, v, z = _split(c.conv_channels + c.value_size, c.num_k_heads, (c.k_dim, c.k_dim, values, values))
    return [np.concatenate([q, k, v]), z]


def _ba(c: GdnConfig) -> list[np.ndarray]:
    ratio = c.num_v_heads // c.num_k_heads
    return _split(2 * c.num_v_heads, c.num_k_heads, (ratio, ratio))


def _part(suffix: str, parts: Callable[[GdnConfig], list[np.ndarray]], which: int) -> Callable[[LayerNames], Recipe]:
    def recipe(names: LayerNames) -> Recipe:
        assert names.config.gdn is not None
        found = parts(names.config.gdn)
        return PickedRows(names(suffix), found[which], sum(part.size for part in found))

    return recipe


def _plain_or_grouped(plain: str, which: int) -> Callable[[LayerNames], Recipe]:
    """GGUF files have q | k | v and z apart; older ones keep them fused and grouped."""
    grouped = _part("ssm_in.weight", _qkvz, which)
    return lambda names: grouped(names) if names.has("ssm_in.weight") else Stored(names(plain))


GGUF_GDN: dict[str, Entry] = {
    "post_norm": "post_attention_norm.weight",
    "gdn.qkv": _plain_or_grouped("attn_qkv.weight", 0),
    "gdn.z": _plain_or_grouped("attn_gate.weight", 1),
    "gdn.b": _part("ssm_ba.weight", _ba, 0),
    "gdn.a": _part("ssm_ba.weight", _ba, 1),
    "gdn.conv": "ssm_conv1d.weight",
    "gdn.A_log": lambda names: log_decay(Stored(names("ssm_a"))),
    "gdn.dt_bias": "ssm_dt.bias",
    "gdn.norm": "ssm_norm.weight",
    "gdn.out": "ssm_out.weight",
}

FAMILY = Family(
    name="qwen3_next",
    architectures=("Qwen3NextForCausalLM",),
    model_types=("qwen3_next",),
    read_config=_config,
    tensors=ATTENTION
    | MLP
    | MOE
    | GDN
    | {
        "gdn.qkv": _part("linear_attn.in_proj_qkvz.weight", _qkvz, 0),
        "gdn.z": _part("linear_attn.in_proj_qkvz.weight", _qkvz, 1),
        "gdn.b": _part("linear_attn.in_proj_ba.weight", _ba, 0),
        "gdn.a": _part("linear_attn.in_proj_ba.weight", _ba, 1),
    },
    gguf_architectures=("qwen3next",),
    gguf_tensors=GGUF_ATTENTION | GGUF_MLP | GGUF_MOE | GGUF_GDN,
)
