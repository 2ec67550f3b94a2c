"""`EngineConfig`: one object holds every choice, first as asked for, then resolved; it is printed at start, nothing hides.

Imports little: `--help` and `import sparkrt` must not load NumPy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from sparkrt.errors import LoadError

if TYPE_CHECKING:
    from sparkrt.engine.core import EngineCore
    from sparkrt.engine.messages import ModelInfo
    from sparkrt.text.template import ChatTemplate
    from sparkrt.text.tokenizer import Tokenizer

DTYPES = ("auto", "float32", "bfloat16", "float16")
LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
DEVICES = ("auto", "host", "cuda")
BLOCK_SIZES = (16, 32, 64)

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
    debug: bool | None = None  # check integrity whenever the engine is idle; None: if SPARKRT_DEBUG is set

    def __post_init__(self) -> None:
        for name, allowed in (("device", DEVICES), ("dtype", DTYPES), ("load_format", LOAD_FORMATS), ("block_size", BLOCK_SIZES)):
            if (value := getattr(self, name)) not in allowed:
                raise LoadError(f"{name} must be one of {', '.join(map(str, allowed))}, got {value!r}")
        if self.max_model_len is not None:
            object.__setattr__(self, "max_model_len", _length("max_model_len", self.max_model_len))
        for name in ("max_num_seqs", "max_num_batched_tokens", "num_gpu_blocks_override", "kv_cache_memory_bytes"):
            if (value := getattr(self, name)) is not None:
                if value == "auto" or (parsed := _length(name, value)) == "auto":
                    raise LoadError(f"{name} must be a positive number, got {value!r}")
                object.__setattr__(self, name, parsed)
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise LoadError(f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization}")

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
        """(option, value) pairs to print; those that ask for nothing are left out."""
        values = ((f.name, getattr(self, f.name)) for f in fields(self))
        return [(name, str(value)) for name, value in values if value is not None and value != {}]


# What other engines take and we can ignore as long as it asks for nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "tensor_parallel_size": (None, 1),
    "pipeline_parallel_size": (None, 1),
    "quantization": (None,),
    "trust_remote_code": (None, False),
    "revision": (None,),
    "disable_log_stats": (None, True, False),
    "enable_chunked_prefill": (None, True),
    "enable_prefix_caching": (None, False),
}


def _length(name: str, value: Any) -> int | str:
    """A positive number of tokens or bytes: an int, or text such as "4096", "32k", "32K", "1M"; "auto" and -1 mean auto."""
    number = value
    if isinstance(value, str):
        text = value.strip()
        scale = {"k": 1000, "K": 1024, "m": 10**6, "M": 1024**2, "g": 10**9, "G": 1024**3}.get(text[-1:], 1)
        if text == "auto":
            return "auto"
        try:
            number = int(float(text[:-1] if scale > 1 else text) * scale)
        except (ValueError, OverflowError):
            number = 0
    if number == -1 and not isinstance(value, bool):
        return "auto"
    if isinstance(number, bool) or not isinstance(number, int) or not 0 < number < 2**48:
        raise LoadError(f"{name} must be a positive number (or text such as 4096 or 32k), got {value!r}")
    return number


def load_engine(config: EngineConfig, progress: Progress | None = None) -> tuple[EngineCore, Tokenizer, ModelInfo]:
    """Open the checkpoint, plan memory, load the weights. The core's `config` is the resolved one.

    Raises LoadError for what cannot be served, before anything large is allocated where possible.
    """
    from sparkrt.engine.loading import load  # NumPy and everything else come in only here

    loaded = load(config, progress)
    return loaded.core, loaded.tokenizer, loaded.info


def load_text(config: EngineConfig) -> tuple[Tokenizer, ChatTemplate]:
    """Only the text side of a model, for a process that does not compute. Raises LoadError."""
    from sparkrt.engine.loading import open_text

    return open_text(config)
