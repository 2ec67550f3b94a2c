"""Row gathers: which token a row reads, its embedding, and the rows that go to the head."""

from __future__ import annotations

import numpy as np

from sparkrt.ops.operator import Array, Operator


def select_tokens(ids: Array, plan_ids: Array, feed_slots: Array, feed: Array) -> None:
    """Input token of every row: the slot's last sampled token, or the plan's where feed_slots is -1.

    ids i32 [T] ← plan_ids i32 [T], feed_slots i32 [T], feed i32 [slots]
    ids = feed[feed_slots] if feed_slots ≥ 0 else plan_ids
    parity: T=1 slots=1; T=5 slots=3; T=65 slots=9; T=0 slots=2
    bench: T=256 slots=257
    """
    feed.take(feed_slots, 0, ids, "clip")  # mode "raise" would gather into a temporary first
    np.copyto(ids, plan_ids, where=feed_slots < 0)


def select_tokens_ref(plan_ids: Array, feed_slots: Array, feed: Array) -> Array:
    return np.where(feed_slots >= 0, feed[np.maximum(feed_slots, 0)], plan_ids)


def embedding(out: Array, ids: Array, table: Array) -> None:
    """Rows of the token table.

    out A [T, H] ← ids i32 [T] (all in range), table A [V, H]
    out[t] = table[ids[t]]
    parity: T=1 H=16 V=7; T=63 H=64 V=100; T=65 H=256 V=33; T=0 H=8 V=4
    bench: T=1 H=256 V=6144; T=512 H=256 V=6144; T=4096 H=2048 V=8192
    """
    table.take(ids, 0, out, "clip")


def gather_rows(out: Array, x: Array, rows: Array) -> None:
    """Chosen rows of an activation (those that need logits). Row -1 is padding and reads row 0.

    out A [R, N] ← x A [T, N], rows i32 [R]
    out[r] = x[max(rows[r], 0)]
    parity: R=1 T=1 N=8; R=4 T=65 N=64; R=64 T=3 N=256; R=0 T=5 N=8
    bench: R=16 T=512 N=256; R=128 T=4096 N=2048
    """
    x.take(rows, 0, out, "clip")


SELECT_TOKENS = Operator(select_tokens, select_tokens_ref, "spark_select_tokens", lambda s: (16 * s.T, 0), tolerance=None)
EMBEDDING = Operator(embedding, lambda ids, table: table[ids], "spark_embedding", lambda s: (8 * s.T * s.H, 0))
GATHER_ROWS = Operator(gather_rows, lambda x, rows: x[np.maximum(rows, 0)], "spark_gather_rows", lambda s: (8 * s.R * s.N, 0))
OPERATORS = (SELECT_TOKENS, EMBEDDING, GATHER_ROWS)
