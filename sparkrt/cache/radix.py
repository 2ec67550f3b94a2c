"""`RadixTree`: which pages of tokens the KV cache holds, from the first token on, with one root per adapter and salt.

A node is one full page of tokens after its parent's, found by the tokens themselves (never by a hash of them alone). The tree
owns one reference to the block of every node; sequences that use a node pin it, and with it all nodes above it. What nobody
pins can be evicted, leaves first, the least recently used first. A node may carry a snapshot of the state after its last token.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from itertools import count

import numpy as np

from sparkrt.cache.paged import BlockPool
from sparkrt.errors import EngineFatal


class Node:
    """A page in the tree. `depth` counts tokens up to its end; `state` is the snapshot's slot, if there is one."""

    __slots__ = ("block", "children", "depth", "key", "name", "parent", "pins", "state", "used")

    def __init__(self, key: bytes, parent: Node | None, block: int, depth: int, name: bytes = b"") -> None:
        self.key, self.parent, self.block, self.depth, self.name = key, parent, block, depth, name
        self.children: dict[bytes, Node] = {}
        self.pins = self.used = 0
        self.state: int | None = None


class RadixTree:
    """See the module. `pinned` and `unpinned` count pages; the second is what eviction can free."""

    def __init__(self, pool: BlockPool, page_size: int) -> None:
        self.pool, self.page_size = pool, page_size
        self.chain: Callable[[bytes, bytes], bytes] | None = None  # names a page after the one before it, if names are wanted
        self.pinned = self.unpinned = 0
        self._roots: dict[int, Node] = {}
        self._clock = 0
        self._leaves: list[tuple[int, int, Node]] = []  # a heap by use; entries that went stale are skipped
        self._ties = count()

    def __len__(self) -> int:
        return self.pinned + self.unpinned

    def walk(self, ids: np.ndarray, root: int = 0) -> list[Node]:
        """The nodes of the longest run of full pages of `ids` (int32) that is in the tree, from the first. Changes nothing."""
        node, path = self._roots.get(root), list[Node]()
        for key in self.keys(ids):
            node = node.children.get(key) if node is not None else None
            if node is None:
                break
            path.append(node)
        return path

    def pin(self, path: Sequence[Node]) -> None:
        """One more sequence uses these nodes."""
        self._clock += 1
        for node in path:
            node.used = self._clock
            if node.pins == 0:
                self.unpinned -= 1
                self.pinned += 1
            node.pins += 1

    def unpin(self, path: Sequence[Node]) -> None:
        """A sequence is done with them; they stay until their pages are needed."""
        self._clock += 1
        for node in path:
            if node.pins < 1:
                raise EngineFatal(f"a cached page at token {node.depth} is unpinned more often than it was pinned")
            node.pins -= 1
            if node.parent is None:  # the tree was reset meanwhile
                continue
            node.used = self._clock
            if node.pins == 0:
                self.pinned -= 1
                self.unpinned += 1
        for node in path:
            self._push(node)

    def insert(self, path: list[Node], ids: np.ndarray, blocks: Sequence[int], root: int = 0) -> None:
        """Extend a sequence's pinned `path` by its full pages of `ids`, which lie in `blocks`.

        A page that is in the tree already stays as it is: the path goes on through it, and the sequence keeps its own block.
        """
        if path and path[-1].parent is None:
            return  # the tree was reset meanwhile
        node = path[-1] if path else self._root(root)
        grown = list[Node]()
        for at, key in enumerate(self.keys(ids, len(path)), len(path)):
            child = node.children.get(key)
            if child is None:
                name = self.chain(node.name, key) if self.chain is not None else b""
                child = node.children[key] = Node(key, node, blocks[at], node.depth + self.page_size, name)
                self.pool.incref(blocks[at])
                self.unpinned += 1
            grown.append(child)
            node = child
        self.pin(grown)
        path += grown

    def evict(self) -> Node | None:
        """Take the least recently used leaf that nobody pins out of the tree; its block is free, its snapshot the caller's."""
        while self._leaves:
            used, _, node = heapq.heappop(self._leaves)
            if node.parent is None or node.pins or node.children or node.used != used:
                continue
            parent, node.parent = node.parent, None
            del parent.children[node.key]
            self.unpinned -= 1
            self.pool.decref(node.block)
            self._push(parent)
            if parent.parent is None and not parent.children:
                self._roots.pop(int.from_bytes(parent.key, "little"), None)
            return node
        return None

    def reset(self) -> None:
        """Forget everything. Pages that sequences use stay theirs."""
        for node in list(self.nodes()):
            node.parent = None
            node.children = {}
            self.pool.decref(node.block)
        self._roots, self._leaves, self.pinned, self.unpinned = {}, [], 0, 0

    def nodes(self) -> Iterator[Node]:
        """Every page, parents first."""
        waiting = list(self._roots.values())
        while waiting:
            node = waiting.pop()
            waiting += node.children.values()
            if node.parent is not None:
                yield node

    def check_integrity(self, paths: Sequence[Sequence[Node]]) -> None:
        """Raises EngineFatal unless pins are those of `paths`, all there are, and the counts agree."""
        pins = dict[Node, int]()
        for path in paths:
            for node in path:
                pins[node] = pins.get(node, 0) + 1
        nodes = list(self.nodes())
        held = sum(node.pins > 0 for node in nodes)
        if (held, len(nodes) - held) != (self.pinned, self.unpinned):
            raise EngineFatal(f"prefix tree: {held} of {len(nodes)} pages pinned, counted {self.pinned} and {self.unpinned}")
        for node in nodes:
            if node.pins != pins.get(node, 0):
                raise EngineFatal(f"prefix tree: the page at token {node.depth} has {node.pins} pins, {pins.get(node, 0)} users")
            if node.pins and node.parent is not None and node.parent.parent is not None and node.parent.pins < node.pins:
                raise EngineFatal(f"prefix tree: the page at token {node.depth} is pinned more often than the one before it")

    def root_name(self, root: int) -> bytes:
        """What names chain from."""
        return b"" if self.chain is None else self.chain(b"", root.to_bytes(16, "little"))

    def _root(self, root: int) -> Node:
        if (node := self._roots.get(root)) is None:
            node = self._roots[root] = Node(root.to_bytes(16, "little"), None, -1, 0, self.root_name(root))
        return node

    def keys(self, ids: np.ndarray, first: int = 0) -> Iterator[bytes]:
        """Full pages of tokens, from page `first` on."""
        size = self.page_size
        for at in range(first * size, len(ids) - size + 1, size):
            yield ids[at : at + size].tobytes()

    def _push(self, node: Node) -> None:
        if node.parent is not None and not node.pins and not node.children:
            heapq.heappush(self._leaves, (node.used, next(self._ties), node))
