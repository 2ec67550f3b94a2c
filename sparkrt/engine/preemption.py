"""Who has to go when KV blocks run out: the one that loses least, of those that came later than the one in need.

The oldest request is nobody's victim, so it always gets on: whatever the mix, all end. A victim loses time only; it keeps its
place in the queue and goes on with the same tokens.
"""

from __future__ import annotations

from collections.abc import Iterable

from sparkrt.engine.job import Job

IMMUNITY = 64  # tokens that a job generates undisturbed after it was preempted, if there is any other choice


def victim_for(job: Job, running: Iterable[Job]) -> Job | None:
    """Of the `running` jobs after `job` in order, the one with the fewest tokens to compute again; None if there is none."""
    later = [other for other in running if other.order > job.order]
    return min(later, key=lambda other: (other.generated < other.immune, other.computed, other.order), default=None)


def victims_of_rank(job: Job, running: Iterable[Job], blocks: int, slots: int) -> list[Job]:
    """Jobs of lower priority than `job`, lowest first, that have `blocks` and `slots` together; none, if all of them do not."""
    below = sorted((other for other in running if other.order[0] > job.order[0]), key=lambda other: other.order, reverse=True)
    chosen: list[Job] = []
    for other in below:
        if blocks <= 0 and slots <= 0:
            break
        chosen.append(other)
        blocks, slots = blocks - other.reserved, slots - 1
    return chosen if blocks <= 0 and slots <= 0 else []
