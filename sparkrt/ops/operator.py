"""`Operator`: one entry per operator, from which launches, parity tests, benchmarks and the docs table are generated.

Calling convention, the same for the host function, the C launcher and `backend.launch`: outputs first (written in place),
then inputs, then scalars. The reference is a pure function of the inputs and scalars that returns the outputs; it accepts
float64, which is how parity is judged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Rng = np.random.Generator


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
    """

    name: str
    doc: str
    reference: Callable[..., Any]
    host: Callable[..., None]
    cuda: str | None = None
    tolerance: float | None = 1e-5
    parity: tuple[Case, ...] = ()
    bench: tuple[Case, ...] = field(default=())
