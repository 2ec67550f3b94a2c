"""Tensor names that several families share, by file format."""

from __future__ import annotations

from sparkrt.model.families.family import Entry, LayerNames
from sparkrt.model.loading.recipes import Joined, Recipe, Reshaped, Stacked, Stored


def _gate_up(names: LayerNames) -> Recipe:
    if names.has("mlp.experts.gate_up_proj"):
        return Stored(names("mlp.experts.gate_up_proj"))
    return Stacked((names("mlp.experts.{e}.gate_proj.weight"), names("mlp.experts.{e}.up_proj.weight")))


def _down(names: LayerNames) -> Recipe:
    if names.has("mlp.experts.down_proj"):
        return Stored(names("mlp.experts.down_proj"))
    return Stacked((names("mlp.experts.{e}.down_proj.weight"),))


def _gguf_gate_up(names: LayerNames) -> Recipe:
    if names.has("ffn_gate_up_exps.weight"):
        return Stored(names("ffn_gate_up_exps.weight"))
    return Joined((names("ffn_gate_exps.weight"), names("ffn_up_exps.weight")))


ATTENTION: dict[str, Entry] = {
    "input_norm": "input_layernorm.weight",
    "post_norm": "post_attention_layernorm.weight",
    "attn.q": "self_attn.q_proj.weight",
    "attn.k": "self_attn.k_proj.weight",
    "attn.v": "self_attn.v_proj.weight",
    "attn.o": "self_attn.o_proj.weight",
    "attn.q_norm": "self_attn.q_norm.weight",
    "attn.k_norm": "self_attn.k_norm.weight",
    "attn.q_bias": "self_attn.q_proj.bias",
    "attn.k_bias": "self_attn.k_proj.bias",
    "attn.v_bias": "self_attn.v_proj.bias",
    "attn.o_bias": "self_attn.o_proj.bias",
}

MLP: dict[str, Entry] = {
    "mlp.gate": "mlp.gate_proj.weight",
    "mlp.up": "mlp.up_proj.weight",
    "mlp.down": "mlp.down_proj.weight",
}

MOE: dict[str, Entry] = {
    "moe.router": "mlp.gate.weight",
    "moe.gate_up": _gate_up,
    "moe.down": _down,
    "moe.shared_gate_proj": "mlp.shared_expert.gate_proj.weight",
    "moe.shared_up_proj": "mlp.shared_expert.up_proj.weight",
    "moe.shared_down_proj": "mlp.shared_expert.down_proj.weight",
    "moe.shared_gate": "mlp.shared_expert_gate.weight",
}

GGUF_ATTENTION: dict[str, Entry] = {
    "input_norm": "attn_norm.weight",
    "post_norm": "ffn_norm.weight",
    "attn.q": "attn_q.weight",
    "attn.k": "attn_k.weight",
    "attn.v": "attn_v.weight",
    "attn.o": "attn_output.weight",
    "attn.q_norm": "attn_q_norm.weight",
    "attn.k_norm": "attn_k_norm.weight",
    "attn.q_bias": "attn_q.bias",
    "attn.k_bias": "attn_k.bias",
    "attn.v_bias": "attn_v.bias",
    "attn.o_bias": "attn_output.bias",
}

GGUF_MLP: dict[str, Entry] = {"mlp.gate": "ffn_gate.weight", "mlp.up": "ffn_up.weight", "mlp.down": "ffn_down.weight"}

GGUF_MOE: dict[str, Entry] = {
    "moe.router": "ffn_gate_inp.weight",
    "moe.gate_up": _gguf_gate_up,
    "moe.down": "ffn_down_exps.weight",
    "moe.shared_gate_proj": "ffn_gate_shexp.weight",
    "moe.shared_up_proj": "ffn_up_shexp.weight",
    "moe.shared_down_proj": "ffn_down_shexp.weight",
    "moe.shared_gate": lambda names: Reshaped(names("ffn_gate_inp_shexp.weight"), lambda shape: shape[1:]),
}
