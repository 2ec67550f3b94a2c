"""`Operator`: one entry per operator, from which launches, parity tests, benchmarks and the docs table are generated.

Calling convention, the same for the host function, the C launcher and `backend.launch`: outputs first (written in place),
then inputs, then scalars. The reference is a pure function that returns the outputs, in that order; it accepts float64, which
is how parity is judged. Its parameters are the trailing arguments of the call: write-only outputs come first and are dropped,
an output that is also read (a state updated in place) is its first parameter.

The doc is read as well as shown. It names every array with type and shape, outputs ← inputs: "x A [T, H], w f32 [2·H + 1] or
none". A case is one line that gives the symbols numbers, "T=64 H=256"; what it does not say about the arguments:

- float arrays are standard normal, times the value that the case gives under their name ("x=300"); int arrays hold that value
  (or several, "starts=0+64", "kv=7*16" being 16 times 7), else 0; `slots` are distinct slots and `cu…` the slices' bounds
- what may be none is none unless named (a bare word is worth 1); scalars are 0 unless named, but eps
- several numbers for T are the lengths of S slices; `slots` counts two more than the rows or slices that use them
- anything else comes from the entry's `inputs(rng, sizes)`: arguments by name
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
from math import prod
from typing import Any

import numpy as np

Array = np.ndarray
Rng = np.random.Generator

_ARRAYS = re.compile(
    r"(?<![/\w])((?:\w+(?:, | and ))*\w+) (A|f32|i32|u32)\b(?: \[([^]]*)\])?( or none)?"
)  # "q, k and v A [T, H]"
_DTYPES = {"A": np.float32, "f32": np.float32, "i32": np.int32, "u32": np.uint32}


def normal(rng: Rng, shape: Sequence[int], scale: float = 1.0) -> Array:
    return rng.standard_normal(shape, np.float32) * np.float32(scale)


class Sizes(dict[str, Any]):
    """The numbers of a case by name, 0 where it names none; `lengths` are T's."""

    def __init__(self, label: str) -> None:
        super().__init__(eps=1e-6)
        for word in label.split():
            name, _, text = word.partition("=")
            terms, _, times = (text or "1").partition("*")
            values = tuple(int(v) if re.fullmatch(r"-?\d+", v) else float(v) for v in terms.split("+")) * int(times or 1)
            self[name] = values if len(values) > 1 else values[0]
        self["lengths"] = self.T if isinstance(self.T, tuple) else (self.T,)
        self |= {"T": sum(self.lengths), "S": len(self.lengths)}
        self.setdefault("slots", (self.B or self.R or self.S) + 2)

    def __getattr__(self, name: str) -> Any:
        return self.get(name, 0)

    def shape(self, dims: str) -> tuple[int, ...]:
        """Of dimensions as the doc spells them: "T, 2·H + 1"."""
        terms = ([re.findall(r"\d+|[^\W\d]\w*", term) for term in dim.split("+")] for dim in dims.split(","))
        return tuple(sum(prod(int(f) if f.isdigit() else self[f] for f in term) for term in dim) for dim in terms)


@dataclass(frozen=True, slots=True)
class Case:
    """One parity or bench case: `make(rng)` returns the full argument list (outputs preallocated, poisoned by the caller).

    `outputs` are the positions written by the operator (state updated in place included); `bytes` is the least device traffic.
    """

    label: str
    make: Callable[[Rng], list[Any]]
    outputs: tuple[int, ...]
    bytes: int
    flops: int


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator: what it computes (`reference`), how the host does it (`host`) and which C launcher does it (`cuda`).

    `tolerance` is the bound on ‖out − ref‖ / ‖ref‖ against the float64 reference; None means exact (integers).
    `parity` and `bench` are cases, separated by ";"; `work` gives a case's bytes (activations counted as float32) and operations.
    `host_kn` are the positions of weights that cases and the reference hold as [..., N, K] and the host function takes as
    [..., K, N], the packing its BLAS prefers.
    """

    name: str
    doc: str
    reference: Callable[..., Any]
    host: Callable[..., None]
    cuda: str | None = None
    tolerance: float | None = 1e-5
    parity: str = ""
    bench: str = ""
    inputs: Callable[[Rng, Sizes], dict[str, Any]] = lambda rng, s: {}
    work: Callable[[Sizes], tuple[float, float]] = lambda s: (0, 0)
    host_kn: tuple[int, ...] = ()

    def reference_args(self, args: Sequence[Any]) -> list[Any]:
        """The part of a call's arguments that the reference takes."""
        return list(args[len(args) - len(signature(self.reference).parameters) :])

    def host_args(self, args: Sequence[Any]) -> list[Any]:
        """A call's arguments as the host function takes them: weights packed, everything else as it is."""
        return [np.ascontiguousarray(np.swapaxes(a, -1, -2)) if i in self.host_kn else a for i, a in enumerate(args)]

    def argument_types(self) -> list[str | None]:
        """Element type of each argument as the doc gives it: "A" (activation), "f32", "i32", "u32"; None for scalars."""
        arrays = _arrays(self.doc)
        return [arrays[name][0] if name in arrays else None for name in signature(self.host).parameters]

    def cases(self, labels: str) -> list[Case]:
        """Cases, separated by ";", as the module describes them."""
        outputs = tuple(range(len(_arrays(self.doc.partition("←")[0]))))
        found = []
        for label in (" ".join(text.split()) for text in labels.split(";")):
            moved, flops = self.work(Sizes(label))
            found.append(Case(label, partial(self._make, Sizes(label)), outputs, int(moved), int(flops)))
        return found

    def _make(self, sizes: Sizes, rng: Rng) -> list[Any]:
        arrays, given = _arrays(self.doc), self.inputs(rng, sizes)
        return [given[n] if n in given else _value(n, arrays.get(n), sizes, rng) for n in signature(self.host).parameters]


def _arrays(doc: str) -> dict[str, tuple[str, str, str]]:
    """(type, dimensions, " or none") of every array that the doc names."""
    return {name: (t, dims, none) for names, t, dims, none in _ARRAYS.findall(doc) for name in re.split(", | and ", names)}


def _value(name: str, array: tuple[str, str, str] | None, sizes: Sizes, rng: Rng) -> Any:
    """An argument that the entry's `inputs` leaves to the rules above."""
    if array is None:
        return sizes.get(name, 0)
    kind, dims, none = array
    if none and name not in sizes:
        return None
    if name == "slots":
        return rng.permutation(sizes.slots)[: sizes.shape(dims)[0]].astype(np.int32)
    if name.startswith("cu"):
        return np.cumsum([0, *sizes.lengths], dtype=np.int32)
    if _DTYPES[kind] == np.float32:
        return normal(rng, sizes.shape(dims), sizes.get(name, 1))
    return np.full(sizes.shape(dims), sizes.get(name, 0), _DTYPES[kind])
