"""`EngineConfig`: one object holds every choice, first as asked for, then resolved; it is printed at start, nothing hides."""

from __future__ import annotations  # and little more: `--help` and `import sparkrt` must not load NumPy

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkrt.errors import LoadError

if TYPE_CHECKING:
    from sparkrt.engine.core import EngineCore
    from sparkrt.engine.messages import ModelInfo
    from sparkrt.model.checkpoint import Checkpoint
    from sparkrt.text.template import ChatTemplate
    from sparkrt.text.tokenizer import Tokenizer

DTYPES = ("auto", "float32", "bfloat16", "float16")
LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
DEVICES = ("auto", "host", "cuda")
BLOCK_SIZES = (16, 32, 64)
SCHEDULING_POLICIES = ("fcfs", "priority")
_CHOICES = {"device": DEVICES, "dtype": DTYPES, "load_format": LOAD_FORMATS, "block_size": BLOCK_SIZES}
_CHOICES |= {"scheduling_policy": SCHEDULING_POLICIES}
_COUNTS = ("state_cache_slots", "max_num_seqs", "max_num_batched_tokens", "num_gpu_blocks_override", "kv_cache_memory_bytes")
# What scripts for other engines pass and we can ignore as long as it asks for nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = dict.fromkeys(("tensor_parallel_size", "pipeline_parallel_size"), (None, 1))
_NEUTRAL |= {"quantization": (None,), "revision": (None,), "disable_log_stats": (None, True, False)}
_NEUTRAL |= {"trust_remote_code": (None, False), "enable_chunked_prefill": (None, True)}

Progress = Callable[[str, int, int], None]
"""`progress(stage, done, total)`; total 0 when it is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Options under the field's names. None and "auto" are resolved by `load_engine` against model and machine.

    Raises LoadError naming the option for a value that cannot be. Lengths are tokens; "32k" is 32,000 and "32K" 32,768.
    """

    model: str | None = None  # folder, GGUF file or hub id; None: the bundled model
    tokenizer: str | None = None  # where another one than the model's lies
    device: str = "auto"
    dtype: str = "auto"
    load_format: str = "auto"
    max_model_len: int | str | None = None  # None: the model's, "auto" (or -1): the largest that fits
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int = 64
    num_gpu_blocks_override: int | None = None  # KV blocks, on whatever device
    gpu_memory_utilization: float = 0.92
    kv_cache_memory_bytes: int | None = None
    seed: int = 0
    generation_config: str = "auto"  # "auto": the model's defaults, "vllm": none, or a folder
    override_generation_config: dict[str, Any] = field(default_factory=dict)
    enforce_eager: bool = False
    batch_invariant: bool = False
    async_scheduling: bool | None = None  # launch a step before the last is read; None: on a GPU
    enable_prefix_caching: bool = True  # prompts that begin as earlier ones did, begin where those differ
    state_cache_slots: int | None = None  # snapshots of recurrent state that the prefix cache may keep
    kv_offloading_size: float | None = None  # GiB of host memory for what the prefix cache evicts; None: none
    kv_offloading_dir: str | None = None  # a folder for what is to outlive the process,
    kv_offloading_disk_size: float | None = None  # and GiB that it may take
    scheduling_policy: str = "fcfs"  # or "priority": requests of a lower `priority` first, others give way
    max_num_queued_reqs: int | None = None  # that may wait, beyond those that run; None: any number
    request_timeout: float | None = None  # s from arrival to the last token; a request that takes longer ends with an error
    enable_sleep_mode: bool = False  # let the model be put to sleep: its memory given back, and taken again
    nvtx: bool = False  # name layers and operators for a profiler
    debug: bool | None = None  # check integrity whenever the engine is idle; None: if SPARKRT_DEBUG is set

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            if (value := getattr(self, name)) not in allowed:
                raise LoadError(f"{name} must be one of {', '.join(map(str, allowed))}, got {value!r}")
        for name in ("max_model_len", *_COUNTS):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, number := _number(name, value))
                if number == "auto" and name in _COUNTS:
                    raise LoadError(f"{name} must be a positive number, got {value!r}")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise LoadError(f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization}")
        for name in ("kv_offloading_size", "kv_offloading_disk_size"):
            if (size := getattr(self, name)) is not None and not (isinstance(size, (int, float)) and 0.0 <= size < 2**20):
                raise LoadError(f"{name} must be a number of GiB, got {size!r}")
            object.__setattr__(self, name, size or None)
        for name, other in (
            ("kv_offloading_dir", "kv_offloading_disk_size"),
            ("kv_offloading_disk_size", "kv_offloading_dir"),
            ("kv_offloading_dir", "kv_offloading_size"),
        ):
            if getattr(self, name) is not None and getattr(self, other) is None:
                raise LoadError(f"{name} needs {other}, too")
        if self.kv_offloading_size is not None and not self.enable_prefix_caching:
            raise LoadError("kv_offloading_size has nothing to keep without enable_prefix_caching")
        if self.request_timeout is not None and not self.request_timeout > 0.0:
            raise LoadError(f"request_timeout must be a number of seconds above 0, got {self.request_timeout}")
        if self.max_num_queued_reqs is not None and self.max_num_queued_reqs < 0:
            raise LoadError(f"max_num_queued_reqs must be 0 or more, got {self.max_num_queued_reqs}")

    @classmethod
    def from_options(cls, **options: Any) -> EngineConfig:
        """From keyword arguments as scripts for other engines carry them. Raises LoadError for an unknown or unsupported one."""
        for name, neutral in _NEUTRAL.items():
            if name in options and options.pop(name) not in neutral:
                raise LoadError(f"{name} is not supported yet: leave it out")
        known = {f.name for f in fields(cls)}
        if unknown := sorted(set(options) - known):
            raise LoadError(f"unknown option {unknown[0]!r}; known are {', '.join(sorted(known))}")
        return cls(**options)

    def lines(self) -> list[tuple[str, str]]:
        """(option, value) pairs to print beside the model's name; those that ask for nothing are left out."""
        values = ((f.name, getattr(self, f.name)) for f in fields(self) if f.name != "model")
        return [(name, str(value)) for name, value in values if value is not None and value != {}]


