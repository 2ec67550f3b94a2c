"""Opening a checkpoint: a folder, a GGUF file, a hub id or the bundled model becomes a configuration and a weight source."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path

from sparkrt.errors import LoadError
from sparkrt.model.config import ModelConfig
from sparkrt.model.families import family_of, gguf_family_of
from sparkrt.model.families.family import Layout, Table, gguf_layout, huggingface_layout, recipes
from sparkrt.model.families.reading import ConfigLevels
from sparkrt.model.keys import ConfigKeys, read_json
from sparkrt.model.loading.dummy import DummySource
from sparkrt.model.loading.hub import fetch, is_hub_id
from sparkrt.model.loading.safetensors import SafetensorsStore
from sparkrt.model.loading.source import CheckpointSource, is_complete
from sparkrt.model.loading.store import TensorStore
from sparkrt.model.source import WeightSource
from sparkrt.model.spec import expected_tensors, mtp_tensors
from sparkrt.runtime import dtypes

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


def open_checkpoint(
    model: str | Path | None = None, load_format: str = "auto", *, revision: str | None = None, seed: int = 0
) -> Checkpoint:
    """Open what `model` names (None: the bundled model) and check it as a whole; weights are read later, by the source.

    `load_format` "dummy" needs a configuration only and makes random weights from `seed`. `revision` is for hub ids.
    Raises LoadError naming the file and the tensor or key at fault.
    """
    if load_format not in LOAD_FORMATS:
        raise LoadError(f"load format {load_format!r} is not known; known are {', '.join(LOAD_FORMATS)}")
    path = _locate(model, revision, weights=load_format != "dummy")
    is_gguf = path.is_file()
    if load_format in ("safetensors", "gguf") and is_gguf != (load_format == "gguf"):
        raise LoadError(f"{path}: load format {load_format} was asked for, but this is {'a GGUF file' if is_gguf else 'not one'}")
    return _open_gguf(path, load_format, seed) if is_gguf else _open_folder(path, load_format, seed)


def _locate(model: str | Path | None, revision: str | None, *, weights: bool) -> Path:
    """A folder with a config.json, or a GGUF file."""
    if model is None:
        return bundled_model()
    path = Path(model).expanduser()
    if not os.path.exists(path):  # unlike Path.exists, False for any name the system cannot look up
        if not is_hub_id(str(model)):
            raise LoadError(f"{model}: no such file or folder, and not a hub id (owner/name)")
        path = fetch(str(model), revision, weights=weights)
    if path.is_file():
        if path.suffix != ".gguf":
            raise LoadError(f"{path}: expected a model folder or a .gguf file")
        return path
    if (path / "config.json").is_file():
        return path
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) != 1:
        found = f"; it has {len(ggufs)} GGUF files, name one of them" if ggufs else ""
        raise LoadError(f"{path / 'config.json'}: missing{found}")
    return ggufs[0]


def _open_folder(folder: Path, load_format: str, seed: int) -> Checkpoint:
    levels = ConfigLevels.of(ConfigKeys(read_json(folder / "config.json"), str(folder / "config.json")))
    family = family_of(levels.root)
    for keys in levels.both:
        _refuse_quantization(keys)
    generation = folder / "generation_config.json"
    generation_config = read_json(generation) if generation.is_file() else {}
    config = family.read_config(levels)
    stop_ids = (*ConfigKeys(generation_config, str(generation)).integers("eos_token_id"), *config.eos_token_ids)
    config = replace(config, eos_token_ids=tuple(dict.fromkeys(stop_ids)))
    if load_format == "dummy":
        return _dummy(config, seed, folder, generation_config, None)
    store = SafetensorsStore(folder)
    config, source = _assemble(config, store, family.tensors, huggingface_layout(store.tensors), levels.tied())
    return Checkpoint(config, source, folder, generation_config)


def _open_gguf(path: Path, load_format: str, seed: int) -> Checkpoint:
    # imported here: the package takes 50 ms, and most start-ups are of folders
    from sparkrt.model.loading.gguf import GgufStore
    from sparkrt.model.loading.gguf_config import gguf_config, gguf_generation_config, rope_divisors
    from sparkrt.model.loading.gguf_file import GgufFile

    store = GgufStore(GgufFile(path))
    family = gguf_family_of(str(path), store.metadata.get("general.architecture"))
    config = family.read_config(ConfigLevels.of(gguf_config(store)))
    rope = config.attention.rope
    rope = replace(rope, freq_divisors=rope_divisors(store, rope.rotary_dim))
    # converters add the 1 of zero-centred norms to the weights
    config = replace(config, norm_offset=0.0, attention=replace(config.attention, rope=rope))
    generation_config = gguf_generation_config(store)
    layout = gguf_layout(config.num_layers)
    if load_format == "dummy":
        config = replace(config, tie_word_embeddings=layout.top["lm_head"] not in store.tensors)
        return _dummy(config, seed, None, generation_config, store.metadata)
    config, source = _assemble(config, store, family.gguf_tensors, layout, (True,))
    return Checkpoint(config, source, None, generation_config, store.metadata)


def _dummy(
    config: ModelConfig, seed: int, folder: Path | None, generation_config: dict[str, object], gguf: Mapping[str, object] | None
) -> Checkpoint:
    config = replace(config, dtype=config.dtype or "bfloat16")
    return Checkpoint(config, DummySource(config, seed), folder, generation_config, gguf)


def _assemble(
    config: ModelConfig, store: TensorStore, table: Table, layout: Layout, tied: tuple[bool, ...]
) -> tuple[ModelConfig, CheckpointSource]:
    """The configuration with what only the tensors tell (tied embeddings, MTP, dtype), and the checked source."""
    config = replace(config, tie_word_embeddings=_is_tied(store, layout, tied))
    if not config.dtype:
        embedding = store.tensors.get(layout.top["embed"])
        plain = embedding is not None and embedding.kind in ("F32", "F16")
        config = replace(config, dtype=dtypes.from_numpy(store.dtype(layout.top["embed"])).name if plain else "bfloat16")
    shapes = expected_tensors(config)
    made = recipes(shapes, table, layout, config, store.tensors)
    if layout.top["mtp.fc"] in store.tensors:
        with_mtp = replace(config, mtp_layers=1)
        extra = mtp_tensors(with_mtp)
        extra_made = recipes(extra, table, layout, with_mtp, store.tensors)
        if is_complete(store, extra_made, extra):
            config, shapes, made = with_mtp, shapes | extra, made | extra_made
        else:
            _log.warning("%s: the multi-token-prediction module is incomplete and will not be used", store.origin)
    return config, CheckpointSource(store, made, shapes, layout.known)


def _is_tied(store: TensorStore, layout: Layout, tied: tuple[bool, ...]) -> bool:
    """Whether the embedding serves as output head. An output head that is there is used, whatever the configuration says."""
    head = layout.top["lm_head"]
    present = head in store.tensors
    if len(set(tied)) > 1:
        _log.warning(
            "tie_word_embeddings is %s in the outer configuration and text_config.tie_word_embeddings is %s; %s",
            *tied,
            f"{head} is there and will be used" if present else f"{head} is missing, the embedding is used",
        )
    if not present and not any(tied):
        raise LoadError(f"{store.origin}: tensor {head} is missing, and the configuration does not tie it to the embedding")
    return not present


def _refuse_quantization(keys: ConfigKeys) -> None:
    for key in ("quantization_config", "compression_config"):
        if (section := keys.section(key)) is not None:
            method = section.values.get("quant_method", section.values.get("quant_algo", "unknown"))
            raise keys.fault(
                key, f"asks for {method} weights, which cannot be served yet; a BF16 checkpoint of the model or a GGUF file can"
            )
