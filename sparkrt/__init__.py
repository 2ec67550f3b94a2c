"""sparkrt: a PyTorch-free inference runtime for hybrid language models.

Names are loaded when they are first used, so that `import sparkrt` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparkrt.engine.config import EngineConfig
    from sparkrt.engine.llm import LLM, BatchDecodeLoop, DecodeLoop
    from sparkrt.engine.outputs import CompletionOutput, Logprob, RequestOutput
    from sparkrt.engine.params import SamplingParams
    from sparkrt.errors import CapacityError, EngineFatal, LoadError, RequestError, SparkrtError

__all__ = [
    "LLM",
    "BatchDecodeLoop",
    "CapacityError",
    "CompletionOutput",
    "DecodeLoop",
    "EngineConfig",
    "EngineFatal",
    "LoadError",
    "Logprob",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "SparkrtError",
]

_HOMES = {
    "engine.config": ("EngineConfig",),
    "engine.llm": ("LLM", "BatchDecodeLoop", "DecodeLoop"),
    "engine.outputs": ("CompletionOutput", "Logprob", "RequestOutput"),
    "engine.params": ("SamplingParams",),
    "errors": ("CapacityError", "EngineFatal", "LoadError", "RequestError", "SparkrtError"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'sparkrt' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"sparkrt.{_HOME_OF[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
