"""Mixture of experts: the router's choice and the experts, grouped by expert.

    p = softmax(logits) over all experts in float32;  ids = the k largest, lowest index on exact ties;
    weights = p[ids], divided by their sum only if `renormalize`
    out[t] = sum_j weights[t, j] * down[e] · (silu(gate[e] · x[t]) * (up[e] · x[t])),  e = ids[t, j]

The host function takes each expert's matrices input-major, gate_up [E, H, 2F] and down [E, F, H]: with few rows BLAS is faster.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sparkrt.ops.elementwise import silu
from sparkrt.ops.operator import Case, Operator, Rng

_SEGMENT = 32  # pairs of one expert that a kernel takes at a time, at least


def workspace_words(tokens: int, top_k: int, experts: int, hidden: int, width: int, itemsize: int) -> int:
    """32-bit words that MOE_EXPERTS wants of a device for `tokens` tokens or fewer, with activations of `itemsize` bytes.

    It holds the (token, choice) pairs sorted by expert, what the first product leaves of each and what the second does.
    """
    pairs = tokens * top_k
    segments = pairs // _SEGMENT + min(pairs, experts)
    parts = (256, 16 * segments, 4 * pairs, pairs * width * itemsize, pairs * hidden * itemsize)
    return sum(-(-part // 256) * 64 for part in parts)


def router_topk_reference(logits: np.ndarray, top_k: int, renormalize: int) -> tuple[np.ndarray, np.ndarray]:
    """logits [T, E] → (weights [T, k], ids [T, k] int32), most likely expert first."""
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    ids = np.argsort(-logits, axis=1, kind="stable")[:, :top_k]
    weights = np.take_along_axis(p, ids, 1)
    if renormalize:
        weights /= weights.sum(1, keepdims=True)
    return weights, ids.astype(np.int32)


def experts_reference(
    x: np.ndarray,
    gate_up: np.ndarray,
    down: np.ndarray,
    ids: np.ndarray,
    weights: np.ndarray,
    workspace: np.ndarray | None = None,
) -> np.ndarray:
    """x [T, H], gate_up [E, 2F, H] (gate rows first), down [E, H, F], ids and weights [T, k] → [T, H], expert after expert."""
    out = np.zeros_like(x)
    for token, (experts, shares) in enumerate(zip(ids, weights, strict=True)):
        for expert, share in zip(experts, shares, strict=True):
            gate, up = np.split(gate_up[expert] @ x[token], 2)
            out[token] += share * (down[expert] @ (silu(gate) * up))
    return out


def router_topk(weights: np.ndarray, ids: np.ndarray, logits: np.ndarray, renormalize: int) -> None:
    """weights [T, k] float32, ids [T, k] int32, logits [T, E] float32. k rounds of argmax, which takes the lowest of equals."""
    left = logits.copy()
    rows = np.arange(len(logits))
    for j in range(ids.shape[1]):
        best = left.argmax(1)
        ids[:, j] = best
        weights[:, j] = logits[rows, best]
        left[rows, best] = -np.inf
    top = weights[:, :1].copy()
    np.exp(weights - top, out=weights)
    total = weights if renormalize else np.exp(logits - top)
    weights /= np.add.reduce(total, 1, keepdims=True)


def moe_experts(
    out: np.ndarray,
    x: np.ndarray,
    gate_up: np.ndarray,
    down: np.ndarray,
    ids: np.ndarray,
    weights: np.ndarray,
    workspace: np.ndarray | None = None,
) -> None:
    """out [T, H], x [T, H], gate_up [E, H, 2F], down [E, F, H], ids [T, k] int32, weights [T, k] float32; no workspace needed.

    Rows are sorted by expert, each expert's run is one product, and a token's k results are added in its own order of choice.
    """
    tokens, k = ids.shape
    if tokens == 0:
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
    np.add.reduce(parts.reshape(tokens, k, -1), axis=1, out=out)


def _router_reference(
    weights: np.ndarray, ids: np.ndarray, logits: np.ndarray, renormalize: int
) -> tuple[np.ndarray, np.ndarray]:
    return router_topk_reference(logits, ids.shape[1], renormalize)


def _router_case(label: str, tokens: int, experts: int, k: int, renormalize: int = 1, ties: bool = False) -> Case:
    def make(rng: Rng) -> list[Any]:
        logits = rng.standard_normal((tokens, experts), np.float32)
        if ties:
            logits = np.round(logits)
        return [np.empty((tokens, k), np.float32), np.empty((tokens, k), np.int32), logits, renormalize]

    return Case(label, make, (0, 1), bytes=4 * tokens * (experts + 2 * k), flops=4 * tokens * experts)


def _experts_case(label: str, tokens: int, experts: int, k: int, hidden: int, width: int) -> Case:
    def make(rng: Rng) -> list[Any]:
        gate_up = rng.standard_normal((experts, 2 * width, hidden), np.float32) * np.float32(hidden**-0.5)
        down = rng.standard_normal((experts, hidden, width), np.float32) * np.float32(width**-0.5)
        ids = np.argsort(rng.random((tokens, experts)), 1)[:, :k].astype(np.int32)
        weights = rng.dirichlet(np.ones(k), tokens).astype(np.float32)
        x = rng.standard_normal((tokens, hidden), np.float32)
        workspace = np.zeros(workspace_words(tokens, k, experts, hidden, width, 4), np.uint32)
        return [np.empty((tokens, hidden), np.float32), x, gate_up, down, ids, weights, workspace]

    distinct = experts * (1 - (1 - k / experts) ** tokens)  # what spread routing touches
    traffic = int(12 * distinct * hidden * width) + 8 * tokens * hidden
    return Case(label, make, bytes=traffic, flops=6 * tokens * k * hidden * width)


ROUTER_TOPK = Operator(
    name="router_topk",
    doc="""Which experts a token goes to, and with what share.

    weights f32 [T, k], ids i32 [T, k] ← logits f32 [T, E], renormalize
    p = softmax(logits) over all experts; the k largest, lowest index on exact ties; divided by their sum if renormalize
    """,
    reference=_router_reference,
    host=router_topk,
    cuda="spark_router_topk",
    parity=(
        _router_case("one token", 1, 8, 2),
        _router_case("not renormalized", 65, 32, 4, renormalize=0),
        _router_case("exact ties", 64, 16, 4, ties=True),
        _router_case("many experts", 5, 512, 10),
    ),
    bench=(_router_case("tiny b16", 16, 8, 2), _router_case("35b t512", 512, 256, 8)),
)
MOE_EXPERTS = Operator(
    name="moe_experts",
    doc="""The routed experts of each token, weighted and summed.

    out A [T, H] ← x A [T, H], gate_up A [E, 2F, H] (gate rows first), down A [E, H, F], ids i32 [T, k], weights f32 [T, k],
    workspace u32 [workspace_words(…) or more] (a device's; the host needs none)
    out = sum_j weights_j · down_e (silu(gate_e x) · (up_e x)), e = ids_j
    """,
    reference=experts_reference,
    host=moe_experts,
    host_kn=(2, 3),
    cuda="spark_moe_experts",
    parity=(
        _experts_case("one token", 1, 8, 2, 64, 16),
        _experts_case("ragged groups", 37, 8, 2, 64, 24),
        _experts_case("most experts idle", 5, 32, 3, 48, 16),
        _experts_case("eight tokens", 8, 12, 4, 264, 136),
        _experts_case("nine tokens", 9, 40, 4, 320, 200),
        _experts_case("more than a segment", 150, 12, 1, 72, 40),
        _experts_case("tiles of pairs", 200, 8, 2, 136, 72),
        _experts_case("no vectors", 5, 4, 2, 20, 12),
    ),
    bench=(
        _experts_case("tiny b1", 1, 8, 2, 256, 64),
        _experts_case("tiny b16", 16, 8, 2, 256, 64),
        _experts_case("tiny t512", 512, 8, 2, 256, 64),
    ),
)
OPERATORS = (ROUTER_TOPK, MOE_EXPERTS)
