"""GDN_PREFILL on tensor cores: cuts on the grid of 64 and company change no bit, and a sick sequence stays alone."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from sparkrt.ops.gdn import GDN_PREFILL, workspace_words
from sparkrt.runtime import dtypes
from sparkrt.runtime.cuda import CudaBackend
from tests.gpu.device import call, rounded, types_of

pytestmark = pytest.mark.gpu

HK, HV, D = 2, 4, 128


def i32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


@pytest.fixture
def rng() -> np.random.Generator:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    return np.random.default_rng(seed)


@dataclass
class Tokens:
    qkv: np.ndarray
    g: np.ndarray
    beta: np.ndarray

    @classmethod
    def random(cls, rng: np.random.Generator, count: int) -> Tokens:
        qkv = rng.standard_normal((count, (2 * HK + HV) * D), np.float32)
        return cls(qkv, -rng.exponential(0.2, (count, HV)).astype(np.float32), rng.random((count, HV), np.float32))

    def part(self, first: int, last: int) -> Tokens:
        return Tokens(self.qkv[first:last], self.g[first:last], self.beta[first:last])


def states(rng: np.random.Generator, slots: int) -> np.ndarray:
    return rng.standard_normal((slots, HV, D, D), np.float32)


def prefill(
    backend: CudaBackend,
    parts: list[Tokens],
    state: np.ndarray,
    slots: np.ndarray,
    starts: np.ndarray,
    snap_rows: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """(out, state, snapshots) after one call in bf16; what is not written is NaN."""
    lengths = [len(p.g) for p in parts]
    total = sum(lengths)
    snapshots = None if snap_rows is None else np.full((len(snap_rows), HV, D, D), np.nan, np.float32)
    joined = [np.concatenate([getattr(p, name) for p in parts]) for name in ("qkv", "g", "beta")]
    workspace = np.full(workspace_words(total, len(parts), HV), 0xFFFFFFFF, np.uint32)
    args: list[Any] = [np.full((total, HV, D), np.nan, np.float32), state, snapshots, *joined]
    args += [slots, np.cumsum([0, *lengths]).astype(np.int32), starts, snap_rows, HK, workspace]
    types = types_of(GDN_PREFILL, args, dtypes.bfloat16)
    back = call(backend, GDN_PREFILL, rounded(args, types), types)
    return back[0], back[1], back[2]


def error(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.linalg.norm(got - want) / max(float(np.linalg.norm(want)), 1e-30))


def reference(parts: list[Tokens], state: np.ndarray, slots: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(out, state) token by token in float64, of the values that the device has in bf16."""
    joined = [np.concatenate([getattr(p, name) for p in parts]).astype(np.float64) for name in ("qkv", "g", "beta")]
    joined[0] = joined[0].astype(dtypes.bfloat16.np).astype(np.float64)
    cu = np.cumsum([0, *(len(p.g) for p in parts)])
    out, after, _ = GDN_PREFILL.reference(None, state.astype(np.float64), None, *joined, slots, cu, starts, None, HK, None)
    return out, after


@pytest.mark.parametrize("decay", [3.0, 40.0, 1000.0])
def test_strong_decay_inside_a_chunk_is_finite(backend: CudaBackend, rng: np.random.Generator, decay: float) -> None:
    tokens, first = Tokens.random(rng, 200), states(rng, 1)
    tokens.g[:] = -decay
    out, state, _ = prefill(backend, [tokens], first, i32(0), i32(64))
    want, after = reference([tokens], first, i32(0), i32(64))
    assert error(out, want) <= 2e-2
    assert error(state, after) <= 2e-2


def test_no_decay_and_repeated_keys_stay_stable(backend: CudaBackend, rng: np.random.Generator) -> None:
    tokens, first = Tokens.random(rng, 4096), states(rng, 1)
    tokens.g[:], tokens.beta[:] = 0, 0.999
    keys = slice(HK * D, 2 * HK * D)
    tokens.qkv[:, keys] = tokens.qkv[:4, keys][np.arange(4096) % 4]
    out, state, _ = prefill(backend, [tokens], first, i32(0), i32(0))
    want, after = reference([tokens], first, i32(0), i32(0))
    assert error(out, want) <= 2e-2
    assert error(state, after) <= 2e-2


@pytest.mark.parametrize("start", [0, 64], ids=["fresh", "going on"])
def test_every_length_leaves_the_state_of_its_tokens(backend: CudaBackend, rng: np.random.Generator, start: int) -> None:
    """Lengths that do not fill the last chunk: 1 to 130, a slice each."""
    parts, first = [Tokens.random(rng, n) for n in range(1, 131)], states(rng, 130)
    slots, starts = np.arange(130, dtype=np.int32), np.full(130, start, np.int32)
    _, state, _ = prefill(backend, parts, first, slots, starts)
    _, after = reference(parts, first, slots, starts)
    assert max(error(a, b) for a, b in zip(state, after, strict=True)) <= 1e-2


def test_cuts_on_the_grid_change_no_bit(backend: CudaBackend, rng: np.random.Generator) -> None:
    start, cuts = 70, (0, 58, 122, 250, 300)
    tokens, split = Tokens.random(rng, 300), states(rng, 3)
    want, state, _ = prefill(backend, [tokens], split, i32(1), i32(start))
    assert np.array_equal(state[[0, 2]], split[[0, 2]])
    got = []
    for first, last in pairwise(cuts):
        out, split, _ = prefill(backend, [tokens.part(first, last)], split, i32(1), i32(start + first))
        got.append(out)
    assert np.array_equal(np.concatenate(got), want)
    assert np.array_equal(split, state)


def test_a_batch_of_slices_gives_the_bits_of_each_alone(backend: CudaBackend, rng: np.random.Generator) -> None:
    """With empty slices, a sequence of NaN in the middle, and snapshots on chunk ends."""
    lengths, starts, slots = (0, 1, 63, 0, 64, 65, 200), i32(64, 0, 3, 0, 0, 64, 17), i32(6, 2, 0, 7, 5, 1, 3)
    parts = [Tokens.random(rng, n) for n in lengths]
    parts[4].qkv[:] = np.nan
    first = states(rng, 9)
    snap_rows = np.array([[5, 0], [-1, 0], [6, 47], [6, 200], [3, 0], [2, 61], [5, 64], [6, 111]], np.int32)
    out, state, snapshots = prefill(backend, parts, first, slots, starts, snap_rows)
    assert snapshots is not None
    assert np.array_equal(state[[4, 8]], first[[4, 8]])
    at = 0
    for s, part in enumerate(parts):
        alone, after, _ = prefill(backend, [part], first, slots[s : s + 1], starts[s : s + 1])
        assert np.array_equal(out[at : at + len(alone)], alone, equal_nan=True), s
        assert np.array_equal(state[slots[s]], after[slots[s]], equal_nan=True), s
        assert s == 4 or (np.isfinite(alone).all() and np.isfinite(after).all()), s
        at += len(alone)
    assert not state[7].any()  # an empty slice at position 0 begins a sequence all the same
    assert np.array_equal(state[6], first[6])
    for (s, offset), snapshot in zip(snap_rows.tolist(), snapshots, strict=True):
        if s < 0:
            assert np.isnan(snapshot).all()
            continue
        _, after, _ = prefill(backend, [parts[s].part(0, offset)], first, slots[s : s + 1], starts[s : s + 1])
        assert np.array_equal(snapshot, after[slots[s]]), (s, offset)
