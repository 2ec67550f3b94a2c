"""Who waits, in which order, and how many blocks to count on for a request that is let in."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from sparkrt.engine.job import Job, Limits

_MEMORY = 8  # requests that the forecast looks back on


class Queue:
    """Waiting jobs by (priority, arrival). A preempted job keeps its place: it comes back before all that arrived later."""

    def __init__(self) -> None:
        self._jobs: list[Job] = []

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(self._jobs)

    @property
    def head(self) -> Job | None:
        return self._jobs[0] if self._jobs else None

    def add(self, job: Job) -> None:
        insort(self._jobs, job, key=_order)

    def remove(self, job: Job) -> None:
        at = bisect_left(self._jobs, job.order, key=_order)
        assert self._jobs[at] is job, "only what waits can leave the queue"
        del self._jobs[at]


class Forecast:
    """Clients ask for far more tokens than they take: what share of `max_tokens` the last requests took says how many blocks
    the next will need. A forecast too low costs a preemption, and raises it; one too high leaves blocks idle.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.share = 0.5

    def blocks(self, job: Job) -> int:
        """What to reserve for a job about to be admitted: its tokens so far, one more, and the share of the rest."""
        rest = job.life - job.target
        return self._limits.blocks_for(job.target + min(max(int(rest * self.share), 1), rest))

    def learn(self, job: Job) -> None:
        """It ended, with this many tokens."""
        self.share += (job.emitted / max(job.max_tokens, 1) - self.share) / _MEMORY

    def missed(self) -> None:
        """Blocks ran out."""
        self.share += (1.0 - self.share) / _MEMORY


def _order(job: Job) -> tuple[int, int]:
    return job.order
