"""The seams later work needs: each has a trivial implementation, and here another one is put in its place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from sparkrt.cache.spill import Costs, SpillOptions
from sparkrt.errors import LoadError
from sparkrt.model import build
from sparkrt.model.batch import ForwardBatch, PrefillSlice
from sparkrt.model.build import shared_experts
from sparkrt.model.context import ForwardContext
from sparkrt.model.layers.layer import DecoderLayer
from sparkrt.model.layers.mlp import MixtureOfExperts
from sparkrt.model.plan import StepPlan
from sparkrt.model.residual import PlainResidual
from sparkrt.model.sequence import SequenceState
from sparkrt.model.weight import Linear, Norm, Segment, Weight
from sparkrt.ops.activation import silu
from sparkrt.ops.norm import ADD
from sparkrt.runtime import HostBackend
from sparkrt.runtime.array import DeviceArray
from sparkrt.runtime.backend import Stream
from sparkrt.runtime.comm import SoloComm
from tests.model.conftest import GREEDY, Bench
from tests.model.test_prefix import Warm

PROMPT = np.random.default_rng(5).integers(0, 250, 40).tolist()


def rebuild(bench: Bench, **parts: Any) -> None:
    """Swap parts of a model's decoder."""
    decoder = bench.model._decoder
    for name, part in parts.items():
        object.__setattr__(decoder, name, part)


@pytest.fixture
def fresh(open_bench: Callable[..., Bench]) -> Bench:
    return open_bench()


class DetachedResidual(PlainResidual):
    """Norms on its own and gathers each result apart before it adds it, as a highway of several streams would have to."""

    _result: DeviceArray | None = None

    def _settle(self, ctx: ForwardContext) -> None:
        if self._result is not None:
            ctx.launch(ADD, super().target(ctx), self._result)
        self._result = None

    def project(self, ctx: ForwardContext, norm: Norm, linear: Linear, out: DeviceArray, normed: DeviceArray) -> None:
        self.head(ctx, norm, normed)
        linear(ctx, out, normed)

    def target(self, ctx: ForwardContext) -> DeviceArray:
        self._result = result = ctx.buffer("delta", ctx.tokens, ctx.hidden_size)
        ctx.backend.memset(result.ptr, 0, result.nbytes, ctx.stream)
        return result

    def head(self, ctx: ForwardContext, norm: Norm, out: DeviceArray) -> None:
        self._settle(ctx)
        norm(ctx, out, super().target(ctx))


def test_another_residual(fresh: Bench) -> None:
    expected = fresh.answer(PROMPT, 8)
    fresh.model._graphs.close(fresh.model._ctx)  # what was captured went through the old one
    rebuild(fresh, residual=DetachedResidual())
    with fresh.backend.count() as traffic:
        assert fresh.answer(PROMPT, 8) == expected
    assert traffic.launched("norm_linear") == 0
    assert traffic.launched("add") > 0


@dataclass
class RecordingDelta:
    """Adds nothing, and keeps what it was given."""

    inputs: list[np.ndarray] = field(default_factory=list)

    def add(self, ctx: ForwardContext, out: DeviceArray, x: DeviceArray) -> None:
        self.inputs.append(x.view.copy())


class ShiftingDelta:
    """Adds one to every output."""

    def add(self, ctx: ForwardContext, out: DeviceArray, x: DeviceArray) -> None:
        out.view[...] += 1


def slots_with_deltas(layer: DecoderLayer) -> list[Any]:
    """Every place of a layer that takes a delta: projections, router, experts."""
    found: list[Any] = []

    def walk(part: Any) -> None:
        if hasattr(part, "delta"):
            found.append(part)
        for name in getattr(type(part), "__slots__", ()):
            child = getattr(part, name)
            if type(child).__module__.startswith("sparkrt.model") and name != "config":
                walk(child)

    walk(layer.mixer)
    walk(layer.mlp)
    return found


