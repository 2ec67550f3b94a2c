"""What the engine does with the prefix cache: where a request begins, who waits for whose pages, and what is kept of it.

A request whose prompt begins as one that is being computed right now waits for that: so equal prompts that arrive together are
computed once. Pages and snapshots go into the cache when the step that wrote them was read, never before.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from sparkrt.cache.prefix import GRID, Match, PrefixCache
from sparkrt.cache.shuttle import Kind
from sparkrt.cache.spill import Hold, Spill
from sparkrt.engine.job import Hit, Job, Slice
from sparkrt.engine.messages import OffloadStats
from sparkrt.model.sequence import SequenceState

_WAIT = Hit(wait=True)


class Reuse:
    """The prefix cache as the engine sees it; without one, nothing is ever found. Prompts that are to be scored bypass it."""

    def __init__(self, cache: PrefixCache | None, copy_state: Callable[[SequenceState, int], object]) -> None:
        """`copy_state` keeps a sequence's state, behind what is in flight, in a spare slot."""
        self.cache, self.spill = cache, None if cache is None else cache.spill
        self._page_size = 1 if cache is None else cache.tree.page_size
        self._copy_state = copy_state
        self._computing: dict[tuple[int, bytes], dict[Job, None]] = {}  # prompts on their way in, by root and first 64 tokens

    @property
    def evictable(self) -> int:
        """Cached blocks that nobody uses."""
        return 0 if self.cache is None else self.cache.tree.unpinned

    def lookup(self, job: Job) -> Hit:
        """What of a waiting job's tokens is cached, or that it should wait for another to compute them."""
        if self.cache is None or job.scored:
            return Hit()
        if job.leader is not None:
            leader, common = job.leader
            if leader.lease is not None and leader.cached < common:
                return _WAIT
            job.leader = None
        if job.fetch is not None and job.fetch.reads:
            return _WAIT
        job.match = match = self._match(job, self.cache)
        if job.swap is None and (found := self._leader(job, match.resume)) is not None:
            job.leader = found
            return _WAIT
        if job.fetch is not None and job.fetch.reads:
            return _WAIT
        decodes = job.swap is not None and job.emitted > 0 and match.resume == job.target - 1
        resume = job.target if decodes else match.resume
        return Hit(len(match.nodes), sum(node.pins == 0 for node in match.nodes), resume)

    @property
    def busy(self) -> bool:
        """Whether anything is on its way between device, host memory and disk."""
        return self.spill is not None and self.spill.busy

    def poll(self) -> None:
        if self.spill is not None:
            self.spill.poll()

    def wait(self) -> None:
        """Return when some of that has ended, or soon."""
        if self.spill is not None:
            self.spill.wait()

    def flush(self) -> None:
        """Return when nothing is on its way: the device's memory is about to go."""
        if self.spill is not None:
            self.spill.flush()

    def woken(self, other_weights: bool) -> None:
        """With `other_weights`, maybe, what is spilled from here on is no later run's."""
        if self.spill is not None and other_weights:
            self.spill.disown()

    def restored(self, job: Job) -> bool:
        return self.spill is None or job.loading is None or self.spill.done(job.loading)

    def make_room(self, blocks: int) -> None:
        """So many blocks will be taken now: let them be free."""
        if self.cache is not None:
            self.cache.make_room(blocks)

    def reset(self) -> None:
        if self.cache is not None:
            self.cache.reset()

    def save(self) -> None:
        """The engine is about to end: what a later run may find on disk goes there."""
        if self.cache is not None:
            self.cache.save()

    def begin(self, job: Job, blocks: int) -> None:
        """Take what `lookup` found as a part of the job's `blocks`, and make room for the others."""
        if self.cache is not None and job.match is not None:
            job.lease = self.cache.open(job.match, job.target, job.root)
            self._unfetch(job)
            job.points = set(self.cache.points(job.match, job.target))
            job.cached = job.match.resume
            job.skipped = job.cached if job.skipped is None else job.skipped
            if job.match.resume < job.target - 1:
                self._computing.setdefault(_beginning(job), {})[job] = None
            blocks -= len(job.match.nodes)
        self.make_room(blocks)

    def restore(self, job: Job) -> bool:
        """Bring back what was spilled of it to its new blocks and slot; until `loaded` it must neither run nor let go of them."""
        if self.spill is None or job.lease is None or job.match is None or job.seq is None:
            return False
        blocks, first, slot, parts = job.seq.blocks.blocks, len(job.match.nodes), job.seq.slot, list[tuple[Hold, list[int]]]()
        if (hold := job.lease.hold) is not None:
            pages = hold.kinds.count(Kind.PAGE)
            parts.append((hold, [*blocks[first : first + pages], slot][: len(hold.kinds)]))
        if (swap := job.swap) is not None:
            places = {Kind.STATE: slot, Kind.PAGE: blocks[swap.length // self._page_size]}
            parts.append((swap, [places[kind] for kind in swap.kinds]))
        if not parts:
            return False
        try:
            job.loading = self.spill.restore(*parts)
        except BaseException:
            job.seq.kv_valid_tokens = 0  # what it begins behind will not come
            raise
        if self.cache is not None:
            self.cache.let_go(job.lease)
        self._unswap(job)
        return True

    def swap(self, job: Job) -> None:
        """It is about to lose slot and blocks, and its pages are in the cache: keep its state, if that is quicker than to compute
        what is not cached again.
        """
        if self.spill is None or self.cache is None or job.seq is None or job.scored or not (length := job.seq.kv_valid_tokens):
            return  # a scored prompt bypasses the cache: its pages are not there
        self._unswap(job)
        ids = self._tokens(job)[:length]
        if length == job.seq.length and self.spill.worth_swapping(length - self.cache.match(ids, job.root).resume):
            page, rest = divmod(length, self._page_size)
            job.swap = self.spill.swap(length, job.seq.slot, job.seq.blocks.blocks[page] if rest else None)

    def forget(self, job: Job) -> None:
        """It needs nothing any more of what was kept or read for it."""
        self._unfetch(job)
        self._unswap(job)

    def snapshots(self, part: Slice) -> tuple[tuple[int, int], ...]:
        """Positions in a slice where the state is kept, each with its slot."""
        job, start, stop, _ = part
        if self.cache is None or job.lease is None:
            return ()
        wanted = sorted({at for at in job.points if start < at < stop} | {stop})
        slots = ((at, self.cache.reserve(job.lease, at, spare=at not in job.points)) for at in wanted)
        return tuple((at, slot) for at, slot in slots if slot is not None)

    def grown(self, job: Job, position: int) -> None:
        """An answer has filled its pages up to `position`: keep its state there, instead of where it was kept before."""
        if self.cache is None or job.lease is None or job.seq is None or position % GRID:
            return
        if (slot := self.cache.follow(job.lease, position)) is not None:
            try:
                self._copy_state(job.seq, slot)
            except BaseException:
                self.cache.forgo(job.lease, position)
                raise

    def read(self, job: Job) -> None:
        """A slice of its prompt was computed: others may use it from now on."""
        if self.cache is not None and job.lease is not None and job.seq is not None:
            job.cached = min(job.seq.kv_valid_tokens, job.target)
            self.cache.insert(job.lease, job.ids, job.seq.blocks.blocks, job.cached)
            if job.cached == job.target:
                self._computed(job)

    def end(self, job: Job) -> None:
        """It lets go of its blocks: what is proven written of them stays, as long as there is room."""
        self._computed(job)
        job.match = None
        if self.cache is not None and job.lease is not None:
            lease, job.lease, valid = job.lease, None, 0
            if job.seq is not None:
                ids = self._tokens(job)
                valid = min(job.seq.kv_valid_tokens, len(ids))
                self.cache.insert(lease, ids, job.seq.blocks.blocks, valid)
            self.cache.close(lease, valid)

    def _match(self, job: Job, cache: PrefixCache) -> Match:
        """What there is of a job's tokens. What is on disk is asked for; the job has to wait while that is read."""
        match = None if job.swap is None else cache.swapped(job.ids, job.swap.length, job.root)
        if match is None:
            self._unswap(job)
            match = cache.match(job.ids, job.root)
        if match.spilled and self.spill is not None and not self.spill.at_hand(match.spilled):
            self._unfetch(job)
            job.fetch = self.spill.fetch(match.spilled)
            if job.fetch is None:  # no room in host memory
                self._unswap(job)
                match = cache.match(job.ids, job.root, spilled=False)
        return match

    def _unfetch(self, job: Job) -> None:
        if job.fetch is not None and self.spill is not None:
            self.spill.release(job.fetch)
        job.fetch = None

    def _unswap(self, job: Job) -> None:
        if job.swap is not None and self.spill is not None:
            self.spill.release(job.swap)
        job.swap = None

    @staticmethod
    def _tokens(job: Job) -> np.ndarray:
        return np.append(job.ids, np.array(job.answer[job.target - job.prompt :], np.int32))

    def _computed(self, job: Job) -> None:
        """Nobody need wait for it any more."""
        if job.lease is not None and (alike := self._computing.get(_beginning(job))) is not None:
            alike.pop(job, None)
            if not alike:
                del self._computing[_beginning(job)]

    def _leader(self, job: Job, resume: int) -> tuple[Job, int] | None:
        """Who is computing the longest beginning of this prompt, a multiple of 64 beyond `resume`, and how long that is."""
        best: tuple[Job, int] | None = None
        for other in self._computing.get(_beginning(job), ()):
            at_least = (best[1] if best else resume) + GRID
            most = min(len(job.ids) - 1, other.target) // GRID * GRID
            if most < at_least or job.ids[at_least - 1] != other.ids[at_least - 1] or other.lease is None:
                continue
            differs = job.ids[:most] != other.ids[:most]
            common = int(differs.argmax()) // GRID * GRID if differs.any() else most
            if self.cache is not None and self.cache.recurrent and common <= other.prefilled:  # too late to ask for a snapshot
                common = max((at for at in other.lease.states if at <= common and at != other.lease.answer), default=0)
            if common >= at_least and common > other.cached:
                best = other, common
        if best is not None:
            leader, common = best
            leader.points.add(common)
            leader.goal = min(leader.goal, common) if leader.goal > leader.prefilled else common
        return best


def offload_stats(spill: Spill, hits: int) -> OffloadStats:
    """What there is to tell of it; `hits`: tokens of prompts that came from there."""
    s, disk = spill.stats, spill.disk
    host = {"host_bytes": spill.used, "total_host_bytes": spill.pool.num_blocks * spill.mover.chunk_bytes}
    moved = {"spilled_bytes": s.spilled, "restored_bytes": s.restored, "loaded_bytes": s.loaded, "lost": s.lost, "swaps": s.swaps}
    if disk is not None:
        host |= {"disk_bytes": disk.used, "total_disk_bytes": disk.budget}
        moved |= {"corrupt_files": disk.corrupt, "disk_failures": disk.failures}
    return OffloadStats(**host, **moved, hits=hits)


def _beginning(job: Job) -> tuple[int, bytes]:
    return job.root, job.ids[:GRID].tobytes()
