"""The gated delta rule, token by token: what GDN_STEP and GDN_PREFILL must compute.

Per value head, with its group's key head, a state S [DV, DK] and natural-log decay g ≤ 0:

    q, k ← q / sqrt(|q|² + 1e-6) · DK^-½,  k / sqrt(|k|² + 1e-6)
    S ← e^g S;   d = beta (v - S k);   S ← S + d kᵀ;   o = S q
"""

from __future__ import annotations

import numpy as np

from sparkrt.ops.elementwise import sigmoid, softplus

L2_EPS = 1e-6  # inside the root; a constant of the layer, not the model's rms_norm_eps


def gdn_gates_reference(proj: np.ndarray, a_log: np.ndarray, dt_bias: np.ndarray, b_col: int) -> tuple[np.ndarray, np.ndarray]:
    """proj [T, N]: b in columns b_col …, a in the HV after them → (g [T, HV] ≤ 0, beta [T, HV])."""
    heads = len(a_log)
    b, a = proj[:, b_col : b_col + heads], proj[:, b_col + heads : b_col + 2 * heads]
    return -np.exp(a_log) * softplus(a + dt_bias), sigmoid(b)


def split_heads(qkv: np.ndarray, k_heads: int, v_heads: int, v_dim: int, k_dim: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """qkv [T, C] → q, k [T, HV, DK] normalized, q scaled, each repeated for the value heads of its group; v [T, HV, DV]."""
    tokens, keys = len(qkv), k_heads * k_dim
    q, k = qkv[:, :keys], qkv[:, keys : 2 * keys]

    def normalized(x: np.ndarray) -> np.ndarray:
        x = x.reshape(tokens, k_heads, k_dim)
        x = x / np.sqrt((x * x).sum(-1, keepdims=True) + L2_EPS)
        return np.repeat(x, v_heads // k_heads, axis=1)

    return normalized(q) * k_dim**-0.5, normalized(k), qkv[:, 2 * keys :].reshape(tokens, v_heads, v_dim)


def gdn_recurrence(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, g: np.ndarray, beta: np.ndarray, state: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """q, k, v as `split_heads` gives them, g, beta [T, HV], state [HV, DV, DK] → (o [T, HV, DV], state)."""
    o = np.empty_like(v)
    for t in range(len(v)):
        state = state * np.exp(g[t])[:, None, None]
        d = beta[t][:, None] * (v[t] - np.einsum("hvk,hk->hv", state, k[t]))
        state = state + d[:, :, None] * k[t][:, None, :]
        o[t] = np.einsum("hvk,hk->hv", state, q[t])
    return o, state


def gdn_step_reference(
    state: np.ndarray, qkv: np.ndarray, g: np.ndarray, beta: np.ndarray, slots: np.ndarray, k_heads: int
) -> tuple[np.ndarray, np.ndarray]:
    """One token a row; see `gdn.gdn_step`. Returns (out [B, HV, DV], state)."""
    state = state.copy()
    q, k, v = split_heads(qkv, k_heads, *state.shape[1:])
    out = np.empty_like(v)
    for i, slot in enumerate(slots):
        row = slice(i, i + 1)
        out[row], state[slot] = gdn_recurrence(q[row], k[row], v[row], g[row], beta[row], state[slot])
    return out, state


def gdn_prefill_reference(
    state: np.ndarray,
    snapshots: np.ndarray | None,
    qkv: np.ndarray,
    g: np.ndarray,
    beta: np.ndarray,
    slots: np.ndarray,
    cu: np.ndarray,
    starts: np.ndarray,
    snap_rows: np.ndarray | None,
    k_heads: int,
) -> tuple[np.ndarray, ...]:
    """See `gdn_chunk.gdn_prefill`. Returns (out [T, HV, DV], state), and the snapshots if there are any."""
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
    return (out, state) if taken is None else (out, state, taken)
