"""`TransformerLayer`: a mixer and an MLP between reads and writes of the residual, and the seams that later layers need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from sparkrt.model.context import ForwardContext, Reservation
    from sparkrt.model.plan import StepPlan
    from sparkrt.model.residual import Residual
    from sparkrt.model.sequence import SequenceState
    from sparkrt.model.weight import Norm


class SubLayer(Protocol):
    """A mixer or an MLP: reads the residual's normed rows [T, H] through its first projection, and adds its result to it."""

    def reserve(self, reservation: Reservation) -> None:
        """Name the scratch it needs."""

    def forward(self, ctx: ForwardContext, residual: Residual, norm: Norm) -> None: ...


class TransformerLayer(Protocol):
    """One layer. Host-fed layers (tables filled by the host between steps) use `prestage`/`rearm` and veto graphs."""

    @property
    def graph_veto(self) -> bool:
        """True: steps through this layer must not be captured."""

    def reserve(self, reservation: Reservation) -> None: ...
    def prestage(self, plan: StepPlan) -> None:
        """The host's half of a step, before launch or replay."""

    def rearm(self) -> None:
        """Undo `prestage` when the step it prepared is not launched."""

    def forward(self, ctx: ForwardContext, residual: Residual) -> None: ...

    @property
    def auxiliary(self) -> bool:
        """Whether it has state beyond KV and recurrent state, which snapshots have to keep: the next two are for such layers."""

    def snapshot_aux(self, seq: SequenceState, position: int) -> Any:
        """That state after `position` tokens, which are computed or in the step that was just launched."""

    def restore_aux(self, seq: SequenceState, aux: Any) -> None:
        """The sequence goes on from there."""


@dataclass(slots=True)
class DecoderLayer:
    """x += mixer(norm(x)); x += mlp(norm(x))."""

    input_norm: Norm
    mixer: SubLayer
    post_norm: Norm
    mlp: SubLayer
    graph_veto: bool = False
    auxiliary: bool = False

    def reserve(self, reservation: Reservation) -> None:
        self.mixer.reserve(reservation)
        self.mlp.reserve(reservation)

    def prestage(self, plan: StepPlan) -> None:
        """Nothing of this layer is fed by the host."""

    def rearm(self) -> None:
        """Nothing was prestaged."""

    def forward(self, ctx: ForwardContext, residual: Residual) -> None:
        self.mixer.forward(ctx, residual, self.input_norm)
        self.mlp.forward(ctx, residual, self.post_norm)

    def snapshot_aux(self, seq: SequenceState, position: int) -> Any:
        raise NotImplementedError

    def restore_aux(self, seq: SequenceState, aux: Any) -> None:
        raise NotImplementedError
