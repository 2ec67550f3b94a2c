"""The MLPs: dense SwiGLU, and a mixture of experts, some of which may be shared by all tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparkrt.model.context import F32, I32
from sparkrt.ops.activation import SWIGLU
from sparkrt.ops.moe import ROUTER_TOPK, workspace_words
from sparkrt.runtime.dtypes import uint32

if TYPE_CHECKING:
    from sparkrt.model.config import MoeConfig
    from sparkrt.model.context import ForwardContext, Reservation
    from sparkrt.model.residual import Residual
    from sparkrt.model.weight import Experts, Linear, Norm


@dataclass(slots=True)
class DenseMlp:
    """down(silu(gate) · up); `gate_up` columns: gate | up."""

    gate_up: Linear
    down: Linear

    def reserve(self, reservation: Reservation) -> None:
        reservation.rows("gate_up", self.gate_up.out_features)
        reservation.rows("act", self.gate_up.out_features // 2)

    def forward(self, ctx: ForwardContext, residual: Residual, norm: Norm) -> None:
        width = self.gate_up.out_features
        gate_up = ctx.buffer("gate_up", ctx.tokens, width)
        act = ctx.buffer("act", ctx.tokens, width // 2)
        residual.project(ctx, norm, self.gate_up, gate_up, ctx.buffer("normed", ctx.tokens, ctx.hidden_size))
        ctx.launch(SWIGLU, act, gate_up)
        self.down.add_to(ctx, residual.target(ctx), act)


@dataclass(slots=True)
class MixtureOfExperts:
    """Softmax router in float32 over all experts, top-k, then the chosen experts.

    A shared expert, an MLP that every token passes and that is scaled by sigmoid(x · gate), lies behind the routed ones as
    `shared` experts of their width; its gate is the router's last GATE_COLUMNS columns, all alike.
    """

    config: MoeConfig
    router: Linear
    experts: Experts
    shared: int

    @property
    def _choices(self) -> int:
        return self.config.top_k + self.shared

    def reserve(self, reservation: Reservation) -> None:
        reservation.rows("router", self.router.out_features, F32)
        reservation.rows("expert_weights", self._choices, F32)
        reservation.rows("expert_ids", self._choices, I32)
        if self.experts.on_device:
            reservation.elements("experts_workspace", self._workspace(reservation.tokens), uint32)

    def forward(self, ctx: ForwardContext, residual: Residual, norm: Norm) -> None:
        tokens, k = ctx.tokens, self._choices
        normed, logits = ctx.buffer("normed", tokens, ctx.hidden_size), ctx.buffer("router", tokens, self.router.out_features)
        weights, ids = ctx.buffer("expert_weights", tokens, k), ctx.buffer("expert_ids", tokens, k)
        residual.project(ctx, norm, self.router, logits, normed)
        ctx.launch(ROUTER_TOPK, weights, ids, logits, self.config.top_k, int(self.config.renormalize))
        workspace = ctx.buffer("experts_workspace", self._workspace(tokens)) if self.experts.on_device else None
        self.experts(ctx, residual.target(ctx), normed, ids, weights, workspace)

    def _workspace(self, tokens: int) -> int:
        experts, hidden, width = self.experts.down.shape
        return workspace_words(tokens, self._choices, experts, hidden, width, self.experts.down.format.itemsize)
