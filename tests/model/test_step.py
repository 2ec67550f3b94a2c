"""The step: its traffic, its independence of company and cuts, and what a sequence can be put through."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from sparkrt.errors import CapacityError
from sparkrt.model.batch import ForwardBatch, PrefillSlice, SamplerParams
from sparkrt.model.build import build_model
from sparkrt.model.checkpoint import open_checkpoint
from sparkrt.model.model import ModelOptions
from sparkrt.runtime import HostBackend, OutOfMemory
from sparkrt.runtime.backend import Graph, GraphExec
from tests.model.conftest import GREEDY, Bench

RNG = np.random.default_rng(11)
PROMPT = RNG.integers(0, 250, 300).tolist()


def test_decode_step_makes_one_upload_and_no_blocking_read(bench: Bench) -> None:
    model = bench.model
    seqs = [model.new_sequence(GREEDY, 200) for _ in range(3)]
    for seq in seqs:
        bench.prefill(seq, PROMPT[:20])
    bench.decode(seqs, 2)
    with bench.backend.count() as traffic:
        handle = model.launch(ForwardBatch(decode=seqs))
    assert traffic.copies("h2d") == 1
    assert traffic.copies("h2d", blocking=True) == 0
    assert traffic.copies("d2h", blocking=True) == 0
    assert traffic.copies("d2h") == 1
    assert traffic.graph_launches == 2  # forward, then sampler
    assert traffic.allocations == 0
    assert traffic.synchronizations("device") == traffic.synchronizations("stream") == 0
    model.collect(handle)
    for seq in seqs:
        model.release(seq)


def test_a_sequence_grows_page_by_page(bench: Bench) -> None:
    """A page more is one small copy before the step that needs it, and changes no token."""
    model, whole = bench.model, bench.answer(PROMPT[:60], 80)
    seq = model.new_sequence(GREEDY, 61)
    got = [bench.prefill(seq, PROMPT[:60])]
    for _ in range(79):
        if seq.length == seq.capacity:
            with bench.backend.count() as traffic:
                model.grow(seq, seq.length + 1)
            assert (traffic.copies("h2d"), traffic.copies("h2d", blocking=True)) == (seq.length % 64 == 0, 0)
        got += bench.decode([seq], 1)[0]
    assert got == whole
    model.check_integrity([seq])
    others = [model.new_sequence(GREEDY, 900) for _ in range(4)]
    with pytest.raises(CapacityError):
        model.grow(seq, 1024)
    assert seq.capacity == 139
    for each in (seq, *others):
        model.release(each)


@pytest.mark.parametrize("step", [1, 7, 31, 32, 33, 63, 64, 65, 128])
def test_cuts_of_a_prompt_change_nothing(bench: Bench, step: int) -> None:
    # H06
    whole = bench.answer(PROMPT, 24)
    assert bench.answer(PROMPT, 24, tuple(range(step, 300, step))) == whole


def test_mixed_steps_give_what_each_sequence_gives_alone(bench: Bench) -> None:
    model = bench.model
    prompts = [PROMPT[:90], PROMPT[100:101], PROMPT[50:250], PROMPT[7:72]]
    alone = [bench.answer(p, 12) for p in prompts]
    seqs = [model.new_sequence(GREEDY, len(p) + 12) for p in prompts]
    got: list[list[int]] = [[] for _ in prompts]
    # Each step: everyone who has a token decodes, the next prompt comes in, one chunk of 64 a step.
    todo = [(i, start, min(start + 64, len(p))) for i, p in enumerate(prompts) for start in range(0, len(p), 64)]
    while any(len(g) < 12 for g in got):
        decoding = [i for i, g in enumerate(got) if 0 < len(g) < 12]
        batch = ForwardBatch(decode=[seqs[i] for i in decoding])
        order = list(decoding)
        if todo:
            i, start, stop = todo.pop(0)
            last = stop == len(prompts[i])
            batch.prefill.append(PrefillSlice(seqs[i], np.array(prompts[i][start:stop], np.int32), start, last))
            order += [i] if last else []
        for i, token in zip(order, model.collect(model.launch(batch)).tokens, strict=True):
            got[i].append(int(token))
    assert got == alone
    for seq in seqs:
        model.release(seq)


def test_several_prompts_in_one_forward(bench: Bench) -> None:
    model = bench.model
    prompts = [PROMPT[:64], PROMPT[64:65], PROMPT[70:200]]
    first = [bench.answer(p, 1)[0] for p in prompts]
    seqs = [model.new_sequence(GREEDY, len(p)) for p in prompts]
    slices = [PrefillSlice(s, np.array(p, np.int32), 0, True) for s, p in zip(seqs, prompts, strict=True)]
    assert model.collect(model.launch(ForwardBatch(prefill=slices))).tokens.tolist() == first
    for seq in seqs:
        model.release(seq)


@pytest.mark.parametrize("eager", [True, False])
def test_pipelined_steps_on_deferred_work_equal_direct_ones(open_bench: Callable[..., Bench], bench: Bench, eager: bool) -> None:
    """Asynchronous work runs as late as it may: a buffer reused too early would change the tokens."""
    other = open_bench(HostBackend(deferred=True), enforce_eager=eager)
    model = other.model
    expected = bench.answer(PROMPT[:70], 16)
    seq = model.new_sequence(GREEDY, 70 + 16)
    handles = [model.launch(ForwardBatch(prefill=[PrefillSlice(seq, np.array(PROMPT[:70], np.int32), 0, True)]))]
    got = []
    for _ in range(15):
        handles.append(model.launch(ForwardBatch(decode=[seq])))  # before the previous token is read
        got.append(int(model.collect(handles.pop(0)).tokens[0]))
    got.append(int(model.collect(handles.pop(0)).tokens[0]))
    assert got == expected
    assert model.captures == (0 if eager else 12)  # forward and two samplers, for 1, 2, 4 and 8 rows
    model.release(seq)
    model.close()
    assert other.backend.leak_report() == ""


def test_a_size_without_a_graph_runs_eagerly_and_is_logged_once(
    open_bench: Callable[..., Bench], bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    backend = HostBackend(debug=True)
    instantiate, sizes = backend.instantiate, iter(range(99))

    def full(graph: Graph) -> GraphExec:  # from the second size on
        if next(sizes) >= 3:
            raise OutOfMemory("no room for a graph")
        return instantiate(graph)

    monkeypatch.setattr(backend, "instantiate", full)
    other = open_bench(backend)
    assert other.model.captures == 3
    assert other.answer(PROMPT[:70], 16) == bench.answer(PROMPT[:70], 16)
    texts = [record.getMessage() for record in caplog.records]
    assert sum("4 rows could not be captured: no room" in text for text in texts) == 1
    assert sum("eagerly" in text for text in texts) == 2  # forward and sampler of one row
    other.model.close()
    assert backend.leak_report() == ""


def test_an_interrupted_capture_gives_everything_back(r2_folder: Path) -> None:
    backend, checkpoint = HostBackend(debug=True), open_checkpoint(str(r2_folder))

    def interrupt(stage: str, done: int, total: int) -> None:
        if stage == "graphs" and done == 2:
            raise KeyboardInterrupt

    options = ModelOptions(6, 512, 1024, 64, checkpoint.config.vocab_size)
    with pytest.raises(KeyboardInterrupt):
        build_model(backend, checkpoint.config, checkpoint.source, options, interrupt)
    assert backend.leak_report() == ""


@pytest.mark.parametrize("length", [1, 63, 64, 65, 130])
def test_fork_continues_as_its_parent(bench: Bench, length: int) -> None:
    model = bench.model
    seq = model.new_sequence(GREEDY, length + 40)
    bench.prefill(seq, PROMPT[:length])
    bench.decode([seq], 3)
    twin = model.fork(seq)
    a, b = bench.decode([seq, twin], 20)
    assert a == b
    model.check_integrity([seq, twin])
    model.release(seq)
    assert bench.decode([twin], 5)[0]  # pages shared with the parent outlive it
    model.release(twin)


def test_snapshot_puts_a_sequence_back(open_bench: Callable[..., Bench]) -> None:
    bench = open_bench(state_snapshots=1)
    model = bench.model
    seq = model.new_sequence(GREEDY, 200)
    bench.prefill(seq, PROMPT[:100])
    saved = model.snapshot(seq, model.states.spare_rows[0])
    bench.decode([seq], 10)
    model.restore(seq, saved)
    assert seq.length == 100
    tail = PrefillSlice(seq, np.array(PROMPT[100:120], np.int32), 100, True)
    token = int(model.collect(model.launch(ForwardBatch(prefill=[tail]))).tokens[0])
    assert token == bench.answer(PROMPT[:120], 1)[0]
    model.release(seq)


def test_capacity_errors_change_nothing(bench: Bench) -> None:
    model = bench.model
    with pytest.raises(CapacityError, match="model length"):
        model.new_sequence(GREEDY, 5000)
    seqs = [model.new_sequence(GREEDY, 64) for _ in range(6)]
    free = model.free_blocks
    with pytest.raises(CapacityError, match="slots"):
        model.new_sequence(GREEDY, 64)
    assert (model.free_blocks, model.free_slots) == (free, 0)
    for seq in seqs:
        model.release(seq)
        model.release(seq)  # once is enough, twice is harmless
    model.check_integrity([])


def test_every_failed_allocation_of_a_build_gives_everything_back(open_bench: Callable[..., Bench]) -> None:
    backend = HostBackend()
    whole = open_bench(backend)
    count = backend.traffic.allocations
    whole.model.close()
    assert backend.leak_report() == ""
    for n in range(1, count + 1, 5):
        backend = HostBackend()
        backend.fail_allocation(n)
        with pytest.raises(OutOfMemory):
            open_bench(backend)
        assert backend.leak_report() == "", f"allocation {n} of {count}"


def test_log_probabilities_of_prompt_and_answer(bench: Bench) -> None:
    """A row's log-probabilities sum to one over the vocabulary, and the scored prompt tokens agree with a later rescoring."""
    model = bench.model
    seq = model.new_sequence(SamplerParams(temperature=0.0, logprobs=5), 200)
    ids = np.array(PROMPT[:40], np.int32)
    part = PrefillSlice(seq, ids, 0, True, targets=ids[1:])
    result = model.collect(model.launch(ForwardBatch(prefill=[part])))
    chosen = result.logprobs[0]
    assert chosen is not None
    assert chosen.rank == 1
    assert chosen.top_ids[0] == chosen.token == result.tokens[0]
    assert np.all(np.diff(chosen.top_logprobs) <= 0)
    scored = result.prompt_logprobs[0]
    assert [s.token for s in scored] == PROMPT[1:40]
    model.release(seq)
    again = model.new_sequence(GREEDY, 200)
    halves = (PrefillSlice(again, ids[:17], 0, False, ids[1:18]), PrefillSlice(again, ids[17:], 17, True, ids[18:]))
    rescored = [s for h in halves for s in model.collect(model.launch(ForwardBatch(prefill=[h]))).prompt_logprobs[0]]
    np.testing.assert_allclose([s.logprob for s in rescored], [s.logprob for s in scored], atol=1e-4)
    model.release(again)


