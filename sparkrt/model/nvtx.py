"""NVTX ranges for a profiler: a name around each layer and each operator's launch.

They are seen where launches are: a replayed graph is one launch, so they go with `--enforce-eager`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from sparkrt.errors import LoadError
from sparkrt.model.hybrid import HybridModel
from sparkrt.runtime.backend import Launchable, Stream

if TYPE_CHECKING:
    from sparkrt.model.context import ForwardContext
    from sparkrt.model.layers.layer import TransformerLayer
    from sparkrt.model.residual import Residual

Annotate = Callable[[str], Any]  # a context manager


class _NamedLayer:
    def __init__(self, layer: TransformerLayer, name: str, annotate: Annotate) -> None:
        self._layer, self._name, self._annotate = layer, name, annotate

    def forward(self, ctx: ForwardContext, residual: Residual) -> None:
        with self._annotate(self._name):
            self._layer.forward(ctx, residual)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


def annotate_model(model: HybridModel) -> None:
    """Name the model's layers, and every launch through its backend. LoadError without the `nvtx` package."""
    try:
        annotate: Annotate = import_module("nvtx").annotate
    except ImportError as error:
        raise LoadError("nvtx is not installed: pip install 'sparkrt[nvtx]'") from error
    backend: Any = model.backend
    launch = backend.launch

    def named(op: Launchable, args: Sequence[Any], stream: Stream) -> None:
        with annotate(op.name):
            launch(op, args, stream)

    backend.launch = named
    model.wrap_layers(lambda i, layer: _NamedLayer(layer, f"layer {i} {model.config.layers[i].mixer}", annotate))
