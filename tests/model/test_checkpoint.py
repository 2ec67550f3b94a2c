"""What a model argument can name: the bundled model, a folder, a GGUF file, a hub id in the hub's cache."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sparkrt.errors import LoadError
from sparkrt.model.checkpoint import bundled_model, open_checkpoint
from tests import miniatures
from tests.model import gguf_files


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    (tmp_path / "gguf").mkdir()
    return gguf_files.write(tmp_path / "gguf" / "model.gguf", *miniatures.build("llama"))


@pytest.fixture
def offline_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache, with the hub's client offline whatever the machine can reach."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def test_nothing_named_is_the_bundled_model() -> None:
    checkpoint = open_checkpoint()
    assert checkpoint.folder == bundled_model()
    assert checkpoint.gguf is None
    assert checkpoint.generation_config["temperature"] == 0.7


def test_folder_with_one_gguf_file(gguf_file: Path) -> None:
    assert open_checkpoint(gguf_file.parent).config.family == "llama"
    (gguf_file.parent / "second.gguf").write_bytes(gguf_file.read_bytes())
    with pytest.raises(LoadError, match="2 GGUF files, name one"):
        open_checkpoint(gguf_file.parent)


def test_load_format_must_fit(gguf_file: Path, tmp_path: Path) -> None:
    folder = miniatures.write("llama", tmp_path / "folder")
    assert open_checkpoint(gguf_file, "gguf").config.family == open_checkpoint(folder, "safetensors").config.family
    assert open_checkpoint(gguf_file, "dummy").source.names() == open_checkpoint(gguf_file).source.names()
    for model, load_format in ((gguf_file, "safetensors"), (folder, "gguf"), (folder, "npcache")):
        with pytest.raises(LoadError, match=load_format):
            open_checkpoint(model, load_format)


@pytest.mark.parametrize("model", ["nowhere", "./no/where", "a/b/c", "/no/where", "x" * 5000, "a\0b", ""])
def test_what_is_not_there_is_named(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LoadError):
        open_checkpoint(model)


def test_folder_without_configuration_and_other_files(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"config\.json: missing"):
        open_checkpoint(tmp_path)
    (tmp_path / "model.bin").touch()
    with pytest.raises(LoadError, match=r"model\.bin: expected a model folder or a \.gguf file"):
        open_checkpoint(tmp_path / "model.bin")
    (tmp_path / "config.json").write_bytes(b"\xff")
    with pytest.raises(LoadError, match=r"config\.json: not valid JSON"):
        open_checkpoint(tmp_path)


def test_hub_id_opens_from_the_cache_when_offline(offline_hub: Path, tmp_path: Path) -> None:
    plain = miniatures.write("llama", tmp_path / "plain")
    repository, commit = offline_hub / "models--owner--name", "0123456789abcdef0123456789abcdef01234567"
    snapshot, blobs = repository / "snapshots" / commit, repository / "blobs"
    for path in (snapshot, blobs, repository / "refs"):
        path.mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    for i, file in enumerate(sorted(plain.iterdir())):
        (blobs / f"{i:040}").write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(f"../../blobs/{i:040}")
    checkpoint = open_checkpoint("owner/name")
    assert checkpoint.folder == snapshot
    assert checkpoint.source.names() == open_checkpoint(plain).source.names()


def test_hub_id_that_is_not_cached_is_named(offline_hub: Path) -> None:
    with pytest.raises(LoadError, match=r"owner/name: neither a folder here nor in the hub's cache"):
        open_checkpoint("owner/name")


def test_start_up_imports_no_hub_client_and_no_gguf() -> None:
    program = "import sys; from sparkrt.model.checkpoint import open_checkpoint; open_checkpoint(); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert "sparkrt.model.checkpoint" in loaded
    assert not {"huggingface_hub", "gguf", "tokenizers", "safetensors"} & set(loaded)