@pytest.mark.parametrize("kind", ["mixer", "mlp"])
def test_every_projection_router_and_expert_matrix_has_a_delta_slot(open_bench: Callable[..., Bench], kind: str) -> None:
    bench = open_bench(enforce_eager=True)
    expected = bench.answer(PROMPT, 6)
    layers = bench.model._decoder.layers
    slots = [slot for layer in layers for slot in slots_with_deltas(layer)]
    # 3 gdn layers of 2 projections, 1 attention layer of 2, 4 MoE layers of router and experts, the shared one among them
    assert len(slots) == 3 * 2 + 2 + 4 * 2
    for slot in slots:
        slot.delta = RecordingDelta()
    assert bench.answer(PROMPT, 6) == expected
    assert all(slot.delta.inputs and np.isfinite(slot.delta.inputs[0]).all() for slot in slots)
    for slot in slots_with_deltas(layers[0]):
        slot.delta = None
    target = layers[0].mixer.out if kind == "mixer" else layers[0].mlp.experts
    target.delta = ShiftingDelta()
    assert bench.answer(PROMPT, 6) != expected


def test_a_projection_of_several_segments_equals_the_fused_one(open_bench: Callable[..., Bench]) -> None:
    """Segments may differ in format: each is its own product, written into its columns."""
    bench = open_bench(enforce_eager=True)
    expected = bench.answer(PROMPT, 6)
    model = bench.model
    mixer = model._decoder.layers[0].mixer
    fused = mixer.in_proj.segments[0].weight
    cut = 100
    parts = [fused.payload.view[:, :cut], fused.payload.view[:, cut:]]
    placed = [model._owner.put(p, fused.format, "segment") for p in parts]
    mixer.in_proj = Linear(
        [Segment(Weight((p.shape[1], p.shape[0]), fused.format, a, "kn")) for p, a in zip(parts, placed, strict=True)]
    )
    scratch = model._ctx.scratch._buffers
    scratch["segment"] = model._owner.empty((model.options.max_tokens * fused.shape[0],), fused.format, "segment")
    assert mixer.in_proj.out_features == fused.shape[0]
    assert bench.answer(PROMPT, 6) == expected


def test_a_host_fed_layer_is_prestaged_and_keeps_steps_out_of_graphs(fresh: Bench) -> None:
    expected = fresh.answer(PROMPT, 6)
    calls: list[str] = []

    class Fed(DecoderLayer):
        __slots__ = ()

        def prestage(self, plan: StepPlan) -> None:
            calls.append("prestage")

        def rearm(self) -> None:
            calls.append("rearm")

        def forward(self, ctx: ForwardContext, residual: Any) -> None:
            calls.append("forward")
            super().forward(ctx, residual)

    layers = fresh.model._decoder.layers
    old = layers[1]
    layers[1] = Fed(old.input_norm, old.mixer, old.post_norm, old.mlp, graph_veto=True)
    before = fresh.model.captures
    assert fresh.answer(PROMPT, 6) == expected
    assert fresh.model.captures == before
    assert calls == ["prestage", "forward"] * 6


def test_a_step_that_fails_rearms_its_layers(fresh: Bench) -> None:
    calls: list[str] = []

    class Failing(DecoderLayer):
        __slots__ = ()

        def rearm(self) -> None:
            calls.append("rearm")

        def forward(self, ctx: ForwardContext, residual: Any) -> None:
            raise RuntimeError("device says no")

    layers = fresh.model._decoder.layers
    old = layers[2]
    layers[2] = Failing(old.input_norm, old.mixer, old.post_norm, old.mlp, graph_veto=True)
    seq = fresh.model.new_sequence(GREEDY, 64)
    with pytest.raises(RuntimeError, match="device says no"):
        fresh.prefill(seq, PROMPT)
    assert calls == ["rearm"]
    fresh.model.release(seq)
    fresh.model.check_integrity([])


class Auxiliary(DecoderLayer):
    """Its state is a note of how far the sequence is."""

    __slots__ = ()

    def snapshot_aux(self, seq: SequenceState, position: int) -> Any:
        return {**seq.aux, "behind": position}

    def restore_aux(self, seq: SequenceState, aux: Any) -> None:
        seq.aux = dict(aux)


def with_auxiliary(decoder: Any) -> Any:
    old = decoder.layers[0]
    decoder.layers[0] = Auxiliary(old.input_norm, old.mixer, old.post_norm, old.mlp, auxiliary=True)
    return decoder


def test_auxiliary_state_travels_with_snapshots(fresh: Bench) -> None:
    with_auxiliary(fresh.model._decoder)
    seq = fresh.model.new_sequence(GREEDY, 100)
    fresh.prefill(seq, PROMPT)
    seq.aux["grams"] = 7
    saved = fresh.model.snapshot(seq, fresh.model.states.dummy_slot)
    seq.aux["grams"] = 8
    fresh.model.restore(seq, saved)
    assert seq.aux == {"grams": 7, "behind": len(PROMPT)}
    fresh.model.release(seq)


