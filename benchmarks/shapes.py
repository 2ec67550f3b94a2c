"""Bench cases of released models, too large for the host: what the kernels are measured on.

"35b" has Qwen3.5-35B-A3B's dimensions, "0.6b" Qwen3-0.6B's. Bytes and operations are counted as if everything were float32; the
benchmark scales bytes to the activation type. Labels name what peers-h200.json names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

import numpy as np

from sparkrt.ops import activation, attention, conv, embedding, gdn, linear, moe, norm, qkv, sampling
from sparkrt.ops.operator import Case, Rng

VOCAB, VALID = 248320, 248077


class QuickRng:
    """A generator whose large draws repeat a block of four million: filling gigabytes must not take minutes."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def standard_normal(self, shape: Any, dtype: Any = np.float32) -> np.ndarray:
        size = int(np.prod(shape))
        if size <= 1 << 16:
            return self._rng.standard_normal(shape, dtype)
        return np.resize(np.roll(_block(), -int(self._rng.integers(1 << 22))), size).reshape(shape)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rng, name)


@cache
def _block() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((1 << 22) - 3, np.float32)


def _experts(tokens: int, experts: int, k: int, hidden: int = 2048, width: int = 512) -> Case:
    """Spread routing; copies of the case (other seeds) share their weights and differ in tokens and experts."""

    def make(rng: Rng) -> list[Any]:
        gate_up, down = _expert_weights(experts, hidden, width)
        ids = np.argsort(rng.random((tokens, experts)), 1)[:, :k].astype(np.int32)
        weights = rng.dirichlet(np.ones(k), tokens).astype(np.float32)
        x = rng.standard_normal((tokens, hidden), np.float32)
        return [np.empty((tokens, hidden), np.float32), x, gate_up, down, ids, weights]

    distinct = experts * (1 - (1 - k / experts) ** tokens)
    traffic = int(12 * distinct * hidden * width) + 8 * tokens * hidden
    return Case(f"T={tokens} E={experts} top={k}", make, bytes=traffic, flops=6 * tokens * k * hidden * width)


