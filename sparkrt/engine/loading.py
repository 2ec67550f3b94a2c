"""From an `EngineConfig` to a running core: checkpoint, text, memory plan, weights; every "auto" gets its value here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sparkrt.engine.config import EngineConfig, Progress
from sparkrt.engine.core import EngineCore
from sparkrt.engine.memory import MemoryPlan, plan_memory
from sparkrt.engine.messages import ModelInfo
from sparkrt.engine.params import SamplingParams
from sparkrt.errors import LoadError, RequestError
from sparkrt.model.build import build_model
from sparkrt.model.checkpoint import Checkpoint, bundled_model, open_checkpoint
from sparkrt.model.keys import read_json
from sparkrt.model.model import ModelOptions
from sparkrt.runtime import GpuBackend, open_backend
from sparkrt.runtime.dtypes import DType, by_name
from sparkrt.runtime.machine import debug_enabled
from sparkrt.text.template import ChatTemplate
from sparkrt.text.tokenizer import Tokenizer

# generation_config's names of what SamplingParams has
_DEFAULTS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


@dataclass(frozen=True, slots=True)
class Loaded:
    core: EngineCore
    tokenizer: Tokenizer
    template: ChatTemplate
    info: ModelInfo


def load(config: EngineConfig, progress: Progress | None = None) -> Loaded:
    """See `load_engine`."""
    report = progress or (lambda stage, done, total: None)
    report("checkpoint", 0, 0)
    checkpoint = open_checkpoint(config.model, config.load_format, seed=config.seed)
    try:
        report("tokenizer", 0, 0)
        tokenizer, template = _text(checkpoint, config)
        backend = open_backend(config.device)
        try:
            return _build(checkpoint, tokenizer, template, backend, config, report)
        except BaseException:
            backend.close()
            raise
    finally:
        checkpoint.source.close()


def open_text(config: EngineConfig) -> tuple[Tokenizer, ChatTemplate]:
    """See `load_text`."""
    checkpoint = open_checkpoint(config.model, config.load_format, seed=config.seed)
    try:
        return _text(checkpoint, config)
    finally:
        checkpoint.source.close()


def _build(
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    backend: GpuBackend,
    config: EngineConfig,
    report: Progress,
) -> Loaded:
    model_config, device = checkpoint.config, backend.properties.kind
    warnings: list[str] = []
    dtype = _dtype(config, model_config.dtype, device, warnings)
    vocab = min(model_config.vocab_size, tokenizer.vocab_size)
    generation = _generation_config(checkpoint, config)
    defaults = _sampling_defaults(generation, config)
    plan = plan_memory(model_config, config, dtype, device, backend.memory_info())
    warnings += plan.warnings
    options = ModelOptions(
        max_num_seqs=plan.max_num_seqs,
        max_num_batched_tokens=plan.max_num_batched_tokens,
        max_model_len=plan.max_model_len,
        num_blocks=plan.num_blocks,
        valid_vocab=vocab,
        dtype=dtype,
        page_size=plan.block_size,
        enforce_eager=config.enforce_eager,
        batch_invariant=config.batch_invariant,
    )
    model = build_model(backend, model_config, checkpoint.source, options, lambda done, total: report("weights", done, total))
    resolved = _resolve(config, plan, dtype, device)
    # Ids that no token has would be out of bounds in the sampler's lists.
    eos = {*model_config.eos_token_ids, *tokenizer.eos_token_ids, *_ids(generation.get("eos_token_id"))}
    info = ModelInfo(
        name=config.model or bundled_model().name,
        architecture=model_config.architecture,
        dtype=dtype.name,
        device=device if device == "host" else backend.properties.name,
        max_model_len=plan.max_model_len,
        vocab_size=vocab,
        eos_token_ids=sorted(i for i in eos if 0 <= i < vocab),
        sampling_defaults=defaults,
        max_num_seqs=plan.max_num_seqs,
        kv_tokens=plan.kv_tokens,
        weight_bytes=plan.weight_bytes,
        lines=plan.lines() + resolved.lines(),
        warnings=warnings,
    )
    return Loaded(EngineCore(model, resolved, on_close=backend.close), tokenizer, template, info)


def _text(checkpoint: Checkpoint, config: EngineConfig) -> tuple[Tokenizer, ChatTemplate]:
    folder = checkpoint.folder if config.tokenizer is None else Path(config.tokenizer).expanduser()
    if folder is not None:
        tokenizer = Tokenizer.from_folder(folder)
        return tokenizer, ChatTemplate.from_folder(folder, tokenizer)
    metadata = checkpoint.gguf or {}
    tokenizer = Tokenizer.from_gguf(metadata)
    return tokenizer, ChatTemplate.from_gguf(metadata, tokenizer)


def _dtype(config: EngineConfig, stored: str, device: str, warnings: list[str]) -> DType:
    """The host computes in float32 whatever the checkpoint holds: processors have no quick bf16."""
    if device == "host":
        if config.dtype not in ("auto", "float32"):
            warnings.append(f"dtype {config.dtype} was asked for; the host backend computes in float32")
        return by_name("float32")
    return by_name(stored if config.dtype == "auto" else config.dtype)


def _generation_config(checkpoint: Checkpoint, config: EngineConfig) -> dict[str, Any]:
    """The defaults that hold: of the model, of a folder, or none, under the overrides."""
    where = config.generation_config
    if where == "auto":
        found: dict[str, Any] = dict(checkpoint.generation_config)
    elif where == "vllm":
        found = {}
    else:
        found = dict(read_json(Path(where).expanduser() / "generation_config.json"))
    return found | config.override_generation_config


def _sampling_defaults(generation: dict[str, Any], config: EngineConfig) -> dict[str, float | int]:
    given = {ours: generation[theirs] for theirs, ours in _DEFAULTS.items() if generation.get(theirs) is not None}
    try:
        checked = SamplingParams(**given)
    except RequestError as error:
        raise LoadError(f"generation_config ({config.generation_config}): {error}") from None
    return {name: getattr(checked, name) for name in given}


def _ids(value: Any) -> Iterable[int]:
    """Eos of a generation_config: none, one or several."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(i) is int for i in ids):
        raise LoadError(f"generation_config: eos_token_id must be an id or a list of ids, got {value!r}")
    return ids


def _resolve(config: EngineConfig, plan: MemoryPlan, dtype: DType, device: str) -> EngineConfig:
    return replace(
        config,
        model=config.model or bundled_model().name,
        device=device,
        dtype=dtype.name,
        max_model_len=plan.max_model_len,
        max_num_seqs=plan.max_num_seqs,
        max_num_batched_tokens=plan.max_num_batched_tokens,
        async_scheduling=device == "cuda" if config.async_scheduling is None else config.async_scheduling,
        debug=debug_enabled() if config.debug is None else config.debug,
    )
