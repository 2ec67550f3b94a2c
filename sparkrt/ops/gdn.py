"""Gated delta net operators: gates, one recurrent step per decode row, and the chunked prefill (see gdn_chunk)."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparkrt.ops.elementwise import sigmoid, softplus
from sparkrt.ops.gdn_chunk import CHUNK, gdn_prefill
from sparkrt.ops.gdn_reference import L2_EPS, gdn_gates_reference, gdn_prefill_reference, gdn_step_reference
from sparkrt.ops.operator import Case, Operator, Rng

_TILE = 1 << 18  # bytes of state updated at once; with a scratch of that size it stays in the L2 cache


def gdn_gates(g: np.ndarray, beta: np.ndarray, proj: np.ndarray, a_log: np.ndarray, dt_bias: np.ndarray, b_col: int) -> None:
    """g, beta [T, HV] float32, proj [T, N]: b in columns b_col …, a in the HV after them; a_log, dt_bias [HV]."""
    heads = g.shape[1]
    beta[:] = sigmoid(proj[:, b_col : b_col + heads])
    np.multiply(softplus(proj[:, b_col + heads : b_col + 2 * heads] + dt_bias), -np.exp(a_log), out=g)


def gdn_step(
    out: np.ndarray, state: np.ndarray, qkv: np.ndarray, g: np.ndarray, beta: np.ndarray, slots: np.ndarray, k_heads: int
) -> None:
    """Decode rows: out [B, HV, DV], state [slots, HV, DV, DK] in/out, qkv [B, C], g/beta [B, HV], slots [B].

    A row's state is read once, S [q k], and updated once; nothing is gathered and no row's result depends on another row.
    The norms of q and k go into the coefficients, q and k themselves stay as they are:

    d = beta (v - e^g S k/|k|),  o = e^g S q/|q| + (q·k)/(|q||k|) d,  S ← e^g S + d/|k| kᵀ
    """
    _, v_heads, v_dim, k_dim = state.shape
    n, group = len(slots), v_heads // k_heads
    qk = qkv[:, : 2 * k_heads * k_dim].reshape(n, 2, k_heads, k_dim).swapaxes(1, 2)
    gram = np.matmul(qk, qk.swapaxes(2, 3))
    inverse = gram.reshape(n, k_heads, 4)[..., ::3] + np.float32(L2_EPS)  # |q|², |k|²
    np.sqrt(inverse, out=inverse)
    np.divide(1, inverse, out=inverse)
    inverse[..., 0] *= np.float32(k_dim**-0.5)
    cross = gram[..., 0, 1] * inverse[..., 0] * inverse[..., 1]

    states = [state[slot].reshape(k_heads, group * v_dim, k_dim) for slot in slots.tolist()]
    seen = np.empty((n, k_heads, 2, group * v_dim), np.float32)  # S q, S k
    for i, s in enumerate(states):
        np.matmul(qk[i], s.swapaxes(1, 2), out=seen[i])
    seen = seen.reshape(n, k_heads, 2, group, v_dim)
    decay = np.exp(g).reshape(n, k_heads, group, 1)
    seen *= inverse[..., None, None] * decay[:, :, None]
    d = qkv[:, 2 * k_heads * k_dim :].reshape(n, k_heads, group, v_dim) - seen[:, :, 1]
    d *= beta.reshape(n, k_heads, group, 1)
    o = out.reshape(n, k_heads, group, v_dim)
    np.multiply(d, cross[..., None, None], out=o)
    o += seen[:, :, 0]

    # d kᵀ as a product with inner size 2, [0 d] [q k]ᵀ: BLAS is four times as quick as a broadcast, and as exact.
    seen[:, :, 0] = 0
    np.multiply(d, inverse[..., 1, None, None], out=seen[:, :, 1])
    left = seen.reshape(n, k_heads, 2, group * v_dim).swapaxes(2, 3)
    heads = min(k_heads, max(1, _TILE // (4 * group * v_dim * k_dim)))
    update = np.empty((heads, group * v_dim, k_dim), np.float32)
    decay = decay[..., None]
    for i, s in enumerate(states):
        for first in range(0, k_heads, heads):
            at = slice(first, first + heads)
            tile = s[at]
            part = np.matmul(left[i, at], qk[i, at], out=update[: len(tile)])
            by_head = tile.reshape(-1, group, v_dim, k_dim)
            by_head *= decay[i, at]
            tile += part


def _gates_case(label: str, tokens: int, heads: int, b_col: int, scale: float = 1.0) -> Case:
    def make(rng: Rng) -> list[Any]:
        proj = rng.standard_normal((tokens, b_col + 2 * heads + 3), np.float32) * np.float32(scale)
        a_log = np.log(rng.uniform(1, 16, heads)).astype(np.float32)
        out = np.empty((tokens, heads), np.float32)
        return [out, out.copy(), proj, a_log, rng.standard_normal(heads, np.float32), b_col]

    return Case(label, make, (0, 1), bytes=16 * tokens * heads)


def _inputs(rng: Rng, tokens: int, k_heads: int, v_heads: int, k_dim: int, v_dim: int, decay: float) -> tuple[np.ndarray, ...]:
    """qkv, g, beta. Keys of a token share a direction, as trained ones do."""
    qkv = rng.standard_normal((tokens, 2 * k_heads * k_dim + v_heads * v_dim), np.float32)
    qkv[:, k_heads * k_dim : 2 * k_heads * k_dim] += 0.5
    g = -rng.exponential(decay, (tokens, v_heads)).astype(np.float32)
    return qkv, g, rng.random((tokens, v_heads), np.float32)


def _state(rng: Rng, slots: int, v_heads: int, v_dim: int, k_dim: int) -> np.ndarray:
    return rng.standard_normal((slots, v_heads, v_dim, k_dim), np.float32) * np.float32(0.3)


def _step_case(
    label: str, batch: int, k_heads: int, v_heads: int, k_dim: int = 128, v_dim: int = 128, decay: float = 0.2
) -> Case:
    def make(rng: Rng) -> list[Any]:
        qkv, g, beta = _inputs(rng, batch, k_heads, v_heads, k_dim, v_dim, decay)
        slots = 1 + rng.permutation(batch).astype(np.int32)  # the last slot included
        out = np.empty((batch, v_heads, v_dim), np.float32)
        return [out, _state(rng, batch + 1, v_heads, v_dim, k_dim), qkv, g, beta, slots, k_heads]

    size = batch * v_heads * v_dim
    return Case(label, make, (0, 1), bytes=8 * size * k_dim + 8 * size, flops=8 * size * k_dim)


def _prefill_case(
    label: str,
    lengths: tuple[int, ...],
    starts: tuple[int, ...],
    k_heads: int = 1,
    v_heads: int = 2,
    k_dim: int = 32,
    v_dim: int = 48,
    decay: float = 0.2,
    snaps: tuple[tuple[int, int], ...] = (),
) -> Case:
    def make(rng: Rng) -> list[Any]:
        tokens, n = sum(lengths), len(lengths)
        qkv, g, beta = _inputs(rng, tokens, k_heads, v_heads, k_dim, v_dim, decay)
        state = _state(rng, n + 1, v_heads, v_dim, k_dim)
        snapshots = np.empty((len(snaps), *state.shape[1:]), np.float32) if snaps else None
        slots = rng.permutation(n + 1)[:n].astype(np.int32)
        cu = np.cumsum((0, *lengths)).astype(np.int32)
        rows = np.array(snaps, np.int32) if snaps else None
        out = np.empty((tokens, v_heads, v_dim), np.float32)
        return [out, state, snapshots, qkv, g, beta, slots, cu, np.array(starts, np.int32), rows, k_heads]

    tokens = sum(lengths)
    per_key_head = 4 * CHUNK * k_dim
    per_value_head = 6 * k_dim * v_dim + 4 * CHUNK * v_dim + CHUNK * CHUNK
    traffic = 4 * tokens * (2 * k_heads * k_dim + 2 * v_heads * v_dim) + 8 * len(lengths) * v_heads * v_dim * k_dim
    flops = tokens * (k_heads * per_key_head + v_heads * per_value_head)
    return Case(label, make, (0, 1, 2) if snaps else (0, 1), bytes=traffic, flops=flops)


GDN_GATES = Operator(
    name="gdn_gates",
    doc="""Decay and write strength of each value head.

    g, beta f32 [T, HV] ← proj A [T, N] (b at column b_col, then a), a_log, dt_bias f32 [HV], b_col
    g = -exp(a_log) · softplus(a + dt_bias);  beta = sigmoid(b)
    """,
    reference=gdn_gates_reference,
    host=gdn_gates,
    parity=(
        _gates_case("one token", 1, 4, 8),
        _gates_case("65 tokens", 65, 6, 0),
        _gates_case("saturated", 64, 4, 3, scale=60.0),
    ),
    bench=(_gates_case("tiny b16", 16, 4, 1536), _gates_case("35b t2048", 2048, 32, 12288)),
)
GDN_STEP = Operator(
    name="gdn_step",
    doc="""One token of the gated delta rule per row, on states held in slots.

    out A [B, HV, DV], state f32 [slots, HV, DV, DK] in/out ← qkv A [B, C], g, beta f32 [B, HV], slots i32 [B], k_heads
    S ← e^g S;  d = beta (v - S k);  S ← S + d kᵀ;  o = S q;  q, k normalized, q scaled by DK^-½
    """,
    reference=gdn_step_reference,
    host=gdn_step,
    parity=(
        _step_case("one row", 1, 2, 4),
        _step_case("odd sizes", 5, 2, 6, k_dim=48, v_dim=40),
        _step_case("strong decay", 3, 1, 1, decay=100.0),
        _step_case("tiles of heads", 2, 8, 8),
    ),
    bench=(_step_case("tiny b1", 1, 2, 4), _step_case("tiny b16", 16, 2, 4), _step_case("35b b8", 8, 16, 32)),
)
GDN_PREFILL = Operator(
    name="gdn_prefill",
    doc="""The gated delta rule over prompt slices, in chunks of 64 on absolute positions.

    out A [T, HV, DV], state f32 [slots, HV, DV, DK] in/out, snapshots f32 [n, HV, DV, DK] or none
    ← qkv A [T, C], g, beta f32 [T, HV], slots i32 [S], cu i32 [S+1], starts i32 [S], snap_rows i32 [n, 2] or none, k_heads
    A slice at start 0 begins from zero; snapshots are states after snap_rows[i, 1] tokens of slice snap_rows[i, 0].
    """,
    reference=gdn_prefill_reference,
    host=gdn_prefill,
    parity=(
        _prefill_case("one token", (1,), (0,)),
        _prefill_case("edges of a chunk", (0, 1, 63, 64, 65), (7, 64, 0, 128, 0)),
        _prefill_case("mid-chunk start", (130,), (37,), k_heads=2, v_heads=4),
        _prefill_case("decay to e^-1000", (100,), (64,), decay=1000.0),
        _prefill_case("snapshots", (200, 64), (30, 0), snaps=((0, 34), (0, 98), (1, 64), (0, 200), (1, 0))),
    ),
    bench=(
        _prefill_case("tiny t512", (512,), (0,), 2, 4, 128, 128),
        _prefill_case("35b t1024", (1024,), (0,), 16, 32, 128, 128),
    ),
)
OPERATORS = (GDN_GATES, GDN_STEP, GDN_PREFILL)
