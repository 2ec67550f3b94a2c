"""What a step costs besides the model: scheduling, growth of block tables, the prefix cache's bookkeeping, and telling the news.

    python -m benchmarks.scheduling [--batch 1,32,256] [--steps 640]

The engine runs over the simulator's model, which computes nothing, with the real block pool and prefix cache. µs a step: the
median, the mean (with the steps in which tables grow) and the 99th percentile, of decode steps with every row resident; and the
mean of the first steps, which admit and prefill. Goals: 60 µs at batch 1, 250 µs at 256.
"""

from __future__ import annotations

import argparse
from time import perf_counter
from typing import Any

import numpy as np

from sparkrt.engine.config import EngineConfig
from sparkrt.engine.core import EngineCore
from sparkrt.engine.messages import EngineRequest
from sparkrt.engine.simulate import NullModel, Replica

_PAGE, _PROMPT = 64, 512  # tokens


def measure(batch: int, steps: int, caching: bool) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of decode steps, and of steps that admit and prefill."""
    tokens = _PROMPT + 2 * steps
    blocks = batch * (-(-tokens // _PAGE) + 1)
    model: Any = NullModel(Replica(batch, 8192, blocks, _PAGE, batch, caching), tokens)
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
