"""The whole model on a GPU against the host's float32, teacher-forced: logits of prefill and of decode, and invariance of rows.

A near-tie must not end a comparison, so the host's own sequence is fed to both, position by position.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from sparkrt.model.batch import ForwardBatch, PrefillSlice, SamplerParams
from sparkrt.model.build import build_model
from sparkrt.model.checkpoint import open_checkpoint
from sparkrt.model.hybrid import HybridModel
from sparkrt.model.model import ModelOptions
from sparkrt.runtime import dtypes
from sparkrt.runtime.backend import GpuBackend, Launchable, Stream
from sparkrt.runtime.cuda import CudaBackend
from sparkrt.runtime.dtypes import DType
from sparkrt.runtime.host import HostBackend
from tests import golden

GREEDY = SamplerParams(temperature=0.0)
GOLDENS = golden.load("sparkrt-tiny").goldens
VALID = 6137


def build(backend: GpuBackend, dtype: DType, **options: object) -> HybridModel:
    checkpoint = open_checkpoint(None)
    settings = {"max_num_seqs": 16, "max_num_batched_tokens": 512, "max_model_len": 1024, "num_blocks": 256} | options
    return build_model(backend, checkpoint.config, checkpoint.source, ModelOptions(valid_vocab=VALID, dtype=dtype, **settings))  # type: ignore[arg-type]


def read(model: HybridModel, array: object) -> np.ndarray:
    out = np.empty(array.shape, np.float32)  # type: ignore[attr-defined]
    model._backend.copy_d2h(out, array.ptr)  # type: ignore[attr-defined]
    return out[:, :VALID]


def prefill_logits(model: HybridModel, ids: np.ndarray) -> np.ndarray:
    """Logits of every position but the last, from slices of 64 tokens."""
    seq = model.new_sequence(GREEDY, len(ids))
    rows = []
    for start in range(0, len(ids) - 1, 64):
        stop = min(start + 64, len(ids) - 1)
        part = PrefillSlice(seq, ids[start:stop], start, False, targets=ids[start + 1 : stop + 1])
        model.collect(model.launch(ForwardBatch(prefill=[part])))
        rows.append(read(model, model._ctx.buffer("logits", stop - start, model.config.vocab_size)))
    model.release(seq)
    return np.concatenate(rows)


def decode_logits(model: HybridModel, ids: np.ndarray, first: int) -> np.ndarray:
    """Logits of positions from `first` on, token by token through the decode graphs, the sequence's own tokens fed."""
    seq = model.new_sequence(GREEDY, len(ids))
    model.collect(model.launch(ForwardBatch(prefill=[PrefillSlice(seq, ids[:first], 0, True)])))
    rows = []
    for position in range(first, len(ids) - 1):
        model._backend.copy_h2d(model._sampler.feed.rows(seq.slot, seq.slot + 1).ptr, ids[position : position + 1])
        result = model.collect(model.launch(ForwardBatch(decode=[seq])))
        rows.append(read(model, result.logits))
    model.release(seq)
    return np.concatenate(rows)


@pytest.fixture(scope="module")
def host() -> Iterator[HybridModel]:
    model = build(HostBackend(), dtypes.float32)
    yield model
    model.close()


@pytest.fixture(scope="module", params=[dtypes.float16, dtypes.bfloat16], ids=str)
def device(request: pytest.FixtureRequest, opened: CudaBackend) -> Iterator[HybridModel]:
    model = build(opened, request.param)
    yield model
    model.check_integrity([])
    model.close()


