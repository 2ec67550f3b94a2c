"""The state machine of spilled records: any order of keeping, asking, copying, reading, forgetting; every chunk accounted for."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sparkrt.cache.disk import DiskCache
from sparkrt.cache.shuttle import Kind, Piece
from sparkrt.cache.spill import Costs, Hold, Spill
from tests.engine.fake_mover import FakeMover

PAGE = 16
NAMES = [bytes([i]) * 32 for i in range(12)]
ASKED = st.lists(st.tuples(st.sampled_from(list(Kind)), st.sampled_from(NAMES)), min_size=1, max_size=5, unique=True)


class Bus(FakeMover):
    """Of a device on which every place holds a number; bytes of a record are that number, over and over."""

    def __init__(self, chunks: int, patience: int) -> None:
        super().__init__(SimpleNamespace(options=SimpleNamespace(page_size=PAGE), recurrent=True), chunks, patience)
        self.device: dict[tuple[Kind, int], int] = {}

    def _take(self, piece: Piece) -> bytes:
        return bytes([self.device[piece.kind, piece.place]]) * self.nbytes(piece.kind)

    def _give(self, piece: Piece) -> None:
        content = np.concatenate(self.views(piece.kind, piece.chunks))
        assert (content == content[0]).all(), "a torn record"
        self.device[piece.kind, piece.place] = int(content[0])


def number(kind: Kind, name: bytes) -> int:
    return name[0] + 100 * (kind is Kind.STATE) + 1


class Records(RuleBasedStateMachine):
    """Against the simplest rule there is: what comes back under a key is what went out under it."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.holds: list[tuple[Hold, list[tuple[Kind, bytes]]]] = []
        self.restores: list[tuple[int, list[tuple[Kind, int, int]]]] = []  # ticket; kind, place, number
        self.places = 1000
        self.open()

    def open(self) -> None:
        disk = DiskCache(Path(self.folder.name), 700)
        self.bus = Bus(8, 3)
        self.spill = Spill(self.bus, b"model", Costs(1.0), disk)

    @rule(asked=ASKED)
    def keep(self, asked: list[tuple[Kind, bytes]]) -> None:
        gone = [(kind, name, i) for i, (kind, name) in enumerate(asked)]
        self.bus.device |= {(kind, i): number(kind, name) for kind, name, i in gone}
        self.spill.keep(gone)
        self.bus.device |= dict.fromkeys(((kind, i) for kind, _, i in gone), 255)  # somebody else's at once

    @rule(asked=ASKED)
    def fetch(self, asked: list[tuple[Kind, bytes]]) -> None:
        there = all(self.spill.has(*record) for record in asked)
        if (hold := self.spill.fetch(asked)) is not None:
            assert there
            self.holds.append((hold, asked))

    @rule(tail=st.booleans())
    def swap(self, tail: bool) -> None:
        self.bus.device |= {(Kind.STATE, 0): 77, (Kind.PAGE, 1): 77}
        if (hold := self.spill.swap(5, 0, 1 if tail else None)) is not None:
            self.holds.append((hold, []))

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        hold, asked = data.draw(st.sampled_from(self.holds))
        if hold.reads or hold.failed or not hold.kinds:
            return
        wanted = [number(kind, name) for kind, name in asked] or [77] * len(hold.kinds)
        places = list(range(self.places, self.places + len(hold.kinds)))
        self.places += len(places)
        self.restores.append((self.spill.restore((hold, places)), list(zip(hold.kinds, places, wanted, strict=True))))

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        chosen = data.draw(st.sampled_from(self.holds))
        self.holds.remove(chosen)
        self.spill.release(chosen[0])

    @rule()
    def poll(self) -> None:
        self.spill.poll()

    @rule()
    def wait(self) -> None:
        self.spill.wait()

    @rule(at=st.integers(0, 300), which=st.integers(0, 20))
    def damage(self, at: int, which: int) -> None:
        files = sorted(path for path in Path(self.folder.name).iterdir() if path.suffix == "" and path.name != "lock")
        if which < len(files) and at < len(content := bytearray(files[which].read_bytes())):
            content[at] ^= 1
            files[which].write_bytes(content)

    @rule()
    def clear(self) -> None:
        self.spill.clear()
        assert not any(self.spill.has(kind, name) for kind in Kind for name in NAMES)

    @rule()
    def restart(self) -> None:
        self.let_go()
        self.spill.close()
        self.open()

    def let_go(self) -> None:
        for hold, _ in self.holds:
            self.spill.release(hold)
        self.spill.flush()
        self.right()
        self.holds, self.restores = [], []

    @invariant()
    def right(self) -> None:
        self.spill.check_integrity()
        assert self.spill.disk is not None
        assert self.spill.disk.used <= 700
        for ticket, places in self.restores:
            if self.spill.done(ticket):
                assert all(self.bus.device[kind, place] == wanted for kind, place, wanted in places)

    def teardown(self) -> None:
        self.let_go()
        self.spill.clear()
        self.spill.check_integrity()
        assert self.spill.pool.free_count == self.spill.pool.num_blocks
        self.spill.close()
        self.folder.cleanup()


