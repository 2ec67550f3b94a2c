"""Gated delta net: one fused projection, causal convolution, gates, the delta rule, gated norm, output projection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparkrt.model.context import F32
from sparkrt.ops.conv import CONV_PREFILL
from sparkrt.ops.gdn import GDN_GATES, GDN_PREFILL, GDN_STEP, workspace_words
from sparkrt.ops.norm import GATED_RMS_NORM
from sparkrt.runtime.dtypes import uint32

if TYPE_CHECKING:
    from sparkrt.model.config import GdnConfig
    from sparkrt.model.context import ForwardContext, Reservation
    from sparkrt.model.residual import Residual
    from sparkrt.model.weight import Linear, Norm
    from sparkrt.runtime.array import DeviceArray


@dataclass(slots=True)
class GatedDeltaNet:
    """`in_proj` columns: q | k | v (the convolved channels) | z | b | a."""

    layer: int
    config: GdnConfig
    in_proj: Linear
    conv: DeviceArray  # [C, 4]
    a_log: DeviceArray  # [HV]
    dt_bias: DeviceArray  # [HV]
    norm: DeviceArray  # [DV]
    out: Linear
    eps: float

    def reserve(self, reservation: Reservation) -> None:
        c = self.config
        reservation.rows("proj", self.in_proj.out_features)
        reservation.rows("conv", c.conv_channels)
        reservation.rows("decay", c.num_v_heads, F32)
        reservation.rows("beta", c.num_v_heads, F32)
        reservation.rows("mixed", c.value_size)
        reservation.rows("gated", c.value_size)
        if self.in_proj.on_device:
            words = workspace_words(reservation.tokens, reservation.sequences, c.num_v_heads)
            reservation.elements("gdn_workspace", words, uint32)

    def forward(self, ctx: ForwardContext, residual: Residual, norm: Norm) -> None:
        c, plan, tokens, decode = self.config, ctx.plan, ctx.tokens, ctx.shape.decode
        proj, gated = ctx.buffer("proj", tokens, self.in_proj.out_features), ctx.buffer("gated", tokens, c.value_size)
        residual.project(ctx, norm, self.in_proj, proj, ctx.buffer("normed", tokens, ctx.hidden_size))
        if decode:
            rows, slots, positions = (a.rows(0, decode) for a in (proj, plan["decode_slots"], plan["positions"]))
            live = ctx.states.dummy_slot + 1  # the last is the one that padding rows have, and that costs nothing
            state, ring = ctx.states.state(self.layer).rows(0, live), ctx.states.ring(self.layer).rows(0, live)
            ctx.launch(
                GDN_STEP,
                *(gated.rows(0, decode), state, ring, rows, self.conv),
                *(self.a_log, self.dt_bias, self.norm, slots, positions, c.num_k_heads, self.eps),
            )
        if ctx.shape.prefill:
            self._prefill(ctx, gated, proj)
        self.out.add_to(ctx, residual.target(ctx), gated)

    def _prefill(self, ctx: ForwardContext, gated: DeviceArray, proj: DeviceArray) -> None:
        c, plan, tokens, n = self.config, ctx.plan, ctx.shape.prefill, ctx.shape.slices
        gated, rows = (a.rows(ctx.shape.decode, ctx.tokens) for a in (gated, proj))
        state, ring = ctx.states.state(self.layer), ctx.states.ring(self.layer)
        qkv, mixed = ctx.buffer("conv", tokens, c.conv_channels), ctx.buffer("mixed", tokens, c.num_v_heads, c.v_dim)
        g, beta = ctx.buffer("decay", tokens, c.num_v_heads), ctx.buffer("beta", tokens, c.num_v_heads)
        slots, starts, cu = plan["prefill_slots"].rows(0, n), plan["prefill_starts"].rows(0, n), plan["prefill_cu"].rows(0, n + 1)
        ctx.launch(GDN_GATES, g, beta, rows, self.a_log, self.dt_bias, c.conv_channels + c.value_size)
        ctx.launch(CONV_PREFILL, qkv, ring, rows, self.conv, slots, cu, starts)
        kept = state.rows(*ctx.states.spare_rows) if ctx.shape.snapshots else None
        ctx.launch(
            GDN_PREFILL,
            *(mixed, state, kept, qkv, g, beta),
            *(slots, cu, starts, kept and plan["snap_rows"], c.num_k_heads, self._workspace(ctx, tokens, n)),
        )
        for row, slot in ctx.shape.snapshots:
            self._keep_ring(ctx, ring.rows(slot, slot + 1), proj, row)
        ctx.launch(GATED_RMS_NORM, gated, mixed, rows, self.norm, c.conv_channels, self.eps)

    def _keep_ring(self, ctx: ForwardContext, to: DeviceArray, proj: DeviceArray, row: int) -> None:
        """The convolution's last inputs before `row`: on a multiple of 64 they fill the ring from its first column on."""
        _, ring, channels = to.shape
        width, pitch = channels * to.dtype.itemsize, proj.shape[1] * proj.dtype.itemsize
        ctx.backend.copy_d2d_2d(to.ptr, width, proj.ptr.offset((row - ring) * pitch), pitch, width, ring, ctx.stream)

    def _workspace(self, ctx: ForwardContext, tokens: int, slices: int) -> DeviceArray | None:
        """Where the prefill kernels keep what a chunk's state does not decide; the host needs none."""
        if not self.in_proj.on_device:
            return None
        return ctx.buffer("gdn_workspace", workspace_words(tokens, slices, self.config.num_v_heads))
