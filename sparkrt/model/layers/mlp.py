"""The MLPs: dense SwiGLU, and a mixture of experts with an optional gated shared expert."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparkrt.model.context import F32, I32
from sparkrt.ops.activation import ADD_SIGMOID_GATED, SWIGLU
from sparkrt.ops.moe import ROUTER_TOPK, workspace_words
from sparkrt.runtime.dtypes import uint32

if TYPE_CHECKING:
    from sparkrt.model.config import MoeConfig
    from sparkrt.model.context import ForwardContext, Reservation
    from sparkrt.model.weight import Experts, Linear
    from sparkrt.runtime.array import DeviceArray


@dataclass(slots=True)
class DenseMlp:
    """down(silu(gate) · up); `gate_up` columns: gate | up."""

    gate_up: Linear
    down: Linear

    def reserve(self, reservation: Reservation) -> None:
        reservation.rows("gate_up", self.gate_up.out_features)
        reservation.rows("act", self.gate_up.out_features // 2)

    def forward(self, ctx: ForwardContext, out: DeviceArray, x: DeviceArray) -> None:
        width = self.gate_up.out_features
        gate_up = ctx.buffer("gate_up", ctx.tokens, width)
        act = ctx.buffer("act", ctx.tokens, width // 2)
        self.gate_up(ctx, gate_up, x)
        ctx.launch(SWIGLU, act, gate_up)
        self.down(ctx, out, act)


@dataclass(slots=True)
class SharedExpert:
    """A dense MLP every token passes, scaled by sigmoid(x · gate)."""

    mlp: DenseMlp
    gate: Linear  # [1, H]


@dataclass(slots=True)
class MixtureOfExperts:
    """Softmax router in float32 over all experts, top-k, then the chosen experts (and the shared one)."""

    config: MoeConfig
    router: Linear
    experts: Experts
    shared: SharedExpert | None

    def reserve(self, reservation: Reservation) -> None:
        reservation.rows("router", self.config.num_experts, F32)
        reservation.rows("expert_weights", self.config.top_k, F32)
        reservation.rows("expert_ids", self.config.top_k, I32)
        if self.experts.on_device:
            reservation.elements("experts_workspace", self._workspace(reservation.tokens), uint32)
        if self.shared is not None:
            self.shared.mlp.reserve(reservation)
            reservation.rows("shared", self.shared.mlp.down.out_features)
            reservation.rows("shared_gate", 1)

    def forward(self, ctx: ForwardContext, out: DeviceArray, x: DeviceArray) -> None:
        tokens, k = ctx.tokens, self.config.top_k
        logits = ctx.buffer("router", tokens, self.config.num_experts)
        weights, ids = ctx.buffer("expert_weights", tokens, k), ctx.buffer("expert_ids", tokens, k)
        self.router(ctx, logits, x)
        ctx.launch(ROUTER_TOPK, weights, ids, logits, int(self.config.renormalize))
        workspace = ctx.buffer("experts_workspace", self._workspace(tokens)) if self.experts.on_device else None
        self.experts(ctx, out, x, ids, weights, workspace)
        if self.shared is not None:
            gate = ctx.buffer("shared_gate", tokens, 1)
            shared = ctx.buffer("shared", tokens, ctx.hidden_size)
            self.shared.gate(ctx, gate, x)
            self.shared.mlp.forward(ctx, shared, x)
            ctx.launch(ADD_SIGMOID_GATED, out, shared, gate)

    def _workspace(self, tokens: int) -> int:
        experts, hidden, width = self.experts.down.shape
        return workspace_words(tokens, self.config.top_k, experts, hidden, width, self.experts.down.format.itemsize)
