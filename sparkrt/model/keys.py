"""Reading a configuration key by key, so that every fault names the file and the key."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from sparkrt.errors import LoadError

_LARGEST = 2**31 - 1


def read_json(path: Path) -> dict[str, object]:
    """The JSON object in a file. Raises LoadError naming the file where it cannot be read or is something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise LoadError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise LoadError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise LoadError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


class ConfigKeys:
    """One level of a configuration; null counts as absent. Messages have `section` before keys, and the file's own names."""

    def __init__(self, values: Mapping[str, object], file: str, section: str = "", aliases: dict[str, str] | None = None) -> None:
        self.values = {key: value for key, value in values.items() if value is not None}
        self.file, self._section, self._aliases = file, section, aliases or {}

    def fault(self, key: str, problem: str) -> LoadError:
        return LoadError(f"{self.file}: {self._section}{self._aliases.get(key, key)} {problem}")

    def section(self, key: str) -> ConfigKeys | None:
        """The object under `key`, None where there is none."""
        values = self._checked(key, {}, "an object", lambda v: isinstance(v, dict))
        return ConfigKeys(values, self.file, f"{self._section}{key}.") if key in self.values else None

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1, maximum: int = _LARGEST) -> int:
        what = f"an integer from {minimum} to {maximum}"
        return int(self._checked(key, default, what, lambda v: type(v) is int and minimum <= v <= maximum))

    def number(self, key: str, default: float | None = None) -> float:
        what = "a finite number above zero"
        return float(self._checked(key, default, what, lambda v: type(v) in (int, float) and 0 < v <= 1e300))

    def flag(self, key: str, default: bool) -> bool:
        return bool(self._checked(key, default, "true or false", lambda v: isinstance(v, bool)))

    def text(self, key: str, default: str | None = None) -> str:
        return str(self._checked(key, default, "a string", lambda v: isinstance(v, str)))

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings, empty where there is none."""
        what = "a list of strings"
        return tuple(self._checked(key, [], what, lambda v: isinstance(v, list) and all(isinstance(item, str) for item in v)))

    def integers(self, key: str) -> tuple[int, ...]:
        """An integer or a list of them, none below zero; empty where there is none."""
        value = self.values.get(key, [])
        items = value if isinstance(value, list) else [value]
        if not all(type(item) is int and 0 <= item <= _LARGEST for item in items):
            raise self.fault(key, f"must be an integer or a list of integers from 0 on, not {value!r}")
        return tuple(items)

    def only(self, key: str, allowed: Collection[object], why: str) -> None:
        """Refuse a value that would be computed differently; absent is fine."""
        if key in self.values and self.values[key] not in allowed:
            expected = " or ".join(json.dumps(value) for value in allowed)
            raise self.fault(key, f"is {json.dumps(self.values[key])}, only {expected} can be served: {why}")

    def _checked(self, key: str, default: object, expected: str, fits: Callable[[Any], bool]) -> Any:
        value = self.values.get(key, default)
        if value is None:
            raise self.fault(key, "is missing")
        if not fits(value):
            raise self.fault(key, f"must be {expected}, not {value!r}")
        return value
