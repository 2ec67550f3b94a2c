"""Take docs/page.png anew: the page at `/` after a short conversation with the bundled model.

python -m tools.page_picture
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from playwright.sync_api import Page, expect, sync_playwright

from tests.serve.harness import running
from tools.fetch_browser import browser

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "page.png"
WISH = "Can you find a movie for me that was directed by Michael Chaves?"
FIELDS = {name: {"type": "string"} for name in ("title", "directed_by", "genre")}
TOOL = {"type": "function", "function": {"name": "FindMovies", "parameters": {"type": "object", "properties": FIELDS}}}
FOUND = '[{"title": "The Curse of La Llorona", "directed_by": "Michael Chaves"}]'


def converse(page: Page) -> None:
    def complete() -> None:
        expect(page.get_by_role("article", name="Answer").last).to_have_attribute("aria-busy", "false")

    page.get_by_label("Temperature").fill("0")
    page.get_by_role("button", name="Think it through").click()
    complete()
    page.get_by_label("Functions the model may call").fill(json.dumps([TOOL]))
    for text in (WISH, FOUND):
        page.get_by_label("Message", exact=True).fill(text)
        page.keyboard.press("Enter")
        complete()
    page.get_by_text("Thought for").click()
    page.locator("#side").evaluate("side => side.scrollTo(0, 0)")
    page.get_by_label("Message", exact=True).focus()


def main() -> int:
    path = browser()
    if path is None:
        print("no Chromium: python tools/fetch_browser.py", file=sys.stderr)
        return 1
    with running() as server, sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = chromium.new_page(viewport={"width": 1280, "height": 860}, color_scheme="light", reduced_motion="reduce")
        page.goto(server.url)
        expect(page.locator("#live path[d]")).to_have_count(7)  # every figure but the time of a step, of which there was none
        converse(page)
        expect(page.locator("#live .tile", has_text="Step time")).to_contain_text("ms")
        page.screenshot(path=PICTURE)
        chromium.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
