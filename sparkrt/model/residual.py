"""`Residual`: the stream that layers read from and add to, owned by the model.

Layers never touch it directly. A highway of several float32 streams (hyper-connections) is another `Residual`, not another
layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from sparkrt.model.context import ForwardContext
    from sparkrt.model.weight import Linear, Norm
    from sparkrt.runtime.array import DeviceArray


class Residual(Protocol):
    """A sub-layer calls `project` once, then `target` once."""

    def begin(self, ctx: ForwardContext) -> DeviceArray:
        """Start a forward; returns where the embedding [T, H] goes."""

    def project(self, ctx: ForwardContext, norm: Norm, linear: Linear, out: DeviceArray, normed: DeviceArray) -> None:
        """A sub-layer's first projection: its normed input [T, H] goes to `normed`, the product with `linear` to `out`."""

    def target(self, ctx: ForwardContext) -> DeviceArray:
        """What the sub-layer adds its result [T, H] to."""

    def head(self, ctx: ForwardContext, norm: Norm, out: DeviceArray) -> None:
        """The final normed hidden states, [T, H]."""


class PlainResidual:
    """One stream, which sub-layers add to: a norm and an addition a sub-layer are parts of its projections' kernels."""

    def __init__(self) -> None:
        self._stream: DeviceArray | None = None

    def begin(self, ctx: ForwardContext) -> DeviceArray:
        self._stream = ctx.buffer("residual", ctx.tokens, ctx.hidden_size)
        return self._stream

    def project(self, ctx: ForwardContext, norm: Norm, linear: Linear, out: DeviceArray, normed: DeviceArray) -> None:
        linear.of_norm(ctx, out, normed, self.target(ctx), norm)

    def target(self, ctx: ForwardContext) -> DeviceArray:
        assert self._stream is not None, "begin comes first"
        return self._stream

    def head(self, ctx: ForwardContext, norm: Norm, out: DeviceArray) -> None:
        norm(ctx, out, self.target(ctx))
