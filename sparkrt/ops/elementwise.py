"""Elementwise functions that several operators share. They keep the dtype of their input, so references use them in float64."""

from __future__ import annotations

import numpy as np


def silu(x: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """x * sigmoid(x). exp may overflow to inf for very negative x: x / inf is the right limit, so it is not worth a clip."""
    with np.errstate(over="ignore"):
        e = np.exp(-x)
    e += 1
    y: np.ndarray = np.divide(x, e, out=e if out is None else out)
    return y


def softplus(x: np.ndarray) -> np.ndarray:
    """log(1 + exp(x)), without overflow."""
    y: np.ndarray = np.logaddexp(x, np.zeros((), x.dtype))
    return y


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)), exact to rounding also where it is tiny (a tanh form is not)."""
    y: np.ndarray = np.exp(-softplus(-x))
    return y
