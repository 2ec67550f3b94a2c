"""`ResponseStore` against a model of it: plain lists and dictionaries."""

from __future__ import annotations

import json
import sqlite3
import stat
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkrt.errors import LoadError
from sparkrt.serve.responses.store import ResponseStore

LIMIT = 400


def response(name: str, size: int = 0) -> bytes:
    return json.dumps({"output": [{"said": name + "x" * size}]}).encode()


def output(name: str, size: int = 0) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(response(name, size))["output"]
    return found


def count(store: ResponseStore) -> tuple[int, int]:
    """Rows, and bytes that the database says it holds; they must be those it does hold."""
    [(rows, size)] = store._run("SELECT count(*), coalesce(sum(length(input) + length(response)), 0) FROM responses")
    assert store._run("SELECT bytes FROM total").fetchone() == (size,)
    return rows, size


ACTIONS = st.one_of(
    st.tuples(st.just("put"), st.integers(0, 8), st.integers(0, 60)),
    st.tuples(st.just("delete"), st.integers(0, 8), st.just(0)),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(ACTIONS, max_size=30))
def test_whatever_is_done(actions: list[tuple[str, int, int]]) -> None:
    """What can be had is right, nothing is over the limit, and deleting everything leaves nothing."""
    store = ResponseStore(None, LIMIT)
    told: dict[str, tuple[list[Any], list[Any]]] = {}  # what each was made from, and what it added
    kept = list[str]()
    for number, (action, at, size) in enumerate(actions):
        other = kept[at % len(kept)] if kept and at else None
        if action == "delete":
            assert store.delete(str(other)) is (other is not None)
            kept = [name for name in kept if name != other]
        else:
            name, given_items = f"r{number}", [{"asked": number}]
            history = [*told[other][0], *told[other][1]] if other else []
            told[name] = [*history, *given_items], output(name, size)
            if store.put(name, response(name, size), given_items, other, history):
                kept.append(name)
                assert store.items(name) == told[name]
            else:
                assert store.get(name) is None
        kept = [name for name in kept if store.get(name) is not None]
        assert all(store.items(name) == told[name] for name in kept)
        assert all(store.get(name) is None and store.items(name) is None for name in told if name not in kept)
        assert count(store)[1] <= LIMIT
    for name in kept:
        assert store.delete(name)
    assert count(store) == (0, 0)
    store.close()


def test_the_oldest_go_first() -> None:
    store = ResponseStore(None, LIMIT)
    names = [f"r{i}" for i in range(20)]
    for name in names:
        assert store.put(name, response(name), [], None, [])
    kept = [name for name in names if store.get(name) is not None]
    assert kept == names[-len(kept) :]
    assert 0 < len(kept) < len(names)
    assert not store.put("huge", response("huge", LIMIT), [], None, [])  # and nobody has to go for it
    assert [name for name in names if store.get(name) is not None] == kept


def test_nothing_may_be_kept() -> None:
    store = ResponseStore(None, 0)
    assert not store.put("a", response("a"), [], None, [])
    assert store.get("a") is None


def test_a_conversation_outlives_its_beginning() -> None:
    """What was evicted or deleted while an answer was under way is kept with that answer."""
    store = ResponseStore(None, LIMIT)
    assert store.put("a", response("a"), [{"asked": 1}], None, [])
    history = [{"asked": 1}, *output("a")]
    store.delete("a")
    assert store.put("b", response("b"), [{"asked": 2}], "a", history)
    assert store.items("b") == ([*history, {"asked": 2}], output("b"))


def test_a_file(tmp_path: Path) -> None:
    """It is for nobody else, is there again afterwards, belongs to one server at a time, and shrinks to a smaller limit."""
    path = tmp_path / "responses.db"
    store = ResponseStore(str(path), LIMIT)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for name in ("a", "b"):
        assert store.put(name, response(name), [], "a", [])
    with pytest.raises(LoadError, match="locked"):
        ResponseStore(str(path), LIMIT)
    store.close()
    store = ResponseStore(str(path), LIMIT)
    assert store.get("a") == response("a")
    store.close()
    store = ResponseStore(str(path), 5)
    assert count(store) == (0, 0)
    store.close()
    assert b"said" not in path.read_bytes()  # deleted means overwritten


def test_what_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no database at all, but long enough to be looked at" * 50, encoding="utf-8")
    with sqlite3.connect(tmp_path / "other") as other:
        other.execute("CREATE TABLE things (x)")
    other.close()
    for path in ("text", "other", "", "missing/folder"):
        with pytest.raises(LoadError, match="--response-store"):
            ResponseStore(str(tmp_path / path), LIMIT)


def test_a_full_disk() -> None:
    """Nothing is stored, nothing is lost, and room that comes is used."""
    store = ResponseStore(None, 10**6)
    assert store.put("a", response("a"), [], None, [])
    [(pages,)] = store._run("PRAGMA page_count")
    store._run(f"PRAGMA max_page_count = {pages}").fetchall()
    assert not store.put("b", response("b", 20_000), [], None, [])
    assert (store.get("a"), store.get("b")) == (response("a"), None)
    count(store)
    store._run(f"PRAGMA max_page_count = {pages + 100}").fetchall()
    assert store.put("b", response("b", 20_000), [], "a", [])


def test_threads() -> None:
    store = ResponseStore(None, 20_000)

    def work(name: str) -> None:
        for i in range(50):
            assert store.put(f"{name}{i}", response(name), [], f"{name}{i - 1}", [])
            store.items(f"{name}{i}")
            store.delete(f"{name}{i - 2}")

    threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert count(store)[1] <= 20_000
