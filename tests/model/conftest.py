"""Models over a host backend that tests can look into."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from sparkrt.model.batch import ForwardBatch, PrefillSlice, SamplerParams
from sparkrt.model.build import build_model
from sparkrt.model.checkpoint import open_checkpoint
from sparkrt.model.hybrid import HybridModel
from sparkrt.model.model import ModelOptions
from sparkrt.model.sequence import SequenceState
from sparkrt.runtime import HostBackend
from tests import rigs

GREEDY = SamplerParams(temperature=0.0)


@dataclass
class Bench:
    """A model and its backend, driven one step at a time."""

    model: HybridModel
    backend: HostBackend

    def prefill(self, seq: SequenceState, ids: list[int], cuts: tuple[int, ...] = ()) -> int:
        """Run a prompt in slices ending at `cuts`; the first token of the answer."""
        edges = [0, *(c for c in cuts if c < len(ids)), len(ids)]
        token = -1
        for start, stop in itertools.pairwise(edges):
            part = PrefillSlice(seq, np.array(ids[start:stop], np.int32), start, sample=stop == len(ids))
            result = self.model.collect(self.model.launch(ForwardBatch(prefill=[part])))
            if part.sample:
                token = int(result.tokens[0])
        return token

    def decode(self, sequences: list[SequenceState], steps: int) -> list[list[int]]:
        """`steps` tokens of each sequence."""
        rows = [self.model.collect(self.model.launch(ForwardBatch(decode=sequences))).tokens.tolist() for _ in range(steps)]
        return [[row[i] for row in rows] for i in range(len(sequences))]

    def answer(self, ids: list[int], steps: int, cuts: tuple[int, ...] = ()) -> list[int]:
        seq = self.model.new_sequence(GREEDY, len(ids) + steps)
        first = self.prefill(seq, ids, cuts)
        rest = self.decode([seq], steps - 1)[0]
        self.model.release(seq)
        return [first, *rest]


@pytest.fixture(scope="session")
def r2_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model in which every fault of state shows in the tokens."""
    folder = tmp_path_factory.mktemp("r2")
    rigs.r2(str(folder), seed=3)
    return folder


@pytest.fixture(scope="session")
def open_bench(r2_folder: Path) -> Callable[..., Bench]:
    def open_it(backend: HostBackend | None = None, **options: object) -> Bench:
        backend = backend or HostBackend(debug=True)
        checkpoint = open_checkpoint(str(r2_folder))
        settings: dict[str, object] = {
            "max_num_seqs": 6,
            "max_num_batched_tokens": 512,
            "max_model_len": 1024,
            "num_blocks": 64,
            "valid_vocab": checkpoint.config.vocab_size,
        }
        model = build_model(backend, checkpoint.config, checkpoint.source, ModelOptions(**(settings | options)))  # type: ignore[arg-type]
        return Bench(model, backend)

    return open_it


@pytest.fixture(scope="module")
def bench(open_bench: Callable[..., Bench]) -> Iterator[Bench]:
    it = open_bench()
    yield it
    it.model.check_integrity([])
    it.model.close()
    assert it.backend.leak_report() == ""
