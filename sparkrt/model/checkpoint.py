"""Opening a checkpoint: a folder, a GGUF file, a hub id or the bundled model becomes a configuration and a weight source."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path

from sparkrt.errors import LoadError
from sparkrt.model.config import ModelConfig
from sparkrt.model.families import read_config
from sparkrt.model.keys import ConfigKeys, read_json
from sparkrt.model.loading.safetensors import SafetensorsStore
from sparkrt.model.source import PLAIN, CheckpointSource, DummySource, TensorStore, WeightSource
from sparkrt.model.spec import Layout, expected_tensors, gguf_layout, mtp_tensors, recipes, safetensors_layout

LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model as it was found. The tokenizer lies in `folder`, or in the `gguf` metadata: exactly one of them is there."""

    config: ModelConfig
    source: WeightSource
    folder: Path | None
    generation_config: dict[str, object]  # {} where there is none
    gguf: Mapping[str, object] | None = None


def bundled_model() -> Path:
    """The folder of sparkrt-tiny, which ships in the package."""
    return Path(str(files("sparkrt") / "assets" / "sparkrt-tiny"))


def open_checkpoint(model: str | Path | None = None, load_format: str = "auto", *, seed: int = 0) -> Checkpoint:
    """Open what `model` names (None: the bundled model) and check it as a whole; weights are read later, by the source.

    Format "dummy" makes random weights of `seed`. Raises LoadError naming the file and the tensor or key at fault.
    """
    if load_format not in LOAD_FORMATS:
        raise LoadError(f"load format {load_format!r} is not known; known are {', '.join(LOAD_FORMATS)}")
    dummy = load_format == "dummy"
    path = bundled_model() if model is None else _locate(str(model), weights=not dummy)
    is_gguf = path.is_file()
    if load_format in ("safetensors", "gguf") and is_gguf != (load_format == "gguf"):
        raise LoadError(f"{path}: load format {load_format} was asked for, but this is {'a GGUF file' if is_gguf else 'not one'}")
    config, generation, store = _read(path, dummy)
    folder, metadata = None if is_gguf else path, store.metadata if store else None
    if store is None or dummy:
        config = replace(config, dtype=config.dtype or "bfloat16")
        return Checkpoint(config, DummySource(config, seed), folder, generation, metadata)
    config, source = _assemble(config, store, gguf_layout(config.num_layers) if is_gguf else safetensors_layout(store.tensors))
    return Checkpoint(config, source, folder, generation, metadata)


def _locate(model: str, *, weights: bool) -> Path:
    """A folder with a config.json, or a GGUF file."""
    path = Path(model).expanduser()
    if not os.path.exists(path):  # unlike Path.exists, False for any name the system cannot look up
        path = _fetch(model, weights=weights)
    if path.is_file() and path.suffix != ".gguf":
        raise LoadError(f"{path}: expected a model folder or a .gguf file")
    ggufs = [path] if path.is_file() else list(path.glob("*.gguf"))
    if (path / "config.json").is_file() or len(ggufs) == 1:
        return path if (path / "config.json").is_file() else ggufs[0]
    found = f"; it has {len(ggufs)} GGUF files, name one of them" if ggufs else ""
    raise LoadError(f"{path / 'config.json'}: missing{found}")


def _fetch(model: str, *, weights: bool) -> Path:
    """The folder of a hub repository's files, fetched as the variables of the hub's client say. Without `weights`, text only."""
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", model):
        raise LoadError(f"{model}: no such file or folder, and not a hub id (owner/name)")
    from huggingface_hub import errors, snapshot_download  # 0.2 s, and most start-ups are of local folders

    patterns = ["*.json", "*.jinja", "*.txt", "*.model", *(["*.safetensors"] if weights else [])]
    try:
        return Path(snapshot_download(model, allow_patterns=patterns))
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise LoadError(f"{model}: neither a folder here nor in the hub's cache, and the hub cannot be reached") from error
    except (OSError, ValueError) as error:  # the client's other errors are of these kinds, and tell what to do
        raise LoadError(f"{model}: not a folder here, and cannot be fetched from the hub: {error}") from error


def _read(path: Path, dummy: bool) -> tuple[ModelConfig, dict[str, object], TensorStore | None]:
    """`(configuration, generation_config, tensors)`, without tensors of a folder for dummy weights."""
    if path.is_file():
        from sparkrt.model.loading.gguf import read_gguf  # 50 ms, and most start-ups are of folders

        return read_gguf(path)
    keys = ConfigKeys(read_json(path / "config.json"), str(path / "config.json"))
    config = read_config(keys)
    file = path / "generation_config.json"
    generation = read_json(file) if file.is_file() else {}
    eos = dict.fromkeys((*ConfigKeys(generation, str(file)).integers("eos_token_id"), *config.eos_token_ids))
    return replace(config, eos_token_ids=tuple(eos)), generation, None if dummy else SafetensorsStore(path)


def _assemble(config: ModelConfig, store: TensorStore, layout: Layout) -> tuple[ModelConfig, CheckpointSource]:
    """The configuration with what only the tensors tell (tied embeddings, MTP, dtype), and the checked source."""
    embed, head = layout.places["embed"], layout.places["lm_head"]
    if head not in store.tensors and not config.tie_word_embeddings:
        raise LoadError(f"{store.origin}: tensor {head} is missing, and the configuration does not tie it to the embedding")
    stored = PLAIN.get(store.tensors[embed].kind if embed in store.tensors else "", PLAIN["BF16"]).name
    # an output head that is there is used, whatever the configuration says
    config = replace(config, tie_word_embeddings=head not in store.tensors, dtype=config.dtype or stored)
    made = recipes(expected_tensors(config), config, layout, store.tensors)
    with_mtp = replace(config, mtp_layers=1)
    extra = recipes(mtp_tensors(with_mtp), with_mtp, layout, store.tensors)
    found = [name in store.tensors for recipe in extra.values() for name in recipe.names]
    if all(found):
        config, made = with_mtp, made | extra
    elif any(found):
        _log.warning("%s: the multi-token-prediction module is incomplete and will not be used", store.origin)
    return config, CheckpointSource(store, made, layout.known)
