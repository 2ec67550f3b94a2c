"""Inputs for an operator, from its doc and a line of sizes such as "T=65 H=64 x=300". What the line does not say:

- float arrays are standard normal, times the value that the line gives under their name ("x=300"); int arrays hold that value
  (or several, "starts=0+64", "L=7*16" being 16 times 7), else 0; `slots` are distinct slots and `cu…` the slices' bounds
- what may be none is none unless named (a bare word is worth 1); scalars are 0 unless named, but eps
- several numbers for T are the lengths of S slices; `slots` counts two more than the rows or slices that use them
- anything else is in INPUTS: by operator, a function of (rng, sizes) that gives arguments by name
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import numpy as np

from sparkrt.ops import gdn, moe
from sparkrt.ops import sampling_rules as rules
from sparkrt.ops.attention import decode_workspace_words, kv_lengths
from sparkrt.ops.operator import Operator
from sparkrt.ops.rope import inverse_frequencies, rope_table

Rng = np.random.Generator
Given = dict[str, Any]
DTYPES = {"A": np.float32, "f32": np.float32, "i32": np.int32, "u32": np.uint32}


class Sizes(dict[str, Any]):
    """The numbers of a case by name, 0 where it names none; `lengths` are T's."""

    def __init__(self, label: str) -> None:
        super().__init__(eps=1e-6)
        for word in label.split():
            name, _, text = word.partition("=")
            terms, _, times = (text or "1").partition("*")
            values = tuple(int(v) if re.fullmatch(r"-?\d+", v) else float(v) for v in terms.split("+")) * int(times or 1)
            self[name] = values if len(values) > 1 else values[0]
        self["lengths"] = self.T if isinstance(self.T, tuple) else (self.T,)
        self |= {"T": sum(self.lengths), "S": len(self.lengths)}
        self.setdefault("slots", (self.B or self.R or self.S) + 2)

    def __getattr__(self, name: str) -> Any:
        return self.get(name, 0)

    def shape(self, dims: str) -> tuple[int, ...]:
        """Of dimensions as the doc spells them: "T, 2·H + 1"."""
        terms = ([re.findall(r"\d+|[^\W\d]\w*", term) for term in dim.split("+")] for dim in dims.split(","))
        return tuple(sum(prod(int(f) if f.isdigit() else self[f] for f in term) for term in dim) for dim in terms)


@dataclass(frozen=True, slots=True)
class Case:
    """One parity or bench case: `make(rng)` returns the full argument list (outputs preallocated, poisoned by the caller).

    `outputs` are the positions written by the operator (state updated in place included); `bytes` is the least device traffic.
    """

    label: str
    make: Callable[[Rng], list[Any]]
    outputs: tuple[int, ...]
    bytes: int
    flops: int


def cases(op: Operator, labels: str) -> list[Case]:
    """Cases of an operator, separated by ";"."""
    found = []
    for label in (" ".join(text.split()) for text in labels.split(";")):
        moved, flops = op.work(Sizes(label))
        found.append(Case(label, partial(_make, op, Sizes(label)), op.outputs, int(moved), int(flops)))
    return found


def _make(op: Operator, sizes: Sizes, rng: Rng) -> list[Any]:
    given = INPUTS.get(op.name, lambda rng, s: {})(rng, sizes)
    return [given[name] if name in given else _value(name, array, sizes, rng) for name, array in op.arguments().items()]


def _value(name: str, array: tuple[str, str, bool] | None, sizes: Sizes, rng: Rng) -> Any:
    if array is None:
        return sizes.get(name, 0)
    kind, dims, optional = array
    if optional and name not in sizes:
        return None
    if name == "slots":
        return rng.permutation(sizes.slots)[: sizes.shape(dims)[0]].astype(np.int32)
    if name.startswith("cu"):
        return np.cumsum([0, *sizes.lengths], dtype=np.int32)
    if DTYPES[kind] == np.float32:
        return normal(rng, sizes.shape(dims), sizes.get(name, 1))
    return np.full(sizes.shape(dims), sizes.get(name, 0), DTYPES[kind])


