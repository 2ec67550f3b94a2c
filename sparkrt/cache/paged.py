"""`PagedKvCache`: keys and values in pages, in groups of layers that share a block table.

A page holds `page_size` tokens of one layer, laid out [kv_head, token, head_dim]: the keys of one head are one stretch of
memory. Block b of a group is page b in each of its layers. A group is one allocation [layer, K | V, page, kv_head, token,
head_dim], so that copying a block is one pitched copy whatever the number of layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from sparkrt.cache.blocks import BlockPool
from sparkrt.errors import EngineFatal
from sparkrt.runtime.array import DeviceArray
from sparkrt.runtime.backend import NULL, DevicePtr, GpuBackend, Stream
from sparkrt.runtime.dtypes import DType


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers whose KV has one shape and one block table. `window`: they look back that many tokens (None: to the start)."""

    layers: tuple[int, ...]
    dtype: DType
    kv_heads: int
    head_dim: int
    page_size: int
    window: int | None = None

    def __post_init__(self) -> None:
        if self.page_size < 1 or self.page_size & (self.page_size - 1):
            raise ValueError(f"page_size is a power of two, not {self.page_size}")

    @property
    def page_bytes(self) -> int:
        """Of K, or of V, in one layer."""
        return self.kv_heads * self.page_size * self.head_dim * self.dtype.itemsize

    @property
    def block_bytes(self) -> int:
        """Of one block: K and V in all layers."""
        return 2 * len(self.layers) * self.page_bytes

    def nbytes(self, num_blocks: int) -> int:
        """Of the group's allocation, dummy page included: for the memory plan."""
        return (num_blocks + 1) * self.block_bytes

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)


class PagedKvCache:
    """Every group with `num_blocks` blocks of its own, and one dummy page behind them that padding rows point at."""

    def __init__(self, backend: GpuBackend, groups: Sequence[KvGroup], num_blocks: int) -> None:
        """Raises OutOfMemory; what was taken until then is given back."""
        self.groups = tuple(groups)
        self.num_blocks = num_blocks
        self.dummy_block = num_blocks
        self.pools = tuple(BlockPool(num_blocks) for _ in groups)
        self._backend = backend
        self._bases: list[DevicePtr] = []
        self._k: dict[int, DeviceArray] = {}
        self._v: dict[int, DeviceArray] = {}
        try:
            for group in self.groups:
                self._allocate(group)
        except BaseException:
            self.close()
            raise

    @property
    def free_blocks(self) -> int:
        """Blocks that are free in every group."""
        return min((pool.free_count for pool in self.pools), default=0)

    def k(self, layer: int) -> DeviceArray:
        """Keys of a layer: [num_blocks + 1, kv_heads, page_size, head_dim]."""
        return self._k[layer]

    def v(self, layer: int) -> DeviceArray:
        """Values of a layer, shaped as the keys."""
        return self._v[layer]

    def new_table(self, group: int = 0) -> BlockTable:
        """An empty table for one sequence."""
        return BlockTable(self, group)

    def copy_block(self, group: int, src: int, dst: int, stream: Stream | None = None) -> None:
        """Copy one block, K and V in all layers, on the device."""
        g = self.groups[group]
        if not g.layers:
            return
        pitch = (self.num_blocks + 1) * g.page_bytes
        base = self._bases[group]
        self._backend.copy_d2d_2d(
            *(base.offset(dst * g.page_bytes), pitch, base.offset(src * g.page_bytes), pitch),
            *(g.page_bytes, 2 * len(g.layers), stream),
        )

    def check_integrity(self, tables: Iterable[BlockTable]) -> None:
        """free + owned = total in every group, when `tables` are all there are. Raises EngineFatal otherwise."""
        live = list(tables)
        for i, pool in enumerate(self.pools):
            pool.check_integrity(block for table in live if table.group == i for block in table.blocks)

    def close(self) -> None:
        """Free the memory; a second call does nothing."""
        while self._bases:
            if base := self._bases.pop():
                self._backend.free(base)
        self._k.clear()
        self._v.clear()

    def _allocate(self, group: KvGroup) -> None:
        if not group.layers:
            self._bases.append(NULL)
            return
        taken = self._k.keys() & set(group.layers)
        if taken or len(set(group.layers)) < len(group.layers):
            raise ValueError(f"layers {sorted(taken) or list(group.layers)} are in the cache twice")
        pages = self.num_blocks + 1
        shape = (pages, group.kv_heads, group.page_size, group.head_dim)
        base = self._backend.alloc(group.nbytes(self.num_blocks), f"kv cache of {len(group.layers)} layers")
        self._bases.append(base)
        for i, layer in enumerate(group.layers):
            for j, arrays in enumerate((self._k, self._v)):
                start = base.offset((2 * i + j) * pages * group.page_bytes)
                arrays[layer] = self._backend.array(start, group.dtype, shape)
                # Padding rows read the dummy page: zeros keep them finite, whatever the memory held before.
                self._backend.memset(start.offset(self.dummy_block * group.page_bytes), 0, group.page_bytes)


