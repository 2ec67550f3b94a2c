"""Row gathers: which token a row reads, its embedding, and the rows that go to the head."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparkrt.ops.operator import Array, Operator, Rng, Sizes


def select_tokens(ids: Array, plan_ids: Array, feed_slots: Array, feed: Array) -> None:
    feed.take(feed_slots, 0, ids, "clip")  # mode "raise" would gather into a temporary first
    np.copyto(ids, plan_ids, where=feed_slots < 0)


def _select_inputs(rng: Rng, s: Sizes) -> dict[str, Any]:
    ids = rng.integers(0, 1 << 18, (2, s.T + s.slots), np.int32)
    return {"plan_ids": ids[0, : s.T], "feed": ids[1, : s.slots], "feed_slots": rng.integers(-1, s.slots, s.T, np.int32)}


def _embedding_inputs(rng: Rng, s: Sizes) -> dict[str, Any]:
    ids = rng.integers(0, s.V, s.T, np.int32)
    ids[:1], ids[-1:] = 0, s.V - 1
    return {"ids": ids}


SELECT_TOKENS = Operator(
    "select_tokens",
    """Input token of every row: the slot's last sampled token, or the plan's where feed_slots is -1.

    ids i32 [T] ← plan_ids i32 [T], feed_slots i32 [T], feed i32 [slots]
    ids = feed[feed_slots] if feed_slots ≥ 0 else plan_ids
    """,
    lambda plan_ids, feed_slots, feed: np.where(feed_slots >= 0, feed[np.maximum(feed_slots, 0)], plan_ids),
    select_tokens,
    cuda="spark_select_tokens",
    tolerance=None,
    parity="T=1 slots=1; T=5 slots=3; T=65 slots=9; T=0 slots=2",
    bench="T=256 slots=257",
    inputs=_select_inputs,
    work=lambda s: (16 * s.T, 0),
)

EMBEDDING = Operator(
    "embedding",
    """Rows of the token table.

    out A [T, H] ← ids i32 [T] (all in range), table A [V, H]
    out[t] = table[ids[t]]
    """,
    lambda ids, table: table[ids],
    lambda out, ids, table: table.take(ids, 0, out, "clip"),
    cuda="spark_embedding",
    parity="T=1 H=16 V=7; T=63 H=64 V=100; T=65 H=256 V=33; T=0 H=8 V=4",
    bench="T=1 H=256 V=6144; T=512 H=256 V=6144; T=4096 H=2048 V=8192",
    inputs=_embedding_inputs,
    work=lambda s: (8 * s.T * s.H, 0),
)

GATHER_ROWS = Operator(
    "gather_rows",
    """Chosen rows of an activation (those that need logits). Row -1 is padding and reads row 0.

    out A [R, N] ← x A [T, N], rows i32 [R]
    out[r] = x[max(rows[r], 0)]
    """,
    lambda x, rows: x[np.maximum(rows, 0)],
    lambda out, x, rows: x.take(rows, 0, out, "clip"),
    cuda="spark_gather_rows",
    parity="R=1 T=1 N=8; R=4 T=65 N=64; R=64 T=3 N=256; R=0 T=5 N=8",
    bench="R=16 T=512 N=256; R=128 T=4096 N=2048",
    inputs=lambda rng, s: {"rows": rng.integers(-1, s.T, s.R, np.int32)},
    work=lambda s: (8 * s.R * s.N, 0),
)

OPERATORS = (SELECT_TOKENS, EMBEDDING, GATHER_ROWS)
