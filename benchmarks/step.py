"""Where the time of one step goes, launch by launch, on a GPU.

    python -m benchmarks.step --model benchmarks/models/35b --batch 1 --option load_format=dummy
    python -m benchmarks.step --model benchmarks/models/35b --prompt 4096 --option load_format=dummy

The launches of a decode step's forward are recorded while all rows are resident, or those of a step that is one whole prompt, and
replayed as CUDA graphs between events; times are medians. Launches that differ in their weights only are one kind, and a line:

- "in step": what the step takes less without the kind's launches, by launch. Bubbles before and after it are in it. Of a
  prompt it is what they take alone: clocks vary with the power drawn, a step without its large products is no measure.
- "alone": by launch, of a graph that has the kind's launches only. Each layer has weights of its own, so that they come from
  memory where a step's layers have more of them than L2 holds; a kind with few bytes finds its data in L2.
- "gap": the difference, what a launch costs beyond its own time; negative where it runs in the shadow of others.
- "floor": what its bytes take at the copy ceiling, or its products at that of a large product if that is longer, both measured in
  the same run, and "%": floor of in step.

In step, a kind of few launches is uncertain by the noise of the whole step, up to fifteen microseconds. What the kinds add up to
is the last line; launches overlap, so that it is not the step. Results are garbage in the graphs that lack launches; the time of
a kernel does not depend on its data, but for routing. An SVG of the waterfall goes to --svg.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.device import DeviceBench
from benchmarks.engine import requests
from sparkrt import LLM
from sparkrt.model.context import StepShape
from sparkrt.model.hybrid import HybridModel
from sparkrt.model.step import padded_batch_n
from sparkrt.runtime.array import DeviceArray
from sparkrt.runtime.backend import GpuBackend, Launchable, Stream
from sparkrt.runtime.cuda import CudaBackend


@dataclass(frozen=True, slots=True)
class Call:
    """One launch of the step."""

    op: Launchable
    args: Sequence[Any]

    @property
    def kind(self) -> tuple[object, ...]:
        return self.op.name, *(a.shape if isinstance(a, DeviceArray) else a for a in self.args)


class Recorder:
    """Stands in for a backend: launches are kept, not made."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def launch(self, op: Launchable, args: Sequence[Any], stream: Stream) -> None:
        self.calls.append(Call(op, list(args)))


