"""Ranges around layers and operators, and none without the flag."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from sparkrt.errors import LoadError
from sparkrt.model.nvtx import annotate_model
from tests.model.conftest import Bench


def test_layers_and_operators_are_named(open_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch) -> None:
    seen, depth = list[tuple[int, str]](), [0]

    @contextmanager
    def annotate(name: str) -> Iterator[None]:
        seen.append((depth[0], name))
        depth[0] += 1
        yield
        depth[0] -= 1

    bench = open_bench(enforce_eager=True)
    expected = bench.answer([1, 2, 3], 4)
    monkeypatch.setitem(sys.modules, "nvtx", SimpleNamespace(annotate=annotate))
    annotate_model(bench.model)
    assert bench.answer([1, 2, 3], 4) == expected
    assert [name for level, name in seen if level == 0][:5] == [
        "select_tokens",
        "embedding",
        "layer 0 gdn",
        "layer 1 gdn",
        "layer 2 gdn",
    ]
    assert (1, "paged_attention_decode") in seen
    bench.model.close()
    assert bench.backend.leak_report() == ""


def test_the_package_is_asked_for(open_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch) -> None:
    bench = open_bench(enforce_eager=True)
    monkeypatch.setitem(sys.modules, "nvtx", None)
    with pytest.raises(LoadError, match="pip install"):
        annotate_model(bench.model)
    bench.model.close()
