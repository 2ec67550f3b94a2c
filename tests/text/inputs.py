"""Real inputs for tests: where they were fetched to, or a skip with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.fetch_inputs import folder


def need(name: str) -> Path:
    """The folder of a fetched input."""
    path = folder(name)
    if path is None:
        pytest.skip(f"needs the real input {name!r}: python tools/fetch_inputs.py {name}")
    return path
