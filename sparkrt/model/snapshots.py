"""What layers keep on the host beside a snapshot of recurrent state: their auxiliary state, by the snapshot's spare slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sparkrt.model.batch import ForwardBatch
from sparkrt.model.layers.layer import TransformerLayer
from sparkrt.model.sequence import SequenceState


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A sequence's state after `length` tokens, in a spare slot of the pool; what is auxiliary of it lies beside that."""

    slot: int
    length: int


class AuxiliaryStates:
    """By spare slot, of the layers that have any; an entry goes when its slot is taken for another snapshot."""

    def __init__(self, layers: Sequence[TransformerLayer]) -> None:
        self._layers = layers
        self._kept: dict[int, list[Any]] = {}

    @property
    def needed(self) -> bool:
        return any(layer.auxiliary for layer in self._layers)

    def keep(self, seq: SequenceState, slot: int, position: int) -> None:
        """Beside the snapshot of a sequence after `position` tokens."""
        if self.needed:
            self._kept[slot] = [layer.snapshot_aux(seq, position) for layer in self._layers if layer.auxiliary]

    def keep_of_step(self, batch: ForwardBatch) -> None:
        """Beside all snapshots that a step takes inside its slices."""
        if self.needed:
            for part in batch.prefill:
                for position, slot in part.snapshots:
                    self.keep(part.seq, slot, position)

    def restore(self, seq: SequenceState, slot: int) -> None:
        """A sequence goes on behind a snapshot."""
        if self.needed:
            layers = [layer for layer in self._layers if layer.auxiliary]
            for layer, aux in zip(layers, self._kept[slot], strict=True):
                layer.restore_aux(seq, aux)
