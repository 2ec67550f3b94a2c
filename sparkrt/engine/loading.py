"""From an `EngineConfig` to a running core: checkpoint, text, memory plan, weights; every "auto" gets its value here."""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from threading import Thread
from typing import Any

from sparkrt.cache.paged import KvGroup
from sparkrt.cache.shuttle import staging_bytes
from sparkrt.cache.state import StateDims, StatePlan
from sparkrt.engine.config import EngineConfig, Progress, load_text
from sparkrt.engine.core import EngineCore
from sparkrt.engine.job import CHUNK
from sparkrt.engine.messages import ModelInfo
from sparkrt.engine.offloading import spill_options
from sparkrt.engine.params import SamplingParams
from sparkrt.errors import LoadError, RequestError
from sparkrt.model.build import build_model, reload_weights
from sparkrt.model.checkpoint import Checkpoint, bundled_model, open_checkpoint
from sparkrt.model.config import ModelConfig
from sparkrt.model.keys import read_json
from sparkrt.model.model import ModelOptions
from sparkrt.model.nvtx import annotate_model
from sparkrt.model.sleeper import Sleeper
from sparkrt.model.spec import expected_tensors
from sparkrt.runtime import GpuBackend, open_backend
from sparkrt.runtime.backend import MemoryInfo
from sparkrt.runtime.dtypes import DType, by_name
from sparkrt.runtime.machine import debug_enabled, usable_cores
from sparkrt.text.grammar import Grammars
from sparkrt.text.template import ChatTemplate
from sparkrt.text.tokenizer import Tokenizer
from sparkrt.text.tools import MARKS

HOST_SHARE = 0.25  # of the memory the weights leave, for KV and state: a laptop has other things to do
SYSTEM_SHARE = 0.125  # of memory that a GPU shares with the processor, left to the system: its own part, page cache, this process
_SNAPSHOT_SHARE = 8  # of the memory for KV and state, the part that snapshots may have
_DEFAULTS = {"host": (32, 512), "cuda": (256, 2048)}  # slots, tokens a step: 512 are a third of a second on two cores
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # of a generation_config, under our names


def load(
    config: EngineConfig, progress: Progress | None = None, grammars_too: bool = False
) -> tuple[EngineCore, Tokenizer, ChatTemplate, ModelInfo]:
    """See `load_engine`. `grammars_too`: the vocabulary is prepared for them, else the first one will have to wait for that."""
    report = progress or (lambda stage, done, total: None)
    report("checkpoint", 0, 0)
    checkpoint = open_checkpoint(config.model, config.load_format, seed=config.seed)
    with closing(checkpoint.source), ExitStack() as undo:
        report("tokenizer", 0, 0)
        tokenizer, template = load_text(config, checkpoint)
        backend = open_backend(config.device, config.enable_sleep_mode)
        undo.callback(backend.close)
        core, info = _build(checkpoint, tokenizer, backend, config, report, grammars_too)
        undo.pop_all()
        return core, tokenizer, template, info


