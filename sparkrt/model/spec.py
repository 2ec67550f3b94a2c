"""The canonical tensors of a model: what layers ask a `WeightSource` for, whatever the checkpoint calls them."""

from __future__ import annotations

from sparkrt.model.config import LayerConfig, ModelConfig

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
    hidden, layer = config.hidden_size, LayerConfig("attention", "dense" if config.moe is None else "moe")
    own: Shapes = {"mtp.fc": (hidden, 2 * hidden)} | {f"mtp.{name}": (hidden,) for name in ("embed_norm", "hidden_norm", "norm")}
    return own | _layer(config, layer, "mtp.layers.0.") if config.mtp_layers else {}


def _layer(config: ModelConfig, layer: LayerConfig, prefix: str) -> Shapes:
    hidden, inner, a, g, m = config.hidden_size, config.intermediate_size, config.attention, config.gdn, config.moe
    shapes: Shapes = {"input_norm": (hidden,), "post_norm": (hidden,)}
    if layer.mixer == "gdn" and g is not None:
        shapes |= {"gdn.qkv": (g.conv_channels, hidden), "gdn.z": (g.value_size, hidden)}
        shapes |= {"gdn.b": (g.num_v_heads, hidden), "gdn.a": (g.num_v_heads, hidden)}
        shapes |= {"gdn.conv": (g.conv_channels, g.conv_kernel), "gdn.A_log": (g.num_v_heads,), "gdn.dt_bias": (g.num_v_heads,)}
        shapes |= {"gdn.norm": (g.v_dim,), "gdn.out": (hidden, g.value_size)}
    else:
        out, kv = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
        q = 2 * out if a.gated else out
        shapes |= {"attn.q": (q, hidden), "attn.k": (kv, hidden), "attn.v": (kv, hidden), "attn.o": (hidden, out)}
        shapes |= {"attn.q_norm": (a.head_dim,), "attn.k_norm": (a.head_dim,)} if a.qk_norm else {}
        shapes |= {"attn.q_bias": (q,), "attn.k_bias": (kv,), "attn.v_bias": (kv,)} if a.qkv_bias else {}
        shapes |= {"attn.o_bias": (hidden,)} if a.o_bias else {}
    if layer.mlp == "moe" and m is not None:
        e, width, shared = m.num_experts, m.intermediate_size, m.shared_intermediate_size
        shapes |= {"moe.router": (e, hidden), "moe.gate_up": (e, 2 * width, hidden), "moe.down": (e, hidden, width)}
        if shared:
            shapes |= {"moe.shared_gate_proj": (shared, hidden), "moe.shared_up_proj": (shared, hidden)}
            shapes |= {"moe.shared_down_proj": (hidden, shared), "moe.shared_gate": (1, hidden)}
    else:
        shapes |= {"mlp.gate": (inner, hidden), "mlp.up": (inner, hidden), "mlp.down": (hidden, inner)}
    return {prefix + name: shape for name, shape in shapes.items()}
