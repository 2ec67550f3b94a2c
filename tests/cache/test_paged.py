"""PagedKvCache and BlockTable: layout, slots, forks that never disturb each other, failures that leave nothing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sparkrt.cache.paged import BlockTable, KvGroup, PagedKvCache
from sparkrt.errors import CapacityError, EngineFatal
from sparkrt.runtime import CaptureError, HostBackend, OutOfMemory, dtypes

MAIN = KvGroup((1, 3), dtypes.float32, kv_heads=2, head_dim=4, page_size=4)
DRAFT = KvGroup((7,), dtypes.bfloat16, kv_heads=1, head_dim=8, page_size=8)


def _cache(num_blocks: int = 6, groups: tuple[KvGroup, ...] = (MAIN,)) -> tuple[HostBackend, PagedKvCache]:
    backend = HostBackend(debug=True)
    return backend, PagedKvCache(backend, groups, num_blocks)


def _write(cache: PagedKvCache, table: BlockTable, start: int, tokens: list[int]) -> None:
    """What an append does: token t goes to K as t and to V as -t, in every layer; slots of -1 are skipped."""
    page = table.page_size
    for slot, token in zip(table.slots(start, start + len(tokens)).tolist(), tokens, strict=True):
        if slot >= 0:
            for layer in cache.groups[table.group].layers:
                cache.k(layer).view[slot // page, :, slot % page] = token + layer
                cache.v(layer).view[slot // page, :, slot % page] = -token - layer


def _read(cache: PagedKvCache, table: BlockTable, length: int) -> list[int]:
    """The tokens a sequence sees, checked over all layers, heads and channels."""
    seen = []
    for position in range(length):
        block, offset = table.blocks[position // table.page_size], position % table.page_size
        values = set()
        for layer in cache.groups[table.group].layers:
            values |= set((cache.k(layer).view[block, :, offset] - layer).ravel().tolist())
            values |= set((-cache.v(layer).view[block, :, offset] - layer).ravel().tolist())
        assert len(values) == 1
        seen.append(int(values.pop()))
    return seen


def test_layout_and_size() -> None:
    backend, cache = _cache(6, (MAIN, DRAFT))
    assert (cache.num_blocks, cache.dummy_block, cache.free_blocks) == (6, 6, 6)
    assert cache.k(1).shape == cache.v(3).shape == (7, 2, 4, 4)
    assert cache.k(7).shape == (7, 1, 8, 8)
    assert cache.k(7).dtype is dtypes.bfloat16
    assert backend.memory_info().allocated == MAIN.nbytes(6) + DRAFT.nbytes(6)
    assert MAIN.nbytes(6) == 2 * 2 * 7 * 2 * 4 * 4 * 4
    arrays = [cache.k(1), cache.v(1), cache.k(3), cache.v(3), cache.k(7), cache.v(7)]
    for i, array in enumerate(arrays):
        array.view[...] = i
    assert [set(a.view.astype(np.float32).ravel().tolist()) for a in arrays] == [{float(i)} for i in range(6)]
    cache.close()
    cache.close()
    assert backend.leak_report() == ""


def test_the_dummy_page_starts_finite() -> None:
    _, cache = _cache()
    assert not cache.k(3).view[cache.dummy_block].any()
    assert not cache.v(3).view[cache.dummy_block].any()


def test_one_allocation_a_group_and_a_failure_leaves_none() -> None:
    groups = (MAIN, DRAFT, KvGroup((0,), dtypes.float32, 1, 4, 4))
    for n in range(1, len(groups) + 2):
        backend = HostBackend()
        backend.fail_allocation(n)
        if n <= len(groups):
            with pytest.raises(OutOfMemory):
                PagedKvCache(backend, groups, 5)
        else:
            PagedKvCache(backend, groups, 5).close()
        assert backend.leak_report() == ""


def test_a_model_without_attention_layers() -> None:
    backend, cache = _cache(3, (KvGroup((), dtypes.float32, 0, 0, 64),))
    assert backend.leak_report() == ""
    table = cache.new_table()
    table.extend_to(100)
    assert table.fork(70).blocks == [0, 2]
    cache.close()


def test_wrong_groups() -> None:
    with pytest.raises(ValueError, match="power of two, not 48"):
        KvGroup((0,), dtypes.float32, 1, 4, 48)
    backend = HostBackend()
    with pytest.raises(ValueError, match=r"layers \[1\] are in the cache twice"):
        PagedKvCache(backend, (MAIN, KvGroup((1,), dtypes.float32, 1, 4, 4)), 2)
    with pytest.raises(ValueError, match="twice"):
        PagedKvCache(backend, (KvGroup((2, 2), dtypes.float32, 1, 4, 4),), 2)
    assert backend.leak_report() == ""


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_extend_takes_whole_pages_once(tokens: int, pages: int) -> None:
    _, cache = _cache()
    table = cache.new_table()
    for _ in range(2):
        table.extend_to(tokens)
        assert table.blocks == list(range(pages))
        assert table.capacity == 4 * pages
    table.extend_to(0)
    assert len(table.blocks) == pages


def test_extend_beyond_the_pool_changes_nothing() -> None:
    _, cache = _cache(3)
    table = cache.new_table()
    table.extend_to(5)
    with pytest.raises(CapacityError):
        table.extend_to(13)
    assert table.blocks == [0, 1]
    cache.check_integrity([table])
    table.extend_to(12)


def test_growing_sequences_keep_their_runs() -> None:
    _, cache = _cache(16)
    first, second = cache.new_table(), cache.new_table()
    first.extend_to(16)
    second.extend_to(8)
    first.release()
    for tokens in range(9, 25):
        second.extend_to(tokens)
    assert second.blocks == [4, 5, 6, 7, 8, 9]  # not the hole in front


def test_slots() -> None:
    _, cache = _cache()
    cache.new_table().extend_to(4)
    table = cache.new_table()
    table.extend_to(8)
    assert table.slots(2, 6).tolist() == [6, 7, 8, 9]
    assert table.slots(0, 8).dtype == np.int32
    assert table.slots(3, 3).shape == (0,)
    for start, stop in ((-1, 2), (0, 9), (5, 4)):
        with pytest.raises(EngineFatal, match="block table for 8"):
            table.slots(start, stop)


def test_fork_shares_full_pages_and_copies_the_rest() -> None:
    backend, cache = _cache(8)
    stream = backend.create_stream("s")
    table = cache.new_table()
    table.extend_to(12)
    _write(cache, table, 0, list(range(10)))
    with backend.count() as traffic:
        twin = table.fork(10, stream)
    assert (traffic.copies(), traffic.copies("2d", stream=stream), traffic.allocations) == (1, 1, 0)
    assert traffic.nbytes() == MAIN.block_bytes
    assert twin.blocks[:2] == table.blocks[:2]
    assert twin.blocks[2] not in table.blocks
    assert (twin.shared, table.shared, twin.capacity) == (2, 2, 12)
    cache.check_integrity([table, twin])

    _write(cache, table, 10, [100, 101])
    _write(cache, twin, 10, [200])
    assert _read(cache, table, 12) == [*range(10), 100, 101]
    assert _read(cache, twin, 11) == [*range(10), 200]
    table.release()
    cache.check_integrity([twin])
    assert _read(cache, twin, 11) == [*range(10), 200]
    twin.release()
    twin.release()
    assert cache.free_blocks == 8


def test_shared_pages_are_never_written_again() -> None:
    _, cache = _cache()
    table = cache.new_table()
    table.extend_to(12)
    _write(cache, table, 0, list(range(9)))
    twin = table.fork(9)
    for owner in (table, twin):
        assert owner.slots(0, 9).tolist()[:8] == [-1] * 8
        assert owner.slots(8, 9)[0] >= 0
        _write(cache, owner, 0, [77] * 8)  # tokens run again behind a restored state
    assert _read(cache, twin, 9) == list(range(9))


@pytest.mark.parametrize("tokens", [0, 4, 8])
def test_fork_at_a_page_boundary_copies_nothing(tokens: int) -> None:
    backend, cache = _cache()
    table = cache.new_table()
    table.extend_to(8)
    with backend.count() as traffic:
        twin = table.fork(tokens)
    assert traffic.copies() == 0
    assert twin.blocks == table.blocks[: tokens // 4]
    twin.extend_to(12)
    assert not set(twin.blocks[tokens // 4 :]) & set(table.blocks)


def test_a_later_shorter_fork_does_not_unshare() -> None:
    _, cache = _cache()
    table = cache.new_table()
    table.extend_to(12)
    twins = [table.fork(8), table.fork(4)]
    assert (table.shared, *(twin.shared for twin in twins)) == (2, 2, 1)
    assert table.slots(0, 9).tolist() == [-1] * 8 + [8]


def test_fork_of_a_fork() -> None:
    _, cache = _cache(12)
    a = cache.new_table()
    a.extend_to(8)
    _write(cache, a, 0, list(range(6)))
    b = a.fork(6)
    b.extend_to(12)
    _write(cache, b, 6, [60, 70, 80])
    c = b.fork(9)
    _write(cache, c, 9, [90])
    assert [cache.pools[0].refcount(block) for block in c.blocks] == [3, 2, 1]
    assert _read(cache, c, 10) == [0, 1, 2, 3, 4, 5, 60, 70, 80, 90]
    cache.check_integrity([a, b, c])


def test_fork_without_room_or_whose_copy_fails_changes_nothing() -> None:
    backend, cache = _cache(2)
    table = cache.new_table()
    table.extend_to(8)
    with pytest.raises(CapacityError):
        table.fork(7)
    assert table.shared == 0
    cache.check_integrity([table])
    with pytest.raises(EngineFatal, match="fork after 9"):
        table.fork(9)

    backend, cache = _cache(4)
    table = cache.new_table()
    table.extend_to(8)
    stream = backend.create_stream("s")
    backend.begin_capture(stream)
    with pytest.raises(CaptureError):
        table.fork(7)  # a blocking copy during a capture
    assert table.shared == 0
    cache.check_integrity([table])


def test_groups_are_counted_apart() -> None:
    _, cache = _cache(4, (MAIN, DRAFT))
    main, draft = cache.new_table(), cache.new_table(1)
    main.extend_to(16)
    draft.extend_to(16)
    assert (main.page_size, draft.page_size) == (4, 8)
    assert (len(main.blocks), len(draft.blocks), cache.free_blocks) == (4, 2, 0)
    _write(cache, draft, 0, list(range(12)))
    assert _read(cache, draft.fork(11), 11) == list(range(11))
    with pytest.raises(EngineFatal, match="miscounted"):
        cache.check_integrity([main, draft])


class Forks(RuleBasedStateMachine):
    """Sequences that write, grow, fork and end: each always reads back what it wrote, and no page is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.backend, self.cache = _cache(9)
        self.live: list[tuple[BlockTable, list[int]]] = []
        self.next_token = 1

    def choose(self, data: st.DataObject) -> int:
        return data.draw(st.integers(0, len(self.live) - 1))

    @rule()
    def begin(self) -> None:
        self.live.append((self.cache.new_table(), []))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), n=st.integers(1, 9))
    def write(self, data: st.DataObject, n: int) -> None:
        table, tokens = self.live[self.choose(data)]
        try:
            table.extend_to(len(tokens) + n)
        except CapacityError:
            assert (len(tokens) + n - table.capacity) > 4 * self.cache.free_blocks
            return
        fresh = list(range(self.next_token, self.next_token + n))
        self.next_token += n
        assert (table.slots(len(tokens), len(tokens) + n) >= 0).all()
        _write(self.cache, table, len(tokens), fresh)
        tokens += fresh

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        table, tokens = self.live[self.choose(data)]
        kept = data.draw(st.integers(0, len(tokens)))
        try:
            twin = table.fork(kept)
        except CapacityError:
            assert self.cache.free_blocks == 0
            return
        self.live.append((twin, tokens[:kept]))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        table, _ = self.live.pop(self.choose(data))
        table.release()
        assert (table.blocks, table.capacity, table.shared) == ([], 0, 0)

    @invariant()
    def everyone_reads_their_own(self) -> None:
        self.cache.check_integrity([table for table, _ in self.live])
        owned = {block for table, _ in self.live for block in table.blocks}
        assert self.cache.free_blocks + len(owned) == 9
        for table, tokens in self.live:
            assert _read(self.cache, table, len(tokens)) == tokens


TestForks = Forks.TestCase
TestForks.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
