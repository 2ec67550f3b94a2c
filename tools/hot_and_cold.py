"""Random trees of prompts on real models: hot = cold = batched = alone, token for token, log-probabilities to 1e-4.

    python -m tools.hot_and_cold [--runs 100] [--seed 0]

Every request is also answered alone, by an engine without a prefix cache. The other engine shares, evicts, preempts, spills,
aborts and begins again over a disk, with random budgets and too little room. In float32, on the bundled model and on R2, a random
one in which a wrong state shows (tests/rigs.py). What fails is printed with its seed, and the exit status is 1.

The bundled model routes: once in some hundred runs two experts tie within rounding (so seed 1023, by 8e-7), a prefill takes
another one than the decode step whose state it goes on from, and log-probabilities differ by more.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from msgspec.structs import replace

from sparkrt import LLM
from sparkrt.engine import offloading
from sparkrt.engine.messages import EngineOutput, EngineRequest
from tests import rigs

CONTEXT, MIB = 448, 1 / 1024  # tokens; of a GiB


@dataclass(slots=True)
class Answer:
    """What was told of a request so far."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    end: str | None = None

    def hear(self, out: EngineOutput) -> None:
        self.tokens += out.token_ids
        self.logprobs += [row.logprob for row in out.logprobs or ()]
        self.end = out.finish_reason or self.end

    def check(self, cold: Answer, name: str) -> None:
        """All of it, or the beginning of it if it was aborted, is what the request gets alone."""
        n = len(self.tokens)
        assert self.end == cold.end or self.end == "abort", f"{name} ended with {self.end}"
        assert self.tokens == cold.tokens[: n if self.end == "abort" else None], f"{name}: {self.tokens}, cold {cold.tokens}"
        worst = max((abs(a - b) for a, b in zip(self.logprobs, cold.logprobs, strict=False)), default=0.0)
        assert len(self.logprobs) == n
        assert worst <= 1e-4, f"{name}: log-probabilities differ by {worst}"


class Twins:
    """A model, alone without a cache, and again as each seed wants it."""

    def __init__(self, model: str | None, vocab: int) -> None:
        self.model, self.vocab = model, vocab
        self.cold = LLM(model, enable_prefix_caching=False, max_model_len=CONTEXT, max_num_seqs=1)

    def run(self, seed: int) -> Counter[str]:
        """What happened, by kind; AssertionError where hot is not cold."""
        rng, happened = random.Random(seed), Counter[str]()
        page = rng.choice([16, 32, 64])
        options: dict[str, Any] = {
            "max_model_len": CONTEXT,
            "max_num_seqs": rng.choice([1, 3, 4, 4]),
            "max_num_batched_tokens": rng.choice([64, 128, 200, CONTEXT]),
            "block_size": page,
            "num_gpu_blocks_override": rng.randint(CONTEXT // page, 3 * CONTEXT // page // 2),
            "state_cache_slots": rng.choice([1, 2, 6]),
            "async_scheduling": rng.random() < 0.5,
            "scheduling_policy": rng.choice(["fcfs", "priority"]),
            "debug": True,
        }
        cold = self._requests(rng)
        requests = [replace(r, priority=rng.randint(-1, 1) * (options["scheduling_policy"] == "priority")) for r, _ in cold]
        with tempfile.TemporaryDirectory() as folder, patch.dict(offloading._FLOPS, {"host": 1.0}):  # every copy is worth it
            tiers = rng.choice([0, 1, 2, 2])
            if tiers:
                options["kv_offloading_size"] = rng.choice([4, 32]) * MIB
            if tiers == 2:
                options |= {"kv_offloading_dir": folder, "kv_offloading_disk_size": 64 * MIB}
            for _ in range(max(tiers, 1)):  # a second engine begins over the disk
                with LLM(self.model, **options) as llm:
                    hot = _mixed(llm, requests, rng)
                    stats = llm.core.stats()
                    backend = llm.core.model._backend
                assert backend.leak_report() == ""
                for r, alone in cold:
                    hot[r.request_id].check(alone, r.request_id)
                happened.update(answer.end for answer in hot.values())
                happened.update({"cached tokens": stats.prefix_cache_hits, "preemptions": stats.preemptions})
                if stats.offload is not None:
                    happened.update({"restored tokens": stats.offload.hits, "swaps": stats.offload.swaps})
        return happened

    def alone(self, r: EngineRequest) -> Answer:
        answer, core = Answer(), self.cold.core
        core.add(r)
        while core.has_work:
            for out in core.step():
                answer.hear(out)
        return answer

    def _requests(self, rng: random.Random) -> list[tuple[EngineRequest, Answer]]:
        texts = [[rng.randrange(self.vocab) for _ in range(rng.randint(1, 300))] for _ in range(2)]
        requests = list[tuple[EngineRequest, Answer]]()
        for i in range(rng.randint(3, 9)):
            base = rng.choice(texts)
            base = base[: rng.choice([len(base), rng.randint(1, len(base)), (len(base) // 64 * 64) or 1])]
            prompt = [*base, *(rng.randrange(self.vocab) for _ in range(rng.choice([0, 1, rng.randint(0, 60)])))][:340]
            # of 20 tokens: of 6,000, one draw in 10,000 falls between two where rounding decides
            drawn = {"temperature": 1.1, "seed": i, "top_k": 20, "repetition_penalty": 1.2, "frequency_penalty": 0.3}
            how: dict[str, Any] = rng.choice([drawn, {"temperature": 0.0}])
            r = EngineRequest(request_id=str(i), prompt_ids=prompt, max_tokens=rng.choice([1, 6, 70, 100]), logprobs=1, **how)
            requests.append((r, answer := self.alone(r)))
            texts.append(prompt + answer.tokens)  # the next turn of a conversation begins so
        return requests


def _mixed(llm: LLM, requests: list[EngineRequest], rng: random.Random) -> dict[str, Answer]:
    """Whatever comes together, and whatever comes in between."""
    core, coming, answers = llm.core, requests[::-1], {r.request_id: Answer() for r in requests}
    while coming or core.has_work:
        core.scheduler.forecast.share = 0.0  # it never learns that answers are long
        for _ in range(min(len(coming), rng.choice([0, 0, 1, 9]))):
            core.add(coming.pop())
        if core._requests and rng.random() < 0.005:
            core.abort([rng.choice(sorted(core._requests))])
        if rng.random() < 0.005:
            core.reset_prefix_cache()
        for out in core.step():
            answers[out.request_id].hear(out)
        core.check_integrity()
    return answers


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100, help="of each model")
    parser.add_argument("--seed", type=int, default=0, help="of the first")
    args = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        rigs.r2(Path(folder))
        for name, model, vocab in (("R2", folder, 256), ("sparkrt-tiny", None, 6000)):
            began, happened, twins = time.monotonic(), Counter[str](), Twins(model, vocab)
            for seed in range(args.seed, args.seed + args.runs):
                try:
                    happened += twins.run(seed)
                except Exception as error:
                    print(f"{name}, seed {seed}: {type(error).__name__}: {error}", file=sys.stderr)
                    failed += 1
            twins.cold.close()
            print(f"{name}: {args.runs} runs in {time.monotonic() - began:.0f} s", flush=True)
            print(*(f"{n:12,} {what}" for what, n in happened.most_common()), sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
