"""`PrefixCache`: what of a prompt need not be computed again. Plain data: it says which blocks and slots, others copy.

A hit needs keys and values *and* the recurrent state after some token: computing goes on behind the deepest snapshot, and tokens
between it and the end of the matching pages run again (their hidden states are needed) without writing those pages. At least the
last token of a prompt always runs. Models without recurrent layers need no snapshots: any page will do.

Snapshots lie in spare slots of the state pool, of fixed number. They are taken where another prompt is likely to leave this one:
at the last multiple of 64 before a prompt's end, where the tree branches, at the newest multiple of 64 of an answer; and at the
ends of chunks, as far as slots are free. The least recently used, of these the shallowest, goes first; those of running requests
are theirs until they end. With a `Spill` behind it, what is evicted goes there, and a prompt may find it there again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from sparkrt.cache.disk import HEADER_BYTES
from sparkrt.cache.paged import BlockPool
from sparkrt.cache.radix import Node, RadixTree
from sparkrt.cache.shuttle import Kind
from sparkrt.cache.spill import Hold, Spill
from sparkrt.errors import EngineFatal

GRID = 64  # tokens: snapshots lie on its multiples, as the ends of chunks do


@dataclass(slots=True)
class Match:
    """Pages of a prompt that are cached. Tokens before `resume` need not run; `state` is the slot of the state there.

    `spilled` has to be brought back for that: the pages that follow `nodes`, and the state, whatever of it is not on the device;
    without it `near` tokens need not run.
    """

    nodes: list[Node]
    resume: int = 0
    state: int | None = None
    spilled: list[tuple[Kind, bytes]] = field(default_factory=list)
    near: int = 0

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
    hold: Hold | None = None  # what has to be brought back


@dataclass(slots=True)
class PrefixStats:
    """Counters, in tokens (vLLM's meaning)."""

    queries: int = 0
    hits: int = 0
    restored: int = 0  # of the hits, those that were spilled


class PrefixCache:
    """See the module. Not thread-safe; `pool` is the block pool of the cached group."""

    def __init__(
        self, pool: BlockPool, page_size: int, slots: Sequence[int], recurrent: bool, spill: Spill | None = None
    ) -> None:
        """`slots`: those of the state pool that snapshots may use. Without `recurrent` layers none are needed."""
        if GRID % page_size:
            raise ValueError(f"pages of {page_size} tokens do not tile the {GRID} tokens between snapshots")
        self.tree, self.pool, self.recurrent, self.stats = RadixTree(pool, page_size), pool, recurrent, PrefixStats()
        self.spill, self.tree.chain = spill, None if spill is None else spill.chain
        self._slots, self._free = tuple(slots), list(reversed(slots))
        self._open: dict[int, Lease] = {}
        self._with_state: dict[Node, None] = {}  # the least recently used first

    @property
    def slots(self) -> int:
        """Snapshots that there is room for; `free_slots` of them are not taken."""
        return len(self._slots)

    @property
    def free_slots(self) -> int:
        return len(self._free)

    # --- lookup -----------------------------------------------------------------------------------------------------------
    def match(self, ids: Sequence[int] | np.ndarray, root: int = 0, spilled: bool = True) -> Match:
        """What is cached of a prompt. Changes nothing: ask as often as you like. `spilled` False: only what is on the device."""
        ids = np.asarray(ids, np.int32)
        nodes = self.tree.walk(ids, root)
        match = self._on_device(nodes, ids)
        return self._with_spilled(match, ids, root, self.spill) if spilled and self.spill is not None else match

    def _on_device(self, nodes: list[Node], ids: np.ndarray) -> Match:
        if not self.recurrent:
            return Match(nodes, min(len(nodes) * self.tree.page_size, len(ids) - 1) // GRID * GRID if nodes else 0)
        for node in reversed(nodes):
            if node.state is not None and node.depth < len(ids):
                return Match(nodes, node.depth, node.state)
        return Match(nodes)

    def _with_spilled(self, match: Match, ids: np.ndarray, root: int, spill: Spill) -> Match:
        """The match with what makes it longer, if there is such and it is quicker to bring back than to compute."""
        size, names = self.tree.page_size, [node.name for node in match.nodes]
        name, here = names[-1] if names else self.tree.root_name(root), len(names)
        for key in self.tree.keys(ids, here):
            name = self.tree.chain(name, key) if self.tree.chain is not None else b""
            if not spill.has(Kind.PAGE, name):
                break
            names.append(name)
        resume = min(len(names) * size, len(ids) - 1) // GRID * GRID
        while self.recurrent and resume > match.resume and not spill.has(Kind.STATE, names[resume // size - 1]):
            resume -= GRID
        if resume <= match.resume:
            return match
        wanted = [(Kind.PAGE, name) for name in names[here : resume // size]]
        if self.recurrent:
            wanted.append((Kind.STATE, names[resume // size - 1]))
        worth = spill.worth(resume - match.resume, wanted)
        return Match(match.nodes, resume, None, wanted, match.resume) if worth else match

    def swapped(self, ids: Sequence[int] | np.ndarray, tokens: int, root: int = 0) -> Match | None:
        """A match with all full pages of the first `tokens`, the state behind them being elsewhere; None if a page is lost."""
        ids = np.asarray(ids, np.int32)[:tokens]
        nodes = self.tree.walk(ids, root)
        name, wanted = nodes[-1].name if nodes else self.tree.root_name(root), list[tuple[Kind, bytes]]()
        for key in self.tree.keys(ids, len(nodes)):
            name = self.tree.chain(name, key) if self.tree.chain is not None else b""
            wanted.append((Kind.PAGE, name))
        there = not wanted or (self.spill is not None and all(self.spill.has(*page) for page in wanted))
        return Match(nodes, tokens, None, wanted, self._on_device(nodes, ids).resume) if there else None

    def open(self, match: Match, tokens: int, root: int = 0) -> Lease:
        """A sequence of `tokens` begins with this match: its pages stay until `close`, the snapshot counts as used.

        What is spilled of it must be in host memory; the lease holds it until `restored`.
        """
        self.tree.pin(match.nodes)
        for node in match.nodes:
            if node.state is not None and node.state == match.state:
                del self._with_state[node]
                self._with_state[node] = None
        self.stats.queries += tokens
        self.stats.hits += match.resume
        lease = Lease(root, list(match.nodes))
        self._open[id(lease)] = lease
        if match.spilled:
            assert self.spill is not None
            lease.hold = self.spill.fetch(match.spilled)
            self.stats.restored += match.resume - match.near
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

    def forgo(self, lease: Lease, position: int) -> None:
        """The state of an answer did not get to the slot that `follow` gave for it."""
        self._free.append(lease.states.pop(position))
        lease.answer = None

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
        self.let_go(lease)
        self.tree.unpin(lease.path)
        lease.path = []

    def let_go(self, lease: Lease) -> None:
        """What a lease holds was brought back, or is not wanted any more."""
        if lease.hold is not None and self.spill is not None:
            self.spill.release(lease.hold)
        lease.hold = None

    def make_room(self, blocks: int) -> None:
        """Evict until so many blocks are free, or nothing is left to evict."""
        gone = list[Node]()
        while self.pool.free_count < blocks and (node := self.tree.evict()) is not None:
            gone.append(node)
        if self.spill is not None and gone:  # the ends of branches come first
            self.spill.keep([record for node in gone for record in self._records(node)])
        for node in gone:
            self._drop_state(node)

    def save(self) -> None:
        """Before the end: what is still on the device goes to the disk, if there is one, as far as it has room."""
        if self.spill is None or self.spill.disk is None:
            return
        gone, room = list[Node](), self.spill.disk.budget
        while (node := self.tree.evict()) is not None:
            gone.append(node)
        records = [record for node in gone for record in self._records(node)]
        for first in range(len(records) - 1, -1, -1):  # the last was used last
            room -= self.spill.mover.nbytes(records[first][0]) + HEADER_BYTES
            if room < 0:
                del records[: first + 1]
                break
        self.spill.save(records)
        for node in gone:
            self._drop_state(node)

    def reset(self) -> None:
        """Forget everything that no running sequence uses; theirs they keep, unseen by others."""
        for node in list(self._with_state):
            self._drop_state(node)
        self.tree.reset()
        if self.spill is not None:
            self.spill.clear()

    def end(self) -> None:
        """Finish what is on its way to host memory and disk, and free that."""
        if self.spill is not None:
            self.spill.close()

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
        if self.spill is not None:
            self.spill.check_integrity()
        self.tree.check_integrity([[n for n in lease.path if n.parent is not None] for lease in leases])

    # --- private ----------------------------------------------------------------------------------------------------------
    def _attach(self, lease: Lease, position: int) -> None:
        slot, at = lease.states.pop(position), position // self.tree.page_size - 1
        node = lease.path[at] if at < len(lease.path) else None
        if node is None or node.parent is None or node.state is not None:
            self._free.append(slot)
            return
        node.state = slot
        self._with_state[node] = None

    def _evict_state(self) -> None:
        if (oldest := next(iter(self._with_state), None)) is not None:
            if self.spill is not None:
                self.spill.keep(self._records(oldest)[:1])
            self._drop_state(oldest)

    def _records(self, node: Node) -> list[tuple[Kind, bytes, int]]:
        """What is to be spilled of a node: its state, if it has one, and its page."""
        state = [] if node.state is None else [(Kind.STATE, node.name, node.state)]
        return [*state, (Kind.PAGE, node.name, node.block)]

    def _drop_state(self, node: Node) -> None:
        if node.state is not None:
            self._free.append(node.state)
            node.state = None
            del self._with_state[node]
