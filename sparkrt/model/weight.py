"""Weights as the layers see them: what a matrix is (`Weight`), and the three things made of weights.

`Linear`, `Experts` and `Embedding` are built from row segments, each with its own format, so that FP8 q,k,v,z can sit beside
BF16 b,a in one projection. Every one of them has a delta slot, which LoRA fills.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from sparkrt.ops.embedding import EMBEDDING
from sparkrt.ops.linear import ADD_LINEAR, LINEAR, LINEAR_INVARIANT, NORM_LINEAR
from sparkrt.ops.moe import MOE_EXPERTS
from sparkrt.ops.norm import ADD, RMS_NORM
from sparkrt.runtime import dtypes
from sparkrt.runtime.array import DeviceArray
from sparkrt.runtime.dtypes import DType

if TYPE_CHECKING:
    from sparkrt.model.context import ForwardContext
    from sparkrt.runtime.owner import Owner
    from sparkrt.runtime.staging import Staging


@dataclass(frozen=True, slots=True)
class Weight:
    """A matrix on the device: what it means (`shape`, rows by columns) apart from how it is stored.

    `packing` "nk" is row-major as in checkpoints; "kn" is its transpose, which the host's BLAS prefers; kernels may add their
    own. `scales` belongs to quantized formats.
    """

    shape: tuple[int, ...]
    format: DType
    payload: DeviceArray
    packing: str = "nk"
    scales: DeviceArray | None = None


class Delta(Protocol):
    """What a delta slot holds (LoRA): adds its part of the product to `out`, given the materialized input."""

    def add(self, ctx: ForwardContext, out: DeviceArray, x: DeviceArray) -> None: ...


@dataclass(frozen=True, slots=True)
class WeightPlacer:
    """Turns logical matrices into device weights in the format and packing that the backend computes with.

    They are there once `staging` is flushed.
    """

    owner: Owner
    staging: Staging
    dtype: DType
    batch_invariant: bool = False

    @property
    def packing(self) -> str:
        return "kn" if self.owner.backend.properties.kind == "host" else "nk"

    def array(self, values: np.ndarray, label: str, dtype: DType = dtypes.float32) -> DeviceArray:
        """Place values as they are. float32 unless told: a norm weight stored near 0 loses digits in bf16."""
        array = self.owner.empty(values.shape, dtype, label)
        self.staging.copy(array, values)
        return array

    def matrix(self, parts: Sequence[np.ndarray], label: str) -> Weight:
        """Place [..., N, K] (a matrix, or one per expert); several become one, the rows (or experts) of one after the other's."""
        if self.packing == "kn" or len(parts) == 1:
            values = np.concatenate(parts) if len(parts) > 1 else parts[0]
            payload = self.array(values.swapaxes(-1, -2) if self.packing == "kn" else values, label, self.dtype)
            return Weight(values.shape, self.dtype, payload, self.packing)
        shape, at = (sum(len(part) for part in parts), *parts[0].shape[1:]), 0
        payload = self.owner.empty(shape, self.dtype, label)
        for part in parts:
            self.staging.copy(payload.rows(at, at + len(part)), part)
            at += len(part)
        return Weight(shape, self.dtype, payload)

    def linear(self, parts: Sequence[np.ndarray], label: str, bias: Sequence[np.ndarray | None] = (), axis: int = 0) -> Linear:
        """One projection whose output columns are those of `parts` in order; parts of one format become one segment."""
        joined = None
        if any(b is not None for b in bias):
            columns = [np.zeros(p.shape[0], np.float32) if b is None else b for p, b in zip(parts, bias, strict=True)]
            joined = self.array(np.concatenate(columns), f"{label}.bias", self.dtype)
        return Linear([Segment(self.matrix(parts, label), joined)], self.batch_invariant, axis)


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive output rows of a projection that share a format."""

    weight: Weight
    bias: DeviceArray | None = None

    @property
    def rows(self) -> int:
        return self.weight.shape[0]


@dataclass(slots=True)
class Linear:
    """out[T, N] = x[T, K] · Wᵀ + b, N the sum of the segments' rows.

    Over several ranks `shard_axis` 0 splits output rows, which each rank keeps to itself, 1 input columns: partial products,
    summed over the ranks.
    """

    segments: list[Segment]
    batch_invariant: bool = False
    shard_axis: int = 0
    delta: Delta | None = None

    @property
    def on_device(self) -> bool:
        return self.segments[0].weight.packing == "nk"

    @property
    def out_features(self) -> int:
        return sum(s.rows for s in self.segments)

    def __call__(self, ctx: ForwardContext, out: DeviceArray, x: DeviceArray) -> None:
        op = LINEAR_INVARIANT if self.batch_invariant else LINEAR
        column = 0
        for segment in self.segments:
            whole = len(self.segments) == 1
            # An array is contiguous, a range of columns is not: one of several segments goes through scratch.
            part = out if whole else ctx.buffer("segment", x.shape[0], segment.rows)
            ctx.launch(op, part, x, segment.weight.payload, segment.bias)
            if not whole:
                width, pitch = segment.rows * out.dtype.itemsize, out.shape[1] * out.dtype.itemsize
                target = out.ptr.offset(column * out.dtype.itemsize)
                ctx.backend.copy_d2d_2d(target, pitch, part.ptr, width, width, x.shape[0], ctx.stream)
                column += segment.rows
        if self.delta is not None:
            self.delta.add(ctx, out, x)
        if self.shard_axis == 1:
            ctx.comm.all_reduce(out, ctx.stream)

    def of_norm(self, ctx: ForwardContext, out: DeviceArray, normed: DeviceArray, x: DeviceArray, norm: Norm) -> None:
        """normed = norm(x), out = normed[T, K] · Wᵀ + b: one kernel for few rows, where nothing needs the rows in between."""
        if len(self.segments) > 1 or self.delta is not None or self.shard_axis == 1:
            norm(ctx, normed, x)
            self(ctx, out, normed)
            return
        (segment,) = self.segments
        weights = (norm.weight, segment.weight.payload, segment.bias)
        ctx.launch(NORM_LINEAR, out, normed, x, *weights, norm.eps, norm.offset, int(self.batch_invariant))

    def add_to(self, ctx: ForwardContext, residual: DeviceArray, x: DeviceArray) -> None:
        """residual[T, N] += x · Wᵀ + b. Partial products of several ranks are summed before they are added."""
        if len(self.segments) > 1 or (self.shard_axis == 1 and ctx.comm.world > 1):
            delta = ctx.buffer("delta", *residual.shape)
            self(ctx, delta, x)
            ctx.launch(ADD, residual, delta)
            return
        (segment,) = self.segments
        ctx.launch(ADD_LINEAR, residual, x, segment.weight.payload, segment.bias, int(self.batch_invariant))
        if self.delta is not None:
            self.delta.add(ctx, residual, x)


@dataclass(slots=True)
class Experts:
    """SwiGLU experts: gate_up [E, 2F, H] (gate rows first), down [E, H, F]. A call adds to `out`."""

    gate_up: Weight
    down: Weight
    batch_invariant: bool = False
    delta: Delta | None = None

    @property
    def on_device(self) -> bool:
        """Kernels sort tokens by expert in a workspace; the host needs none."""
        return self.gate_up.packing == "nk"

    def __call__(
        self,
        ctx: ForwardContext,
        out: DeviceArray,
        x: DeviceArray,
        ids: DeviceArray,
        weights: DeviceArray,
        workspace: DeviceArray | None,
    ) -> None:
        invariant = int(self.batch_invariant)
        ctx.launch(MOE_EXPERTS, out, x, self.gate_up.payload, self.down.payload, ids, weights, workspace, invariant)
        if self.delta is not None:
            self.delta.add(ctx, out, x)


@dataclass(slots=True)
class Embedding:
    """Token table [V, H], always row-major: a gather reads rows."""

    table: DeviceArray
    delta: Delta | None = None

    def __call__(self, ctx: ForwardContext, out: DeviceArray, ids: DeviceArray) -> None:
        ctx.launch(EMBEDDING, out, ids, self.table)
        if self.delta is not None:
            self.delta.add(ctx, out, ids)


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMSNorm weight with its epsilon and offset (1 for zero-centred weights)."""

    weight: DeviceArray
    eps: float
    offset: float = 0.0

    def __call__(self, ctx: ForwardContext, out: DeviceArray, x: DeviceArray) -> None:
        ctx.launch(RMS_NORM, out, x, self.weight, self.eps, self.offset)
