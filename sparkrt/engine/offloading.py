"""What is decided at start about spilling the prefix cache: how much memory, whose pages these are, and what they are worth."""

from __future__ import annotations

import os
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from math import prod
from pathlib import Path

from sparkrt.cache.spill import Costs, SpillOptions
from sparkrt.engine.config import EngineConfig
from sparkrt.errors import LoadError
from sparkrt.model.checkpoint import Checkpoint
from sparkrt.model.config import ModelConfig
from sparkrt.model.spec import expected_tensors
from sparkrt.runtime import machine

_GIB = 1 << 30
_FLOPS = {"cuda": 300e12, "host": 40e9}  # of prefill: an H200 in bf16 (0.6B: 3.0 us a token), and two cores in float32
_BUS = {"cuda": 50e9, "host": 5e9}  # bytes a second between device and host memory


def spill_options(checkpoint: Checkpoint, config: EngineConfig, device: str) -> SpillOptions | None:
    """None where nothing is to be spilled. `config` is resolved; `device` is the name of the one that computes.

    Raises LoadError when the machine has not that much memory.
    """
    if config.kv_offloading_size is None or not config.enable_prefix_caching:
        return None
    size, free = int(config.kv_offloading_size * _GIB), machine.available_memory()
    if size > free:
        text = f"kv_offloading_size {config.kv_offloading_size:g}: {size / _GIB:.1f} GiB of host memory are wanted"
        raise LoadError(f"{text}, {free / _GIB:.1f} are free")
    costs = Costs(2 * active_weights(checkpoint.config) / _FLOPS[config.device], 1 / _BUS[config.device])
    if config.kv_offloading_dir is None:
        return SpillOptions(host_bytes=size, model=os.urandom(32), costs=costs)
    folder, disk = Path(config.kv_offloading_dir).expanduser(), int((config.kv_offloading_disk_size or 0) * _GIB)
    model = fingerprint(checkpoint, config, device)
    return SpillOptions(host_bytes=size, model=model, costs=costs, folder=folder, disk_bytes=disk)


def fingerprint(checkpoint: Checkpoint, config: EngineConfig, device: str) -> bytes:
    """32 bytes that differ whenever a page may hold something else: by weights, dtype, page size, kernels, device."""
    try:
        program = version("sparkrt")
    except PackageNotFoundError:
        program = "source"
    rules = (program, device, config.dtype, config.block_size, config.batch_invariant, config.enforce_eager)
    told = repr((rules, checkpoint.config, checkpoint.source.identity()))
    return blake2b(told.encode(), digest_size=32).digest()


def active_weights(model: ModelConfig) -> float:
    """How many weights a token of a prompt is multiplied with."""
    share = 1.0 if model.moe is None else model.moe.top_k / model.moe.num_experts
    shapes = {name: shape for name, shape in expected_tensors(model).items() if name not in ("embed", "lm_head")}
    return sum(prod(shape) * (share if name.endswith(("moe.gate_up", "moe.down")) else 1.0) for name, shape in shapes.items())
