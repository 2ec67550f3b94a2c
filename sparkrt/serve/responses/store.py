"""Where answers of /v1/responses are kept: a SQLite database, in memory or in a file, under a limit of bytes."""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
from typing import Any

import msgspec

from sparkrt.errors import LoadError

log = logging.getLogger("sparkrt.serve")

_VERSION = 1
_SCHEMA = f"""
BEGIN IMMEDIATE;
CREATE TABLE responses (
    number INTEGER PRIMARY KEY, id TEXT UNIQUE NOT NULL, parent INTEGER, deleted INTEGER NOT NULL DEFAULT 0,
    input BLOB NOT NULL, response BLOB NOT NULL);
CREATE INDEX children ON responses (parent);
CREATE TABLE total (bytes INTEGER NOT NULL);
INSERT INTO total VALUES (0);
CREATE TRIGGER more AFTER INSERT ON responses
    BEGIN UPDATE total SET bytes = bytes + length(NEW.input) + length(NEW.response); END;
CREATE TRIGGER less AFTER DELETE ON responses
    BEGIN UPDATE total SET bytes = bytes - length(OLD.input) - length(OLD.response); END;
PRAGMA user_version = {_VERSION};
COMMIT;
"""
_CHILDLESS = "NOT EXISTS (SELECT 1 FROM responses AS c WHERE c.parent = r.number)"
_CHAIN = """
WITH RECURSIVE chain(number, parent, input, response) AS (
    SELECT number, parent, input, response FROM responses WHERE id = ? AND NOT deleted
    UNION ALL SELECT r.number, r.parent, r.input, r.response FROM responses AS r JOIN chain ON r.number = chain.parent)
SELECT input, response FROM chain ORDER BY number
"""

Item = dict[str, Any]


class ResponseStore:
    """Responses with the items they answer. One knows which it continues, so that a conversation of any length is kept once.

    Over `limit` bytes the oldest go first, but none that a younger one continues. Safe to share between threads.
    """

    def __init__(self, path: str | None, limit: int) -> None:
        """`path` None: in memory. LoadError: there is no database of ours at `path`, none can be made, or it is in use."""
        self._lock, self._limit, self._failing = threading.Lock(), limit, False
        try:
            if path is not None:
                os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))  # what people say is for nobody else
            self._db = sqlite3.connect(path or ":memory:", timeout=0, isolation_level=None, check_same_thread=False)
            for pragma in ("locking_mode = EXCLUSIVE", "journal_mode = WAL", "synchronous = NORMAL", "secure_delete = ON"):
                self._run(f"PRAGMA {pragma}")
            [(version,)] = self._run("PRAGMA user_version")
            if version == 0 and not self._run("SELECT 1 FROM sqlite_master").fetchone():
                self._db.executescript(_SCHEMA)
            elif version != _VERSION:
                raise sqlite3.DatabaseError("it is a database of something else, or of another version")
            with self._db:
                self._run("BEGIN IMMEDIATE")
                self._evict()  # the limit may be another than last time
        except (OSError, sqlite3.Error) as error:
            raise LoadError(f"--response-store {path}: {getattr(error, 'strerror', None) or error}") from None

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def get(self, response_id: str) -> bytes | None:
        """A response as it was answered, in JSON; None if it is not here."""
        with self._lock:
            found = self._run("SELECT response FROM responses WHERE id = ? AND NOT deleted", response_id).fetchone()
        return None if found is None else found[0]

    def items(self, response_id: str) -> tuple[list[Item], list[Item]] | None:
        """What the response was made from, earlier turns included, and what it added; None if it is not here."""
        with self._lock:
            chain = self._run(_CHAIN, response_id).fetchall()
        before, output = list[Item](), list[Item]()
        for given, response in chain:
            before += output + msgspec.json.decode(given)
            output = msgspec.json.decode(response)["output"]
        return (before, output) if chain else None

    def put(self, response_id: str, response: bytes, given: list[Item], previous: str | None, history: list[Item]) -> bool:
        """Keep a response to `given`, after the `history` that ends with `previous`. False: there is no room."""
        try:
            with self._lock, self._db:
                self._run("BEGIN IMMEDIATE")
                parent = self._run("SELECT number FROM responses WHERE id = ? AND NOT deleted", previous).fetchone()
                items = msgspec.json.encode(given if parent else history + given)  # it may have gone meanwhile
                if len(items) + len(response) > self._limit:
                    return False
                row = response_id, parent and parent[0], items, response
                self._run("INSERT INTO responses (id, parent, input, response) VALUES (?, ?, ?, ?)", *row)
                self._evict()
                kept = self._run("SELECT 1 FROM responses WHERE id = ?", response_id).fetchone() is not None
        except sqlite3.Error as error:
            if not self._failing:
                log.error("responses cannot be stored: %s", error)
            self._failing = True
            return False
        self._failing = False
        return kept

    def delete(self, response_id: str) -> bool:
        """Whether it was here. What continues it keeps its items."""
        with self._lock, self._db:
            self._run("BEGIN IMMEDIATE")
            found = self._run("SELECT number FROM responses WHERE id = ? AND NOT deleted", response_id).fetchone()
            if found is not None:
                self._remove(found[0])
        return found is not None

    def _run(self, statement: str, *values: Any) -> sqlite3.Cursor:
        return self._db.execute(statement, values)

    def _evict(self) -> None:
        while self._run("SELECT bytes FROM total").fetchone()[0] > self._limit:
            oldest = f"SELECT number FROM responses AS r WHERE {_CHILDLESS} ORDER BY number LIMIT 1"
            self._remove(self._run(oldest).fetchone()[0])

    def _remove(self, number: int) -> None:
        """Hide a response and, if nothing continues it, drop it and those before it that stayed for its sake alone."""
        self._run("UPDATE responses SET deleted = 1 WHERE number = ?", number)
        droppable = f"SELECT parent FROM responses AS r WHERE number = ? AND deleted AND {_CHILDLESS}"
        while (found := self._run(droppable, number).fetchone()) is not None:
            self._run("DELETE FROM responses WHERE number = ?", number)
            (number,) = found
