"""The canonical tensors of a model: what layers ask a `WeightSource` for, whatever the checkpoint calls them."""

from __future__ import annotations

from sparkrt.model.config import AttentionConfig, GdnConfig, LayerConfig, ModelConfig, MoeConfig

Shapes = dict[str, tuple[int, ...]]


def expected_tensors(config: ModelConfig) -> Shapes:
    """Canonical name to shape of everything a model of `config` computes with, in the order of the forward pass."""
    hidden = config.hidden_size
    shapes: Shapes = {"embed": (config.vocab_size, hidden)}
    for i, layer in enumerate(config.layers):
        shapes |= _layer(config, layer, f"layers.{i}.")
    shapes["norm"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head"] = (config.vocab_size, hidden)
    return shapes


def mtp_tensors(config: ModelConfig) -> Shapes:
    """The multi-token-prediction module's tensors: one attention layer of the model's own MLP kind. Empty without one."""
    if not config.mtp_layers:
        return {}
    hidden = config.hidden_size
    shapes: Shapes = {
        "mtp.fc": (hidden, 2 * hidden),
        "mtp.embed_norm": (hidden,),
        "mtp.hidden_norm": (hidden,),
        "mtp.norm": (hidden,),
    }
    layer = LayerConfig("attention", "moe" if config.moe is not None else "dense")
    for i in range(config.mtp_layers):
        shapes |= _layer(config, layer, f"mtp.layers.{i}.")
    return shapes


def _layer(config: ModelConfig, layer: LayerConfig, prefix: str) -> Shapes:
    hidden = config.hidden_size
    shapes: Shapes = {"input_norm": (hidden,), "post_norm": (hidden,)}
    if layer.mixer == "gdn":
        assert config.gdn is not None
        shapes |= _gdn(config.gdn, hidden)
    else:
        shapes |= _attention(config.attention, hidden)
    if layer.mlp == "moe":
        assert config.moe is not None
        shapes |= _moe(config.moe, hidden)
    else:
        shapes |= {f"mlp.{part}": (config.intermediate_size, hidden) for part in ("gate", "up")}
        shapes["mlp.down"] = (hidden, config.intermediate_size)
    return {prefix + name: shape for name, shape in shapes.items()}


def _attention(c: AttentionConfig, hidden: int) -> Shapes:
    heads, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    q = heads * 2 if c.gated else heads
    shapes: Shapes = {"attn.q": (q, hidden), "attn.k": (kv, hidden), "attn.v": (kv, hidden), "attn.o": (hidden, heads)}
    if c.qk_norm:
        shapes |= {"attn.q_norm": (c.head_dim,), "attn.k_norm": (c.head_dim,)}
    if c.qkv_bias:
        shapes |= {"attn.q_bias": (q,), "attn.k_bias": (kv,), "attn.v_bias": (kv,)}
    if c.o_bias:
        shapes["attn.o_bias"] = (hidden,)
    return shapes


def _gdn(c: GdnConfig, hidden: int) -> Shapes:
    heads = c.num_v_heads
    return {
        "gdn.qkv": (c.conv_channels, hidden),
        "gdn.z": (c.value_size, hidden),
        "gdn.b": (heads, hidden),
        "gdn.a": (heads, hidden),
        "gdn.conv": (c.conv_channels, c.conv_kernel),
        "gdn.A_log": (heads,),
        "gdn.dt_bias": (heads,),
        "gdn.norm": (c.v_dim,),
        "gdn.out": (hidden, c.value_size),
    }


def _moe(c: MoeConfig, hidden: int) -> Shapes:
    experts, inner, shared = c.num_experts, c.intermediate_size, c.shared_intermediate_size
    shapes: Shapes = {
        "moe.router": (experts, hidden),
        "moe.gate_up": (experts, 2 * inner, hidden),
        "moe.down": (experts, hidden, inner),
    }
    if shared:
        shapes |= {
            "moe.shared_gate_proj": (shared, hidden),
            "moe.shared_up_proj": (shared, hidden),
            "moe.shared_down_proj": (hidden, shared),
            "moe.shared_gate": (1, hidden),
        }
    return shapes
