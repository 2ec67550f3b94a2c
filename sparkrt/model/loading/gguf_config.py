"""A GGUF file's metadata under the configuration keys that families read."""

from __future__ import annotations

import re

from sparkrt.errors import LoadError
from sparkrt.model.families import MAX_LAYERS, family_of
from sparkrt.model.keys import ConfigKeys
from sparkrt.model.loading.gguf import GgufStore

_KEYS = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "norm_topk_prob": "expert_weights_norm",
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
    "linear_value_head_dim": "ssm.inner_size",  # of all value heads together
    "partial_rotary_factor": "rope.dimension_count",  # in channels
    "mtp_layers": "nextn_predict_layers",
}
_ROPE = {"rope_type": "type", "factor": "factor", "original_max_position_embeddings": "original_context_length"}
_ROPE |= {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
_SAMPLING = {"temperature": "temp", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "repetition_penalty": "penalty_repeat"}


def gguf_config(store: GgufStore) -> tuple[ConfigKeys, dict[str, object]]:
    """`(configuration keys, sampling defaults under the names of generation_config.json)`.

    Raises LoadError, in the file's own words, where metadata and tensors disagree.
    """
    meta, arch = store.metadata, str(store.metadata.get("general.architecture"))
    aliases = {key: f"{arch}.{name}" for key, name in _KEYS.items()} | {"architectures": "general.architecture"}
    keys = ConfigKeys({key: meta.get(aliases[key]) for key in _KEYS}, str(store.origin), aliases=aliases)
    values = keys.values
    values["architectures"] = [arch]
    family_of(keys)  # before anything is missed that other kinds of files do not have
    if ConfigKeys(meta, keys.file).integer("split.count", 0, minimum=0) > 1:
        raise LoadError(f"{store.origin}: is one part of a split GGUF, which cannot be served; merge the parts first")
    if (embedding := store.tensors.get("token_embd.weight")) is None:
        raise LoadError(f"{store.origin}: tensor token_embd.weight is missing")
    values["vocab_size"] = embedding.shape[0]  # the padded vocabulary; the token list may be shorter
    values["attention_bias"] = any(name.endswith(".attn_output.bias") for name in store.tensors)
    values.setdefault("norm_topk_prob", True)
    mtp_layers = keys.integer("mtp_layers", 0, minimum=0)
    layers = keys.integer("num_hidden_layers", minimum=mtp_layers + 1, maximum=MAX_LAYERS) - mtp_layers
    values["num_hidden_layers"] = layers
    # what the metadata does not always tell: which layers are recurrent, and which are dense among experts
    blocks = {(int(m[1]), m[2]) for name in store.tensors if (m := re.match(r"blk\.([0-9]{1,6})\.(ssm|ffn_gate_inp)[._]", name))}
    if any(part == "ssm" for _, part in blocks):
        values["layer_types"] = ["linear_attention" if (i, "ssm") in blocks else "full_attention" for i in range(layers)]
    if any(part != "ssm" for _, part in blocks):
        values["mlp_only_layers"] = [i for i in range(layers) if (i, "ffn_gate_inp") not in blocks]
    if isinstance(kv_heads := values.get("num_key_value_heads"), list):  # one a layer, 0 where the layer is recurrent
        values["num_key_value_heads"] = max(kv_heads, default=0)
    if "linear_num_value_heads" in keys:
        inner, heads = keys.integer("linear_value_head_dim"), keys.integer("linear_num_value_heads")
        if inner % heads:
            raise keys.fault("linear_value_head_dim", f"of {inner} is no multiple of {heads} value heads")
        values["linear_value_head_dim"] = inner // heads
    rope = {key: meta.get(f"{arch}.rope.scaling.{name}") for key, name in _ROPE.items()}
    values["rope_parameters"] = {key: value for key, value in rope.items() if value != "none"}
    values["tie_word_embeddings"] = "output.weight" not in store.tensors
    if rotary_dim := keys.integer("partial_rotary_factor", 0, minimum=0):
        head_dim = keys.integer("head_dim", keys.integer("hidden_size") // keys.integer("num_attention_heads"))
        values["partial_rotary_factor"] = rotary_dim / head_dim
    for ours, names in (("eos", ("eos", "eot", "eom")), ("bos", ("bos",)), ("pad", ("padding",))):
        values[f"{ours}_token_id"] = [meta[key] for name in names if (key := f"tokenizer.ggml.{name}_token_id") in meta]
    found = {ours: meta.get(f"general.sampling.{name}") for ours, name in _SAMPLING.items()}
    return keys, {key: value for key, value in found.items() if value is not None}


def rope_divisors(store: GgufStore, rotary_dim: int) -> tuple[float, ...]:
    """`rope_freqs.weight`: what llama3 scaling comes to, as divisors of the inverse frequencies. Empty where there is none."""
    name = "rope_freqs.weight"
    if (tensor := store.tensors.get(name)) is None:
        return ()
    if tensor.shape != (rotary_dim // 2,) or tensor.kind != "F32":
        raise LoadError(f"{tensor.file}: tensor {name} is {tensor.kind} {list(tensor.shape)}, expected F32 [{rotary_dim // 2}]")
    return tuple(store.read(name).tolist())