@pytest.mark.parametrize("case", GOLDENS, ids=[g.label for g in GOLDENS])
@pytest.mark.parametrize("path", ["prefill", "decode"])
def test_logits_are_the_hosts(host: HybridModel, device: HybridModel, case: golden.Golden, path: str) -> None:
    """float16 keeps 2e-2 over every sequence. bf16 does not, up to 3.8e-2: at 8 % of the positions a router near a tie takes
    another expert (docs/adr/0008), so its bound is 4e-2, and choices count where it keeps 2e-2."""
    ids, first = case.sequence, len(case.prompt)
    want = prefill_logits(host, ids)
    got = prefill_logits(device, ids) if path == "prefill" else decode_logits(device, ids, first)
    want = want if path == "prefill" else want[first:]
    errors = np.linalg.norm(got - want, axis=1) / np.linalg.norm(want, axis=1)
    top = np.sort(want, axis=1)
    same = (got.argmax(1) == want.argmax(1)) | (top[:, -1] - top[:, -2] <= 0.5)
    half = device.options.dtype is dtypes.float16
    assert np.linalg.norm(got - want) <= (2e-2 if half else 4e-2) * np.linalg.norm(want)
    assert np.median(errors) <= 2e-2
    assert same[errors <= (np.inf if half else 2e-2)].all()


@pytest.mark.parametrize("dtype", [dtypes.float16, dtypes.bfloat16], ids=str)
def test_logits_are_the_hosts_where_its_experts_are_taken(
    opened: CudaBackend, monkeypatch: pytest.MonkeyPatch, dtype: DType
) -> None:
    """Routing taught like the tokens: then bf16 keeps 2e-2 over every sequence, and every clear choice is the host's."""
    routes: list[tuple[np.ndarray, np.ndarray]] = []
    host, device = build(HostBackend(), dtypes.float32, enforce_eager=True), build(opened, dtype, enforce_eager=True)
    host_launch, device_launch = host._backend.launch, opened.launch

    def record(op: Launchable, args: Sequence[Any], stream: Stream) -> None:
        host_launch(op, args, stream)
        if op.name == "router_topk":
            routes.append((args[0].view.copy(), args[1].view.copy()))

    def impose(op: Launchable, args: Sequence[Any], stream: Stream) -> None:
        device_launch(op, args, stream)
        if op.name == "router_topk":
            opened.synchronize()
            for array, values in zip(args[:2], routes.pop(0), strict=True):
                opened.copy_h2d(array.ptr, values)

    monkeypatch.setattr(host._backend, "launch", record)
    monkeypatch.setattr(opened, "launch", impose)
    for case in GOLDENS:
        want, got = prefill_logits(host, case.sequence), prefill_logits(device, case.sequence)
        assert not routes
        top = np.sort(want, axis=1)
        assert np.linalg.norm(got - want) <= 2e-2 * np.linalg.norm(want), case.label
        assert ((got.argmax(1) == want.argmax(1)) | (top[:, -1] - top[:, -2] <= 0.5)).all(), case.label
    device.close()
    host.close()


def answers(model: HybridModel, prompts: list[np.ndarray], steps: int, together: bool, cut: int) -> list[list[int]]:
    """Greedy answers, alone or in one batch, prompts cut into slices of `cut` tokens."""
    got: list[list[int]] = []
    groups = [list(range(len(prompts)))] if together else [[i] for i in range(len(prompts))]
    for group in groups:
        seqs, first = [], []
        for i in group:
            seq = model.new_sequence(GREEDY, len(prompts[i]) + steps)
            for start in range(0, len(prompts[i]), cut):
                part = prompts[i][start : start + cut]
                last = start + cut >= len(prompts[i])
                result = model.collect(model.launch(ForwardBatch(prefill=[PrefillSlice(seq, part, start, last)])))
            first.append(int(result.tokens[0]))
            seqs.append(seq)
        rows = [first] + [model.collect(model.launch(ForwardBatch(decode=seqs))).tokens.tolist() for _ in range(steps - 1)]
        got += [list(column) for column in zip(*rows, strict=True)]
        for seq in seqs:
            model.release(seq)
    return got


def test_batch_invariant_texts_are_identical_alone_and_together(opened: CudaBackend) -> None:
    model = build(opened, dtypes.bfloat16, batch_invariant=True)
    prompts = [g.prompt for g in GOLDENS]
    alone = answers(model, prompts, 32, together=False, cut=512)
    assert answers(model, prompts, 32, together=True, cut=512) == alone
    assert answers(model, prompts, 32, together=True, cut=64) == alone
    model.close()
