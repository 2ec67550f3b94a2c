"""Configurations: where keys live, what is assumed when they are absent, and what is refused, always by file and key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkrt.errors import LoadError
from sparkrt.model.checkpoint import open_checkpoint
from sparkrt.model.config import LayerConfig, ModelConfig, RopeConfig
from sparkrt.model.families import read_config
from sparkrt.model.keys import ConfigKeys
from tests import miniatures, rigs

Config = dict[str, Any]


def read(config: Config) -> ModelConfig:
    return read_config(ConfigKeys(config, "config.json"))


def hybrid(**changes: Any) -> Config:
    """A flat Qwen3.5 MoE configuration; a change to None takes the key away."""
    config = rigs.hybrid_config(512, 256, 258) | changes
    return {key: value for key, value in config.items() if value is not None}


def llama(**changes: Any) -> Config:
    return miniatures.build("llama")[1] | changes


def rope(**changes: Any) -> RopeConfig:
    return read(hybrid(**changes)).attention.rope


def test_bundled_model() -> None:
    config = open_checkpoint().config
    assert (config.family, config.num_layers, config.attention_layers) == ("qwen3_5", 8, (3, 7))
    assert config.attention.gated
    assert config.attention.qk_norm
    assert config.norm_offset == 1.0
    assert config.attention.rope == RopeConfig(theta=1e5, rotary_dim=32, original_max_position=4096)
    assert config.moe is not None
    assert (config.moe.num_experts, config.moe.shared_intermediate_size, config.moe.renormalize) == (8, 64, True)
    assert config.tie_word_embeddings
    assert config.eos_token_ids == (6130, 6128)
    assert config.pad_token_id == 6128
    assert config.dtype == "bfloat16"


def test_absent_keys_get_the_family_defaults() -> None:
    absent = ["head_dim", "rope_parameters", "layer_types", "rms_norm_eps", "hidden_act", "tie_word_embeddings"]
    absent += [key for key in hybrid() if key.startswith("linear_")]
    config = read(hybrid(**dict.fromkeys(absent), num_hidden_layers=8))
    assert config.attention.head_dim == 256
    assert config.attention.rope == RopeConfig(theta=1e4, rotary_dim=64, original_max_position=4096)
    assert config.gdn is not None
    assert (config.gdn.num_k_heads, config.gdn.num_v_heads, config.gdn.k_dim, config.gdn.v_dim) == (16, 32, 128, 128)
    assert config.attention_layers == (3, 7)
    assert config.rms_norm_eps == 1e-6
    assert not config.tie_word_embeddings
    assert not config.attention.qkv_bias


def test_dense_families_rotate_the_whole_head() -> None:
    config = read(llama())
    assert config.attention.head_dim == config.attention.rope.rotary_dim == 16
    assert config.norm_offset == 0.0
    assert not config.attention.qk_norm


def test_qwen_attention_kinds() -> None:
    qwen2, qwen3 = (read(miniatures.build(name)[1]) for name in ("qwen2", "qwen3"))
    assert qwen2.attention.qkv_bias
    assert not qwen2.attention.o_bias
    assert qwen3.attention.qk_norm
    assert not qwen3.attention.qkv_bias
    assert read(miniatures.build("qwen3_moe")[1] | {"norm_topk_prob": False}).moe != read(miniatures.build("qwen3_moe")[1]).moe


def test_attention_bias_covers_all_four_projections() -> None:
    attention = read(hybrid(attention_bias=True)).attention
    assert attention.qkv_bias
    assert attention.o_bias


THETA = {"rope_theta": 5e5, "partial_rotary_factor": 0.5}


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": {"rope_type": "default", **THETA}},
        {"rope_parameters": None, **THETA},
        {"rope_parameters": None, "rope_scaling": {"type": "default", **THETA}},
        {"rope_parameters": {"rope_theta": 5e5}, "partial_rotary_factor": 0.5},
        {"rope_parameters": {"partial_rotary_factor": 0.5}, "rope_scaling": {"rope_theta": 5e5}},
        {"rope_parameters": {**THETA}, "rope_theta": 7.0, "partial_rotary_factor": 1.0},
        {"rope_parameters": {**THETA}, "rope_scaling": {"rope_theta": None, "mrope_section": [3, 3, 2], "rope_type": "mrope"}},
    ],
)
def test_every_spelling_of_rope_is_the_same(changes: Config) -> None:
    found = rope(**changes)
    assert (found.theta, found.rotary_dim, found.kind) == (5e5, 32, "default")


def test_scaling_beside_parameters_keeps_their_theta_and_raises_the_limit() -> None:
    changes = {"rope_parameters": {"rope_type": "default", **THETA}, "rope_scaling": {"type": "yarn", "factor": 4}}
    config = read(hybrid(**changes))
    assert config.attention.rope == RopeConfig(theta=5e5, rotary_dim=32, kind="yarn", factor=4.0, original_max_position=4096)
    assert config.max_position == 16384


@pytest.mark.parametrize(
    ("scaling", "limit"),
    [
        ({"rope_type": "linear", "factor": 2.0}, 8192),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}, 16384),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}, 4096),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 256}, 4096),
        ({"rope_type": "default"}, 4096),
    ],
)
def test_scaling_and_context_limit(scaling: Config, limit: int) -> None:
    assert read(hybrid(rope_scaling=scaling)).max_position == limit


def test_llama3_bands_and_yarn_details_are_kept() -> None:
    bands = {"low_freq_factor": 2.0, "high_freq_factor": 8.0, "factor": 8.0, "original_max_position_embeddings": 256}
    found = read(llama(rope_scaling={"rope_type": "llama3", **bands})).attention.rope
    assert (found.kind, found.low_freq_factor, found.high_freq_factor, found.original_max_position) == ("llama3", 2.0, 8.0, 256)
    details = {"beta_fast": 16, "beta_slow": 2, "mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False, "attention_factor": 1.5}
    found = read(llama(rope_scaling={"type": "yarn", "factor": 2, **details})).attention.rope
    assert (found.beta_fast, found.beta_slow, found.mscale, found.mscale_all_dim) == (16.0, 2.0, 1.0, 0.5)
    assert (found.truncate, found.attention_factor) == (False, 1.5)


def test_layer_types_win_over_the_interval() -> None:
    types = ["full_attention", "linear_attention", "linear_attention", "full_attention"]
    assert read(hybrid(layer_types=types, full_attention_interval=2)).attention_layers == (0, 3)
    assert read(hybrid(layer_types=None, full_attention_interval=2)).attention_layers == (1, 3)


def test_dense_layers_among_experts() -> None:
    config = miniatures.build("qwen3_next")[1] | {"mlp_only_layers": [0], "decoder_sparse_step": 2}
    assert [layer.mlp for layer in read(config).layers] == ["dense", "moe", "dense", "moe"]
    assert read(config).layers[3] == LayerConfig("attention", "moe")
    assert read(config).intermediate_size == miniatures.DENSE_FFN


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"output_gate_type": "sigmoid"}, 'output_gate_type is "sigmoid", only "swish" or "silu"'),
        ({"attn_output_gate": False}, "attn_output_gate is false, only true"),
        ({"mamba_ssm_dtype": "bfloat16"}, 'mamba_ssm_dtype is "bfloat16", only "float32"'),
        ({"hidden_act": "gelu"}, 'hidden_act is "gelu"'),
        ({"linear_conv_kernel_dim": 3}, "linear_conv_kernel_dim is 3"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries, num_hidden_layers is 4"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types has 'sliding_attention'"),
        ({"layer_types": "full_attention"}, "layer_types must be a list of strings"),
        ({"linear_num_value_heads": 3, "linear_num_key_heads": 2}, "linear_num_value_heads of 3 is no multiple"),
        ({"num_key_value_heads": 3}, "num_key_value_heads of 3 does not divide"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "256"}, "hidden_size must be an integer"),
        ({"hidden_size": True}, "hidden_size must be an integer"),
        ({"hidden_size": 0}, "hidden_size must be an integer from 1"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be an integer from 1 to 4096"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok must be an integer from 1 to 8"),
        ({"max_position_embeddings": None}, "max_position_embeddings is missing"),
        ({"rms_norm_eps": 0}, "rms_norm_eps must be a finite number above zero"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps must be a finite number"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be an integer or a list"),
        ({"eos_token_id": [1, None]}, "eos_token_id must be an integer or a list"),
        ({"dtype": "float8_e4m3fn"}, "dtype is 'float8_e4m3fn', expected bfloat16"),
        ({"rope_parameters": {"rope_theta": 10**400}}, "rope_parameters.rope_theta must be a finite number"),
        ({"rope_parameters": [1]}, "rope_parameters must be an object"),
        ({"rope_scaling": {"type": "longrope", "factor": 4}}, "rope_scaling.rope_type is 'longrope', which cannot be served"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling.factor is missing"),
        ({"rope_scaling": {"type": "llama3", "factor": 2, "low_freq_factor": 4}}, "rope_scaling.high_freq_factor must be above"),
        ({"rope_parameters": {"partial_rotary_factor": 1.5}}, "rope_parameters.partial_rotary_factor of 1.5"),
        ({"rope_parameters": {"partial_rotary_factor": 0.4}}, "rope_parameters.partial_rotary_factor of 0.4 rotates 25 of 64"),
    ],
)
def test_faults_name_file_and_key(changes: Config, message: str) -> None:
    with pytest.raises(LoadError) as error:
        read(hybrid(**changes))
    assert f"config.json: {message}" in str(error.value)


@pytest.mark.parametrize("changes", [{"output_gate_type": "swish"}, {"attn_output_gate": True}, {"mamba_ssm_dtype": "float32"}])
def test_known_gate_values_are_fine(changes: Config) -> None:
    assert read(hybrid(**changes)) == read(hybrid())


def test_sliding_windows_are_refused_only_where_they_act() -> None:
    config = miniatures.build("qwen2")[1] | {"sliding_window": 128, "max_window_layers": 2}
    assert read(config | {"use_sliding_window": False}).num_layers == 3
    assert read(config | {"use_sliding_window": True, "max_window_layers": 3}).num_layers == 3
    with pytest.raises(LoadError, match="use_sliding_window is true"):
        read(config | {"use_sliding_window": True})


def test_wrapped_configuration_reads_both_levels() -> None:
    config = miniatures.build("qwen3_5_vision")[1]
    text = config["text_config"]
    eos = text.pop("eos_token_id")
    del text["dtype"]
    found = read(config | {"eos_token_id": [eos, 7], "torch_dtype": "torch.float16", "text_config": text | {"eos_token_id": 9}})
    assert found.eos_token_ids == (eos, 7, 9)
    assert found.dtype == "float16"
    assert found.architecture == "Qwen3_5ForConditionalGeneration"
    with pytest.raises(LoadError, match=r"config\.json: text_config\.hidden_size is missing"):
        read(config | {"text_config": {key: value for key, value in text.items() if key != "hidden_size"}})


@pytest.mark.parametrize(
    ("generation", "expected"),
    [(None, (258,)), ({}, (258,)), ({"eos_token_id": 256}, (256, 258)), ({"eos_token_id": [256, 258, 3]}, (256, 258, 3))],
)
def test_eos_is_the_union_of_both_files(tmp_path: Path, generation: Config | None, expected: tuple[int, ...]) -> None:
    rigs.r2(tmp_path)
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config.eos_token_ids == expected
    assert checkpoint.generation_config == (generation or {})


def test_generation_config_faults_are_named(tmp_path: Path) -> None:
    rigs.r2(tmp_path)
    for content in ('{"eos_token_id": "x"}', "{"):
        (tmp_path / "generation_config.json").write_text(content)
        with pytest.raises(LoadError, match=r"generation_config\.json"):
            open_checkpoint(tmp_path)


@pytest.mark.parametrize("method", ["fp8", "awq", "gptq", "nvfp4", "bitsandbytes", "compressed-tensors"])
@pytest.mark.parametrize("nested", [False, True])
def test_quantization_is_refused_by_name(tmp_path: Path, method: str, nested: bool) -> None:
    miniatures.write("qwen3_5_vision", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (config["text_config"] if nested else config)["quantization_config"] = {"quant_method": method}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(LoadError, match=rf"config\.json: .*quantization_config asks for {method} weights.*BF16 checkpoint.*GGUF"):
        open_checkpoint(tmp_path)


_values = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.lists(st.integers(), max_size=3)


@settings(max_examples=300, deadline=None)
@given(
    changes=st.dictionaries(
        st.sampled_from(sorted(hybrid())), _values | st.dictionaries(st.text(max_size=3), _values), max_size=3
    )
)
def test_any_value_is_read_or_a_load_error(changes: Config) -> None:
    try:
        config = read(hybrid() | changes)
    except LoadError:
        return
    assert config.num_layers >= 1
    assert config.attention.rope.rotary_dim <= config.attention.head_dim