Records.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestRecords = Records.TestCase


def test_the_end_of_a_branch_goes_before_its_beginning() -> None:
    bus = Bus(3, 0)
    spill = Spill(bus, b"model", Costs(1.0))
    bus.device = {(Kind.PAGE, i): i for i in range(5)}
    spill.keep([(Kind.PAGE, NAMES[i], i) for i in (4, 3, 2, 1, 0)])  # leaves first, as they are evicted
    assert [i for i in range(5) if spill.has(Kind.PAGE, NAMES[i])] == [0, 1, 2]
    spill.release(spill.fetch([(Kind.PAGE, NAMES[0]), (Kind.PAGE, NAMES[1])]) or Hold())
    bus.device[Kind.PAGE, 9] = 9
    spill.flush()
    spill.keep([(Kind.PAGE, NAMES[9], 9)])
    assert [i for i in range(10) if spill.has(Kind.PAGE, NAMES[i])] == [0, 1, 9]
    spill.close()


def test_names_depend_on_every_token_before_and_on_the_model() -> None:
    one, other = (Spill(Bus(1, 0), model, Costs(1.0)) for model in (b"a", b"b"))
    names: list[Any] = [one.chain(b"", b"x"), other.chain(b"", b"x"), one.chain(one.chain(b"", b"y"), b"x")]
    assert len({*names}) == 3
    assert {*map(len, names)} == {32}


def test_it_is_worth_it_where_copying_is_quicker_than_computing() -> None:
    spill = Spill(Bus(8, 0), b"model", Costs(token=1e-6, bus=1e-7, disk=1e-6))
    spill.keep([(Kind.PAGE, NAMES[0], spill.mover.device.setdefault((Kind.PAGE, 0), 0))])  # type: ignore[attr-defined]
    page = [(Kind.PAGE, NAMES[0])]  # 64 bytes, in host memory: 6.4 us
    assert [spill.worth(tokens, page) for tokens in (6, 7)] == [False, True]
    assert not spill.worth(10**9, [(Kind.STATE, name) for name in NAMES])  # more than fits
    assert [spill.worth_swapping(tokens) for tokens in (16, 17)] == [False, True]  # 80 bytes out and back
    spill.flush()
    spill.close()


def test_what_is_saved_at_the_end_keeps_its_order(tmp_path: Path) -> None:
    """Written from the most recently used on, found again as least recently used first: a branch's beginning stays longest."""
    bus = Bus(3, 0)
    spill = Spill(bus, b"model", Costs(1.0), DiskCache(tmp_path, 1 << 20))
    bus.device = {(Kind.PAGE, i): i for i in range(9)}
    spill.save([(Kind.PAGE, NAMES[i], i) for i in range(9)])
    spill.close()
    again = DiskCache(tmp_path, 1 << 20)
    assert [key[1] for key in again._files] == [name[0] for name in NAMES[:9]]
    again.close()
