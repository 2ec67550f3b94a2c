"""`sparkrt bench latency` and `sparkrt bench throughput`: the engine in this process, without a server."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from sparkrt.bench.dataset import Dataset
from sparkrt.bench.progress import bar
from sparkrt.engine.config import EngineConfig
from sparkrt.engine.llm import LLM
from sparkrt.engine.params import SamplingParams
from sparkrt.errors import SparkrtError

PERCENTILES = (10, 25, 50, 75, 90, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """What both commands ask of answers, and where the result goes."""

    n: int = 1
    disable_detokenize: bool = False
    output_json: str | None = None
    disable_tqdm: bool = False

    def params(self, tokens: int) -> SamplingParams:
        return SamplingParams(n=self.n, ignore_eos=True, max_tokens=tokens, detokenize=not self.disable_detokenize)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch(Answers):
    """What `sparkrt bench latency` was asked to time. Lengths are tokens."""

    input_len: int = 32
    output_len: int = 128
    batch_size: int = 8
    num_iters_warmup: int = 10
    num_iters: int = 30


def latency(args: Batch, config: EngineConfig) -> int:
    """How long one batch takes from its prompts to its last token, again and again."""
    rng = random.Random(config.seed)
    params = args.params(args.output_len)
    with _open(config) as llm:
        words = range(llm.info.vocab_size)
        batch = [rng.choices(words, k=args.input_len) for _ in range(args.batch_size)]
        taken = []
        with bar(args.num_iters_warmup + args.num_iters, "iterations", shown=not args.disable_tqdm) as done:
            for _ in range(args.num_iters_warmup + args.num_iters):
                began = perf_counter()
                llm.generate(batch, params, use_tqdm=False)
                taken.append(perf_counter() - began)
                done()
    times = np.array(taken[args.num_iters_warmup :])
    shares = dict(zip(PERCENTILES, np.percentile(times, PERCENTILES).tolist(), strict=True))
    average, deviation = float(times.mean()), float(times.std())
    print(f"Avg latency: {average} seconds", f"Std latency: {deviation} seconds", sep="\n")
    print(*(f"{share}% percentile latency: {seconds} seconds" for share, seconds in shares.items()), sep="\n")
    result = {"avg_latency": average, "std_latency": deviation, "latencies": times.tolist(), "percentiles": shares}
    _save(args.output_json, result)
    return 0


def throughput(args: Answers, config: EngineConfig, dataset: Dataset) -> int:
    """How long all of a dataset takes, handed in at once."""
    with _open(config) as llm:
        samples = dataset.samples(llm.tokenizer)
        prompts = [sample.prompt for sample in samples]
        params = [args.params(sample.output_len) for sample in samples]
        began = perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=not args.disable_tqdm)
        elapsed = perf_counter() - began
    tokens_in = sum(len(output.prompt_token_ids) for output in outputs)
    tokens_out = sum(len(answer.token_ids) for output in outputs for answer in output.outputs)
    tokens = tokens_in + tokens_out
    requests, total, generated = len(outputs) / elapsed, tokens / elapsed, tokens_out / elapsed
    print(f"Throughput: {requests:.2f} requests/s, {total:.2f} total tokens/s, {generated:.2f} output tokens/s")
    print(f"Total num prompt tokens:  {tokens_in}", f"Total num output tokens:  {tokens_out}", sep="\n")
    result = {"elapsed_time": elapsed, "num_requests": len(outputs), "total_num_tokens": tokens}
    _save(args.output_json, result | {"requests_per_second": requests, "tokens_per_second": total})
    return 0


def _open(config: EngineConfig) -> LLM:
    options = asdict(config)
    return LLM(options.pop("model"), **options)


def _save(path: str | None, result: dict[str, Any]) -> None:
    if path is not None:
        try:
            Path(path).write_text(json.dumps(result, indent=4) + "\n", encoding="utf-8")
        except OSError as error:
            raise SparkrtError(f"the result cannot be saved: {error}") from None
