"""Writes every page and drawing of docs/ that is made from the code or from results: `python -m tools.pages`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tools import flags, http_api, metrics, operators, plots, python_api

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGES: dict[str, Callable[[], str]] = {
    "flags.md": flags.page,
    "http.md": http_api.page,
    "metrics.md": metrics.page,
    "operators.md": operators.operator_table,
    "python.md": python_api.page,
}


def generated() -> dict[str, str]:
    """Path under docs/ → what has to be there."""
    return {name: make() for name, make in PAGES.items()} | {f"plots/{name}": text for name, text in plots.plots().items()}


if __name__ == "__main__":
    for name, text in generated().items():
        (DOCS / name).write_text(text, encoding="utf-8")
