"""`Sleeper`: a model's memory given back to the device and taken again, its addresses kept, and with them its captured graphs."""

from __future__ import annotations

from collections.abc import Callable

from sparkrt.model.hybrid import HybridModel
from sparkrt.runtime.parking import Parked

Progress = Callable[[str, int, int], None]


class Sleeper:
    """Puts `model` to sleep and wakes it up. `reload` fills its weights anew (build.reload_weights)."""

    def __init__(self, model: HybridModel, reload: Callable[[Progress], None]) -> None:
        self._model, self._reload = model, reload
        self._parked: list[Parked] = []  # while it sleeps
        self._discarded = False  # the weights, then

    def sleep(self, keep_weights: bool) -> int:
        """Give back the memory of KV, states and weights; how many bytes of the device that were.

        keep_weights: in host memory (CapacityError, changing nothing, when that is too small); where the device's memory is the
        host's they simply stay. No sequence may live, and the prefix cache must be empty.
        """
        model = self._model
        stay = keep_weights and model.backend.properties.unified_memory
        weights = [] if stay else [Parked(model.weights, keep_weights)]  # first: what is to be kept may not fit
        self._parked, self._discarded = [*weights, Parked(model.kv), Parked(model.states)], not keep_weights
        return sum(part.nbytes for part in self._parked)

    def wake_up(self, progress: Progress) -> None:
        """Take memory again and fill it. Raises what fails (OutOfMemory, LoadError), and then everything sleeps on."""
        try:
            for part in self._parked:
                part.resume()
            self._model.kv.clear_dummy()
            self._model.states.clear_dummy()
            if self._discarded:
                self._reload(progress)
            for part in self._parked:
                part.refill()
        except BaseException:
            for part in self._parked:
                part.suspend()
            raise
        self._parked = []
