"""What a step costs besides the model: scheduling, growth of block tables, the prefix cache's bookkeeping, and telling the news.

    python -m benchmarks.scheduling [--batch 1,32,256] [--steps 640]

The engine runs over a model that computes nothing, with the real block pool and prefix cache. µs a step: the median, the mean
(with the steps in which tables grow) and the 99th percentile, of decode steps with every row resident; and the mean of the first
steps, which admit and prefill. Goals: 60 µs at batch 1, 250 µs at 256.
"""

from __future__ import annotations

import argparse
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import numpy as np

from sparkrt.cache.paged import BlockPool
from sparkrt.cache.prefix import Match, PrefixCache
from sparkrt.engine.config import EngineConfig
from sparkrt.engine.core import EngineCore
from sparkrt.engine.messages import EngineRequest
from sparkrt.model.batch import ForwardBatch, MixedBatchResult, SamplerParams

_PAGE, _PROMPT = 64, 512  # tokens


class NullModel:
    """Books and no arithmetic; every token is 7."""

    def __init__(self, slots: int, steps: int, caching: bool) -> None:
        tokens = _PROMPT + 2 * steps
        blocks = slots * (-(-tokens // _PAGE) + 1)
        self.options: Any = SimpleNamespace(
            max_num_seqs=slots,
            max_num_batched_tokens=8192,
            max_model_len=tokens,
            page_size=_PAGE,
            num_blocks=blocks,
            valid_vocab=1000,
            prompt_logit_rows=64,
        )
        self.pool, self.num_blocks, self.free_slots = BlockPool(blocks), blocks, slots
        self.prefix = PrefixCache(self.pool, _PAGE, range(slots, 2 * slots), recurrent=True) if caching else None
        self._flying: list[tuple[MixedBatchResult, ForwardBatch]] = []

    @property
    def free_blocks(self) -> int:
        return self.pool.free_count

    def new_sequence(self, params: SamplerParams, tokens: int, history: Any, generated: int, match: Match | None) -> Any:
        self.free_slots -= 1
        shared = [] if match is None else match.blocks
        for block in shared:
            self.pool.incref(block)
        blocks = shared + self.pool.alloc(-(-tokens // _PAGE) - len(shared))
        done = 0 if match is None else match.resume
        return SimpleNamespace(blocks=SimpleNamespace(blocks=blocks), kv_valid_tokens=done, length=done)

    def grow(self, seq: Any, tokens: int) -> None:
        seq.blocks.blocks += self.pool.alloc(-(-tokens // _PAGE) - len(seq.blocks.blocks))

    def snapshot(self, seq: Any, slot: int) -> None:
        pass

    def release(self, seq: Any) -> None:
        self.free_slots += 1
        for block in seq.blocks.blocks:
            self.pool.decref(block)

    def launch(self, batch: ForwardBatch) -> int:
        rows = len(batch.decode) + sum(part.sample for part in batch.prefill)
        self._flying.append((MixedBatchResult(np.full(rows, 7, np.int32), [None] * rows, []), batch))
        return 0

    def collect(self, handle: int) -> MixedBatchResult:
        result, batch = self._flying.pop(0)
        for part in batch.prefill:
            part.seq.kv_valid_tokens = part.start + len(part.tokens)
        return result

    def check_integrity(self, sequences: Any) -> None:
        pass

    def close(self) -> None:
        pass


def measure(batch: int, steps: int, caching: bool) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of decode steps, and of steps that admit and prefill."""
    model: Any = NullModel(batch, steps, caching)
    core = EngineCore(model, EngineConfig(async_scheduling=True, device="cuda", debug=False))
    rng = np.random.default_rng(0)
    for i in range(batch):  # tables grow at different steps, as they do
        ids = rng.integers(0, 1000, _PROMPT - i % _PAGE).tolist()
        core.add(EngineRequest(request_id=str(i), prompt_ids=ids, max_tokens=_PAGE + steps, temperature=0.0))
    core.scheduler.forecast.share = 0.0
    first, later, rows = [], [], 0
    while rows < batch:
        began = perf_counter()
        rows = len(core.step())
        first.append(perf_counter() - began)
    for _ in range(steps):
        began = perf_counter()
        rows = len(core.step())
        later.append(perf_counter() - began)
        assert rows == batch, f"{rows} of {batch} rows are resident"
    core.close()
    return np.array(later), np.array(first)


def main() -> int:
    parser = argparse.ArgumentParser(description="What a step costs besides the model.")
    parser.add_argument("--batch", default="1,32,256", help="rows, a list")
    parser.add_argument("--steps", type=int, default=640)
    arguments = parser.parse_args()
    print("  batch  cache   decode: median    mean     p99   with prefill: mean   (µs a step)")
    for batch in map(int, arguments.batch.split(",")):
        for caching in (False, True):
            later, first = (1e6 * x for x in measure(batch, arguments.steps, caching))
            numbers = f"{np.median(later):8.1f} {later.mean():7.1f} {np.percentile(later, 99):7.1f} {first.mean():20.1f}"
            print(f"{batch:7}  {'on' if caching else 'off':5}  {'':7} {numbers}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
