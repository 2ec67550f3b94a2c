"""Row gathers: which token a row reads, its embedding, and the rows that go to the head."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparkrt.ops.operator import Case, Operator, Rng


def select_tokens_ref(plan_ids: np.ndarray, feed_slots: np.ndarray, feed: np.ndarray) -> np.ndarray:
    return np.where(feed_slots >= 0, feed[np.maximum(feed_slots, 0)], plan_ids)


def select_tokens(ids: np.ndarray, plan_ids: np.ndarray, feed_slots: np.ndarray, feed: np.ndarray) -> None:
    feed.take(feed_slots, 0, ids, "clip")
    np.copyto(ids, plan_ids, where=feed_slots < 0)


def embedding_ref(ids: np.ndarray, table: np.ndarray) -> np.ndarray:
    rows: np.ndarray = table[ids]
    return rows


def embedding(out: np.ndarray, ids: np.ndarray, table: np.ndarray) -> None:
    table.take(ids, 0, out, "clip")  # mode "raise" would gather into a temporary first


def gather_rows_ref(x: np.ndarray, rows: np.ndarray) -> np.ndarray:
    chosen: np.ndarray = x[np.maximum(rows, 0)]
    return chosen


def gather_rows(out: np.ndarray, x: np.ndarray, rows: np.ndarray) -> None:
    x.take(rows, 0, out, "clip")


def _select_case(tokens: int, slots: int, bench: bool = False) -> Case:
    def make(rng: Rng) -> list[Any]:
        feed = rng.integers(0, 1 << 18, slots, dtype=np.int32)
        feed_slots = rng.integers(-1, slots, tokens, dtype=np.int32)
        return [np.empty(tokens, np.int32), rng.integers(0, 1 << 18, tokens, dtype=np.int32), feed_slots, feed]

    return Case(f"T={tokens} slots={slots}", make, bytes=16 * tokens if bench else 0)


def _embedding_case(tokens: int, hidden: int, vocab: int) -> Case:
    def make(rng: Rng) -> list[Any]:
        ids = rng.integers(0, vocab, tokens, dtype=np.int32)
        ids[:1], ids[-1:] = 0, vocab - 1
        table = rng.standard_normal((vocab, hidden), dtype=np.float32)
        return [np.empty((tokens, hidden), np.float32), ids, table]

    return Case(f"T={tokens} H={hidden} V={vocab}", make, bytes=8 * tokens * hidden)


def _gather_case(rows: int, tokens: int, width: int) -> Case:
    def make(rng: Rng) -> list[Any]:
        x = rng.standard_normal((tokens, width), dtype=np.float32)
        index = rng.integers(-1, tokens, rows, dtype=np.int32)
        return [np.empty((rows, width), np.float32), x, index]

    return Case(f"R={rows} T={tokens} N={width}", make, bytes=8 * rows * width)


SELECT_TOKENS = Operator(
    "select_tokens",
    """Input token of every row: the slot's last sampled token, or the plan's where feed_slots is -1.

    ids i32 [T] ← plan_ids i32 [T], feed_slots i32 [T], feed i32 [slots]
    ids = feed[feed_slots] if feed_slots ≥ 0 else plan_ids
    """,
    select_tokens_ref,
    select_tokens,
    cuda="spark_select_tokens",
    tolerance=None,
    parity=tuple(_select_case(t, s) for t, s in ((1, 1), (5, 3), (65, 9), (0, 2))),
    bench=(_select_case(256, 257, bench=True),),
)

EMBEDDING = Operator(
    "embedding",
    """Rows of the token table.

    out A [T, H] ← ids i32 [T] (all in range), table A [V, H]
    out[t] = table[ids[t]]
    """,
    embedding_ref,
    embedding,
    cuda="spark_embedding",
    parity=tuple(_embedding_case(*s) for s in ((1, 16, 7), (63, 64, 100), (65, 256, 33), (0, 8, 4))),
    bench=(_embedding_case(1, 256, 6144), _embedding_case(512, 256, 6144), _embedding_case(4096, 2048, 8192)),
)

GATHER_ROWS = Operator(
    "gather_rows",
    """Chosen rows of an activation (those that need logits). Row -1 is padding and reads row 0.

    out A [R, N] ← x A [T, N], rows i32 [R]
    out[r] = x[max(rows[r], 0)]
    """,
    gather_rows_ref,
    gather_rows,
    cuda="spark_gather_rows",
    parity=tuple(_gather_case(*s) for s in ((1, 1, 8), (4, 65, 64), (64, 3, 256), (0, 5, 8))),
    bench=(_gather_case(16, 512, 256), _gather_case(128, 4096, 2048)),
)

OPERATORS = (SELECT_TOKENS, EMBEDDING, GATHER_ROWS)
