"""The documentation says what the code does: generated pages are up to date, and examples run."""

from __future__ import annotations

import contextlib
import io
import json
import re

import pytest

from tests.serve import ROOT
from tests.serve.harness import Server
from tools.pages import DOCS, generated

SOURCES = ("README.md", "docs/quickstart.md")
HERE = "http://127.0.0.1:8000"


def _blocks(language: str) -> list[tuple[str, str]]:
    """(where it is, its text) of every block of a language, those inside tabs too."""
    found = list[tuple[str, str]]()
    for name in SOURCES:
        text = (ROOT / name).read_text(encoding="utf-8")
        for indent, block in re.findall(rf"^( *)```{language}\n(.*?)^\1```", text, re.DOTALL | re.MULTILINE):
            found.append((name, re.sub(rf"^{indent}", "", block, flags=re.MULTILINE)))
    return found


def test_generated_pages_are_up_to_date() -> None:
    for name, text in generated().items():
        assert (DOCS / name).read_text(encoding="utf-8") == text, f"docs/{name} is out of date: python -m tools.pages"


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert {page.name for page in DOCS.glob("*.md")} <= set(re.findall(r": ([\w-]+\.md)$", navigation, re.MULTILINE))


def test_links_to_parts_of_pages_lead_somewhere() -> None:
    parts = {
        page.name: {_slug(head) for head in re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)}
        for page in DOCS.glob("*.md")
    }
    for page in DOCS.glob("*.md"):
        for name, part in re.findall(r"\]\(([\w-]*\.?m?d?)#([^)]+)\)", page.read_text(encoding="utf-8")):
            assert part in parts[name or page.name], f"{page.name} links to {name}#{part}"


def _slug(head: str) -> str:
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", head).strip().lower())


@pytest.mark.parametrize(("source", "block"), [pytest.param(*b, id=f"{b[0]}-{i}") for i, b in enumerate(_blocks("python"))])
def test_python_examples_run(tiny: Server, source: str, block: str) -> None:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(block.replace(HERE, tiny.url), source, "exec"), {})
    assert said.getvalue().strip()


def test_requests_of_curl_are_answered(tiny: Server) -> None:
    found = [re.search(rf"{HERE}(\S+) .*?-d '(.*?)'", block, re.DOTALL) for _, block in _blocks("sh") if "curl" in block]
    assert len(found) == len(SOURCES)
    for match in found:
        assert match is not None
        answer = tiny.post(match[1], json.loads(match[2]))
        assert answer["choices"][0]["message"]["content"] == "Hello! How can I help you today?"
