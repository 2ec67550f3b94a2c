"""`Parked`: what an owner holds, without the memory behind it. Addresses stay, so arrays and captured graphs stay right."""

from __future__ import annotations

from contextlib import closing

import numpy as np

from sparkrt.errors import CapacityError
from sparkrt.runtime import dtypes, machine
from sparkrt.runtime.array import DeviceArray
from sparkrt.runtime.owner import Owner
from sparkrt.runtime.staging import Staging


class Parked:
    """Takes the device memory of everything `owner` allocated; `restore` puts it back.

    keep: what was in it is copied to host memory, and restored. Raises CapacityError, changing nothing, where that is too small.
    `nbytes` of the device were given back.
    """

    def __init__(self, owner: Owner, keep: bool = False) -> None:
        self._owner, self._backend = owner, owner.backend
        self._kept: list[np.ndarray] = []
        if keep:
            needed, free = sum(block.nbytes for block in owner.blocks), machine.available_memory()
            if needed > free:
                text = f"{needed >> 20:,} MiB of weights do not fit into the {free >> 20:,} MiB of free host memory"
                raise CapacityError(f"{text}: level 2 discards them")
            with closing(Staging(self._backend)) as staging:
                for block in owner.blocks:
                    self._kept.append(host := np.empty(block.nbytes, np.uint8))
                    staging.fetch(host, block.ptr)
        self._backend.synchronize()
        self.nbytes = sum(self._backend.suspend(block.ptr) for block in owner.blocks)

    def resume(self) -> None:
        """Memory for all of it again, contents undefined. Raises OutOfMemory, and then has given all of it back."""
        try:
            for block in self._owner.blocks:
                self._backend.resume(block.ptr)
        except BaseException:
            self.suspend()
            raise

    def suspend(self) -> None:
        """Give the memory back once more, as after a wake-up that failed elsewhere; what was kept is still kept."""
        self._backend.synchronize()
        for block in self._owner.blocks:
            self._backend.suspend(block.ptr)

    def refill(self) -> None:
        """Bring back what was kept, after `resume`."""
        if not self._kept:
            return
        with closing(Staging(self._backend)) as staging:
            for block, host in zip(self._owner.blocks, self._kept, strict=True):
                staging.copy(DeviceArray(block.ptr, dtypes.uint8, host.shape), host)
            staging.flush()
        self._kept = []
