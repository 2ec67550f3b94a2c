"""The canonical tensors of a model: what layers ask a `WeightSource` for, whatever the checkpoint calls them."""

from __future__ import annotations

from sparkrt.model.config import AttentionConfig, GdnConfig, LayerConfig, ModelConfig, MoeConfig

Shapes = dict[str, tuple[int, ...]]


def expected_tensors(config: ModelConfig) -> Shapes:
    """Canonical name to shape of everything a model of `config` computes with, in the order of the forward pass."""
    table = (config.vocab_size, config.hidden_size)
    shapes: Shapes = {"embed": table}
    for i, layer in enumerate(config.layers):
        shapes |= _layer(config, layer, f"layers.{i}.")
    shapes["norm"] = (config.hidden_size,)
    return shapes if config.tie_word_embeddings else shapes | {"lm_head": table}


def mtp_tensors(config: ModelConfig) -> Shapes:
    """The multi-token-prediction module's tensors: one attention layer of the model's own MLP kind. Empty without one."""
    if not config.mtp_layers:
        return {}
    hidden, layer = config.hidden_size, LayerConfig("attention", "moe" if config.moe is not None else "dense")
    shapes: Shapes = {"mtp.fc": (hidden, 2 * hidden)}
    shapes |= {f"mtp.{name}": (hidden,) for name in ("embed_norm", "hidden_norm", "norm")}
    for i in range(config.mtp_layers):
        shapes |= _layer(config, layer, f"mtp.layers.{i}.")
    return shapes


def _layer(config: ModelConfig, layer: LayerConfig, prefix: str) -> Shapes:
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes: Shapes = {"input_norm": (hidden,), "post_norm": (hidden,)}
    shapes |= _attention(config.attention, hidden) if layer.mixer == "attention" else _gdn(config.gdn, hidden)
    if layer.mlp == "dense":
        shapes |= {"mlp.gate": (inner, hidden), "mlp.up": (inner, hidden), "mlp.down": (hidden, inner)}
    else:
        shapes |= _moe(config.moe, hidden)
    return {prefix + name: shape for name, shape in shapes.items()}


def _attention(c: AttentionConfig, hidden: int) -> Shapes:
    heads, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    q = heads * 2 if c.gated else heads
    shapes: Shapes = {"attn.q": (q, hidden), "attn.k": (kv, hidden), "attn.v": (kv, hidden), "attn.o": (hidden, heads)}
    if c.qk_norm:
        shapes |= {"attn.q_norm": (c.head_dim,), "attn.k_norm": (c.head_dim,)}
    if c.qkv_bias:
        shapes |= {"attn.q_bias": (q,), "attn.k_bias": (kv,), "attn.v_bias": (kv,)}
    return shapes | ({"attn.o_bias": (hidden,)} if c.o_bias else {})


def _gdn(c: GdnConfig | None, hidden: int) -> Shapes:
    assert c is not None
    heads, channels, values = c.num_v_heads, c.conv_channels, c.value_size
    shapes: Shapes = {"qkv": (channels, hidden), "z": (values, hidden), "b": (heads, hidden), "a": (heads, hidden)}
    shapes |= {"conv": (channels, c.conv_kernel), "A_log": (heads,), "dt_bias": (heads,), "norm": (c.v_dim,)}
    return {f"gdn.{name}": shape for name, shape in (shapes | {"out": (hidden, values)}).items()}


def _moe(c: MoeConfig | None, hidden: int) -> Shapes:
    assert c is not None
    experts, inner, shared = c.num_experts, c.intermediate_size, c.shared_intermediate_size
    shapes: Shapes = {"router": (experts, hidden), "gate_up": (experts, 2 * inner, hidden), "down": (experts, hidden, inner)}
    if shared:
        shapes |= {"shared_gate_proj": (shared, hidden), "shared_up_proj": (shared, hidden)}
        shapes |= {"shared_down_proj": (hidden, shared), "shared_gate": (1, hidden)}
    return {f"moe.{name}": shape for name, shape in shapes.items()}
