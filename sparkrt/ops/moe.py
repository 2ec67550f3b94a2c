"""Mixture of experts: the router's choice and the experts, grouped by expert.

A shared expert is one more expert (or several, if it is wider) that every token chooses, with the sigmoid of one more logit, its
gate. The gate stands GATE_COLUMNS times behind the experts' logits, so that rows of logits are whole vectors: with 257 columns a
product of 4096 rows took an H200 64 us, with 264 18.

The host function takes each expert's matrices input-major, gate_up [E, H, 2F] and down [E, F, H]: with few rows BLAS is faster.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sparkrt.ops.activation import sigmoid, silu
from sparkrt.ops.operator import Array, Operator

GATE_COLUMNS = 8
_SEGMENT = 32  # pairs of one expert that a kernel takes at a time, at least


def workspace_words(tokens: int, top_k: int, experts: int, hidden: int, width: int, itemsize: int) -> int:
    """32-bit words that MOE_EXPERTS wants of a device for `tokens` tokens or fewer, with activations of `itemsize` bytes.

    It holds the (token, choice) pairs sorted by expert, what the first product leaves of each and what the second does.
    """
    pairs = tokens * top_k
    segments = pairs // _SEGMENT + min(pairs, experts)
    parts = (256, 16 * segments, 4 * pairs, pairs * width * itemsize, pairs * hidden * itemsize)
    return sum(-(-part // 256) * 64 for part in parts)


def router_topk_reference(weights: Array, ids: Array, logits: Array, top: int, renormalize: int) -> tuple[Array, Array]:
    """See `router_topk`; of the outputs only the width is read."""
    shared = ids.shape[1] - top
    logits, gates = np.split(logits, [logits.shape[1] - GATE_COLUMNS], 1) if shared else (logits, logits[:, :0])
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    best = np.argsort(-logits, axis=1, kind="stable")[:, :top]
    shares = np.take_along_axis(p, best, 1)
    if renormalize:
        shares = shares / shares.sum(1, keepdims=True)
    always = np.broadcast_to(np.arange(shared) + p.shape[1], (len(p), shared))
    return np.hstack([shares, np.repeat(sigmoid(gates[:, :1]), shared, 1)]), np.hstack([best, always]).astype(np.int32)


def experts_reference(
    out: Array,
    x: Array,
    gate_up: Array,
    down: Array,
    ids: Array,
    weights: Array,
    workspace: Array | None = None,
    invariant: int = 0,
) -> Array:
    out = out.copy()
    for token, (experts, shares) in enumerate(zip(ids, weights, strict=True)):
        for expert, share in zip(experts, shares, strict=True):
            gate, up = np.split(gate_up[expert] @ x[token], 2)
            out[token] += share * (down[expert] @ (silu(gate) * up))
    return out


def router_topk(weights: Array, ids: Array, logits: Array, top: int, renormalize: int) -> None:
    """Which experts a token goes to, and with what share.

    weights f32 [T, top + shared], ids i32 [T, top + shared] ← logits f32 [T, E, + GATE_COLUMNS if shared], top, renormalize
    p = softmax(logits) over E experts; the `top` largest, lowest index on exact ties; divided by their sum if renormalize;
    then, if there are any, the shared experts E, E+1 …, each with sigmoid(logits[E]), which stands GATE_COLUMNS times
    parity: T=1 E=8 top=2 renormalize; T=65 E=32 top=4; T=64 E=16 top=4 renormalize ties; T=5 E=512 top=10 renormalize;
    T=7 E=256 top=8 renormalize shared=1; T=3 E=40 top=4 shared=3
    bench: T=16 E=8 top=2 renormalize; T=512 E=256 top=8 renormalize
    """
    shared = ids.shape[1] - top
    experts = logits.shape[1] - (GATE_COLUMNS if shared else 0)
    if shared:
        weights[:, top:] = sigmoid(logits[:, experts : experts + 1])
        ids[:, top:] = np.arange(experts, experts + shared)
    left = logits[:, :experts].copy()  # `top` rounds of argmax, which takes the lowest of equals
    rows = np.arange(len(logits))
    for j in range(top):
        best = left.argmax(1)
        ids[:, j] = best
        weights[:, j] = left[rows, best]
        if j + 1 < top:
            left[rows, best] = -np.inf
    shares = weights[:, :top]
    largest = shares[:, :1].copy()
    shares -= largest
    np.exp(shares, out=shares)
    total = shares if renormalize else np.exp(logits[:, :experts] - largest)
    shares /= np.add.reduce(total, 1, keepdims=True)


def moe_experts(
    out: Array,
    x: Array,
    gate_up: Array,
    down: Array,
    ids: Array,
    weights: Array,
    workspace: Array | None = None,
    invariant: int = 0,
) -> None:
    """Adds the chosen experts of each token, weighted, to the residual.

    out A [T, H] in/out ← x A [T, H], gate_up A [E, 2F, H] (gate rows first), down A [E, H, F], ids i32 [T, top],
    weights f32 [T, top], workspace u32 [workspace_words(…) or more] (a device's; the host needs none), invariant
    A row has the same bits in any company of up to 256 rows, with `invariant` in any.
    out += sum_j weights_j · down_e (silu(gate_e x) · (up_e x)), e = ids_j
    parity: T=1 E=8 top=2 H=64 F=16; T=37 E=8 top=2 H=64 F=24; T=5 E=32 top=3 H=48 F=16; T=8 E=12 top=4 H=264 F=136;
    T=9 E=40 top=4 H=320 F=200; T=150 E=12 top=1 H=72 F=40; T=200 E=8 top=2 H=136 F=72; T=5 E=4 top=2 H=20 F=12;
    T=3000 E=96 top=4 H=256 F=128 uneven; T=3000 E=96 top=4 H=256 F=128 uneven invariant; T=300 E=4 top=2 H=256 F=128;
    T=261 E=3 top=3 H=512 F=256
    bench: T=1 E=8 top=2 H=256 F=64; T=16 E=8 top=2 H=256 F=64; T=512 E=8 top=2 H=256 F=64
    """
    # Rows are sorted by expert, each expert's run is one product, and a token's results are added in its own order of choice.
    tokens, k = ids.shape
    if tokens == 0:
        return
    if tokens == 1:  # a single stream: nothing to sort, and gemv as for its projections (docs/adr/0006)
        wide, parts = np.empty((k, gate_up.shape[2]), x.dtype), np.empty((k, x.shape[1]), x.dtype)
        experts = ids[0].tolist()
        for row, expert in zip(wide, experts, strict=True):
            np.matmul(x[0], gate_up[expert], out=row)
        hidden = silu(wide[:, : wide.shape[1] // 2])
        hidden *= wide[:, wide.shape[1] // 2 :]
        for row, part, expert in zip(hidden, parts, experts, strict=True):
            np.matmul(row, down[expert], out=part)
        out += weights @ parts
        return
    chosen = ids.reshape(-1)
    n = chosen.size
    order = chosen.argsort(kind="stable")
    experts = chosen[order]
    cuts = [0, *((experts[1:] != experts[:-1]).nonzero()[0] + 1).tolist(), n]
    # A lone row runs as two, or BLAS would take its matrix-vector path, which sums in another order. The second is the row
    # that follows (a spare one at the end); what it leaves in the buffers, the next expert overwrites.
    firsts = experts[cuts[:-1]].tolist()
    runs = [(lo, max(hi, lo + 2), expert) for lo, hi, expert in zip(cuts[:-1], cuts[1:], firsts, strict=True)]
    rows = np.zeros((n + 1, x.shape[1]), x.dtype)
    rows[:n] = x[order // k]
    wide = np.empty((n + 1, gate_up.shape[2]), x.dtype)
    wide[n] = 0
    for lo, hi, expert in runs:
        np.matmul(rows[lo:hi], gate_up[expert], out=wide[lo:hi])
    half = wide.shape[1] // 2
    hidden = silu(wide[:, :half])
    hidden *= wide[:, half:]
    for lo, hi, expert in runs:
        np.matmul(hidden[lo:hi], down[expert], out=rows[lo:hi])
    parts = np.empty((n, x.shape[1]), x.dtype)
    parts[order] = rows[:n]
    parts *= weights.reshape(n, 1)
    out += np.add.reduce(parts.reshape(tokens, k, -1), axis=1)


def _work(s: Any) -> tuple[float, float]:
    distinct = s.E * (1 - (1 - s.top / s.E) ** s.T)  # experts that spread routing touches
    return 12 * distinct * s.H * s.F + 12 * s.T * s.H, 6 * s.T * s.top * s.H * s.F


ROUTER_TOPK = Operator(
    router_topk, router_topk_reference, "spark_router_topk", lambda s: (4 * s.T * (s.E + 2 * s.top), 4 * s.T * s.E)
)
MOE_EXPERTS = Operator(moe_experts, experts_reference, "spark_moe_experts", _work, host_kn=(2, 3))
OPERATORS = (ROUTER_TOPK, MOE_EXPERTS)
