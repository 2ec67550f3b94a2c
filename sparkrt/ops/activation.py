"""Elementwise gates of the MLPs."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparkrt.ops.elementwise import sigmoid, silu
from sparkrt.ops.operator import Case, Operator, Rng

_LARGEST = 80.0  # e^80 is finite in float32, and sigmoid(-80) is 0 for every purpose


def times_sigmoid(x: np.ndarray, gate: np.ndarray, out: np.ndarray) -> None:
    """out = x · sigmoid(gate), as x / (1 + e^-gate) without overflow; `out` may be x."""
    t = np.negative(gate)
    np.minimum(t, _LARGEST, out=t)
    np.exp(t, t)
    t += 1.0
    np.divide(x, t, out)


def swiglu_ref(gate_up: np.ndarray) -> np.ndarray:
    gate, up = np.split(gate_up, 2, axis=-1)
    y: np.ndarray = silu(gate) * up
    return y


def swiglu(out: np.ndarray, gate_up: np.ndarray) -> None:
    width = out.shape[1]
    silu(gate_up[:, :width], out)
    np.multiply(out, gate_up[:, width:], out)


def add_sigmoid_gated_ref(out: np.ndarray, x: np.ndarray, gate: np.ndarray) -> np.ndarray:
    y: np.ndarray = out + sigmoid(gate) * x
    return y


def add_sigmoid_gated(out: np.ndarray, x: np.ndarray, gate: np.ndarray) -> None:
    scaled = np.empty_like(x)
    times_sigmoid(x, gate, scaled)
    np.add(out, scaled, out)


def _swiglu_case(tokens: int, width: int, scale: float = 1.0) -> Case:
    def make(rng: Rng) -> list[Any]:
        gate_up = rng.standard_normal((tokens, 2 * width), dtype=np.float32) * np.float32(scale)
        return [np.empty((tokens, width), np.float32), gate_up]

    label = f"T={tokens} F={width}" + (f" scale={scale:g}" if scale != 1.0 else "")
    return Case(label, make, bytes=12 * tokens * width, flops=5 * tokens * width)


def _gated_case(tokens: int, hidden: int, scale: float = 1.0) -> Case:
    def make(rng: Rng) -> list[Any]:
        out, x = (rng.standard_normal((tokens, hidden), dtype=np.float32) for _ in range(2))
        return [out, x, rng.standard_normal((tokens, 1), dtype=np.float32) * np.float32(scale)]

    label = f"T={tokens} H={hidden}" + (f" scale={scale:g}" if scale != 1.0 else "")
    return Case(label, make, bytes=12 * tokens * hidden, flops=2 * tokens * hidden)


SWIGLU = Operator(
    "swiglu",
    """SiLU-gated product.

    out A [T, F] ← gate_up A [T, 2F]: gate columns, then up columns
    out = gate · sigmoid(gate) · up
    """,
    swiglu_ref,
    swiglu,
    cuda="spark_swiglu",
    parity=tuple(_swiglu_case(*s) for s in ((1, 64), (65, 192), (0, 8), (7, 33, 300.0))),
    bench=(_swiglu_case(1, 1536), _swiglu_case(512, 1536)),
)

ADD_SIGMOID_GATED = Operator(
    "add_sigmoid_gated",
    """Adds the shared expert, scaled by one sigmoid a token.

    out A [T, H] in/out ← x A [T, H], gate A [T, 1]
    out += sigmoid(gate) · x
    """,
    add_sigmoid_gated_ref,
    add_sigmoid_gated,
    cuda="spark_add_sigmoid_gated",
    parity=tuple(_gated_case(*s) for s in ((1, 256), (63, 40), (0, 8), (5, 17, 300.0))),
    bench=(_gated_case(1, 256), _gated_case(512, 256)),
)

OPERATORS = (SWIGLU, ADD_SIGMOID_GATED)
