"""`PagedKvCache`: keys and values in pages, in groups of layers that share a block table.

A group is one allocation [layer, K | V, page, kv_head, token, head_dim]: to copy a block, a page in each layer, is one copy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from sparkrt.errors import CapacityError, EngineFatal
from sparkrt.runtime.array import DeviceArray
from sparkrt.runtime.backend import DevicePtr, GpuBackend, Stream
from sparkrt.runtime.dtypes import DType
from sparkrt.runtime.owner import Owner


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers whose KV has one shape and one block table, and look back `window` tokens (None: to the start)."""

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
        """Of the group's allocation, dummy page included."""
        return (num_blocks + 1) * self.block_bytes

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)


class BlockPool:
    """How many owners each block of a group has. Requests get the smallest free run that holds them: one stretch of memory."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = self.free_count = num_blocks
        self._refs = np.zeros(num_blocks, np.int32)
        # free runs: length by start, and start by end. A pass over the counts took 80 us a page of 40,000, and rows grow by pages
        self._runs = {0: num_blocks} if num_blocks else {}
        self._starts = {num_blocks: 0} if num_blocks else {}

    def refcount(self, block: int) -> int:
        """Owners of `block`; 0 is free."""
        if not 0 <= block < self.num_blocks:
            raise EngineFatal(f"cache block {block} of {self.num_blocks}")
        return int(self._refs[block])

    def alloc(self, n: int, after: int | None = None) -> list[int]:
        """`n` blocks with one reference each, behind block `after` where that is free. CapacityError takes nothing."""
        if n < 0:
            raise ValueError(f"{n} blocks wanted")
        if n > self.free_count:
            raise CapacityError(f"{n} cache blocks wanted, {self.free_count} of {self.num_blocks} are free")
        if n == 0:
            return []
        if after is not None and self._runs.get(after + 1, 0) >= n:
            taken = self._take(after + 1, n)
        elif fitting := [(length, start) for start, length in self._runs.items() if length >= n]:
            taken = self._take(min(fitting)[1], n)
        else:  # where no run holds them all, pieces from the front
            taken = []
            for start in sorted(self._runs):
                taken += self._take(start, min(n - len(taken), self._runs[start]))
                if len(taken) == n:
                    break
        self._refs[taken] = 1
        self.free_count -= n
        return taken

    def _take(self, start: int, n: int) -> list[int]:
        """The first `n` blocks of the free run at `start`."""
        end = start + self._runs.pop(start)
        if start + n < end:
            self._runs[start + n], self._starts[end] = end - start - n, start + n
        else:
            del self._starts[end]
        return list(range(start, start + n))

    def incref(self, block: int) -> None:
        """One more owner. Raises EngineFatal on a free block: its contents belong to nobody."""
        if not self.refcount(block):
            raise EngineFatal(f"cache block {block} is free and cannot be shared")
        self._refs[block] += 1

    def decref(self, block: int) -> bool:
        """One owner less; True when that was the last and the block is free now. Raises EngineFatal on a free block."""
        refs = self.refcount(block)
        if not refs:
            raise EngineFatal(f"cache block {block} is released more often than it was taken")
        self._refs[block] = refs - 1
        if refs == 1:  # it joins the runs on either side
            start, end = self._starts.pop(block, block), block + 1 + self._runs.pop(block + 1, 0)
            self._runs[start], self._starts[end] = end - start, start
            self.free_count += 1
        return refs == 1

    def check_integrity(self, owned: Iterable[int]) -> None:
        """`owned` lists a block once per owner. Raises EngineFatal unless free + owned = total and every count agrees."""
        held, total = Counter(owned), self.num_blocks
        if outside := sorted(b for b in held if not 0 <= b < total):
            raise EngineFatal(f"cache blocks {outside[:8]} are held, of {total} that exist")
        if wrong := [f"{b}: {refs} counted, {held[b]} held" for b, refs in enumerate(self._refs.tolist()) if refs != held[b]]:
            raise EngineFatal(f"{len(wrong)} of {total} cache blocks are miscounted ({', '.join(wrong[:8])})")
        if self.free_count + len(held) != total:
            raise EngineFatal(f"{self.free_count} cache blocks free, {len(held)} held of {total}")
        if (in_runs := sum(self._runs.values())) != self.free_count or len(self._starts) != len(self._runs):
            raise EngineFatal(f"{self.free_count} cache blocks free, {in_runs} of them in runs")


class PagedKvCache(Owner):
    """Every group with `num_blocks` blocks of its own, and one dummy page behind them that padding rows point at."""

    def __init__(self, backend: GpuBackend, groups: Sequence[KvGroup], num_blocks: int) -> None:
        super().__init__(backend)
        self.groups, self.pools = tuple(groups), tuple(BlockPool(num_blocks) for _ in groups)
        self.num_blocks = self.dummy_block = num_blocks
        self._kv: dict[int, list[DeviceArray]] = {}  # K and V by layer
        try:
            for group in (g for g in self.groups if g.layers):
                self._allocate(group)
            self.clear_dummy()
        except BaseException:
            self.close()
            raise

    @property
    def free_blocks(self) -> int:
        """Blocks that are free in every group."""
        return min((pool.free_count for pool in self.pools), default=0)

    def k(self, layer: int) -> DeviceArray:
        """Keys of a layer: [num_blocks + 1, kv_heads, page_size, head_dim]; `v` are its values, shaped alike."""
        return self._kv[layer][0]

    def v(self, layer: int) -> DeviceArray:
        return self._kv[layer][1]

    def new_table(self, group: int = 0) -> BlockTable:
        return BlockTable(self, group)

    def copy_block(self, group: int, src: int, dst: int, stream: Stream | None = None) -> None:
        """Copy one block, K and V in all layers, on the device."""
        g = self.groups[group]
        if g.layers:
            (to, pitch, size, rows), source = self._places(group, dst), self._places(group, src)[0]
            self.backend.copy_d2d_2d(to, pitch, source, pitch, size, rows, stream)

    def pack(self, group: int, block: int, dst: DevicePtr, stream: Stream) -> None:
        """Gather a block, K and V in all layers, into `block_bytes` at `dst`; `unpack` brings it back from there."""
        base, pitch, size, rows = self._places(group, block)
        self.backend.copy_d2d_2d(dst, size, base, pitch, size, rows, stream)

    def unpack(self, group: int, block: int, src: DevicePtr, stream: Stream) -> None:
        base, pitch, size, rows = self._places(group, block)
        self.backend.copy_d2d_2d(base, pitch, src, size, size, rows, stream)

    def _places(self, group: int, block: int) -> tuple[DevicePtr, int, int, int]:
        """Where a block begins, bytes from one of its pages to the next, bytes of a page, and how many pages."""
        g = self.groups[group]
        pitch = (self.num_blocks + 1) * g.page_bytes
        return self.k(g.layers[0]).ptr.offset(block * g.page_bytes), pitch, g.page_bytes, 2 * len(g.layers)

    def check_integrity(self, tables: Iterable[BlockTable], cached: Iterable[int] = ()) -> None:
        """Raises EngineFatal unless free + owned = total in every group. `tables` are all; `cached` blocks are of the first."""
        live = list(tables)
        for i, pool in enumerate(self.pools):
            owned = [block for table in live if table.group == i for block in table.blocks]
            pool.check_integrity([*owned, *cached] if i == 0 else owned)

    def _allocate(self, group: KvGroup) -> None:
        taken = self._kv.keys() & set(group.layers)
        if taken or len(set(group.layers)) < len(group.layers):
            raise ValueError(f"layers {sorted(taken) or list(group.layers)} are in the cache twice")
        pages, base = self.num_blocks + 1, self.alloc(group.nbytes(self.num_blocks), f"kv cache of {len(group.layers)} layers")
        for i in range(2 * len(group.layers)):
            start, shape = base.offset(i * pages * group.page_bytes), (pages, group.kv_heads, group.page_size, group.head_dim)
            self._kv.setdefault(group.layers[i // 2], []).append(self.backend.array(start, group.dtype, shape))

    def clear_dummy(self) -> None:
        """Padding rows read the dummy page: zeros keep them finite, whatever the memory held before."""
        for group in self.groups:
            for array in (a for layer in group.layers for a in self._kv[layer]):
                self.backend.memset(array.ptr.offset(self.dummy_block * group.page_bytes), 0, group.page_bytes)


class BlockTable:
    """The blocks of one sequence in one group, in token order. `shared` of them, from the first, may have other owners."""

    def __init__(self, cache: PagedKvCache, group: int) -> None:
        self.group, self.shared, self.page_size = group, 0, cache.groups[group].page_size
        self.blocks: list[int] = []
        self._cache, self._pool = cache, cache.pools[group]

    @property
    def capacity(self) -> int:
        """Tokens the table has room for."""
        return len(self.blocks) * self.page_size

    def extend_to(self, tokens: int) -> None:
        """Make room for `tokens`. CapacityError changes nothing."""
        missing = self._cache.groups[self.group].blocks_for(tokens) - len(self.blocks)
        if missing > 0:
            self.blocks += self._pool.alloc(missing, self.blocks[-1] if self.blocks else None)

    def share(self, blocks: Sequence[int]) -> None:
        """Begin with these blocks of somebody else's, full and never to be written."""
        for block in blocks:
            self._pool.incref(block)
            self.blocks.append(block)
        self.shared = len(self.blocks)

    def slots(self, start: int, stop: int) -> np.ndarray:
        """Where tokens [start, stop) are written: int32 page · page_size + offset, and -1 (do not write) in shared pages."""
        if not 0 <= start <= stop <= self.capacity:
            raise EngineFatal(f"tokens {start}:{stop} of a block table for {self.capacity}")
        page, offset = np.divmod(np.arange(start, stop, dtype=np.int32), np.int32(self.page_size))
        slots = np.asarray(self.blocks, np.int32)[page] * self.page_size + offset
        return np.where(page < self.shared, np.int32(-1), slots)

    def fork(self, kv_valid_tokens: int, stream: Stream | None = None) -> BlockTable:
        """A second table of the same first `kv_valid_tokens`: full pages are shared, the rest, still written to, is copied.

        Only tokens whose KV is written, or will be earlier in the order of `stream`, may be named. CapacityError changes nothing.
        """
        if not 0 <= kv_valid_tokens <= self.capacity:
            raise EngineFatal(f"fork after {kv_valid_tokens} tokens of a block table for {self.capacity}")
        full, rest = divmod(kv_valid_tokens, self.page_size)
        twin = BlockTable(self._cache, self.group)
        twin.blocks = self._pool.alloc(1 if rest else 0)
        try:
            for block in twin.blocks:
                self._cache.copy_block(self.group, self.blocks[full], block, stream)
        except BaseException:
            twin.release()
            raise
        for block in self.blocks[:full]:
            self._pool.incref(block)
        twin.blocks[:0] = self.blocks[:full]
        twin.shared, self.shared = full, max(self.shared, full)
        return twin

    def release(self) -> None:
        """Give every block back; a second call does nothing."""
        blocks, self.blocks, self.shared = self.blocks, [], 0
        for block in blocks:
            self._pool.decref(block)
