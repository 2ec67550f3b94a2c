"""A few of the random worlds of `tools/worlds.py`; `python -m tools.worlds` runs ten thousand."""

from __future__ import annotations

import pytest

from tools import worlds


@pytest.mark.parametrize("tens", range(8))
def test_everybody_ends_and_everything_comes_back(tens: int) -> None:
    # S04, W07, H12 and whatever else comes together
    for seed in range(10 * tens, 10 * tens + 10):
        worlds.run(seed)
