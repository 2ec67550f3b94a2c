"""The parts of a configuration that families share, read into the dataclasses of `config.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sparkrt.model.config import AttentionConfig, GdnConfig, LayerConfig, ModelConfig, MoeConfig
from sparkrt.model.keys import ConfigKeys
from sparkrt.model.rope import read_rope

_DTYPES = ("bfloat16", "float16", "float32")
MAX_LAYERS = 4096  # refuses a corrupt count before anything of its size is made
_MIXERS = {"full_attention": "attention", "linear_attention": "gdn"}


@dataclass(frozen=True, slots=True)
class ConfigLevels:
    """A configuration's outer level and the one that holds the text model's keys; one and the same unless it is wrapped."""

    root: ConfigKeys
    text: ConfigKeys

    @classmethod
    def of(cls, root: ConfigKeys) -> ConfigLevels:
        return cls(root, root.section("text_config") or root)

    @property
    def both(self) -> tuple[ConfigKeys, ...]:
        """Outer level first."""
        return (self.root,) if self.text is self.root else (self.root, self.text)

    def tied(self) -> tuple[bool, ...]:
        """What each level that says so says about tied embeddings, outer first."""
        return tuple(keys.flag("tie_word_embeddings", False) for keys in self.both if "tie_word_embeddings" in keys)

    def dtype(self) -> str:
        """The checkpoint's dtype by name, empty where the configuration does not tell."""
        for keys in reversed(self.both):
            for key in ("dtype", "torch_dtype"):
                if key in keys:
                    name = keys.text(key).removeprefix("torch.")
                    if name not in _DTYPES:
                        raise keys.fault(key, f"is {name!r}, expected {', '.join(_DTYPES)}")
                    return name
        return ""

    def token_ids(self, key: str) -> tuple[int, ...]:
        """The ids under `key` at every level."""
        return tuple(dict.fromkeys(i for keys in self.both for i in keys.integers(key)))


def read_decoder(
    levels: ConfigLevels, family: str, layers: tuple[LayerConfig, ...], attention: AttentionConfig, **parts: Any
) -> ModelConfig:
    """A `ModelConfig` of the given parts and of the keys that every decoder has. `parts` are further fields of it."""
    text = levels.text
    text.only("hidden_act", ("silu", "swish"), "the feed-forward layers are SwiGLU")
    tied = levels.tied()
    bos, pad = levels.token_ids("bos_token_id"), levels.token_ids("pad_token_id")
    architectures = levels.root.texts("architectures")
    return ModelConfig(
        family=family,
        architecture=architectures[0] if architectures else levels.root.text("model_type"),
        vocab_size=text.integer("vocab_size"),
        hidden_size=text.integer("hidden_size"),
        layers=layers,
        attention=attention,
        rms_norm_eps=text.number("rms_norm_eps", 1e-6),
        intermediate_size=text.integer("intermediate_size") if any(layer.mlp == "dense" for layer in layers) else 0,
        tie_word_embeddings=bool(tied) and tied[0],
        eos_token_ids=levels.token_ids("eos_token_id"),
        bos_token_id=bos[0] if bos else None,
        pad_token_id=pad[0] if pad else None,
        dtype=levels.dtype(),
        raw=levels.root.values,
        **parts,
    )


