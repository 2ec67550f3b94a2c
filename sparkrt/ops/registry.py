"""Every operator there is. Parity tests, `make bench` and docs/operators.md are generated from this list."""

from __future__ import annotations

from sparkrt.ops import activation, attention, conv, embedding, gdn, linear, moe, norm, qkv, sampling
from sparkrt.ops.operator import Operator

OPERATORS: tuple[Operator, ...] = (
    *embedding.OPERATORS,
    *norm.OPERATORS,
    *linear.OPERATORS,
    *qkv.OPERATORS,
    *attention.OPERATORS,
    *conv.OPERATORS,
    *gdn.OPERATORS,
    *activation.OPERATORS,
    *moe.OPERATORS,
    *sampling.OPERATORS,
)