def normal(rng: Rng, shape: Sequence[int], scale: float = 1.0) -> np.ndarray:
    return rng.standard_normal(shape, np.float32) * np.float32(scale)


def _select_inputs(rng: Rng, s: Sizes) -> Given:
    ids = rng.integers(0, 1 << 18, (2, s.T + s.slots), np.int32)
    return {"plan_ids": ids[0, : s.T], "feed": ids[1, : s.slots], "feed_slots": rng.integers(-1, s.slots, s.T, np.int32)}


def _embedding_inputs(rng: Rng, s: Sizes) -> Given:
    ids = rng.integers(0, s.V, s.T, np.int32)
    ids[:1], ids[-1:] = 0, s.V - 1
    return {"ids": ids}


def _qkv_inputs(rng: Rng, s: Sizes) -> Given:
    """Rows land in distinct random cache slots; the first row is at position 0, the last at the table's end."""
    pages, last = s.T // s.page + 3, 4095
    positions = rng.integers(0, last, s.T, np.int32)
    positions[:1], positions[-1:] = 0, last
    slot_map = rng.permutation(pages * s.page)[: s.T].astype(np.int32)
    if s.skipped:
        slot_map[::2] = -1
    table = rope_table(inverse_frequencies(1e6, s.R), 1.0, last + 1)
    pools = normal(rng, (2, pages, s.Hkv, s.page, s.D))
    proj = normal(rng, (s.T, (s.Hq * (1 + s.gated) + 2 * s.Hkv) * s.D))
    given = {"k_pool": pools[0], "v_pool": pools[1], "proj": proj, "positions": positions, "slot_map": slot_map}
    return given | {"cos_sin": table}