def _build(
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    backend: GpuBackend,
    asked: EngineConfig,
    report: Progress,
    grammars_too: bool,
) -> tuple[EngineCore, ModelInfo]:
    model, device, name = checkpoint.config, backend.properties.kind, asked.model or bundled_model().name
    defaults, eos = _generation_config(checkpoint, asked)
    eos |= {*model.eos_token_ids, *tokenizer.eos_token_ids}
    vocab, warnings = min(model.vocab_size, tokenizer.vocab_size), list[str]()
    dtype = model.dtype if asked.dtype == "auto" else asked.dtype
    if device == "host":  # whatever the checkpoint holds: processors have no quick bf16
        if asked.dtype not in ("auto", "float32"):
            warnings.append(f"dtype {asked.dtype} was asked for; the host backend computes in float32")
        dtype = "float32"
    ahead = device == "cuda" if asked.async_scheduling is None else asked.async_scheduling
    debug = debug_enabled() if asked.debug is None else asked.debug
    config = replace(asked, model=name, device=device, dtype=dtype, async_scheduling=ahead, debug=debug)
    spill = spill_options(checkpoint, config, backend.properties.name)
    plan = plan_memory(model, config, backend.memory_info())
    sizes: dict[str, Any] = {"max_num_seqs": plan.slots, "max_num_batched_tokens": plan.tokens, "max_model_len": plan.length}
    config = replace(config, **sizes)
    sizes |= {"num_blocks": plan.num_blocks, "page_size": config.block_size, "valid_vocab": vocab}
    sizes |= {"prefix_caching": config.enable_prefix_caching, "state_snapshots": plan.snapshots}
    sizes |= {"spill": spill, "enforce_eager": config.enforce_eager, "batch_invariant": config.batch_invariant}
    options = ModelOptions(**sizes, dtype=by_name(dtype))
    ends = sorted(i for i in eos if 0 <= i < vocab)  # others would be out of bounds in the sampler's lists
    shown = [i for i in tokenizer.special_ids if tokenizer.token_str(i) in MARKS]
    threads = min(usable_cores() // 2, 8)  # the other half is the API process's
    grammars = Grammars(tokenizer, model.vocab_size, ends, shown, threads)  # padding included: masks have it, too
    opening = Thread(target=grammars.open, name="grammars", daemon=True)
    if grammars_too:
        opening.start()
    built = build_model(backend, model, checkpoint.source, options, report)
    if grammars_too:
        report("grammars", 0, 0)
        opening.join()
    if config.nvtx:
        annotate_model(built)
    info = ModelInfo(
        name=name,
        architecture=model.architecture,
        dtype=dtype,
        device=device if device == "host" else backend.properties.name,
        max_model_len=plan.length,
        vocab_size=vocab,
        eos_token_ids=ends,
        sampling_defaults=defaults,
        max_num_seqs=plan.slots,
        kv_tokens=plan.num_blocks * config.block_size,
        weight_bytes=plan.weight_bytes,
        lines=[*plan.lines, ("graphs", f"{built.captures} of decode steps of up to {plan.slots} rows"), *config.lines()],
        warnings=warnings + plan.warnings,
    )

    def reload(progress: Progress) -> None:
        again = open_checkpoint(asked.model, asked.load_format, seed=asked.seed)
        with closing(again.source):
            reload_weights(built, again.source, progress)

    sleeper = Sleeper(built, reload) if config.enable_sleep_mode else None
    return EngineCore(built, config, backend.close, grammars, sleeper), info


def _generation_config(checkpoint: Checkpoint, config: EngineConfig) -> tuple[dict[str, float | int], set[int]]:
    """Sampling defaults and eos ids: of the model, of a folder, or none, under the overrides."""
    where = config.generation_config
    found: dict[str, Any] = {} if where == "vllm" else dict(checkpoint.generation_config)
    if where not in ("auto", "vllm"):
        found = dict(read_json(Path(where).expanduser() / "generation_config.json"))
    found |= config.override_generation_config
    given: dict[str, Any] = {"max_tokens": found.get("max_new_tokens")} | {name: found.get(name) for name in _SAMPLING}
    eos = found.get("eos_token_id")
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(type(i) is int for i in ids):
        raise LoadError(f"generation_config: eos_token_id must be an id or a list of ids, got {eos!r}")
    try:
        checked = SamplingParams(**given)
    except RequestError as error:
        raise LoadError(f"generation_config ({where}): {error}") from None
    return {name: getattr(checked, name) for name, value in given.items() if value is not None}, set(ids)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Capacities, and where the bytes go."""

    slots: int
    tokens: int  # a step
    length: int  # of the context
    block_size: int
    num_blocks: int
    snapshots: int  # of recurrent state, for the prefix cache
    weight_bytes: int
    kv_bytes: int
    state_bytes: int
    lines: list[tuple[str, str]]  # (what, how much) pairs to print
    warnings: list[str]


def plan_memory(model: ModelConfig, config: EngineConfig, memory: MemoryInfo) -> MemoryPlan:
    """How many KV blocks, slots and tokens of context. `config` has its device and dtype resolved.

    What was asked for and does not fit is cut, with a warning; what cannot work at all is a LoadError with the numbers.
    """
    dtype, warnings, on_host = by_name(config.dtype), list[str](), config.device == "host"
    asked = config.max_model_len if isinstance(config.max_model_len, int) else model.max_position
    length = min(asked, model.max_position)
    if asked > length:
        warnings.append(f"max_model_len {asked} is beyond the model's {length} positions: cut to that")
    slots, tokens = _DEFAULTS[config.device]
    slots, tokens = config.max_num_seqs or slots, config.max_num_batched_tokens or tokens
    weights = weight_bytes(model, dtype, on_host)
    spared = 0 if on_host else memory.total - int(memory.total * config.gpu_memory_utilization)
    if memory.unified:
        spared = max(spared, int(memory.total * SYSTEM_SHARE))
    room = memory.free - weights - spared
    if room <= 0:
        raise LoadError(
            f"the weights need {_size(weights)} as {dtype}, {_size(memory.free)} of {_size(memory.total)} are free: "
            "use a smaller model or free memory"
        )

    # State first: without a slot nothing runs. It may take half of what KV and state share.
    g, share = model.gdn, int(room * (HOST_SHARE if on_host else 1.0))
    dims = StateDims(0, 0, 0, 0) if g is None else StateDims(g.num_v_heads, g.v_dim, g.k_dim, g.conv_channels)
    per_slot = StatePlan(len(model.gdn_layers), 0, dims, dtype).nbytes  # `slots=0` counts one row: the dummy
    sampler = model.vocab_size * 4 + model.vocab_size // 8  # counts (int32) and a mask bit per vocabulary entry
    most = max(share // 2 // (per_slot + sampler) - 1, 1)
    if slots > most and config.max_num_seqs is not None:
        warnings.append(f"max_num_seqs {slots} needs {_size(slots * (per_slot + sampler))} of state: cut to {most}")
    slots = min(slots, most)
    snapshots = _snapshots(config, slots, share // _SNAPSHOT_SHARE // per_slot) if per_slot else 0
    if per_slot and not snapshots and config.enable_prefix_caching:
        warnings.append("there is no room for snapshots of recurrent state: no prompt will be found in the prefix cache")
    state = (slots + 1 + snapshots) * per_slot
    step = _step_bytes(model, max(tokens, CHUNK) + 2 * slots, slots, dtype) + (slots + 1) * sampler

    group = KvGroup(model.attention_layers, dtype, model.attention.num_kv_heads, model.attention.head_dim, config.block_size)
    if config.kv_offloading_size is not None:
        step += staging_bytes(group.block_bytes, per_slot)
    if (blocks := config.num_gpu_blocks_override) is None:
        blocks = slots * group.blocks_for(length)  # more could never be used
        if (budget := config.kv_cache_memory_bytes) is None:
            budget = share - state - (0 if on_host else step)
        if group.block_bytes:
            blocks = min(budget // group.block_bytes - 1, blocks)
    if blocks < 1:
        raise LoadError(
            f"no room for a KV cache: {_size(memory.free)} are free, weights take {_size(weights)}, state {_size(state)}, "
            f"a step {_size(step)}, and one block {_size(group.block_bytes)}"
        )
    if length > (fits := blocks * config.block_size) and config.max_model_len != "auto":
        warnings.append(f"the KV cache holds {fits} tokens: max_model_len is cut from {length} to {fits}")
    length, kv, free = min(length, fits), group.nbytes(blocks), _size(memory.free)
    pool = f"{_size(kv)}: {blocks} blocks of {config.block_size}, {fits} tokens"
    lines = [("weights", _size(weights)), ("KV cache", pool), ("state", f"{_size(state)}: {slots} slots, {snapshots} snapshots")]
    lines += [("step", f"{_size(step)}: {tokens} tokens"), ("free before", free), ("context", f"{length} tokens")]
    return MemoryPlan(slots, tokens, length, config.block_size, blocks, snapshots, weights, kv, state, lines, warnings)


def _snapshots(config: EngineConfig, slots: int, most: int) -> int:
    """One for every other slot: an answer on its way holds one, a prompt leaves one or two, and sessions come back to those."""
    if not config.enable_prefix_caching:
        return 0
    return config.state_cache_slots or min(max(slots // 2, 4), most)


def weight_bytes(model: ModelConfig, dtype: DType, on_host: bool) -> int:
    """Of the placed weights; on the host a tied head is placed a second time, in the packing of a product."""
    tied = model.vocab_size * model.hidden_size if model.tie_word_embeddings and on_host else 0
    return (sum(prod(shape) for shape in expected_tensors(model).values()) + tied) * dtype.itemsize


def _step_bytes(model: ModelConfig, tokens: int, slots: int, dtype: DType) -> int:
    """Buffers of the largest step: the residual and its norm, the widest projections, rows of logits."""
    a, g, m = model.attention, model.gdn, model.moe
    attention = (a.num_heads * (3 if a.gated else 2) + 2 * a.num_kv_heads) * a.head_dim
    gdn = 2 * g.conv_channels + 2 * g.value_size if g else 0
    mlp = 3 * m.shared_intermediate_size + m.num_experts + 4 * m.top_k if m else 0
    widths = 3 * model.hidden_size + max(attention, gdn) + max(3 * model.intermediate_size, mlp)
    return tokens * widths * dtype.itemsize + (slots + CHUNK) * model.vocab_size * 4


def _size(nbytes: int) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= scale:
            return f"{nbytes / scale:.2f} {unit}"
    return f"{nbytes} B"
