"""`Operator`: one entry per operator, from which launches, parity tests, benchmarks and the docs table are generated.

Calling convention, the same for the host function, the C launcher and `backend.launch`: outputs first (written in place),
then inputs, then scalars. The reference is a pure function that returns the outputs, in that order; it accepts float64, which
is how parity is judged. Its parameters are the trailing arguments of the call: write-only outputs come first and are dropped,
an output that is also read (a state updated in place) is its first parameter.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import numpy as np

Rng = np.random.Generator

_TYPED = re.compile(r"((?:\w+(?:, | and ))*\w+) (A|f32|i32|u32)\b")  # "q, k and v A": three names of type A


@dataclass(frozen=True, slots=True)
class Case:
    """One parity or bench case: `make(rng)` returns the full argument list (outputs preallocated, poisoned by the caller).

    `outputs` are the positions written by the operator (state updated in place included).
    """

    label: str
    make: Callable[[Rng], list[Any]]
    outputs: tuple[int, ...] = (0,)
    bytes: int = 0  # least device traffic, for bench cases
    flops: int = 0


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator: what it computes (`reference`), how the host does it (`host`) and which C launcher does it (`cuda`).

    `tolerance` is the bound on ‖out − ref‖ / ‖ref‖ against the float64 reference; None means exact (integers).
    `host_kn` are the positions of weights that cases and the reference hold as [..., N, K] and the host function takes as
    [..., K, N], the packing its BLAS prefers.
    """

    name: str
    doc: str
    reference: Callable[..., Any]
    host: Callable[..., None]
    cuda: str | None = None
    tolerance: float | None = 1e-5
    parity: tuple[Case, ...] = ()
    bench: tuple[Case, ...] = field(default=())
    host_kn: tuple[int, ...] = ()

    def reference_args(self, args: Sequence[Any]) -> list[Any]:
        """The part of a call's arguments that the reference takes."""
        return list(args[len(args) - len(signature(self.reference).parameters) :])

    def host_args(self, args: Sequence[Any]) -> list[Any]:
        """A call's arguments as the host function takes them: weights packed, everything else as it is."""
        return [np.ascontiguousarray(np.swapaxes(a, -1, -2)) if i in self.host_kn else a for i, a in enumerate(args)]

    def argument_types(self) -> list[str | None]:
        """Element type of each argument as the doc gives it: "A" (activation), "f32", "i32", "u32"; None for scalars."""
        types = {name: kind for names, kind in _TYPED.findall(self.doc) for name in re.split(r", | and ", names)}
        return [types.get(name) for name in signature(self.host).parameters]
