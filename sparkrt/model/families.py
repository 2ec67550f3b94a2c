"""The supported architectures, one entry each, and their configurations read into `ModelConfig`."""

from __future__ import annotations

import itertools
import logging
from dataclasses import dataclass
from typing import Any

from sparkrt.model.config import AttentionConfig, GdnConfig, LayerConfig, ModelConfig, MoeConfig, RopeConfig
from sparkrt.model.keys import ConfigKeys

_log = logging.getLogger(__name__)
MAX_LAYERS = 4096  # refuses a corrupt count before anything of its size is made
_MIXERS = {"full_attention": "attention", "linear_attention": "gdn"}
_ROPE_KINDS = {"default": "default", "mrope": "default", "linear": "linear", "llama3": "llama3", "yarn": "yarn"}


@dataclass(frozen=True, slots=True)
class Family:
    """One kind of model: what `architectures` and `model_type` call it, GGUF files too, and what no key tells."""

    name: str
    known_as: str  # with spaces between
    hybrid: bool = False  # gated delta nets beside gated attention, and zero-centred norms
    experts: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False  # whatever attention_bias says
    head_dim: int | None = None  # None: hidden_size / heads


_QWEN3_5 = "Qwen3_5ForCausalLM Qwen3_5MoeForCausalLM Qwen3_5ForConditionalGeneration Qwen3_5MoeForConditionalGeneration"
_QWEN3_5 += " qwen3_5_text qwen3_5_moe_text qwen3_5 qwen3_5_moe qwen35 qwen35moe"
FAMILIES = (
    Family("qwen3_5", _QWEN3_5, hybrid=True, experts=True, qk_norm=True, head_dim=256),
    Family("qwen3_next", "Qwen3NextForCausalLM qwen3_next qwen3next", hybrid=True, experts=True, qk_norm=True, head_dim=256),
    Family("qwen3", "Qwen3ForCausalLM Qwen3MoeForCausalLM qwen3 qwen3_moe qwen3moe", experts=True, qk_norm=True, head_dim=128),
    Family("qwen2", "Qwen2ForCausalLM qwen2", qkv_bias=True),
    Family("llama", "LlamaForCausalLM llama"),
)


def family_of(keys: ConfigKeys) -> Family:
    """The family of a configuration: by `architectures`, which tells a classifier from a decoder, else by `model_type`."""
    names = keys.texts("architectures")
    key, found = ("architectures", names[0]) if names else ("model_type", keys.text("model_type"))
    for family in FAMILIES:
        if found in family.known_as.split():
            return family
    raise keys.fault(key, f"is {found!r}, which cannot be served. Supported: {' '.join(f.known_as for f in FAMILIES)}")


def read_config(root: ConfigKeys) -> ModelConfig:
    """The `ModelConfig` of a configuration; its dtype is "" where no key tells. Raises LoadError naming file and key."""
    family, text = family_of(root), root.section("text_config") or root
    both, names = (root,) if text is root else (root, text), root.texts("architectures")
    for keys, key in itertools.product(both, ("quantization_config", "compression_config")):
        if (section := keys.section(key)) is not None:
            method = section.values.get("quant_method", section.values.get("quant_algo", "unknown"))
            raise keys.fault(key, f"asks for {method} weights, which cannot be served yet; a BF16 checkpoint or a GGUF file can")
    tied = [keys.flag("tie_word_embeddings", False) for keys in both if "tie_word_embeddings" in keys.values]
    if len(set(tied)) > 1:
        _log.warning("tie_word_embeddings is %s, text_config.tie_word_embeddings is %s: a head that is there is used", *tied)
    text.only("hidden_act", ("silu", "swish"), "the feed-forward layers are SwiGLU")
    text.only("mlp_bias", (False,), "the feed-forward layers have no biases")
    moe = _moe(family, text) if family.experts else None
    layers = _layers(family, text, moe)
    windowed = text.integer("max_window_layers", len(layers), minimum=0) < len(layers)
    if text.flag("use_sliding_window", False) and windowed and "sliding_window" in text.values:
        raise text.fault("use_sliding_window", "is true: sliding-window attention cannot be served yet")
    attention, limit = _attention(family, text)
    eos, bos, pad = ([i for keys in both for i in keys.integers(f"{key}_token_id")] for key in ("eos", "bos", "pad"))
    dtypes = [(keys, key) for keys in reversed(both) for key in ("dtype", "torch_dtype") if key in keys.values]
    dtype = dtypes[0][0].text(dtypes[0][1]).removeprefix("torch.") if dtypes else ""
    if dtype not in ("", "bfloat16", "float16", "float32"):
        raise dtypes[0][0].fault(dtypes[0][1], f"is {dtype!r}, expected bfloat16, float16 or float32")
    ids = tuple(dict.fromkeys(eos)), next(iter(bos), None), next(iter(pad), None)
    vocab, hidden, eps = text.integer("vocab_size"), text.integer("hidden_size"), text.number("rms_norm_eps", 1e-6)
    inner = text.integer("intermediate_size") if any(layer.mlp == "dense" for layer in layers) else 0
    offset, gdn = (1.0, _gdn(text)) if family.hybrid else (0.0, None)
    stated = names[0] if names else root.text("model_type")
    parts = (layers, attention, eps, limit, offset, gdn, moe)  # in the order of the fields
    return ModelConfig(family.name, stated, vocab, hidden, *parts, inner, any(tied), *ids, dtype)