def test_auxiliary_state_comes_with_what_is_cached(open_bench: Callable[..., Bench]) -> None:
    """With snapshots that a prefill takes inside a slice, and with those of answers; who finds nothing begins without any."""
    bench = open_bench(prefix_caching=True, state_snapshots=6)
    with_auxiliary(bench.model._decoder)
    warm, adopted, text = Warm(bench), list[dict[str, Any]](), [i % 60 for i in range(200)]
    take = bench.model.new_sequence

    def new_sequence(*about: Any, **more: Any) -> SequenceState:
        seq = take(*about, **more)
        adopted.append(dict(seq.aux))
        return seq

    bench.model.new_sequence = new_sequence  # type: ignore[method-assign]
    answer, cached = warm.answer(text, steps=70)
    assert (cached, adopted) == (0, [{}])
    other = text[:100] + text[50:]  # the first such shows where the tree branches
    for prompt, found in ((text, 192), (text + answer, 256), (other, 0), (text[:100] + text, 64), (text[5:], 0)):
        assert warm.answer(prompt)[1] == found
        assert adopted[-1] == ({"behind": found} if found else {})
    bench.model.close()


def test_auxiliary_state_cannot_be_spilled(open_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = build._decoder
    monkeypatch.setattr(build, "_decoder", lambda *about: with_auxiliary(decoder(*about)))
    spill, backend = SpillOptions(host_bytes=1 << 20, model=b"", costs=Costs(1.0)), HostBackend()
    with pytest.raises(LoadError, match="cannot be spilled"):
        open_bench(backend, prefix_caching=True, state_snapshots=6, spill=spill)
    assert backend.leak_report() == ""


def test_input_sharded_projections_are_summed_over_the_ranks(open_bench: Callable[..., Bench]) -> None:
    """Each mixer's projection back to the residual, before it is added to it; a world of one has nothing to sum."""
    bench = open_bench(enforce_eager=True)
    expected = bench.answer(PROMPT, 3)
    calls: list[tuple[int, ...]] = []

    class Recording(SoloComm):
        world = 2

        def all_reduce(self, array: DeviceArray, stream: Stream) -> None:
            calls.append(array.shape)

    bench.model._ctx.comm = Recording(bench.backend)
    assert bench.answer(PROMPT, 3) == expected
    hidden = bench.model.config.hidden_size
    assert calls == [(len(PROMPT), hidden)] * 4 + [(1, hidden)] * 8


def test_results_carry_logits_and_hidden_states_of_the_sampled_rows(fresh: Bench) -> None:
    model = fresh.model
    seq = model.new_sequence(GREEDY, 64)
    part = PrefillSlice(seq, np.array(PROMPT, np.int32), 0, True)
    result = model.collect(model.launch(ForwardBatch(prefill=[part])))
    assert result.logits is not None
    assert result.hidden is not None
    assert result.logits.shape == (1, model.config.vocab_size)
    assert result.hidden.shape == (1, model.config.hidden_size)
    head = model._decoder.head.segments[0].weight.payload.view
    np.testing.assert_allclose(result.hidden.view @ head, result.logits.view, atol=1e-4)
    assert int(result.logits.view[0].argmax()) == result.tokens[0]
    assert isinstance(model._decoder.layers[0].mlp, MixtureOfExperts)
    model.release(seq)


@pytest.mark.parametrize("shared", [12, 8, 5, 20])
def test_a_shared_expert_of_any_width_is_a_sum_of_experts(shared: int) -> None:
    rng = np.random.default_rng(shared)
    gate, up, down, x = (rng.standard_normal(shape) for shape in ((shared, 6), (shared, 6), (6, shared), (3, 6)))
    stacked, back = shared_experts(8, gate, up, down)
    assert stacked.shape == (-(-shared // 8), 16, 6)
    out = np.zeros_like(x)
    for rows, columns in zip(stacked, back, strict=True):
        out += (silu(x @ rows[:8].T) * (x @ rows[8:].T)) @ columns.T
    np.testing.assert_allclose(out, (silu(x @ gate.T) * (x @ up.T)) @ down.T, atol=1e-12)
