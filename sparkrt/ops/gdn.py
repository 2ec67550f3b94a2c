"""Gated delta net operators: gates, one recurrent step per decode row, and the chunked prefill (see gdn_chunk).

The rule, token by token, per value head with its group's key head, a state S [DV, DK] and natural-log decay g ≤ 0:

    q, k ← q / sqrt(|q|² + 1e-6) · DK^-½,  k / sqrt(|k|² + 1e-6)
    S ← e^g S;   d = beta (v - S k);   S ← S + d kᵀ;   o = S q
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sparkrt.ops.activation import sigmoid, softplus
from sparkrt.ops.conv import conv_step, conv_step_reference
from sparkrt.ops.gdn_chunk import CHUNK, L2_EPS, gdn_prefill
from sparkrt.ops.norm import gated_rms_norm, gated_rms_norm_ref
from sparkrt.ops.operator import Array, Operator

_TILE = 1 << 18  # bytes of state updated at once; with a scratch of that size it stays in the L2 cache
_RECORD_WORDS = 4352  # of the workspace, a chunk and value head: two 64 x 64 tiles of float16, 4 x 64 floats


def workspace_words(tokens: int, slices: int, v_heads: int) -> int:
    """32-bit words that GDN_PREFILL's tensor-core kernels want for `tokens` tokens in `slices` slices, or for fewer of both."""
    return (tokens // CHUNK + 2 * slices) * v_heads * _RECORD_WORDS


def gdn_gates_reference(proj: Array, a_log: Array, dt_bias: Array, b_col: int) -> tuple[Array, Array]:
    """proj [T, N]: b in columns b_col …, a in the HV after them → (g [T, HV] ≤ 0, beta [T, HV])."""
    heads = len(a_log)
    b, a = proj[:, b_col : b_col + heads], proj[:, b_col + heads : b_col + 2 * heads]
    return -np.exp(a_log) * softplus(a + dt_bias), sigmoid(b)


def split_heads(qkv: Array, k_heads: int, v_heads: int, v_dim: int, k_dim: int) -> tuple[Array, Array, Array]:
    """qkv [T, C] → q, k [T, HV, DK] normalized, q scaled, each repeated for the value heads of its group; v [T, HV, DV]."""
    tokens, keys = len(qkv), k_heads * k_dim
    q, k = qkv[:, :keys], qkv[:, keys : 2 * keys]

    def normalized(x: Array) -> Array:
        x = x.reshape(tokens, k_heads, k_dim)
        x = x / np.sqrt((x * x).sum(-1, keepdims=True) + L2_EPS)
        return np.repeat(x, v_heads // k_heads, axis=1)

    return normalized(q) * k_dim**-0.5, normalized(k), qkv[:, 2 * keys :].reshape(tokens, v_heads, v_dim)


def gdn_recurrence(q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array) -> tuple[Array, Array]:
    """q, k, v as `split_heads` gives them, g, beta [T, HV], state [HV, DV, DK] → (o [T, HV, DV], state)."""
    o = np.empty_like(v)
    for t in range(len(v)):
        state = state * np.exp(g[t])[:, None, None]
        d = beta[t][:, None] * (v[t] - np.einsum("hvk,hk->hv", state, k[t]))
        state = state + d[:, :, None] * k[t][:, None, :]
        o[t] = np.einsum("hvk,hk->hv", state, q[t])
    return o, state


def delta_step_reference(state: Array, qkv: Array, g: Array, beta: Array, slots: Array, k_heads: int) -> tuple[Array, Array]:
    """One token a row. Returns (out [B, HV, DV], state)."""
    state = state.copy()
    q, k, v = split_heads(qkv, k_heads, *state.shape[1:])
    out = np.empty_like(v)
    for i, slot in enumerate(slots):
        row = slice(i, i + 1)
        out[row], state[slot] = gdn_recurrence(q[row], k[row], v[row], g[row], beta[row], state[slot])
    return out, state


def gdn_step_reference(*call: Any) -> tuple[Array, Array, Array]:
    """Returns (out [B, HV·DV], state, ring)."""
    _, state, ring, proj, conv, a_log, dt_bias, norm, slots, positions, k_heads, eps = call
    z_col, width = len(conv), state.shape[1] * state.shape[2]
    qkv, ring = conv_step_reference(ring, proj, conv, slots, positions)
    out, state = delta_step_reference(state, qkv, *gdn_gates_reference(proj, a_log, dt_bias, z_col + width), slots, k_heads)
    return gated_rms_norm_ref(out, proj, norm, z_col, eps), state, ring


def gdn_prefill_reference(*call: Any) -> tuple[Array, Array, Array | None]:
    """Returns (out [T, HV, DV], state, snapshots if there are any)."""
    _, state, snapshots, qkv, g, beta, slots, cu, starts, snap_rows, k_heads, _ = call
    state = state.copy()
    q, k, v = split_heads(qkv, k_heads, *state.shape[1:])
    out = np.empty_like(v)
    marks = [] if snap_rows is None else snap_rows.tolist()
    taken = None if snapshots is None else snapshots.copy()
    for s, slot in enumerate(slots):
        now = state[slot] if starts[s] else np.zeros_like(state[slot])
        cuts = sorted({0, *(offset for sequence, offset in marks if sequence == s), cu[s + 1] - cu[s]})
        for lo, hi in zip([0, *cuts[:-1]], cuts, strict=True):
            rows = slice(cu[s] + lo, cu[s] + hi)
            out[rows], now = gdn_recurrence(q[rows], k[rows], v[rows], g[rows], beta[rows], now)
            for i, mark in enumerate(marks):
                if taken is not None and mark == [s, hi]:
                    taken[i] = now
        state[slot] = now
    return out, state, taken


def gdn_gates(g: Array, beta: Array, proj: Array, a_log: Array, dt_bias: Array, b_col: int) -> None:
    """Decay and write strength of each value head.

    g, beta f32 [T, HV] ← proj A [T, N] (b at column b_col, then a), a_log, dt_bias f32 [HV], b_col
    g = -exp(a_log) · softplus(a + dt_bias);  beta = sigmoid(b)
    parity: T=1 HV=4 b_col=8 N=19; T=65 HV=6 N=15; T=64 HV=4 b_col=3 N=14 proj=60
    bench: T=16 HV=4 b_col=1536 N=1547; T=2048 HV=32 b_col=12288 N=12355
    """
    heads = g.shape[1]
    beta[:] = sigmoid(proj[:, b_col : b_col + heads])
    np.multiply(softplus(proj[:, b_col + heads : b_col + 2 * heads] + dt_bias), -np.exp(a_log), out=g)


def delta_step(out: Array, state: Array, qkv: Array, g: Array, beta: Array, slots: Array, k_heads: int) -> None:
    """One token of the rule per row: out [B, HV, DV], state [slots, HV, DV, DK] ← qkv [B, C], g, beta [B, HV], slots [B]."""
    # A row's state is read once, S [q k], and updated once; nothing is gathered and no row's result depends on another row.
    # The norms of q and k go into the coefficients, q and k themselves stay as they are:
    # d = beta (v - e^g S k/|k|),  o = e^g S q/|q| + (q·k)/(|q||k|) d,  S ← e^g S + d/|k| kᵀ
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


def gdn_step(
    out: Array,
    state: Array,
    ring: Array,
    proj: Array,
    conv: Array,
    a_log: Array,
    dt_bias: Array,
    norm: Array,
    slots: Array,
    positions: Array,
    k_heads: int,
    eps: float,
) -> None:
    """One token per row, from the layer's projection to what its output projection takes, on states held in slots.

    out A [B, HV·DV], state f32 [slots, HV, DV, DK] in/out, ring A [slots, R, C] in/out ← proj A [B, N] (q|k|v|z|b|a),
    conv A [C, 4], a_log, dt_bias f32 [HV], norm f32 [DV], slots, positions i32 [B], k_heads, eps
    q|k|v convolved at `positions` as by CONV_PREFILL; g, beta as by GDN_GATES; S ← e^g S;  d = beta (v - S k);  S ← S + d kᵀ;
    o = S q, with q, k normalized and q scaled by DK^-½;  out = rms_norm(o, norm, eps) · silu(z)
    Rows in the last slot, the dummy, may be skipped: their output is finite and their state anything finite.
    parity: B=1 HK=2 HV=4 DK=128 DV=128 R=4; B=5 HK=2 HV=6 DK=48 DV=40 R=7; B=3 HK=1 HV=1 DK=128 DV=128 R=4 decay=100;
    B=2 HK=8 HV=8 DK=128 DV=128 R=5; B=33 HK=4 HV=16 DK=128 DV=128 R=4; B=4 HK=2 HV=4 DK=128 DV=64 R=4 positions=0+1+2+3;
    B=2 HK=1 HV=3 DK=20 DV=9 R=4
    bench: B=1 HK=2 HV=4 DK=128 DV=128 R=4; B=16 HK=2 HV=4 DK=128 DV=128 R=4; B=8 HK=16 HV=32 DK=128 DV=128 R=4
    """
    heads, v_dim = state.shape[1:3]
    rows, z_col = len(out), len(conv)
    qkv, o = np.empty((rows, z_col), proj.dtype), np.empty((rows, heads, v_dim), proj.dtype)
    g, beta = np.empty((2, rows, heads), np.float32)
    conv_step(qkv, ring, proj, conv, slots, positions)
    gdn_gates(g, beta, proj, a_log, dt_bias, z_col + heads * v_dim)
    delta_step(o, state, qkv, g, beta, slots, k_heads)
    gated_rms_norm(out, o, proj, norm, z_col, eps)


def _step_work(s: Any) -> tuple[float, float]:
    values, keys = s.HV * s.DV, 2 * s.HK * s.DK
    return 4 * s.B * (2 * values * s.DK + 3 * values + 5 * (keys + values)), 8 * s.B * values * s.DK


def _prefill_work(s: Any) -> tuple[float, float]:
    per_value_head = 6 * s.DK * s.DV + 4 * CHUNK * s.DV + CHUNK * CHUNK
    traffic = 8 * s.T * (s.HK * s.DK + s.HV * s.DV) + 8 * s.S * s.HV * s.DV * s.DK
    return traffic, s.T * (s.HK * 4 * CHUNK * s.DK + s.HV * per_value_head)


GDN_GATES = Operator(gdn_gates, gdn_gates_reference, "spark_gdn_gates", lambda s: (16 * s.T * s.HV, 0))
GDN_STEP = Operator(gdn_step, gdn_step_reference, "spark_gdn_step", _step_work)
GDN_PREFILL = Operator(gdn_prefill, gdn_prefill_reference, "spark_gdn_prefill", _prefill_work)
OPERATORS = (GDN_GATES, GDN_STEP, GDN_PREFILL)
