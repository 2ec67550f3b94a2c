"""`BlockPool`: which pages of a cache group are free, and how many owners the others have. Plain counting, no memory."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable

from sparkrt.errors import CapacityError, EngineFatal


class BlockPool:
    """Blocks 0 … num_blocks-1, each free or with one reference per owner.

    Free blocks are kept as runs, and a request is served from the smallest run that holds it. So a sequence's pages usually
    are one ascending run (which readers may treat as contiguous memory), and holes that were just left, still warm, are
    filled before untouched blocks.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 0:
            raise ValueError(f"a pool of {num_blocks} blocks")
        self.num_blocks = num_blocks
        self._refs = [0] * num_blocks
        self._starts = [0] if num_blocks else []  # of the free runs, sorted
        self._lengths = {0: num_blocks} if num_blocks else {}  # by start
        self._free = num_blocks

    @property
    def free_count(self) -> int:
        return self._free

    def refcount(self, block: int) -> int:
        """Owners of `block`; 0 is free."""
        return self._refs[self._checked(block)]

    def alloc(self, n: int, after: int | None = None) -> list[int]:
        """`n` blocks with one reference each, continuing the run behind block `after` where that is free.

        Raises CapacityError when fewer are free; nothing is then taken.
        """
        if n < 0:
            raise ValueError(f"{n} blocks wanted")
        if n > self._free:
            raise CapacityError(f"{n} cache blocks wanted, {self._free} of {self.num_blocks} are free")
        taken: list[int] = []
        while len(taken) < n:
            want = n - len(taken)
            start = after + 1 if after is not None and after + 1 in self._lengths else self._best_run(want)
            length = self._lengths.pop(start)
            used = min(want, length)
            at = bisect_left(self._starts, start)
            if used < length:
                self._starts[at] = start + used
                self._lengths[start + used] = length - used
            else:
                del self._starts[at]
            taken.extend(range(start, start + used))
        for block in taken:
            self._refs[block] = 1
        self._free -= n
        return taken

    def incref(self, block: int) -> None:
        """One more owner. Raises EngineFatal on a free block: its contents belong to nobody."""
        if not self._refs[self._checked(block)]:
            raise EngineFatal(f"cache block {block} is free and cannot be shared")
        self._refs[block] += 1

    def decref(self, block: int) -> bool:
        """One owner less; True when that was the last and the block is free now. Raises EngineFatal on a free block."""
        if not self._refs[self._checked(block)]:
            raise EngineFatal(f"cache block {block} is released more often than it was taken")
        self._refs[block] -= 1
        if self._refs[block]:
            return False
        self._return(block)
        return True

    def check_integrity(self, owned: Iterable[int]) -> None:
        """`owned` lists a block once per owner. Raises EngineFatal unless free + owned = total and every count agrees."""
        held = Counter(owned)
        outside = [b for b in held if not 0 <= b < self.num_blocks]
        if outside:
            raise EngineFatal(f"cache blocks {sorted(outside)[:8]} are held, of {self.num_blocks} that exist")
        wrong = [f"{b}: {refs} counted, {held[b]} held" for b, refs in enumerate(self._refs) if refs != held[b]]
        if wrong:
            raise EngineFatal(f"{len(wrong)} of {self.num_blocks} cache blocks are miscounted ({', '.join(wrong[:8])})")
        free = [b for start in self._starts for b in range(start, start + self._lengths[start])]
        if free != [b for b, refs in enumerate(self._refs) if not refs] or len(free) != self._free:
            raise EngineFatal(f"free list of {len(free)} cache blocks, {self._free} free, {len(held)} held of {self.num_blocks}")

    def _best_run(self, want: int) -> int:
        """Start of the smallest free run of at least `want` blocks, else of the longest."""
        fitting = [(length, start) for start, length in self._lengths.items() if length >= want]
        return min(fitting)[1] if fitting else max(self._lengths, key=lambda start: (self._lengths[start], -start))

    def _return(self, block: int) -> None:
        """Put a block back, joined with the runs it touches."""
        at = bisect_right(self._starts, block)
        start, length = block, 1
        following = self._lengths.pop(block + 1, 0)
        if following:
            length += following
            del self._starts[at]
        if at and self._starts[at - 1] + self._lengths[self._starts[at - 1]] == block:
            start = self._starts[at - 1]
            length += self._lengths[start]
        else:
            self._starts.insert(at, start)
        self._lengths[start] = length
        self._free += 1

    def _checked(self, block: int) -> int:
        if not 0 <= block < self.num_blocks:
            raise EngineFatal(f"cache block {block} of {self.num_blocks}")
        return block
