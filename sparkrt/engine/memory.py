"""The memory plan: from a model's shape, a machine and wishes to the number of KV blocks, slots and the context length.

A pure function, decided before anything large is allocated. What was asked for and does not fit is cut, with a warning; what
cannot work at all is a LoadError with the numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from sparkrt.cache.paged import KvGroup
from sparkrt.cache.state import StateDims, StatePlan
from sparkrt.engine.config import EngineConfig
from sparkrt.engine.scheduler import CHUNK
from sparkrt.errors import LoadError
from sparkrt.model.config import ModelConfig
from sparkrt.model.spec import expected_tensors
from sparkrt.runtime.backend import MemoryInfo
from sparkrt.runtime.dtypes import DType

HOST_SHARE = 0.25  # of the memory the weights leave, for KV and state: a laptop has other things to do
_DEFAULT_SEQS = {"host": 32, "cuda": 256}
_DEFAULT_TOKENS = {"host": 512, "cuda": 2048}  # a step of 512 tokens is about a third of a second on two cores


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Capacities, and where the bytes go."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    num_blocks: int
    weight_bytes: int
    kv_bytes: int
    state_bytes: int
    step_bytes: int  # activations, logits, sampler tables: an estimate
    free_bytes: int  # before anything of this was taken
    warnings: tuple[str, ...] = ()

    @property
    def kv_tokens(self) -> int:
        return self.num_blocks * self.block_size

    def lines(self) -> list[tuple[str, str]]:
        """(what, how much) pairs to print."""
        return [
            ("weights", _size(self.weight_bytes)),
            ("KV cache", f"{_size(self.kv_bytes)}: {self.num_blocks} blocks of {self.block_size}, {self.kv_tokens} tokens"),
            ("state", f"{_size(self.state_bytes)}: {self.max_num_seqs} slots"),
            ("step", f"{_size(self.step_bytes)}: {self.max_num_batched_tokens} tokens"),
            ("free before", _size(self.free_bytes)),
            ("context", f"{self.max_model_len} tokens"),
        ]


def plan_memory(model: ModelConfig, config: EngineConfig, dtype: DType, device: str, memory: MemoryInfo) -> MemoryPlan:
    """`device` is "host" or "cuda". Raises LoadError when the model cannot run in `memory`."""
    warnings: list[str] = []
    length = _context(model, config, warnings)
    slots = config.max_num_seqs or _DEFAULT_SEQS[device]
    tokens = config.max_num_batched_tokens or _DEFAULT_TOKENS[device]
    weights = weight_bytes(model, dtype)
    room = memory.free - weights
    if device == "cuda":
        room = int(memory.total * config.gpu_memory_utilization) - (memory.total - memory.free) - weights
    if room <= 0:
        raise LoadError(
            f"the weights need {_size(weights)} as {dtype}, {_size(memory.free)} of {_size(memory.total)} are free: "
            "use a smaller model or free memory"
        )

    # State first: without a slot nothing runs. It may take half of what KV and state share.
    state = StatePlan(len(model.gdn_layers), 0, _state_dims(model), dtype)
    share = int(room * (HOST_SHARE if device == "host" else 1.0))
    per_slot = state.nbytes + _sampler_bytes(model)  # `slots=0` counts one row: the dummy
    most = max(share // 2 // per_slot - 1, 1)
    if slots > most:
        if config.max_num_seqs is not None:
            warnings.append(f"max_num_seqs {slots} needs {_size(slots * per_slot)} of state: cut to {most}")
        slots = most
    state_bytes = (slots + 1) * state.nbytes
    step = _step_bytes(model, max(tokens, CHUNK) + 2 * slots, slots, dtype) + (slots + 1) * _sampler_bytes(model)

    group = KvGroup(model.attention_layers, dtype, model.attention.num_kv_heads, model.attention.head_dim, config.block_size)
    useful = slots * group.blocks_for(length)
    if (blocks := config.num_gpu_blocks_override) is None:
        budget = config.kv_cache_memory_bytes
        if budget is None:
            budget = share - state_bytes - (step if device == "cuda" else 0)
        blocks = useful if not group.block_bytes else min(budget // group.block_bytes - 1, useful)
    if blocks < 1:
        raise LoadError(
            f"no room for a KV cache: {_size(memory.free)} are free, weights take {_size(weights)}, state {_size(state_bytes)}, "
            f"a step {_size(step)}, and one block {_size(group.block_bytes)}"
        )
    if length > blocks * config.block_size:
        fits = blocks * config.block_size
        if config.max_model_len != "auto":
            warnings.append(f"the KV cache holds {fits} tokens: max_model_len is cut from {length} to {fits}")
        length = fits
    return MemoryPlan(
        max_num_seqs=slots,
        max_num_batched_tokens=tokens,
        max_model_len=length,
        block_size=config.block_size,
        num_blocks=blocks,
        weight_bytes=weights,
        kv_bytes=group.nbytes(blocks),
        state_bytes=state_bytes,
        step_bytes=step,
        free_bytes=memory.free,
        warnings=tuple(warnings),
    )


def weight_bytes(model: ModelConfig, dtype: DType) -> int:
    """Of the placed weights; a tied head is placed a second time in the packing of a product."""
    elements = sum(prod(shape) for shape in expected_tensors(model).values())
    if model.tie_word_embeddings:
        elements += model.vocab_size * model.hidden_size
    return elements * dtype.itemsize


def _context(model: ModelConfig, config: EngineConfig, warnings: list[str]) -> int:
    asked = config.max_model_len
    if not isinstance(asked, int):
        return model.max_position
    if asked > model.max_position:
        warnings.append(f"max_model_len {asked} is beyond the model's {model.max_position} positions: cut to that")
    return min(asked, model.max_position)


def _state_dims(model: ModelConfig) -> StateDims:
    g = model.gdn
    return StateDims(0, 0, 0, 0) if g is None else StateDims(g.num_v_heads, g.v_dim, g.k_dim, g.conv_channels)


def _sampler_bytes(model: ModelConfig) -> int:
    """Of one slot: counts (int32) and a mask bit per vocabulary entry."""
    return model.vocab_size * 4 + model.vocab_size // 8


def _step_bytes(model: ModelConfig, tokens: int, slots: int, dtype: DType) -> int:
    """Buffers of the largest step: the residual and its norm, the widest projections, rows of logits."""
    a, hidden = model.attention, model.hidden_size
    widest = (a.num_heads * (2 if a.gated else 1) + 2 * a.num_kv_heads) * a.head_dim + a.num_heads * a.head_dim
    if model.gdn is not None:
        widest = max(widest, 2 * model.gdn.conv_channels + 2 * model.gdn.value_size)
    mlp = 3 * model.intermediate_size
    if model.moe is not None:
        mlp = max(mlp, 3 * model.moe.shared_intermediate_size + model.moe.num_experts + 4 * model.moe.top_k)
    return tokens * (3 * hidden + widest + mlp) * dtype.itemsize + (slots + CHUNK) * model.vocab_size * 4


def _size(nbytes: int) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= scale:
            return f"{nbytes / scale:.2f} {unit}"
    return f"{nbytes} B"