@lru_cache(maxsize=1)
def _expert_weights(experts: int, hidden: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    rng = QuickRng(1)
    small = np.float32(hidden**-0.5)
    return (
        rng.standard_normal((experts, 2 * width, hidden)) * small,
        rng.standard_normal((experts, hidden, width)) * small,
    )


def _linear(tokens: int, outputs: int, inputs: int) -> Case:
    """Row counts of one projection share its weight: a head has a gigabyte."""
    case = linear._case(tokens, outputs, inputs)

    def make(rng: Rng) -> list[Any]:
        x = rng.standard_normal((tokens, inputs), np.float32)
        return [np.empty((tokens, outputs), np.float32), x, _projection(outputs, inputs), None]

    return replace(case, make=make)


@lru_cache(maxsize=1)
def _projection(outputs: int, inputs: int) -> np.ndarray:
    weight: np.ndarray = QuickRng(2).standard_normal((outputs, inputs))
    return weight * np.float32(inputs**-0.5)


def _decode(batch: int, length: int, shape: tuple[int, int, int] = (16, 2, 256)) -> Case:
    case = attention._decode_case(shape, (length,) * batch)
    return replace(case, label=f"B={batch} L={length} Hq={shape[0]} Hkv={shape[1]} D={shape[2]} page=64")


def _prefill(tokens: int, context: int, shape: tuple[int, int, int] = (16, 2, 256)) -> Case:
    case = attention._prefill_case(shape, (tokens,), (tokens + context,))
    return replace(case, label=f"T={tokens} ctx={context} Hq={shape[0]} Hkv={shape[1]} D={shape[2]} page=64")


def _sample(rows: int, label: str, change: Callable[[Rng, list[Any]], None] | None = None) -> Case:
    return replace(sampling._sample_case("", rows, VOCAB, VALID, change), label=f"R={rows} V={VOCAB} {label}")


def model_cases() -> dict[str, list[Case]]:
    """Cases by operator name."""
    rows = (1, 8, 32, 128, 4096)
    projections = ((12352, 2048), (12288, 2048), (2048, 4096), (9216, 2048), (256, 2048), (1, 2048), (VOCAB, 2048))
    dense = ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (151936, 1024))  # 0.6b
    penalties = sampling._penalties
    return {
        "select_tokens": [embedding._select_case(128, 257, bench=True)],
        "embedding": [embedding._embedding_case(t, 2048, 65536) for t in (1, 128, 4096)],
        "gather_rows": [embedding._gather_case(128, 4096, 2048)],
        "rms_norm": [norm._rms_case(t, 2048, 1.0) for t in (1, 128, 4096)],
        "add_rms_norm": [norm._add_rms_case(t, 2048, 1.0) for t in (1, 128, 4096)],
        "add": [norm._add_case(t, 2048) for t in (1, 4096)],
        "gated_rms_norm": [norm._gated_case(t, 32, 128, 8192) for t in (1, 128, 4096)],
        "linear": [
            _linear(t, n, k)
            for n, k in (*projections, *dense)
            for t in rows
            if not (n >= 100_000 and t > 128) and not (t in (8, 32) and n < 2048)
        ],
        "qk_norm_rope_append": [qkv._case(t, (16, 2), 256, 64, gated=1, offset=1.0) for t in (1, 128, 4096)],
        "paged_attention_decode": [
            *(_decode(b, n) for b, n in ((1, 1024), (1, 32768), (8, 8192), (32, 4096), (128, 1024))),
            *(_decode(b, 1024, (16, 8, 128)) for b in (1, 128)),
        ],
        "paged_attention_prefill": [_prefill(4096, 0), _prefill(8192, 24576), _prefill(512, 0)],
        "merge_attention": [attention._merge_case(512, 16, 256)],
        "sigmoid_gate": [attention._gate_case(t, 16, 256) for t in (1, 4096)],
        "conv_step": [conv._step_case(f"B={b} C=8192", b, 8192, extra=4160) for b in (1, 128)],
        "conv_prefill": [conv._prefill_case("T=4096 C=8192", (4096,), (0,), 8192, extra=4160)],
        "gdn_gates": [gdn._gates_case(f"T={t} HV=32", t, 32, 12288) for t in (1, 4096)],
        "gdn_step": [gdn._step_case(f"B={b} HK=16 HV=32", b, 16, 32) for b in (1, 8, 32, 128)],
        "gdn_prefill": [gdn._prefill_case(f"T={t} HK=16 HV=32", (t,), (0,), 16, 32, 128, 128) for t in (512, 1024, 4096, 32768)],
        "swiglu": [activation._swiglu_case(t, 3072) for t in (1, 128, 4096)],
        "add_sigmoid_gated": [activation._gated_case(t, 2048) for t in (1, 4096)],
        "router_topk": [moe._router_case(f"T={t} E=256 top=8", t, 256, 8) for t in (1, 128, 4096)],
        "moe_experts": [
            *(_experts(t, 256, 8) for t in (1, 4, 8, 32, 128, 1024, 8192)),
            *(_experts(t, 512, 10) for t in (1, 8, 128)),
        ],
        "sample": [
            _sample(1, "temperature"),
            _sample(128, "temperature"),
            *(_sample(r, "top-k top-p", sampling._filters(top_k=20, top_p=0.8)) for r in (1, 128)),
            *(_sample(r, "top-p", sampling._filters(top_p=0.95)) for r in (1, 128)),
            _sample(1, "penalties", penalties),
        ],
        "greedy": [replace(sampling._greedy_case("", r, VOCAB, VALID), label=f"R={r} V={VOCAB}") for r in (1, 128)],
        "mark_prompt": [sampling._mark_case("T=4096", (4096,), (0,), VOCAB)],
        "logprobs": [replace(sampling._logprobs_case("", r, VOCAB, VALID, 20), label=f"R={r} V={VOCAB} K=20") for r in (1, 64)],
    }
