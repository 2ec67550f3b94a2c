"""`Residual`: the stream that layers read from and write to, owned by the model.

Layers never add to it directly. A highway of several float32 streams (hyper-connections) is another `Residual`, not another
layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from sparkrt.ops.norm import ADD_RMS_NORM, RMS_NORM

if TYPE_CHECKING:
    from sparkrt.model.context import ForwardContext
    from sparkrt.model.weight import Norm
    from sparkrt.runtime.array import DeviceArray


class Residual(Protocol):
    def begin(self, ctx: ForwardContext) -> DeviceArray:
        """Start a forward; returns where the embedding [T, H] goes."""

    def read(self, ctx: ForwardContext, norm: Norm, out: DeviceArray) -> None:
        """The normed input of a sub-layer, [T, H]."""

    def write(self, ctx: ForwardContext, delta: DeviceArray) -> None:
        """A sub-layer's output, [T, H]; `delta` must stay untouched until the next read."""

    def head(self, ctx: ForwardContext, norm: Norm, out: DeviceArray) -> None:
        """The final normed hidden states, [T, H]."""


class PlainResidual:
    """x += delta. The addition is left pending and fused into the norm that reads next: one pass over the row instead of two."""

    def __init__(self) -> None:
        self._stream: DeviceArray | None = None
        self._pending: DeviceArray | None = None

    def begin(self, ctx: ForwardContext) -> DeviceArray:
        self._pending = None
        self._stream = ctx.buffer("residual", ctx.tokens, ctx.hidden_size)
        return self._stream

    def read(self, ctx: ForwardContext, norm: Norm, out: DeviceArray) -> None:
        assert self._stream is not None
        if self._pending is None:
            ctx.launch(RMS_NORM, out, self._stream, norm.weight, norm.eps, norm.offset)
        else:
            ctx.launch(ADD_RMS_NORM, out, self._stream, self._pending, norm.weight, norm.eps, norm.offset)
            self._pending = None

    def write(self, ctx: ForwardContext, delta: DeviceArray) -> None:
        assert self._pending is None, "two writes without a read between"
        self._pending = delta

    def head(self, ctx: ForwardContext, norm: Norm, out: DeviceArray) -> None:
        self.read(ctx, norm, out)
