"""Elementwise functions that several operators share (they keep their input's dtype: references use them in float64), and the
gate of the MLPs."""

from __future__ import annotations

import numpy as np

from sparkrt.ops.operator import Array, Operator

_LARGEST = 80.0  # e^80 is finite in float32, and sigmoid(-80) is 0 for every purpose


def silu(x: Array, out: Array | None = None) -> Array:
    """x * sigmoid(x)."""
    y: Array = np.divide(x, e := _one_and_exp(x), out=e if out is None else out)
    return y


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)), exact to rounding also where it is tiny (a tanh form is not)."""
    e = _one_and_exp(x)
    y: Array = np.reciprocal(e, out=e)
    return y


def softplus(x: Array) -> Array:
    """log(1 + exp(x)), without overflow."""
    y: Array = np.logaddexp(x, np.zeros((), x.dtype))
    return y


def times_sigmoid(x: Array, gate: Array, out: Array) -> None:
    """out = x · sigmoid(gate); `out` may be x."""
    np.divide(x, _one_and_exp(gate), out)


def _one_and_exp(x: Array) -> Array:
    """1 + e^-x. Clipped, because a guard against overflow (errstate) costs more than a pass over a step's few elements."""
    e: Array = np.maximum(x, -_LARGEST)
    np.negative(e, e)
    np.exp(e, e)
    e += 1
    return e


def swiglu(out: Array, gate_up: Array) -> None:
    """SiLU-gated product.

    out A [T, F] ← gate_up A [T, 2F]: gate columns, then up columns
    out = gate · sigmoid(gate) · up
    parity: T=1 F=64; T=65 F=192; T=0 F=8; T=7 F=33 gate_up=300
    bench: T=1 F=1536; T=512 F=1536
    """
    width = out.shape[1]
    silu(gate_up[:, :width], out)
    np.multiply(out, gate_up[:, width:], out)


def swiglu_ref(gate_up: Array) -> Array:
    gate, up = np.split(gate_up, 2, axis=-1)
    y: Array = silu(gate) * up
    return y


SWIGLU = Operator(swiglu, swiglu_ref, "spark_swiglu", lambda s: (12 * s.T * s.F, 5 * s.T * s.F))
OPERATORS = (SWIGLU,)
