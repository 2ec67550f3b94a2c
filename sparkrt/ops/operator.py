"""`Operator`: one entry per operator, from which launches, parity tests, benchmarks and the docs table are generated.

Calling convention, the same for the host function, the C launcher and `backend.launch`: outputs first (written in place),
then inputs, then scalars. The reference is a pure function that returns the outputs, in that order; it accepts float64, which
is how parity is judged. Its parameters are the trailing arguments of the call: write-only outputs come first and are dropped,
an output that is also read (a state updated in place) is its first parameter. A reference of `*call` takes the whole call.

The host function's docstring is the contract, and is read as well as shown. It names every array with type and shape, outputs ←
inputs: "x A [T, H], w f32 [2·H + 1] or none"; A is the activation type. It ends with the cases of parity tests and of benchmarks,
"parity: T=1 H=64; T=65 H=8 x=300" and "bench: …", which give the symbols numbers (benchmarks/cases.py makes the arrays).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from inspect import cleandoc, signature
from typing import Any

import numpy as np

Array = np.ndarray

_ARRAYS = re.compile(r"(?<![/\w])((?:\w+(?:, | and ))*\w+) (A|f32|i32|u32)\b(?: \[([^]]*)\])?( or none)?")  # "k and v A [T, D]"


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator: how the host does it (`host`, whose name it has), what it computes (`reference`), its C launcher (`cuda`).

    `work` gives the bytes (activations counted as float32) and operations that a case needs at least. `tolerance` is the bound on
    ‖out − ref‖ / ‖ref‖ against the float64 reference; None means exact (integers). `host_kn` are the positions of weights that
    cases and the reference hold as [..., N, K] and the host function takes as [..., K, N], the packing its BLAS prefers.
    """

    host: Callable[..., None]
    reference: Callable[..., Any]
    cuda: str | None = None
    work: Callable[[Any], tuple[float, float]] = lambda s: (0, 0)
    tolerance: float | None = 1e-5
    host_kn: tuple[int, ...] = ()
    name: str = field(init=False)
    doc: str = field(init=False)
    parity: str = field(init=False)
    bench: str = field(init=False)

    def __post_init__(self) -> None:
        doc, _, cases = cleandoc(self.host.__doc__ or "").partition("\nparity: ")
        parity, _, bench = cases.partition("\nbench: ")
        for name, value in (("name", self.host.__name__), ("doc", doc), ("parity", parity), ("bench", bench)):
            object.__setattr__(self, name, value)

    def reference_args(self, args: Sequence[Any]) -> list[Any]:
        """The part of a call's arguments that the reference takes."""
        parameters = signature(self.reference).parameters.values()
        whole = any(p.kind is p.VAR_POSITIONAL for p in parameters)
        return list(args if whole else args[len(args) - len(parameters) :])

    def host_args(self, args: Sequence[Any]) -> list[Any]:
        """A call's arguments as the host function takes them: weights packed, everything else as it is."""
        return [np.ascontiguousarray(np.swapaxes(a, -1, -2)) if i in self.host_kn else a for i, a in enumerate(args)]

    @property
    def outputs(self) -> tuple[int, ...]:
        """Positions of what is written: the arguments before the doc's arrow."""
        return tuple(range(len(_arrays(self.doc.partition("←")[0]))))

    def arguments(self) -> dict[str, tuple[str, str, bool] | None]:
        """Of every argument: the doc's type ("A", "f32", "i32" or "u32"), shape, whether it may be none; None for scalars."""
        arrays = _arrays(self.doc)
        return {name: arrays.get(name) for name in signature(self.host).parameters}

    def argument_types(self) -> list[str | None]:
        return [array and array[0] for array in self.arguments().values()]


def _arrays(doc: str) -> dict[str, tuple[str, str, bool]]:
    found = ((re.split(", | and ", names), array) for names, *array in _ARRAYS.findall(doc))
    return {name: (kind, dims, bool(none)) for names, (kind, dims, none) in found for name in names}