class BlockTable:
    """The blocks of one sequence in one group, in token order. `shared` of them, from the first, may have other owners."""

    __slots__ = ("_cache", "_pool", "blocks", "group", "shared")

    def __init__(self, cache: PagedKvCache, group: int) -> None:
        self.group = group
        self.blocks: list[int] = []
        self.shared = 0
        self._cache = cache
        self._pool = cache.pools[group]

    @property
    def page_size(self) -> int:
        return self._cache.groups[self.group].page_size

    @property
    def capacity(self) -> int:
        """Tokens the table has room for."""
        return len(self.blocks) * self.page_size

    def extend_to(self, tokens: int) -> None:
        """Make room for `tokens`. Raises CapacityError, changing nothing, when the pool is short."""
        missing = self._cache.groups[self.group].blocks_for(tokens) - len(self.blocks)
        if missing > 0:
            self.blocks += self._pool.alloc(missing, self.blocks[-1] if self.blocks else None)

    def slots(self, start: int, stop: int) -> np.ndarray:
        """Where tokens [start, stop) are written: int32 page · page_size + offset, and -1 (do not write) in shared pages."""
        if not 0 <= start <= stop <= self.capacity:
            raise EngineFatal(f"tokens {start}:{stop} of a block table for {self.capacity}")
        positions = np.arange(start, stop, dtype=np.int32)
        page = positions // self.page_size
        slots = np.asarray(self.blocks, np.int32)[page] * self.page_size + positions % self.page_size
        return np.where(page < self.shared, np.int32(-1), slots)

    def fork(self, kv_valid_tokens: int, stream: Stream | None = None) -> BlockTable:
        """A second table of the same first `kv_valid_tokens`: full pages are shared, the rest of them is copied into one page.

        Only tokens whose KV is written, or will be earlier in the order of `stream`, may be named; a page that is not full
        is still being written to and never shared. Raises CapacityError, changing nothing, when there is no page for the rest.
        """
        if not 0 <= kv_valid_tokens <= self.capacity:
            raise EngineFatal(f"fork after {kv_valid_tokens} tokens of a block table for {self.capacity}")
        full, rest = divmod(kv_valid_tokens, self.page_size)
        tail = self._pool.alloc(1 if rest else 0)
        try:
            for block in tail:
                self._cache.copy_block(self.group, self.blocks[full], block, stream)
        except BaseException:
            for block in tail:
                self._pool.decref(block)
            raise
        for block in self.blocks[:full]:
            self._pool.incref(block)
        twin = BlockTable(self._cache, self.group)
        twin.blocks = self.blocks[:full] + tail
        twin.shared = full
        self.shared = max(self.shared, full)
        return twin

    def release(self) -> None:
        """Give every block back. A table without blocks has nothing to give, so a second call does nothing."""
        blocks, self.blocks, self.shared = self.blocks, [], 0
        for block in blocks:
            self._pool.decref(block)
