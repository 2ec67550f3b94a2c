"""`PrefixCache`: what of a prompt need not be computed again. Plain data: it says which blocks and slots, others copy.

A hit needs keys and values *and* the recurrent state after some token: computing goes on behind the deepest snapshot, and tokens
between it and the end of the matching pages run again (their hidden states are needed) without writing those pages. At least the
last token of a prompt always runs. Models without recurrent layers need no snapshots: any page will do.

Snapshots lie in spare slots of the state pool, of fixed number. They are taken where another prompt is likely to leave this one:
at the last multiple of 64 before a prompt's end, where the tree branches, at the newest multiple of 64 of an answer; and at the
ends of chunks, as far as slots are free. The least recently used, of these the shallowest, goes first; those of running requests
are theirs until they end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from sparkrt.cache.paged import BlockPool
from sparkrt.cache.radix import Node, RadixTree
from sparkrt.errors import EngineFatal

GRID = 64  # tokens: snapshots lie on its multiples, as the ends of chunks do


@dataclass(slots=True)
class Match:
    """Pages of a prompt that are cached. Tokens before `resume` need not run; `state` is the slot of the state there."""

    nodes: list[Node]
    resume: int = 0
    state: int | None = None

    @property
    def blocks(self) -> list[int]:
        return [node.block for node in self.nodes]


@dataclass(slots=True)
class Lease:
    """What one sequence has of the cache: its path of pinned pages, and snapshots that wait for theirs, by position."""

    root: int = 0
    path: list[Node] = field(default_factory=list)
    states: dict[int, int] = field(default_factory=dict)
    answer: int | None = None  # position of the snapshot that follows the answer


@dataclass(slots=True)
class PrefixStats:
    """Counters, in tokens (vLLM's meaning)."""

    queries: int = 0
    hits: int = 0


class PrefixCache:
    """See the module. Not thread-safe; `pool` is the block pool of the cached group."""

    def __init__(self, pool: BlockPool, page_size: int, slots: Sequence[int], recurrent: bool) -> None:
        """`slots`: those of the state pool that snapshots may use. Without `recurrent` layers none are needed."""
        if GRID % page_size:
            raise ValueError(f"pages of {page_size} tokens do not tile the {GRID} tokens between snapshots")
        self.tree, self.pool, self.recurrent, self.stats = RadixTree(pool, page_size), pool, recurrent, PrefixStats()
        self._slots, self._free = tuple(slots), list(reversed(slots))
        self._open: dict[int, Lease] = {}
        self._with_state: dict[Node, None] = {}
        self._clock = 0

    @property
    def slots(self) -> int:
        """Snapshots that there is room for; `free_slots` of them are not taken."""
        return len(self._slots)

    @property
    def free_slots(self) -> int:
        return len(self._free)

    # --- lookup -----------------------------------------------------------------------------------------------------------
    def match(self, ids: Sequence[int] | np.ndarray, root: int = 0) -> Match:
        """What is cached of a prompt. Changes nothing: ask as often as you like."""
        nodes = self.tree.walk(np.asarray(ids, np.int32), root)
        if not self.recurrent:
            return Match(nodes, min(len(nodes) * self.tree.page_size, len(ids) - 1) // GRID * GRID if nodes else 0)
        for node in reversed(nodes):
            if node.state is not None and node.depth < len(ids):
                return Match(nodes, node.depth, node.state)
        return Match(nodes)

    def open(self, match: Match, tokens: int, root: int = 0) -> Lease:
        """A sequence of `tokens` begins with this match: its pages stay until `close`, the snapshot counts as used."""
        self.tree.pin(match.nodes)
        self._clock += 1
        for node in match.nodes:
            if node.state is not None and node.state == match.state:
                node.state_used = self._clock
        self.stats.queries += tokens
        self.stats.hits += match.resume
        lease = Lease(root, list(match.nodes))
        self._open[id(lease)] = lease
        return lease

    # --- snapshots --------------------------------------------------------------------------------------------------------
    def points(self, match: Match, prompt: int) -> list[int]:
        """Where the state of a prompt of that length should be kept, besides the ends of its chunks: ascending positions."""
        if not self.recurrent:
            return []
        branch, last = len(match.nodes) * self.tree.page_size // GRID * GRID, (prompt - 1) // GRID * GRID
        return sorted({at for at in (branch, last) if match.resume < at <= last})

    def reserve(self, lease: Lease, position: int, spare: bool = False) -> int | None:
        """A slot for the state at `position`, to be copied there by the step that computes it; None if there is none.

        With `spare` nothing is evicted for it.
        """
        if position % GRID or position < GRID or position in lease.states or not self.recurrent:
            return None
        if not self._free and not spare:
            self._evict_state()
        if not self._free:
            return None
        lease.states[position] = self._free.pop()
        return lease.states[position]

    def follow(self, lease: Lease, position: int) -> int | None:
        """As `reserve`, for an answer on its way: the slot moves along with it, from one multiple of 64 to the next."""
        if lease.answer is None:
            slot = self.reserve(lease, position)
        else:
            slot = lease.states.pop(lease.answer)
            lease.states[position] = slot
        if slot is not None:
            lease.answer = position
        return slot

    # --- growth and end ---------------------------------------------------------------------------------------------------
    def insert(self, lease: Lease, ids: Sequence[int] | np.ndarray, blocks: Sequence[int], valid: int) -> None:
        """Pages and snapshots of the first `valid` tokens, proven computed, become part of the tree."""
        self.tree.insert(lease.path, np.asarray(ids[:valid], np.int32), blocks, lease.root)
        for position in [at for at in lease.states if at <= valid and at != lease.answer]:
            self._attach(lease, position)

    def close(self, lease: Lease, valid: int = 0) -> None:
        """The sequence ends; the state of its answer is kept if it is within the `valid` tokens that were inserted."""
        if self._open.pop(id(lease), None) is None:
            raise EngineFatal("a lease on the prefix cache is closed twice")
        if lease.answer is not None and lease.answer <= valid:
            self._attach(lease, lease.answer)
        self._free += lease.states.values()
        lease.states = {}
        self.tree.unpin(lease.path)
        lease.path = []

    def make_room(self, blocks: int) -> None:
        """Evict until so many blocks are free, or nothing is left to evict."""
        while self.pool.free_count < blocks and (node := self.tree.evict()) is not None:
            self._drop_state(node)

    def reset(self) -> None:
        """Forget everything that no running sequence uses; theirs they keep, unseen by others."""
        for node in list(self._with_state):
            self._drop_state(node)
        self.tree.reset()

    def blocks(self) -> Iterable[int]:
        """Blocks that the tree has a share in."""
        return (node.block for node in self.tree.nodes())

    def check_integrity(self) -> None:
        """Raises EngineFatal unless free + leased + kept snapshots = all, and pins are those of the open leases."""
        leases = list(self._open.values())
        held = [*self._free, *(slot for lease in leases for slot in lease.states.values())]
        held += [node.state for node in self._with_state if node.state is not None]
        if sorted(held) != sorted(self._slots):
            raise EngineFatal(f"snapshots: {sorted(held)} free, leased or kept, of {sorted(self._slots)}")
        self.tree.check_integrity([[n for n in lease.path if n.parent is not None] for lease in leases])

    # --- private ----------------------------------------------------------------------------------------------------------
    def _attach(self, lease: Lease, position: int) -> None:
        slot, at = lease.states.pop(position), position // self.tree.page_size - 1
        node = lease.path[at] if at < len(lease.path) else None
        if node is None or node.parent is None or node.state is not None:
            self._free.append(slot)
            return
        self._clock += 1
        node.state, node.state_used = slot, self._clock
        self._with_state[node] = None

    def _evict_state(self) -> None:
        if self._with_state:
            self._drop_state(min(self._with_state, key=lambda node: (node.state_used, node.depth)))

    def _drop_state(self, node: Node) -> None:
        if node.state is not None:
            self._free.append(node.state)
            node.state = None
            del self._with_state[node]
