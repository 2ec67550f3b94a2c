"""Attention over the paged cache: one fused projection, q/k norm + RoPE + append, one kernel each for decode and prefill."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparkrt.model.context import F32
from sparkrt.ops.attention import PAGED_ATTENTION_DECODE, PAGED_ATTENTION_PREFILL, SIGMOID_GATE, decode_workspace_words
from sparkrt.ops.qkv import QK_NORM_ROPE_APPEND

if TYPE_CHECKING:
    from sparkrt.model.config import AttentionConfig
    from sparkrt.model.context import ForwardContext, Reservation
    from sparkrt.model.residual import Residual
    from sparkrt.model.weight import Linear, Norm
    from sparkrt.runtime.array import DeviceArray

CAUSAL = 0
FULL = 1


@dataclass(slots=True)
class Attention:
    """`qkv` columns: q (with its gate interleaved per head when gated) | k | v. `rope` is the cos/sin table [max_position, R]."""

    layer: int
    config: AttentionConfig
    qkv: Linear
    out: Linear
    rope: DeviceArray
    q_norm: DeviceArray | None
    k_norm: DeviceArray | None
    eps: float
    norm_offset: float
    mask: int = CAUSAL

    @property
    def _words(self) -> int:
        return decode_workspace_words(self.config.num_heads, self.config.num_kv_heads, self.config.head_dim)

    def reserve(self, reservation: Reservation) -> None:
        heads = self.config.num_heads * self.config.head_dim
        reservation.rows("proj", self.qkv.out_features)
        reservation.rows("q", heads)
        reservation.rows("mixed", heads)
        if self.qkv.on_device:
            reservation.elements("attention_workspace", reservation.sequences * self._words, F32, zeroed=True)

    def forward(self, ctx: ForwardContext, residual: Residual, norm: Norm) -> None:
        c, plan, tokens, decode = self.config, ctx.plan, ctx.tokens, ctx.shape.decode
        proj = ctx.buffer("proj", tokens, self.qkv.out_features)
        q = ctx.buffer("q", tokens, c.num_heads, c.head_dim)
        mixed = ctx.buffer("mixed", tokens, c.num_heads, c.head_dim)
        k_pool, v_pool = ctx.kv.k(self.layer), ctx.kv.v(self.layer)
        residual.project(ctx, norm, self.qkv, proj, ctx.buffer("normed", tokens, ctx.hidden_size))
        ctx.launch(
            QK_NORM_ROPE_APPEND,
            *(q, k_pool, v_pool),
            *(proj, plan["positions"].rows(0, tokens), plan["slot_map"].rows(0, tokens), self.rope, self.q_norm, self.k_norm),
            *(int(c.gated), self.eps, self.norm_offset),
        )
        scale = c.head_dim**-0.5
        if decode:
            slots, kv_len = plan["decode_slots"].rows(0, decode), plan["decode_kv_len"].rows(0, decode)
            ctx.launch(
                PAGED_ATTENTION_DECODE,
                *(mixed.rows(0, decode), q.rows(0, decode), k_pool, v_pool, ctx.tables, slots, kv_len, scale),
                ctx.buffer("attention_workspace", decode, self._words) if self.qkv.on_device else None,
            )
        if ctx.shape.prefill:
            n = ctx.shape.slices
            ctx.launch(
                PAGED_ATTENTION_PREFILL,
                *(mixed.rows(decode, tokens), None, q.rows(decode, tokens), k_pool, v_pool, ctx.tables),
                *(plan["prefill_slots"].rows(0, n), plan["prefill_cu"].rows(0, n + 1), plan["prefill_kv_len"].rows(0, n)),
                *(scale, self.mask, c.sliding_window or 0, None),
            )
        if c.gated:
            ctx.launch(SIGMOID_GATE, mixed, proj)
        self.out.add_to(ctx, residual.target(ctx), mixed.reshape(tokens, c.num_heads * c.head_dim))