def _attention_inputs(rng: Rng, s: Sizes) -> Given:
    """A cache of pages that are shuffled, or one run, with NaN where nothing may be read."""
    kv_len = kv_lengths(s)
    counts = -(-kv_len // s.page)
    ends, total, rows = np.cumsum(counts), int(counts.sum()) + 2, len(kv_len)
    order = np.arange(total) if s.run else rng.permutation(total)
    pools = normal(rng, (2, total, s.Hkv, s.page, s.D))
    pools[:, order[ends[-1] :]] = np.nan
    tables = np.full((rows + 1, max(1, counts.max())), total - 1, np.int32)
    slots = rng.permutation(rows + 1)[:rows].astype(np.int32)
    for slot, length, count, end in zip(slots, kv_len, counts, ends, strict=True):
        tables[slot, :count] = order[end - count : end]
        pools[:, tables[slot, max(count - 1, 0)], :, length - (count - 1) * s.page :] = np.nan
    bias = normal(rng, (s.Hq, s.T, kv_len.max())) if s.bias else None
    given = {"k_pool": pools[0], "v_pool": pools[1], "block_tables": tables, "slots": slots, "kv_len": kv_len, "bias": bias}
    if s.B:
        given["workspace"] = np.zeros((s.B, decode_workspace_words(s.Hq, s.Hkv, s.D)), np.float32)
    return given | {"scale": s.D**-0.5}


def _merge_inputs(rng: Rng, s: Sizes) -> Given:
    given: Given = {}
    for i, side in enumerate("ab"):
        out, lse = normal(rng, (s.T, s.Hq, s.D)), normal(rng, (s.T, s.Hq), 30)
        if s.empty:  # rows that saw nothing: on one side, and (the first) on both
            lse[i::2] = lse[0] = -np.inf
            out[i::2] = out[0] = 0
        given |= {f"out_{side}": out, f"lse_{side}": lse}
    return given


def _step_inputs(rng: Rng, s: Sizes) -> Given:
    """Keys share a direction; slots are all but the first and the dummy behind the last; any position unless named."""
    keys, values = 2 * s.HK * s.DK, s.HV * s.DV
    proj, conv = normal(rng, (s.B, keys + 2 * values + 2 * s.HV)), normal(rng, (keys + values, 4), 0.5)
    proj[:, keys // 2 : keys] += 0.5
    given = {"proj": proj, "conv": conv, "ring": normal(rng, (s.slots, s.R, keys + values)), "k_heads": s.HK}
    given |= {"out": np.zeros((s.B, values), np.float32), "state": normal(rng, (s.slots, s.HV, s.DV, s.DK), 0.3)}
    given |= {"a_log": normal(rng, (s.HV,), 0.2) + np.float32(np.log(s.decay or 0.2)), "norm": 1 + normal(rng, (s.DV,), 0.2)}
    given["slots"] = 1 + rng.permutation(s.slots - 2)[: s.B].astype(np.int32)
    return given if "positions" in s else given | {"positions": rng.integers(0, 4096, s.B, np.int32)}


def _gdn_inputs(rng: Rng, s: Sizes) -> Given:
    """Keys of a token share a direction, as trained ones do. Slots are all but the first and the dummy behind the last."""
    rows, state = s.T, (s.HV, s.DV, s.DK)
    qkv = normal(rng, (rows, 2 * s.HK * s.DK + s.HV * s.DV))
    qkv[:, s.HK * s.DK : 2 * s.HK * s.DK] += 0.5
    given = {"qkv": qkv, "state": normal(rng, (s.slots, *state), 0.3), "k_heads": s.HK}
    given["g"] = -rng.exponential(s.decay or 0.2, (rows, s.HV)).astype(np.float32)
    given["slots"] = 1 + rng.permutation(s.slots - 2).astype(np.int32)
    if s.snaps:
        given["snap_rows"] = np.array(s.snaps, np.int32).reshape(-1, 2)
        given["snapshots"] = np.empty((len(s.snaps) // 2, *state), np.float32)
    if s.DK == s.DV == 128:
        given["workspace"] = np.zeros(gdn.workspace_words(s.T, s.S, s.HV), np.uint32)
    return given | {"beta": rng.random((rows, s.HV), np.float32)}


def _router_inputs(rng: Rng, s: Sizes) -> Given:
    logits, chosen = normal(rng, (s.T, s.E + (moe.GATE_COLUMNS if s.shared else 0))), (s.T, s.top + s.shared)
    outputs = {"weights": np.zeros(chosen, np.float32), "ids": np.zeros(chosen, np.int32)}
    return outputs | {"logits": np.round(logits) if s.ties else logits}


def _experts_inputs(rng: Rng, s: Sizes) -> Given:
    """Spread routing; `uneven`: each expert likelier than the one before, so that the last are crowded and the first idle."""
    order = rng.random((s.T, s.E)) ** (1 + np.arange(s.E) if s.uneven else 1)
    return {
        "gate_up": normal(rng, (s.E, 2 * s.F, s.H), s.H**-0.5),
        "down": normal(rng, (s.E, s.H, s.F), s.F**-0.5),
        "ids": np.argsort(order, 1)[:, : s.top].astype(np.int32),
        "weights": rng.dirichlet(np.ones(s.top), s.T).astype(np.float32),
        "workspace": np.zeros(moe.workspace_words(s.T, s.top, s.E, s.H, s.F, 4), np.uint32),
    }


def _logits(rng: Rng, s: Sizes) -> np.ndarray:
    """Multiples of 1/64, and edits below in powers of two: float32 and float64 then agree exactly, ties included. With `ties`,
    the best third of the ids share one logit and most others the next: more equals than a kernel cares to sort."""
    z = rng.standard_normal((s.R, s.V), np.float32)
    return np.minimum(np.round(z), np.float32(1)) if s.ties else np.round(z * np.float32(160)) / np.float32(64)


def _sample_inputs(rng: Rng, s: Sizes) -> Given:
    """Rows at temperature 0.9 with random seeds, with the filters and edits that the case names."""
    f, i = np.zeros((s.R, rules.PARAMS_F), np.float32), np.zeros((s.R, rules.PARAMS_I), np.int32)
    f[:, :4] = 0.9, s.top_p or 1, s.min_p, 1
    i[:, rules.I_TOP_K], i[:, rules.I_STEP], i[:, rules.I_ALLOWED_ROW] = s.top_k, rng.integers(0, 1000, s.R), -1
    i[:, rules.I_SEED_LO : rules.I_SEED_HI + 1] = rng.integers(-(1 << 31), 1 << 31, (s.R, 2))
    seen = rng.random((2, s.slots, s.V), np.float32) < 0.2
    counts = rng.integers(0, 4, (s.slots, s.V), np.int32) * seen[0] | rules.PROMPT_BIT * seen[1]
    given = {"logits": _logits(rng, s), "counts": counts.astype(np.int32), "params_f": f, "params_i": i}
    if s.penalties:
        f[:, rules.F_REPETITION] = rng.choice([0.5, 1, 2], s.R)
        f[:, rules.F_PRESENCE : rules.F_FREQUENCY + 1] = rng.integers(-4, 8, (s.R, 2)) / 4
        f[::2, rules.F_TEMPERATURE] = 0
    if s.restrictions:  # biases and stop ids, which may still be banned; every second row may use half of the ids, the first none
        for name in ("bias", "stop"):
            given[f"{name}_indptr"] = np.arange(0, 5 * s.R + 1, 5, dtype=np.int32)
            given[f"{name}_ids"] = np.concatenate([rng.permutation(s.valid_vocab)[:5] for _ in range(s.R)]).astype(np.int32)
        given["bias_values"] = rng.integers(-64, 64, 5 * s.R).astype(np.float32) / 8
        i[:, rules.I_MIN_TOKENS] = i[:, rules.I_STEP] + rng.integers(0, 2, s.R)
        i[::2, rules.I_ALLOWED_ROW] = np.arange(0, s.R, 2) // 2
        given["allowed_bits"] = bits = rng.integers(0, 1 << 32, (s.R, -(-s.V // 32)), np.uint32)
        bits[0] = 0
    return given


def _mark_inputs(rng: Rng, s: Sizes) -> Given:
    return {"counts": rng.integers(0, 3, (s.slots, s.V), np.int32), "ids": rng.integers(0, s.V, s.T, np.int32)}


INPUTS: dict[str, Callable[[Rng, Sizes], Given]] = {
    "select_tokens": _select_inputs,
    "embedding": _embedding_inputs,
    "gather_rows": lambda rng, s: {"rows": rng.integers(-1, s.T, s.R, np.int32)},
    "linear": lambda rng, s: {"w": normal(rng, (s.N, s.K), s.K**-0.5)},
    "linear_invariant": lambda rng, s: {"w": normal(rng, (s.N, s.K), s.K**-0.5)},
    "add_linear": lambda rng, s: {"w": normal(rng, (s.N, s.K), s.K**-0.5)},
    "norm_linear": lambda rng, s: {"w": normal(rng, (s.N, s.K), s.K**-0.5)},
    "qk_norm_rope_append": _qkv_inputs,
    "paged_attention_prefill": _attention_inputs,
    "paged_attention_decode": _attention_inputs,
    "merge_attention": _merge_inputs,
    "gdn_step": _step_inputs,
    "gdn_prefill": _gdn_inputs,
    "router_topk": _router_inputs,
    "moe_experts": _experts_inputs,
    "sample": _sample_inputs,
    "greedy": lambda rng, s: {"logits": _logits(rng, s)},
    "mark_prompt": _mark_inputs,
    "logprobs": lambda rng, s: {"logits": _logits(rng, s), "tokens": rng.integers(0, s.valid_vocab, s.R, np.int32)},
}
