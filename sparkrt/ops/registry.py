"""Every operator there is. Parity tests, `make bench` and docs/operators.md are generated from this list."""

from __future__ import annotations

from sparkrt.ops import activation, attention, conv, embedding, gdn, linear, moe, norm, qkv, sampling
from sparkrt.ops.operator import Operator

_MODULES = (embedding, norm, linear, qkv, attention, conv, gdn, activation, moe, sampling)
OPERATORS: tuple[Operator, ...] = tuple(op for module in _MODULES for op in module.OPERATORS)
