"""Random weights from a configuration alone: seeded, of the right shapes, quickly made even where they would fill a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from sparkrt.model.checkpoint import open_checkpoint
from sparkrt.model.source import DummySource
from sparkrt.model.spec import expected_tensors
from tests import miniatures


def folder(path: Path, config: dict[str, Any]) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("name", miniatures.NAMES)
def test_needs_a_configuration_only(name: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(folder(tmp_path, miniatures.build(name)[1]), "dummy")
    shapes = expected_tensors(checkpoint.config)
    assert checkpoint.source.names() == shapes.keys()
    for tensor, shape in shapes.items():
        values = checkpoint.source.get(tensor)
        assert values.shape == checkpoint.source.shapes[tensor] == shape
        assert np.isfinite(values).all()
        rows = slice(shape[0] // 2, shape[0])
        np.testing.assert_array_equal(checkpoint.source.get(tensor, rows), values[rows])


def test_seed_decides_every_weight(tmp_path: Path) -> None:
    path = folder(tmp_path, miniatures.build("qwen3_5_moe")[1])
    first, again, other = (open_checkpoint(path, "dummy", seed=seed).source for seed in (1, 1, 2))
    for name in first.names():
        np.testing.assert_array_equal(first.get(name), again.get(name))
    assert not np.array_equal(first.get("embed"), other.get("embed"))


def test_norms_leave_values_alone_and_the_state_remembers(tmp_path: Path) -> None:
    for name, effective in (("qwen3_5_moe", 0.0), ("llama", 1.0)):
        source = open_checkpoint(folder(tmp_path, miniatures.build(name)[1]), "dummy").source
        assert (source.get("layers.0.input_norm") == effective).all()
    source = open_checkpoint(folder(tmp_path, miniatures.build("qwen3_5_moe")[1]), "dummy").source
    assert (source.get("layers.0.gdn.norm") == 1).all()
    assert (source.get("layers.0.gdn.A_log") < -2).all()


def test_a_large_model_takes_no_memory(tmp_path: Path) -> None:
    """70 GB of the 35B shape: every matrix is a window on one pool; experts, rows and layers differ."""
    config = miniatures.build("qwen3_5_moe")[1] | {
        "hidden_size": 2048,
        "vocab_size": 248320,
        "num_hidden_layers": 40,
        "layer_types": None,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "dtype": "bfloat16",
    }
    source = open_checkpoint(folder(tmp_path, config), "dummy").source
    assert isinstance(source, DummySource)
    experts = source.get("layers.7.moe.gate_up")
    assert experts.shape == (256, 1024, 2048)
    assert experts.dtype == ml_dtypes.bfloat16
    assert not experts.flags.writeable
    assert np.shares_memory(experts[0, 0], source.get("layers.7.moe.gate_up")[0, 0])
    rows = [experts[0, 0], experts[0, 1], experts[1, 0], experts[255, 1023], source.get("layers.8.moe.gate_up")[0, 0]]
    for i, row in enumerate(rows):
        assert 0.9 < float(row.astype(np.float32).std() * 2048**0.5) < 1.1
        assert all(not np.array_equal(row, other) for other in rows[:i])
    embed = source.get("embed")
    assert embed.shape == (248320, 2048)
    assert not np.array_equal(embed[0], embed[1])
    assert np.isfinite(embed[-1].astype(np.float32)).all()


def test_absent_dtype_is_bfloat16(tmp_path: Path) -> None:
    config = {key: value for key, value in miniatures.build("llama")[1].items() if key != "dtype"}
    checkpoint = open_checkpoint(folder(tmp_path, config), "dummy")
    assert checkpoint.config.dtype == "bfloat16"
    assert checkpoint.source.get("embed").dtype == ml_dtypes.bfloat16