class Listener(Recorder):
    """Stands in for a backend that goes on working: launches are kept and made."""

    def __init__(self, backend: GpuBackend) -> None:
        super().__init__()
        self._backend = backend

    def launch(self, op: Launchable, args: Sequence[Any], stream: Stream) -> None:
        super().launch(op, args, stream)
        self._backend.launch(op, args, stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


@dataclass(frozen=True, slots=True)
class Line:
    """A kind of launch: how often, its times by launch in microseconds, and the bytes that one moves at least."""

    name: str
    count: int
    in_step: float
    alone: float
    moved: float
    floor: float


def moved(call: Call, context: int) -> float:
    """Bytes of a launch: of its arrays, but for tables and pools what its rows touch of them."""
    arrays = [a for a in call.args if isinstance(a, DeviceArray)]
    rows = arrays[0].shape[0]
    match call.op.name:
        case "moe_experts":
            out, x, gate_up, down, ids, *_ = arrays
            experts, chosen = gate_up.shape[0], ids.shape[1]
            distinct = experts * (1 - (1 - chosen / experts) ** rows)
            return distinct / experts * (gate_up.nbytes + down.nbytes) + 2 * out.nbytes + x.nbytes
        case "gdn_step":
            out, state, ring, proj = arrays[:4]
            return rows * (2 * state.nbytes / state.shape[0] + ring.nbytes / ring.shape[0]) + out.nbytes + proj.nbytes
        case "paged_attention_decode":
            out, q, k_pool = arrays[:3]
            _, heads, _, dim = k_pool.shape
            return 2 * rows * context * heads * dim * k_pool.dtype.itemsize + out.nbytes + q.nbytes
        case "paged_attention_prefill":
            out, q, k_pool = [a for a in arrays if len(a.shape) > 2][:3]
            return out.nbytes + q.nbytes + 2.0 * context * k_pool.shape[1] * k_pool.shape[3] * k_pool.dtype.itemsize
        case "gdn_prefill" | "conv_prefill":  # of the pool of states a slice's alone
            return float(sum(a.nbytes for a in arrays if a.shape[0] == rows))
        case "qk_norm_rope_append" | "embedding" | "select_tokens" | "mark_prompt":
            return 3.0 * arrays[0].nbytes
    return float(sum(a.nbytes for a in arrays))


def operations(call: Call, context: int) -> float:
    """Floating-point operations of a launch's products, where it is made of them."""
    arrays = [a for a in call.args if isinstance(a, DeviceArray)]
    rows = arrays[0].shape[0]
    if call.op.name == "moe_experts":
        _, _, gate_up, down, ids, *_ = arrays
        return 2.0 * rows * ids.shape[1] * (gate_up.size + down.size) / gate_up.shape[0]
    if call.op.name == "paged_attention_prefill":
        return 4.0 * arrays[0].size * (context - rows / 2)
    if "linear" in call.op.name:
        return 2.0 * rows * weight_of(call).size
    return 0.0


def weight_of(call: Call) -> DeviceArray:
    """The matrix of a linear operator: the last one with a row for each column of the output."""
    out, *rest = (a for a in call.args if isinstance(a, DeviceArray))
    return [a for a in rest if len(a.shape) == 2 and a.shape[0] == out.shape[1]][-1]


def record(llm: LLM, batch: int, context: int) -> list[Call]:
    """The launches of a decode step's forward with `batch` rows resident, each of about `context` tokens."""
    core = llm.core
    for request in requests(llm, batch, context, 64 + context // 64 * batch, 0.0):
        core.add(request)
    running: set[str] = set()
    while len(running) < batch:
        running |= {out.request_id for out in core.step()}
    core.settle()
    model = core.model
    assert isinstance(model, HybridModel)
    ctx, recorder = model._ctx, Recorder()
    rows = padded_batch_n(batch)
    ctx.shape = StepShape(rows)
    backend, ctx.backend = ctx.backend, recorder  # type: ignore[assignment]
    try:
        logits = ctx.buffer("logits", rows, model.config.vocab_size)
        model._decoder.forward(ctx, model._sampler.feed, logits, gather=False)
    finally:
        ctx.backend = backend
    return recorder.calls


def record_prompt(llm: LLM, tokens: int) -> list[Call]:
    """The launches of the forward of a step that is one prompt of `tokens` tokens."""
    core, model = llm.core, llm.core.model
    assert isinstance(model, HybridModel)
    core.add(*requests(llm, 1, tokens, 4, 0.0))
    ctx = model._ctx
    backend, ctx.backend = ctx.backend, (listener := Listener(ctx.backend))  # type: ignore[assignment]
    try:
        core.step()
    finally:
        ctx.backend = backend
    core.settle()
    return listener.calls


def waterfall(
    bench: DeviceBench, calls: list[Call], context: int, copy: float, multiply: float | None, subtract: bool
) -> tuple[float, list[Line]]:
    """(microseconds of the whole step, a line by kind in the order of their first launch)."""

    def us(chosen: Sequence[Call]) -> float:
        def issue() -> None:
            for call in chosen:
                bench.backend.launch(call.op, call.args, bench.backend.default_stream)

        return bench.time(issue, 1) * 1e6

    kinds: dict[tuple[object, ...], list[Call]] = {}
    for call in calls:
        kinds.setdefault(call.kind, []).append(call)
    step, lines = us(calls), []
    for kind, own in kinds.items():
        again = own * max(1, 24 // len(own))
        alone = us(again) / len(again)
        in_step = (step - us([call for call in calls if call.kind != kind])) / len(own) if subtract else alone
        size = moved(own[0], context)
        floor = max(size / copy, operations(own[0], context) / multiply if multiply else 0.0) * 1e6
        name = own[0].op.name
        if "linear" in name:
            name += " {} x {}".format(*weight_of(own[0]).shape)
        lines.append(Line(name, len(own), in_step, alone, size, floor))
    return step, lines


def table(step: float, lines: list[Line]) -> str:
    rows = [f"{'launch':<34} {'count':>5} {'in step':>8} {'alone':>7} {'gap':>6} {'MB':>8} {'floor':>7} {'%':>4}"]
    for x in lines:
        share = 100 * x.floor / x.in_step if x.in_step > 0 else 0.0
        rows.append(
            f"{x.name:<34} {x.count:>5} {x.in_step:>8.2f} {x.alone:>7.2f} {x.in_step - x.alone:>6.2f} {x.moved / 1e6:>8.2f} "
            f"{x.floor:>7.2f} {share:>4.0f}"
        )
    total, floor = sum(x.count * x.in_step for x in lines), sum(x.count * x.floor for x in lines)
    launches = sum(x.count for x in lines)
    rows.append(
        f"step {step:.0f} us, {launches} launches; kinds add up to {total:.0f}; floor {floor:.0f} ({100 * floor / step:.0f} %)"
    )
    return "\n".join(rows)


def svg(title: str, step: float, lines: list[Line]) -> str:
    """Bars from left to right, a kind each, as wide as all its launches in the step; the dark part is their floor."""
    width, height, left = 640, 18, 250
    scale = width / max(step, sum(max(x.count * x.in_step, 0) for x in lines))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 90}" height="{(len(lines) + 2) * height}" '
        f'font-family="sans-serif" font-size="11" fill="#7c8594">',
        f'<text x="4" y="13" font-weight="bold">{title}: {step:.0f} us</text>',
    ]
    at = 0.0
    for i, x in enumerate(lines, 1):
        y, all_of_them = i * height, max(x.count * x.in_step, 0.0)
        floor = min(x.count * x.floor, all_of_them)
        parts.append(f'<text x="{left - 6}" y="{y + 13}" text-anchor="end">{x.name} ({x.count})</text>')
        for span, colour in ((all_of_them, "#9ecae1"), (floor, "#08519c")):
            box = f'x="{left + at * scale:.1f}" y="{y + 3}" width="{span * scale:.1f}" height="{height - 6}"'
            parts.append(f'<rect {box} fill="{colour}"/>')
        parts.append(f'<text x="{left + (at + all_of_them) * scale + 4:.1f}" y="{y + 13}">{all_of_them:.0f}</text>')
        at += all_of_them
    return "\n".join([*parts, "</svg>\n"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder, a GGUF file or a hub id")
    parser.add_argument("--batch", type=int, default=1, help="rows (default: 1)")
    parser.add_argument("--prompt", type=int, help="tokens of a prompt, for a step of its prefill instead of decode")
    parser.add_argument("--context", type=int, default=1024, help="tokens behind each row (default: 1024)")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="an EngineConfig option")
    parser.add_argument("--svg", type=Path, help="where the picture goes")
    args = parser.parse_args()
    options: dict[str, Any] = dict(pair.split("=", 1) for pair in args.option)
    options.setdefault("max_num_seqs", str(args.batch))
    if args.prompt:
        options |= {
            "enable_prefix_caching": False,
            "max_num_batched_tokens": str(args.prompt),
            "max_model_len": str(args.prompt + 64),
        }
    context = args.prompt or args.context
    with LLM(args.model, **options) as llm:
        calls = record_prompt(llm, args.prompt) if args.prompt else record(llm, args.batch, args.context)
        backend = llm.core.model._backend  # type: ignore[attr-defined]
        if not isinstance(backend, CudaBackend):
            parser.exit(1, "this is the host backend: there is no GPU to measure\n")
        bench = DeviceBench(backend)
        copy, multiply = bench.copy_ceiling(), bench.product_ceiling()
        step, lines = waterfall(bench, calls, context, copy, multiply, subtract=args.prompt is None)
    title = f"{Path(args.model).name}, " + (
        f"a prompt of {args.prompt}" if args.prompt else f"{args.batch} rows, context {context}"
    )
    products = f", {multiply / 1e12:.0f} TFLOP/s" if multiply else ""
    print(f"{title}; ceiling {copy / 1e12:.2f} TB/s{products}\n{table(step, lines)}")
    if args.svg:
        args.svg.write_text(svg(title, step, lines))


if __name__ == "__main__":
    main()
