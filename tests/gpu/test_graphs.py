"""Captured decode steps against eager ones, and a cache so large that offsets pass 2^31: what only a GPU gets wrong."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from sparkrt.model.batch import ForwardBatch, PrefillSlice, SamplerParams
from sparkrt.model.hybrid import HybridModel
from sparkrt.model.sequence import SequenceState
from sparkrt.runtime import dtypes
from sparkrt.runtime.cuda import CudaBackend
from tests.gpu.test_model import GREEDY, VALID, build

RNG = np.random.default_rng(7)
PROMPTS = [RNG.integers(0, VALID, int(n)).astype(np.int32) for n in RNG.integers(1, 100, 17)]
SAMPLED = SamplerParams(temperature=0.9, top_p=0.95, seed=5)


def start(model: HybridModel, prompt: np.ndarray, steps: int, params: SamplerParams = GREEDY) -> tuple[SequenceState, int]:
    seq = model.new_sequence(params, len(prompt) + steps)
    result = model.collect(model.launch(ForwardBatch(prefill=[PrefillSlice(seq, prompt, 0, True)])))
    return seq, int(result.tokens[0])


def staggered(model: HybridModel, n: int) -> list[list[int]]:
    """Answers of `n` sequences that decode together and end one after another, every third of them sampled."""
    rows = [start(model, PROMPTS[i], 3 + i, GREEDY if i % 3 else SAMPLED) for i in range(n)]
    answers, live = [[first] for _, first in rows], list(range(n))
    while live:
        result = model.collect(model.launch(ForwardBatch(decode=[rows[i][0] for i in live])))
        for i, token in zip(live, result.tokens.tolist(), strict=True):
            answers[i].append(token)
        for i in [i for i in live if len(answers[i]) == 3 + i]:
            model.release(rows[i][0])
            live.remove(i)
    return answers


@pytest.fixture(scope="module")
def models(opened: CudaBackend) -> Iterator[tuple[HybridModel, HybridModel]]:
    pair = tuple(build(opened, dtypes.bfloat16, batch_invariant=True, max_num_seqs=17, enforce_eager=e) for e in (False, True))
    yield pair  # type: ignore[misc]
    for model in pair:
        model.check_integrity([])
        model.close()


@pytest.mark.parametrize("n", range(1, 18))
def test_padding_of_a_graph_changes_nothing(models: tuple[HybridModel, HybridModel], n: int) -> None:
    """Rows that a graph pads with must leave the states of live ones alone, also when slots were just given back."""
    graphs, eager = models
    assert graphs.captures == 3 * 7
    assert staggered(graphs, n) == staggered(eager, n)


def test_few_slots_and_large_graphs(opened: CudaBackend) -> None:
    model = build(opened, dtypes.bfloat16, max_num_seqs=3, num_blocks=16)
    assert model.captures == 9
    assert len(staggered(model, 3)) == 3
    model.close()


def test_blocks_beyond_two_to_the_31_elements(opened: CudaBackend) -> None:
    blocks = (1 << 31) // (2 * 64 * 64) + 64  # of 64 tokens of 2 heads of 64: elements of K alone in one layer
    if opened.memory_info().free < 24 << 30:
        pytest.skip(f"needs 24 GiB of free device memory, {opened.memory_info().free >> 30} are there")
    model = build(opened, dtypes.bfloat16, num_blocks=blocks)
    texts = []
    for taken in (0, blocks - 16):
        hog = model.kv.new_table()
        hog.extend_to(taken * 64)
        seq, first = start(model, PROMPTS[0].repeat(9)[:300], 32)
        assert min(seq.blocks.blocks) >= taken
        rows = [model.collect(model.launch(ForwardBatch(decode=[seq]))).tokens for _ in range(31)]
        texts.append([first, *(int(row[0]) for row in rows)])
        model.release(seq)
        hog.release()
    assert texts[0] == texts[1]
    model.close()