def read_attention(
    text: ConfigKeys, *, head_dim: int | None = None, rotary_fraction: float = 1.0, qkv_bias: bool | None = None, **parts: bool
) -> tuple[AttentionConfig, int]:
    """`(attention, context limit)`. Absent `head_dim` is hidden_size / heads; `qkv_bias` None follows `attention_bias`."""
    heads = text.integer("num_attention_heads")
    kv_heads = text.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise text.fault("num_key_value_heads", f"of {kv_heads} does not divide num_attention_heads ({heads})")
    hidden = text.integer("hidden_size")
    if head_dim is None and "head_dim" not in text and hidden % heads:
        raise text.fault("head_dim", f"is missing, and num_attention_heads ({heads}) does not divide hidden_size ({hidden})")
    dim = text.integer("head_dim", head_dim or hidden // heads)
    rope, limit = read_rope(text, dim, rotary_fraction)
    o_bias = qkv_bias is None and text.flag("attention_bias", False)
    return AttentionConfig(heads, kv_heads, dim, rope, qkv_bias=qkv_bias or o_bias, o_bias=o_bias, **parts), limit


def read_gdn(text: ConfigKeys) -> GdnConfig:
    """The gated-delta-net sizes, with the defaults of the families that have it."""
    gdn = GdnConfig(
        num_k_heads=text.integer("linear_num_key_heads", 16),
        num_v_heads=text.integer("linear_num_value_heads", 32),
        k_dim=text.integer("linear_key_head_dim", 128),
        v_dim=text.integer("linear_value_head_dim", 128),
        conv_kernel=text.integer("linear_conv_kernel_dim", 4),
    )
    if gdn.num_v_heads % gdn.num_k_heads:
        raise text.fault("linear_num_value_heads", f"of {gdn.num_v_heads} is no multiple of the {gdn.num_k_heads} key heads")
    text.only("linear_conv_kernel_dim", (4,), "the convolution kernels take four taps")
    text.only("output_gate_type", ("swish", "silu"), "the output gate of the delta net is SiLU")
    text.only("attn_output_gate", (True,), "attention is always gated in this family")
    text.only("mamba_ssm_dtype", ("float32",), "the recurrent state is float32")
    return gdn


def read_moe(text: ConfigKeys, *, renormalize: bool | None = None, default_renormalize: bool = True) -> MoeConfig | None:
    """The mixture of experts, None where `num_experts` is absent or 0. `renormalize` None follows `norm_topk_prob`."""
    experts = text.integer("num_experts", 0, minimum=0)
    if not experts:
        return None
    return MoeConfig(
        num_experts=experts,
        top_k=text.integer("num_experts_per_tok", maximum=experts),
        intermediate_size=text.integer("moe_intermediate_size"),
        shared_intermediate_size=text.integer("shared_expert_intermediate_size", 0, minimum=0),
        renormalize=text.flag("norm_topk_prob", default_renormalize) if renormalize is None else renormalize,
    )


def read_layers(text: ConfigKeys, *, hybrid: bool, moe: MoeConfig | None) -> tuple[LayerConfig, ...]:
    """One `LayerConfig` a layer. `layer_types` wins over `full_attention_interval`, which only `hybrid` families have."""
    count = text.integer("num_hidden_layers", maximum=MAX_LAYERS)
    interval = text.integer("full_attention_interval", 4) if hybrid else 1
    types = text.texts("layer_types") or tuple(
        "full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(count)
    )
    if len(types) != count:
        raise text.fault("layer_types", f"has {len(types)} entries, num_hidden_layers is {count}")
    served = tuple(_MIXERS) if hybrid else ("full_attention",)
    if unknown := next((kind for kind in types if kind not in served), None):
        raise text.fault("layer_types", f"has {unknown!r}, which cannot be served in this family; known are {', '.join(served)}")
    dense = set(text.integers("mlp_only_layers"))
    step = text.integer("decoder_sparse_step", 1)
    return tuple(
        LayerConfig(_MIXERS[kind], "moe" if moe is not None and i not in dense and (i + 1) % step == 0 else "dense")
        for i, kind in enumerate(types)
    )


def refuse_sliding_window(text: ConfigKeys, num_layers: int) -> None:
    """Refuse a window that would be in force somewhere: full attention would answer differently there."""
    windowed = text.integer("max_window_layers", num_layers, minimum=0) < num_layers
    if text.flag("use_sliding_window", False) and windowed and "sliding_window" in text:
        raise text.fault("use_sliding_window", "is true: sliding-window attention cannot be served yet")
