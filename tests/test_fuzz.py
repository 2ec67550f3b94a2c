"""A few inputs for each target of `tools/fuzz.py`; `python -m tools.fuzz` tries many more."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.fuzz import FILES, TARGETS, run


@pytest.mark.parametrize("name", TARGETS)
def test_target(name: str) -> None:
    run(name, 40, start=1)


def test_the_files_that_are_damaged_were_sound(tmp_path: Path) -> None:
    for content, read in FILES:
        (tmp_path / "file").write_bytes(content)
        read(tmp_path / "file")
