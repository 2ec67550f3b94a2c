"""How fast the engine is, in process: decode steps, a prompt to its first token, start to ready.

    python -m benchmarks.engine --model tiny --batch 1,16

Prints a table and keeps the figures in benchmarks/results/engine-<card>.json. Decode steps are timed while all rows are
resident, after a warm-up; figures are medians.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from sparkrt import LLM
from sparkrt.engine.messages import EngineRequest
from sparkrt.runtime.machine import usable_cores
from sparkrt.text.grammar import grammar_of, json_schema

ROOT = Path(__file__).resolve().parent.parent

_START = """
from time import perf_counter
began = perf_counter()
from sparkrt import LLM, SamplingParams
llm = LLM({model!r}, **{options!r})
ready = perf_counter() - began
llm.generate([[1, 2, 3]], SamplingParams(max_tokens=1), use_tqdm=False)
print(ready, perf_counter() - began)
"""


_ENDLESS = {"type": "array", "items": {"type": "string", "maxLength": 60}, "minItems": 10_000}


def requests(llm: LLM, batch: int, context: int, tokens: int, temperature: float, masked: int = 0) -> Iterator[EngineRequest]:
    """Prompts of random ids that go on for `tokens` tokens, whatever they say; the first `masked` of them write JSON."""
    rng = random.Random(0)
    grammar = grammar_of([{"json_schema": json_schema(_ENDLESS, "json")}]), "json"
    for i in range(batch):
        ids = [rng.randrange(llm.info.vocab_size) for _ in range(context)]
        yield EngineRequest(
            request_id=f"{context}-{i}-{rng.random()}",
            prompt_ids=ids,
            max_tokens=tokens,
            temperature=temperature,
            seed=i,
            grammar=grammar if i < masked else None,
        )


def decode(llm: LLM, batch: int, context: int, tokens: int, temperature: float, masked: int = 0) -> dict[str, Any]:
    """`tokens` decode steps of `batch` rows that all have at least `context` tokens behind them.

    The device's part is taken in a second round of steps: events around every graph would cost the first one time.
    """
    core, warm_up, again = llm.core, 8, min(tokens, 32)
    names = []
    for request in requests(llm, batch, context, tokens + again + warm_up + context // 64 * batch + 4, temperature, masked):
        names.append(request.request_id)
        core.add(request)
    running: set[str] = set()
    while len(running) < batch:
        running |= {out.request_id for out in core.step()}
    for _ in range(warm_up):
        core.step()
    before, steps = core.stats().host_seconds, []
    for _ in range(tokens):
        began = perf_counter()
        rows = len(core.step())
        steps.append(perf_counter() - began)
        assert rows == batch, f"{rows} of {batch} rows are resident"
    host = core.stats().host_seconds - before
    busy = None
    if core.config.device == "cuda":
        from benchmarks.device import GraphClock

        with GraphClock(core.model) as clock:
            for _ in range(again):
                core.step()
            core.settle()
        busy = clock.busy
    core.abort(names)
    core.step()
    core.settle()
    return figures(batch, context, tokens, median(steps), batch, host / tokens, busy)


def prefill(llm: LLM, context: int, repeat: int) -> dict[str, Any]:
    """One prompt of `context` tokens, from `add` to its first token."""
    core, times = llm.core, []
    for _ in range(repeat + 1):
        (request,) = requests(llm, 1, context, 1, 0.0)
        began = perf_counter()
        core.add(request)
        while core.has_work:
            core.step()
        times.append(perf_counter() - began)
    return figures(1, context, 1, median(times[1:]), context, None)


def startup(model: str | None, options: dict[str, Any]) -> tuple[dict[str, Any], float]:
    """A fresh process: import and load until it could answer; and seconds until it did."""
    code = _START.format(model=model, options=options)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    ready, first = map(float, done.stdout.split())
    return figures(0, 0, 0, ready, 0, None), first


def figures(
    batch: int, context: int, tokens: int, seconds: float, each: int, host: float | None, busy: float | None = None
) -> dict[str, Any]:
    return {
        "batch": batch,
        "context": context,
        "tokens": tokens,
        "step_ms": round(seconds * 1e3, 3),
        "tok_s": round(each / seconds, 1) if each else None,
        "host_us_per_step": None if host is None else round(host * 1e6, 1),
        "gpu_idle_pct": None if busy is None else round(100 * (1 - busy), 1),  # none on the host, which computes in the step
    }


def keep(file: Path, rows: list[dict[str, Any]]) -> None:
    """Replace the rows of the same measurement, keep the others."""

    def key(row: dict[str, Any]) -> tuple[Any, ...]:
        return row["model"], row["what"], row["batch"], row["context"]

    new = {key(row) for row in rows}
    old = json.loads(file.read_text()) if file.exists() else []
    file.parent.mkdir(exist_ok=True)
    lines = ",\n".join(json.dumps(row) for row in [*(row for row in old if key(row) not in new), *rows])
    file.write_text(f"[\n{lines}\n]\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = lambda text: [int(n) for n in text.split(",")]  # noqa: E731
    parser.add_argument("--model", default="tiny", help="tiny (the bundled one), a folder, a GGUF file or a hub id")
    parser.add_argument("--batch", type=numbers, default=[1, 16], help="rows of a decode step (default: 1,16)")
    parser.add_argument("--context", type=numbers, default=[64], help="tokens behind each row at the start (default: 64)")
    parser.add_argument("--prompt", type=numbers, default=[512], help="prompt lengths to prefill (default: 512)")
    parser.add_argument("--tokens", type=int, default=128, help="decode steps to time (default: 128)")
    parser.add_argument("--repeat", type=int, default=5, help="prefills and starts to time (default: 5)")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--masked", type=numbers, default=[0], help="rows of a decode step that follow a grammar (default: 0)")
    parser.add_argument("--what", default="decode,prefill,startup")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="an EngineConfig option")
    parser.add_argument("--no-keep", action="store_true", help="print only")
    args = parser.parse_args()
    model = None if args.model == "tiny" else args.model
    options = dict(pair.split("=", 1) for pair in args.option)
    options.setdefault("max_num_seqs", str(max(args.batch)))
    what, rows = args.what.split(","), []
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    with LLM(model, **{"enable_prefix_caching": False, **options}) as llm:  # its prompts come more than once
        device = llm.info.device
        card = f"host-{usable_cores()}c" if device == "host" else re.sub(r"\W+", "-", device.lower())
        print(f"{llm.info.name} ({llm.info.architecture}, {llm.info.dtype}) on {card}")
        if device == "host":
            print("this is the host backend: NumPy on the processor, no GPU")
        name = "sparkrt-tiny" if model is None else Path(model).name
        stamp = {"commit": commit.stdout.strip(), "date": date.today().isoformat(), "card": card}
        print(f"{'what':>8} {'batch':>6} {'context':>8} {'ms':>10} {'tok/s':>10} {'host µs':>8} {'idle %':>7}")

        def row(kind: str, result: dict[str, Any]) -> None:
            rows.append({"model": name, "what": kind, **result, **stamp})
            columns = ("batch", "context", "step_ms", "tok_s", "host_us_per_step", "gpu_idle_pct")
            shown = ["" if result[k] is None else result[k] for k in columns]
            print("{:>8} {:>6} {:>8} {:>10} {:>10} {:>8} {:>7}".format(kind, *shown), flush=True)

        for context in args.context if "decode" in what else ():
            for batch in args.batch:
                for masked in args.masked:
                    label = f"decode/{masked}" if masked else "decode"
                    row(label, decode(llm, batch, context, args.tokens, args.temperature, min(masked, batch)))
        for context in args.prompt if "prefill" in what else ():
            row("prefill", prefill(llm, context, args.repeat))
    if "startup" in what:
        results = sorted((startup(model, options) for _ in range(args.repeat)), key=lambda pair: pair[0]["step_ms"])
        ready, first = results[len(results) // 2]
        row("startup", ready)
        print(f"start to ready {ready['step_ms'] / 1e3:.2f} s, to the first token {first:.2f} s")
    if not args.no_keep:
        keep(ROOT / "benchmarks" / "results" / f"engine-{card}.json", rows)


if __name__ == "__main__":
    main()