def _number(name: str, value: Any) -> int | str:
    """A positive number of tokens or bytes: an int, or text such as "4096", "32k", "32K", "1M"; "auto" and -1 mean auto."""
    number = value
    if isinstance(value, str):
        text = value.strip()
        scale = {"k": 1000, "K": 1024, "m": 10**6, "M": 1024**2, "g": 10**9, "G": 1024**3}.get(text[-1:], 1)
        try:
            number = -1 if text == "auto" else int(float(text[:-1] if scale > 1 else text) * scale)
        except (ValueError, OverflowError):
            number = 0
    if isinstance(number, bool) or not isinstance(number, int) or not (number == -1 or 0 < number < 2**48):
        raise LoadError(f"{name} must be a positive number (or text such as 4096 or 32k), got {value!r}")
    return "auto" if number == -1 else number


def load_engine(config: EngineConfig, progress: Progress | None = None) -> tuple[EngineCore, Tokenizer, ModelInfo]:
    """Open the checkpoint, plan memory, load the weights. LoadError, before anything large is allocated, for what cannot be."""
    from sparkrt.engine.loading import load  # NumPy and everything else come in only here

    core, tokenizer, _, info = load(config, progress, grammars_too=True)
    return core, tokenizer, info


def load_text(config: EngineConfig, checkpoint: Checkpoint | None = None) -> tuple[Tokenizer, ChatTemplate]:
    """The text side of a model, from `checkpoint` if it is open already; without NumPy from a folder. Raises LoadError."""
    from sparkrt.text.template import ChatTemplate
    from sparkrt.text.tokenizer import Tokenizer

    bundled = Path(__file__).parents[1] / "assets" / "sparkrt-tiny"
    path: Path | None = Path(os.path.expanduser(config.tokenizer or config.model or bundled))
    metadata: Mapping[str, Any] = {}
    if config.tokenizer is None and not os.path.isfile(f"{path}/config.json"):  # a GGUF file, or on the hub
        if checkpoint is None:
            from sparkrt.model.checkpoint import open_checkpoint

            checkpoint = open_checkpoint(config.model, "dummy")  # whatever the weights are: they stay closed
        path, metadata = checkpoint.folder, checkpoint.gguf or {}
    tokenizer = Tokenizer.from_gguf(metadata) if path is None else Tokenizer.from_folder(path)
    template = ChatTemplate.from_gguf(metadata, tokenizer) if path is None else ChatTemplate.from_folder(path, tokenizer)
    return tokenizer, template