def test_padding_rows_touch_nobody(bench: Bench) -> None:
    """Batches of 1 to 6 with staggered ends: each row gives what it gives alone, whatever bucket it is padded to."""
    model = bench.model
    prompts = [PROMPT[i * 11 : i * 11 + 20 + i] for i in range(6)]
    alone = [bench.answer(p, 6 + i) for i, p in enumerate(prompts)]
    seqs = [model.new_sequence(GREEDY, 64) for _ in prompts]
    got = [[bench.prefill(s, p)] for s, p in zip(seqs, prompts, strict=True)]
    while live := [i for i in range(6) if len(got[i]) < 6 + i]:
        for i, column in zip(live, bench.decode([seqs[i] for i in live], 1), strict=True):
            got[i] += column
    assert got == alone
    for seq in seqs:
        model.release(seq)


def test_eager_decode_of_several_rows_equals_the_captured_one(open_bench: Callable[..., Bench], bench: Bench) -> None:
    """Which rows go to the head must come from this step: what an earlier, mixed step chose is another step's business."""
    prompts = [PROMPT[:40], PROMPT[60:63], PROMPT[100:190]]
    alone = [bench.answer(p, 8) for p in prompts]
    eager = open_bench(enforce_eager=True)
    seqs = [eager.model.new_sequence(GREEDY, 200) for _ in prompts]
    slices = [PrefillSlice(s, np.array(p, np.int32), 0, True) for s, p in zip(seqs, prompts, strict=True)]
    first = eager.model.collect(eager.model.launch(ForwardBatch(prefill=slices))).tokens.tolist()
    rest = eager.decode(seqs, 7)
    assert [[f, *r] for f, r in zip(first, rest, strict=True)] == alone
    for seq in seqs:
        eager.model.release(seq)
    eager.model.close()
