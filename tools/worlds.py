"""Random worlds for the engine: whoever comes, with whatever there is room for, everybody ends and everything comes back.

    python -m tools.worlds [--worlds 10000] [--seed 0]

A world is the real scheduler, prefix cache and spill over the tests' fake model, which knows what every page and state stands
for: requests that share beginnings, too few slots, pages, snapshots and chunks, both policies, tiny budgets, aborts, deadlines,
resets, decode loops, failing allocations and restarts over a disk. After every step the books are checked, at the end every
token. What fails is printed with its seed, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sparkrt.cache.disk import DiskCache
from sparkrt.engine.core import EngineCore
from sparkrt.engine.llm import DecodeLoop
from sparkrt.engine.messages import EngineRequest
from sparkrt.errors import CapacityError, RequestError, SparkrtError
from sparkrt.model.batch import SamplerParams
from sparkrt.runtime.backend import OutOfMemory
from tests.engine.fake_model import FakeModel, config, expected
from tests.engine.fake_mover import spilling

PATIENCE = 500  # steps without any news, while somebody waits
FALLIBLE = ("new_sequence", "grow", "snapshot", "launch", "collect"), ("out", "into")  # of the model, and of its spill's mover


class World:
    """One world, all of it from a seed. `lives` are engines that follow one another over one disk, if there is a disk."""

    def __init__(self, seed: int, folder: Path | None = None) -> None:
        """`folder`: an empty one for the disk; None: this world has none."""
        self.rng, self.folder, self.happened = random.Random(seed), folder, Counter[str]()
        rng = self.rng
        self.page = rng.choice([16, 32, 64])
        self.slots, self.blocks = rng.randint(1, 8), rng.randint(192 // self.page, 1024 // self.page)
        self.texts = [[rng.randrange(1000) for _ in range(rng.randint(1, 300))] for _ in range(rng.randint(1, 4))]
        self.failing, self.aborting = rng.choice([0.0, 0.0, 0.0, 0.02]), rng.choice([0.0, 0.0, 0.01, 0.05])
        self.spills, self.disk_bytes = folder is not None or rng.random() < 0.4, rng.choice([3_000, 20_000, 1 << 20])
        self.shape: dict[str, Any] = {
            "slots": self.slots,
            "blocks": self.blocks,
            "block_size": self.page,
            "budget": rng.choice([1, 64, 128, rng.randint(65, 400), 2048]),
            "recurrent": rng.random() < 0.7,
            "snapshots": rng.choice([None, 1, 4, 20]) if not self.spills else rng.choice([1, 4, 20]),
        }
        self.options: dict[str, Any] = {
            "async_scheduling": rng.random() < 0.5,
            "scheduling_policy": rng.choice(["fcfs", "priority"]),
            "max_num_queued_reqs": rng.choice([None, None, None, rng.randint(0, 8)]),
            "request_timeout": rng.choice([None, 1e6]),
        }

    def run(self) -> Counter[str]:
        """What happened, by kind. Raises AssertionError or EngineFatal where a promise is broken."""
        for life in range(1 if self.folder is None else 2):
            disk = None if self.folder is None else DiskCache(self.folder, self.disk_bytes)
            spill = spilling(self.rng.choice([4, 20, 100]), disk, seed=life) if self.spills else None
            self._live(FakeModel(spill=spill, **self.shape), life)
            assert disk is None or disk.used <= disk.budget
        return self.happened

    def _live(self, model: FakeModel, life: int) -> None:
        rng, armed, hopeful = self.rng, True, self.rng.random() < 0.7
        for owner, names in zip((model, model.spill and model.spill.mover), FALLIBLE, strict=True):
            for name in names if owner is not None else ():
                setattr(owner, name, self._fallible(getattr(owner, name), name == "collect", lambda: armed))
        core = EngineCore(model, config(**self.options))  # type: ignore[arg-type]
        wanted = {r.request_id: r for r in (self._request(f"{life}.{i}") for i in range(rng.randint(1, 40)))}
        coming, tokens, ends, quiet = list(wanted.values()), dict[str, list[int]](), dict[str, str](), 0
        loops: list[DecodeLoop] = []
        while coming or core.has_work or loops:
            if hopeful:  # it never learns that answers are long
                core.scheduler.forecast.share = 0.0
            for _ in range(min(len(coming), rng.choice([0, 0, 1, 3, 25]))):
                self._add(core, coming.pop(), ends)
            self._disturb(core, loops)
            try:
                news = core.step()
            except OutOfMemory:  # of a step that a loop left in flight
                assert self.failing
                news = []
            for out in news:
                assert out.request_id not in ends, f"{out.request_id} ended, and there is news of it"
                assert out.cached_tokens % 64 == 0
                assert 0 <= out.cached_tokens < len(wanted[out.request_id].prompt_ids)
                tokens.setdefault(out.request_id, []).extend(out.token_ids)
                if out.finish_reason is not None:
                    ends[out.request_id] = out.finish_reason
            core.check_integrity()
            quiet = 0 if news or coming else quiet + 1
            assert quiet < PATIENCE, f"nothing moves any more: {core.stats()}"
        armed = False
        for name, r in wanted.items():
            whole, got, end = answer(r), tokens.get(name, []), ends[name]
            assert got == (whole if end in ("length", "stop") else whole[: len(got)]), f"{name} ({end}): {got} of {whole}"
            assert end in ("length", "stop", "abort", "timeout", "refused") or (end == "error" and self.failing)
        stats = core.stats()
        assert (stats.running, stats.waiting, stats.free_slots, stats.free_blocks) == (0, 0, self.slots, self.blocks)
        offload = {} if stats.offload is None else {"restored tokens": stats.offload.hits, "swaps": stats.offload.swaps}
        assert stats.offload is None or not stats.offload.corrupt_files
        self.happened.update(ends.values())
        self.happened.update({"preemptions": stats.preemptions, "cached tokens": stats.prefix_cache_hits, **offload})
        core.close()
        assert model.prefix is not None or model.free_blocks == self.blocks

    def _request(self, name: str) -> EngineRequest:
        rng, base = self.rng, self.rng.choice(self.texts)
        base = base[: rng.choice([len(base), rng.randint(1, len(base)), (len(base) // 64 * 64) or 1])]
        prompt = [*base, *(rng.randrange(1000) for _ in range(rng.choice([0, 1, rng.randint(0, 100)])))]
        max_tokens = rng.choice([0, 1, 2, *(rng.randint(1, 90) for _ in range(4))])
        prompt = prompt[: self.blocks * self.page - max_tokens + (rng.random() < 0.02)]  # most fit
        self.texts.append(
            prompt + answer(EngineRequest(request_id=name, prompt_ids=prompt, max_tokens=max_tokens, temperature=0.0))
        )
        drawn = {"temperature": 1.0, "seed": rng.randrange(2**32)} if rng.random() < 0.3 else {"temperature": 0.0}
        return EngineRequest(
            request_id=name,
            prompt_ids=prompt,
            max_tokens=max_tokens,
            min_tokens=rng.randint(0, max_tokens),
            stop_token_ids=rng.sample(range(1000), rng.choice([0, 0, 40])),
            prompt_logprobs=1 if max_tokens == 0 or rng.random() < 0.1 else None,
            cache_salt=rng.choice([None, None, None, "a"]),
            priority=rng.randint(-1, 1) if self.options["scheduling_policy"] == "priority" else 0,
            **drawn,
        )

    def _add(self, core: EngineCore, r: EngineRequest, ends: dict[str, str]) -> None:
        try:
            core.add(r)
        except RequestError:
            assert len(r.prompt_ids) + r.max_tokens > min(self.blocks * self.page, 4096), "refused though it fits"
            ends[r.request_id] = "refused"
        except CapacityError:
            assert self.options["max_num_queued_reqs"] is not None
            ends[r.request_id] = "refused"

    def _disturb(self, core: EngineCore, loops: list[DecodeLoop]) -> None:
        """Whatever may come between two steps."""
        rng = self.rng
        if core._requests and rng.random() < self.aborting:
            core.abort(rng.sample(sorted(core._requests), rng.choice([1, 1, 1, len(core._requests)])))
        if core._requests and self.options["request_timeout"] and rng.random() < self.aborting:
            core._deadlines[0].deadline = 0.0
        if rng.random() < 0.01:
            core.reset_prefix_cache()
        if rng.random() < 0.02:
            maker: Any = SimpleNamespace(core=core, _loop_request=lambda r, _: r)
            r = self._request(f"loop {rng.random()}")
            r.prompt_logprobs, r.max_tokens = None, r.max_tokens + 1
            with suppress(CapacityError, OutOfMemory):
                loops.append(DecodeLoop(maker, r))  # type: ignore[arg-type]
                self.happened["loops"] += 1
        for loop in loops[:]:
            try:
                for _ in range(rng.randint(0, 3)):
                    next(loop)
                over = core.stalled or rng.random() < 0.05
            except (StopIteration, OutOfMemory, SparkrtError):
                over = True
            if over:
                with suppress(OutOfMemory):
                    loop.close()
                loops.remove(loop)

    def _fallible(self, call: Callable[..., Any], late: bool, armed: Callable[[], bool]) -> Callable[..., Any]:
        def wrapped(*about: Any) -> Any:
            if armed() and self.rng.random() < self.failing:
                if late:
                    call(*about)  # a result that is collected is gone
                self.happened["failures"] += 1
                raise OutOfMemory("no memory")
            return call(*about)

        return wrapped


def answer(r: EngineRequest) -> list[int]:
    """What this request gets alone."""
    params = SamplerParams(temperature=r.temperature, seed=r.seed or 0, stop_ids=tuple(r.stop_token_ids), min_tokens=r.min_tokens)
    return expected(r.prompt_ids, params, r.max_tokens)


def run(seed: int) -> Counter[str]:
    """World number `seed`; one in 20 has a disk, and ends and begins again over it."""
    if seed % 20:
        return World(seed).run()
    with tempfile.TemporaryDirectory() as folder:
        return World(seed, Path(folder)).run()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first")
    args = parser.parse_args()
    logging.getLogger("sparkrt").setLevel(logging.CRITICAL)  # failures are what is wanted here
    began, happened, failed = time.monotonic(), Counter[str](), list[int]()
    for seed in range(args.seed, args.seed + args.worlds):
        try:
            happened += run(seed)
        except Exception as error:
            print(f"world {seed}: {type(error).__name__}: {error}", file=sys.stderr)
            failed.append(seed)
    print(f"{args.worlds} worlds in {time.monotonic() - began:.0f} s, {len(failed)} failed: {failed[:20]}")
    print(*(f"{n:12,} {what}" for what, n in happened.most_common()), sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
