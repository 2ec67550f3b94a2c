"""Bench cases of released models, too large for the host: what the kernels are measured on.

"35b" has Qwen3.5-35B-A3B's dimensions, "0.6b" Qwen3-0.6B's. Bytes and operations are counted as if everything were float32; the
benchmark scales bytes to the activation type. Labels name what peers-h200.json names.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

import numpy as np

from benchmarks.cases import Case, Rng, cases
from sparkrt.ops.moe import workspace_words
from sparkrt.ops.registry import OPERATORS

VOCAB = "V=248320 valid_vocab=248077"
HEADS = "Hq=16 Hkv=2 D=256 page=64"
CASES = {
    "select_tokens": "T=128 slots=257",
    "embedding": "; ".join(f"T={t} H=2048 V=65536" for t in (1, 128, 4096)),
    "gather_rows": "R=128 T=4096 N=2048",
    "rms_norm": "; ".join(f"T={t} H=2048 offset=1" for t in (1, 128, 4096)),
    "add": "T=1 H=2048; T=4096 H=2048",
    "gated_rms_norm": "; ".join(f"T={t} HV=32 DV=128 z_col=8192 N=12291" for t in (1, 128, 4096)),
    "qk_norm_rope_append": "; ".join(f"T={t} {HEADS} R=64 q_w k_w gated offset=1" for t in (1, 128, 4096)),
    "paged_attention_decode": f"""B=1 L=1024 {HEADS}; B=1 L=32768 {HEADS}; B=8 L=8192 {HEADS}; B=32 L=4096 {HEADS};
    B=128 L=1024 {HEADS}; B=1 L=1024 Hq=16 Hkv=8 D=128 page=64; B=128 L=1024 Hq=16 Hkv=8 D=128 page=64""",
    "paged_attention_prefill": f"T=4096 ctx=0 {HEADS}; T=8192 ctx=24576 {HEADS}; T=512 ctx=0 {HEADS}",
    "merge_attention": "T=512 Hq=16 D=256",
    "sigmoid_gate": "T=1 Hq=16 D=256 N=8197; T=4096 Hq=16 D=256 N=8197",
    "conv_prefill": "T=4096 C=8192 N=12352 ring=4",
    "gdn_gates": "T=1 HV=32 b_col=12288 N=12355; T=4096 HV=32 b_col=12288 N=12355",
    "gdn_step": "; ".join(f"B={b} HK=16 HV=32 DK=128 DV=128 R=4" for b in (1, 8, 32, 128)),
    "gdn_prefill": "; ".join(f"T={t} HK=16 HV=32 DK=128 DV=128" for t in (512, 1024, 4096, 32768)),
    "swiglu": "T=1 F=3072; T=128 F=3072; T=4096 F=3072",
    "router_topk": "; ".join(f"T={t} E=256 top=8 renormalize" for t in (1, 128, 4096)),
    "sample": f"""R=1 {VOCAB}; R=128 {VOCAB}; R=1 {VOCAB} top_k=20 top_p=0.8; R=128 {VOCAB} top_k=20 top_p=0.8;
    R=1 {VOCAB} top_p=0.95; R=128 {VOCAB} top_p=0.95; R=1 {VOCAB} penalties""",
    "greedy": f"R=1 {VOCAB}; R=128 {VOCAB}",
    "mark_prompt": "T=4096 V=248320",
    "logprobs": f"R=1 {VOCAB} K=20; R=64 {VOCAB} K=20",
}
BY_NAME = {op.name: op for op in OPERATORS}


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
    """Copies of the case (other seeds) share their weights and differ in tokens and experts."""
    (case,) = cases(BY_NAME["moe_experts"], f"T={tokens} E={experts} top={k} H={hidden} F={width}")

    def make(rng: Rng) -> list[Any]:
        gate_up, down = _expert_weights(experts, hidden, width)
        ids = np.argsort(rng.random((tokens, experts)), 1)[:, :k].astype(np.int32)
        weights = rng.dirichlet(np.ones(k), tokens).astype(np.float32)
        x = rng.standard_normal((tokens, hidden), np.float32)
        workspace = np.zeros(workspace_words(tokens, k, experts, hidden, width, 4), np.uint32)
        return [np.empty((tokens, hidden), np.float32), x, gate_up, down, ids, weights, workspace, 0]

    return replace(case, make=make)


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
    (case,) = cases(BY_NAME["linear"], f"T={tokens} N={outputs} K={inputs}")

    def make(rng: Rng) -> list[Any]:
        x = rng.standard_normal((tokens, inputs), np.float32)
        return [np.empty((tokens, outputs), np.float32), x, _projection(outputs, inputs), None]

    return replace(case, make=make)


@lru_cache(maxsize=1)
def _projection(outputs: int, inputs: int) -> np.ndarray:
    weight: np.ndarray = QuickRng(2).standard_normal((outputs, inputs))
    return weight * np.float32(inputs**-0.5)


def model_cases() -> dict[str, list[Case]]:
    """Cases by operator name."""
    rows = (1, 8, 32, 128, 4096)
    projections = ((12352, 2048), (12288, 2048), (2048, 4096), (9216, 2048), (256, 2048), (1, 2048), (248320, 2048))
    dense = ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (151936, 1024))  # 0.6b
    return {name: cases(BY_NAME[name], labels) for name, labels in CASES.items()} | {
        "linear": [
            _linear(t, n, k)
            for n, k in (*projections, *dense)
            for t in rows
            if not (n >= 100_000 and t > 128) and not (t in (8, 32) and n < 2048)
        ],
        "moe_experts": [
            *(_experts(t, 256, 8) for t in (1, 4, 8, 32, 128, 512, 1024, 4096, 8192)),
            *(_experts(t, 512, 10) for t in (1, 8, 128)),
        ],
    }
