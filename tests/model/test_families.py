"""Every family's tensors under canonical names: prefixes, expert layouts, row orders, MTP, vision."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest

from sparkrt.errors import LoadError
from sparkrt.model.checkpoint import Checkpoint, open_checkpoint
from sparkrt.model.spec import expected_tensors, mtp_tensors
from tests import miniatures, rigs

Tensors = dict[str, np.ndarray]


def opened(folder: Path, tensors: Tensors, config: dict[str, object]) -> Checkpoint:
    rigs.save(folder, tensors, config)
    return open_checkpoint(folder)


def contents(checkpoint: Checkpoint) -> Tensors:
    return {name: checkpoint.source.get(name) for name in checkpoint.source.names()}


def assert_same(found: Checkpoint, expected: Checkpoint) -> None:
    assert found.source.names() == expected.source.names()
    for name, values in contents(expected).items():
        np.testing.assert_array_equal(found.source.get(name), values, err_msg=name)


@pytest.mark.parametrize("name", miniatures.NAMES)
def test_every_tensor_is_there_and_of_its_shape(name: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(miniatures.write(name, tmp_path))
    shapes = expected_tensors(checkpoint.config)
    assert checkpoint.source.names() == shapes.keys()
    for tensor, shape in shapes.items():
        assert checkpoint.source.shapes[tensor] == shape
        assert checkpoint.source.get(tensor).shape == shape
        rows = slice(shape[0] // 3, shape[0] - shape[0] // 3)
        np.testing.assert_array_equal(checkpoint.source.get(tensor, rows), checkpoint.source.get(tensor)[rows])


def test_plain_names_map_to_canonical_ones(tmp_path: Path) -> None:
    tensors, config = miniatures.build("qwen2")
    source = opened(tmp_path, tensors, config).source
    for ours, theirs in {
        "embed": "model.embed_tokens.weight",
        "norm": "model.norm.weight",
        "layers.1.input_norm": "model.layers.1.input_layernorm.weight",
        "layers.1.post_norm": "model.layers.1.post_attention_layernorm.weight",
        "layers.2.attn.q_bias": "model.layers.2.self_attn.q_proj.bias",
        "layers.2.attn.o": "model.layers.2.self_attn.o_proj.weight",
        "layers.0.mlp.gate": "model.layers.0.mlp.gate_proj.weight",
        "layers.0.mlp.down": "model.layers.0.mlp.down_proj.weight",
    }.items():
        np.testing.assert_array_equal(source.get(ours), tensors[theirs], err_msg=ours)


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_next_uneven"])
def test_grouped_rows_are_permuted(name: str, tmp_path: Path) -> None:
    """Head by head, as the layout is described: q k v v… z z… for each key head, and b b… a a…."""
    tensors, config = miniatures.build(name)
    source = opened(tmp_path, tensors, config).source
    k_heads, v_heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    dk, dv = config["linear_key_head_dim"], config["linear_value_head_dim"]
    ratio, keys, values = v_heads // k_heads, k_heads * dk, v_heads * dv
    fused = tensors["model.layers.0.linear_attn.in_proj_qkvz.weight"]
    gates = tensors["model.layers.0.linear_attn.in_proj_ba.weight"]
    qkv, z = source.get("layers.0.gdn.qkv"), source.get("layers.0.gdn.z")
    b, a = source.get("layers.0.gdn.b"), source.get("layers.0.gdn.a")
    assert qkv.shape == (2 * keys + values, miniatures.HIDDEN)
    for g in range(k_heads):
        group = fused[g * (2 * dk + 2 * ratio * dv) :]
        np.testing.assert_array_equal(qkv[g * dk : (g + 1) * dk], group[:dk])
        np.testing.assert_array_equal(qkv[keys + g * dk : keys + (g + 1) * dk], group[dk : 2 * dk])
        for j in range(ratio):
            head, start = g * ratio + j, 2 * dk + j * dv
            np.testing.assert_array_equal(qkv[2 * keys + head * dv : 2 * keys + (head + 1) * dv], group[start : start + dv])
            start += ratio * dv
            np.testing.assert_array_equal(z[head * dv : (head + 1) * dv], group[start : start + dv])
            np.testing.assert_array_equal(b[head], gates[g * 2 * ratio + j])
            np.testing.assert_array_equal(a[head], gates[g * 2 * ratio + ratio + j])


def split_experts(tensors: Tensors) -> Tensors:
    """What `save_pretrained` of the reference library makes of fused experts."""
    split: Tensors = {}
    for name, tensor in tensors.items():
        base = name.rpartition(".")[0]
        if name.endswith("experts.gate_up_proj"):
            for e, (gate, up) in enumerate(np.split(matrix, 2) for matrix in tensor):
                split |= {f"{base}.{e}.gate_proj.weight": gate.copy(), f"{base}.{e}.up_proj.weight": up.copy()}
        elif name.endswith("experts.down_proj"):
            split |= {f"{base}.{e}.down_proj.weight": matrix.copy() for e, matrix in enumerate(tensor)}
        else:
            split[name] = tensor
    return split


def test_fused_and_split_experts_are_the_same(tmp_path: Path) -> None:
    tensors, config = miniatures.build("qwen3_5_moe")
    fused = opened(tmp_path / "fused", tensors, config)
    split = opened(tmp_path / "split", split_experts(tensors), config)
    assert_same(split, fused)
    np.testing.assert_array_equal(
        split.source.get("layers.1.moe.gate_up", slice(2, 5)), tensors["model.layers.1.mlp.experts.gate_up_proj"][2:5]
    )


def test_missing_expert_is_named(tmp_path: Path) -> None:
    tensors, config = miniatures.build("qwen3_moe")
    del tensors["model.layers.1.mlp.experts.5.up_proj.weight"]
    with pytest.raises(
        LoadError, match=r"model\.safetensors: tensor model\.layers\.1\.mlp\.experts\.5\.up_proj\.weight is missing"
    ):
        opened(tmp_path, tensors, config)


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model.", ""])
def test_prefix_is_found_in_the_names(prefix: str, tmp_path: Path) -> None:
    """A flat configuration beside wrapped names is what fine-tuning tools write."""
    tensors, config = miniatures.build("qwen3_5_moe")
    renamed = {prefix + name.removeprefix("model.") if name.startswith("model.") else name: t for name, t in tensors.items()}
    assert_same(opened(tmp_path / "renamed", renamed, config), opened(tmp_path / "plain", tensors, config))


def test_vision_and_rotary_buffers_are_known(tmp_path: Path) -> None:
    tensors, config = miniatures.build("llama3")
    buffers = ("visual.patch.weight", "model.visual.layers.0.norm.weight", "model.layers.0.self_attn.rotary_emb.inv_freq")
    checkpoint = opened(tmp_path, tensors | {name: np.zeros(3, np.float64) for name in buffers}, config)
    assert checkpoint.source.names() == expected_tensors(checkpoint.config).keys()


def test_bundled_model_has_an_mtp_module() -> None:
    checkpoint = open_checkpoint(None)
    assert checkpoint.config.mtp_layers == 1
    assert mtp_tensors(checkpoint.config).items() <= checkpoint.source.shapes.items()
    assert checkpoint.source.get("mtp.fc").shape == (256, 512)


def mtp(tensors: Tensors, prefix: str) -> Tensors:
    """An MTP module for the miniature: its last layer again, and the parts of its own."""
    hidden, last = miniatures.HIDDEN, "model.layers.3."
    own = {
        f"{prefix}{name}.weight": np.ones(hidden, np.float32) for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    }
    own[f"{prefix}fc.weight"] = np.ones((hidden, 2 * hidden), np.float32)
    layer = {f"{prefix}layers.0.{n.removeprefix(last)}": t.copy() for n, t in tensors.items() if n.startswith(last)}
    return own | layer


@pytest.mark.parametrize("prefix", ["mtp.", "model.mtp.", "model.language_model.mtp."])
def test_mtp_is_found_in_the_tensors(prefix: str, tmp_path: Path) -> None:
    tensors, config = miniatures.build("qwen3_5_moe")
    checkpoint = opened(tmp_path, tensors | mtp(tensors, prefix), config)
    assert checkpoint.config.mtp_layers == 1
    np.testing.assert_array_equal(checkpoint.source.get("mtp.layers.0.attn.q"), tensors["model.layers.3.self_attn.q_proj.weight"])


def test_mtp_key_without_tensors_and_incomplete_mtp_are_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tensors, config = miniatures.build("qwen3_5_moe")
    assert opened(tmp_path / "none", tensors, config | {"mtp_num_hidden_layers": 1}).config.mtp_layers == 0
    some = mtp(tensors, "mtp.")
    del some["mtp.layers.0.self_attn.k_proj.weight"]
    with caplog.at_level(logging.WARNING):
        assert opened(tmp_path / "some", tensors | some, config).config.mtp_layers == 0
    assert "multi-token-prediction" in caplog.text


def test_output_head_that_is_there_is_used(tmp_path: Path) -> None:
    tensors, config = miniatures.build("llama3")
    head = opened(tmp_path / "untied", tensors, config)
    assert not head.config.tie_word_embeddings
    tied_too = opened(tmp_path / "tied", tensors, config | {"tie_word_embeddings": True})
    assert not tied_too.config.tie_word_embeddings
    np.testing.assert_array_equal(tied_too.source.get("lm_head"), tensors["lm_head.weight"])


def test_missing_output_head_needs_a_tied_configuration(tmp_path: Path) -> None:
    tensors, config = miniatures.build("llama3")
    del tensors["lm_head.weight"]
    with pytest.raises(LoadError, match=r"model\.safetensors: tensor lm_head\.weight is missing"):
        opened(tmp_path / "untied", tensors, config)
    checkpoint = opened(tmp_path / "tied", tensors, config | {"tie_word_embeddings": True})
    assert checkpoint.config.tie_word_embeddings
    assert "lm_head" not in checkpoint.source.names()


@pytest.mark.parametrize("outer", [True, False])
@pytest.mark.parametrize("present", [True, False])
def test_disagreeing_tie_flags_warn_with_both(
    outer: bool, present: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensors, config = miniatures.build("qwen3_5_vision")
    config |= {"tie_word_embeddings": outer, "text_config": config["text_config"] | {"tie_word_embeddings": not outer}}
    if not present:
        del tensors["lm_head.weight"]
    with caplog.at_level(logging.WARNING):
        checkpoint = opened(tmp_path, tensors, config)
    assert checkpoint.config.tie_word_embeddings is not present
    assert f"tie_word_embeddings is {outer}" in caplog.text
    assert f"text_config.tie_word_embeddings is {not outer}" in caplog.text


def test_unsupported_architecture_is_named_with_those_that_are(tmp_path: Path) -> None:
    miniatures.write("llama", tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    for change in ({"architectures": ["GemmaForCausalLM"]}, {"architectures": None, "model_type": "gemma"}):
        path.write_text(json.dumps(config | change))
        with pytest.raises(LoadError, match=r"config\.json: .*[Gg]emma.*Supported: .*Qwen3_5MoeForCausalLM.*LlamaForCausalLM"):
            open_checkpoint(tmp_path)


def test_model_type_decides_without_architectures(tmp_path: Path) -> None:
    tensors, config = miniatures.build("qwen3_5_vision")
    del config["architectures"]
    assert opened(tmp_path, tensors, config).config.family == "qwen3_5"
