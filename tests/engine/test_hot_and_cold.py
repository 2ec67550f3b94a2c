"""A few runs of `tools/hot_and_cold.py`; `python -m tools.hot_and_cold` makes hundreds."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tests import rigs
from tools.hot_and_cold import Twins


def test_a_random_model_that_shows_wrong_states(tmp_path: Path) -> None:
    # H01, H05, H07, H10 and whatever else comes together
    rigs.r2(tmp_path)
    twins = Twins(str(tmp_path), 256)
    happened = sum(map(twins.run, (5, 8, 12)), Counter[str]())
    twins.cold.close()
    assert min(happened[what] for what in ("cached tokens", "restored tokens", "preemptions", "swaps", "abort")) > 0


def test_the_bundled_model() -> None:
    twins = Twins(None, 6000)
    assert twins.run(12)["length"] > 0
    twins.cold.close()