def _attention(family: Family, text: ConfigKeys) -> tuple[AttentionConfig, int]:
    """`(attention, context limit in tokens)`."""
    heads, hidden = text.integer("num_attention_heads"), text.integer("hidden_size")
    kv_heads = text.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise text.fault("num_key_value_heads", f"of {kv_heads} does not divide num_attention_heads ({heads})")
    dim = text.integer("head_dim", family.head_dim or hidden // heads)
    rope, limit = _rope(text, dim, 0.25 if family.hybrid else 1.0)
    bias = not family.qkv_bias and text.flag("attention_bias", False)
    return AttentionConfig(heads, kv_heads, dim, rope, family.hybrid, family.qk_norm, bias or family.qkv_bias, bias), limit


def _rope(text: ConfigKeys, head_dim: int, default_fraction: float) -> tuple[RopeConfig, int]:
    """`(settings, context limit)`; a scaling factor raises the limit above `max_position_embeddings`.

    `rope_scaling` is merged over `rope_parameters`: replacing it, as elsewhere, loses a theta that is named only there.
    Inside, keys win over the same keys beside it.
    """
    merged: dict[str, object] = {}
    for section in (text.section("rope_parameters"), text.section("rope_scaling")):
        values = dict(section.values) if section is not None else {}
        if "type" in values:  # the older spelling
            values.setdefault("rope_type", values.pop("type"))
        merged |= values
    rope = ConfigKeys(merged, text.file, "rope_scaling." if "rope_scaling" in text.values else "rope_parameters.")
    stated = rope.text("rope_type", "default")
    if stated not in _ROPE_KINDS:
        raise rope.fault("rope_type", f"is {stated!r}, which cannot be served; known are {', '.join(_ROPE_KINDS)}")
    kind, limit = _ROPE_KINDS[stated], text.integer("max_position_embeddings")
    fraction = rope.number("partial_rotary_factor", text.number("partial_rotary_factor", default_fraction))
    rotary_dim = int(head_dim * fraction)
    if fraction > 1 or rotary_dim < 2 or rotary_dim % 2:
        raise rope.fault("partial_rotary_factor", f"of {fraction} rotates {rotary_dim} of {head_dim} channels, not an even part")
    factor = rope.number("factor") if kind != "default" else 1.0
    original = rope.integer("original_max_position_embeddings", text.integer("original_max_position_embeddings", limit))
    theta = rope.number("rope_theta", text.number("rope_theta", 1e4))
    keys = ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")
    more: dict[str, Any] = {key: rope.number(key) for key in keys if key in rope.values}
    settings = RopeConfig(theta, rotary_dim, kind, factor, original, truncate=rope.flag("truncate", True), **more)
    if kind == "llama3" and settings.high_freq_factor <= settings.low_freq_factor:
        raise rope.fault("high_freq_factor", f"must be above low_freq_factor ({settings.low_freq_factor})")
    return settings, limit if kind == "default" else max(limit, int(original * factor))


def _gdn(text: ConfigKeys) -> GdnConfig:
    sizes = {"num_key_heads": 16, "num_value_heads": 32, "key_head_dim": 128, "value_head_dim": 128}
    gdn = GdnConfig(*(text.integer(f"linear_{key}", default) for key, default in sizes.items()))
    if gdn.num_v_heads % gdn.num_k_heads:
        raise text.fault("linear_num_value_heads", f"of {gdn.num_v_heads} is no multiple of the {gdn.num_k_heads} key heads")
    text.only("linear_conv_kernel_dim", (4,), "the convolution kernels take four taps")
    text.only("output_gate_type", ("swish", "silu"), "the output gate of the delta net is SiLU")
    text.only("attn_output_gate", (True,), "attention is always gated in this family")
    text.only("mamba_ssm_dtype", ("float32",), "the recurrent state is float32")
    return gdn


def _moe(family: Family, text: ConfigKeys) -> MoeConfig | None:
    if not (experts := text.integer("num_experts", 0, minimum=0)):
        return None
    top_k, inner = text.integer("num_experts_per_tok", maximum=experts), text.integer("moe_intermediate_size")
    shared = text.integer("shared_expert_intermediate_size", 0, minimum=0)
    renormalize = family.name == "qwen3_5" or text.flag("norm_topk_prob", family.name != "qwen3")  # Qwen3.5 has no such key
    return MoeConfig(experts, top_k, inner, shared, renormalize)


def _layers(family: Family, text: ConfigKeys, moe: MoeConfig | None) -> tuple[LayerConfig, ...]:
    """One `LayerConfig` a layer. `layer_types` wins over `full_attention_interval`, which only hybrid families have."""
    count = text.integer("num_hidden_layers", maximum=MAX_LAYERS)
    interval = text.integer("full_attention_interval", 4) if family.hybrid else 1
    served = tuple(_MIXERS) if family.hybrid else ("full_attention",)
    types = text.texts("layer_types") or tuple(served[(i + 1) % interval > 0] for i in range(count))
    if len(types) != count:
        raise text.fault("layer_types", f"has {len(types)} entries, num_hidden_layers is {count}")
    if unknown := next((kind for kind in types if kind not in served), None):
        raise text.fault("layer_types", f"has {unknown!r}, which cannot be served in this family; known are {', '.join(served)}")
    dense, step = text.integers("mlp_only_layers"), text.integer("decoder_sparse_step", 1)
    sparse = [moe is not None and i not in dense and (i + 1) % step == 0 for i in range(count)]
    return tuple(LayerConfig(_MIXERS[kind], "moe" if s else "dense") for kind, s in zip(types, sparse, strict=True))
