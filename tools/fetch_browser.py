"""Have a Chromium for the tests of the page: the one that is there, or else the one Playwright keeps in its cache.

    python tools/fetch_browser.py [--system]

With --system, as root, Debian's is installed before Playwright is asked: for machines made for tests. Where none can be had this
says so, and is no error; the tests concerned skip.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
TIMEOUT = 240  # seconds for one way to get it


def browser() -> str | None:
    """The path of a Chromium that Playwright can drive."""
    if found := next(filter(None, map(shutil.which, NAMES)), None):
        return found
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        own = playwright.chromium.executable_path
    return own if Path(own).is_file() else None


def main() -> int:
    if browser():
        return 0
    ways = [[sys.executable, "-m", "playwright", "install", "chromium"]]
    if "--system" in sys.argv[1:] and os.geteuid() == 0 and shutil.which("apt-get"):
        ways.insert(0, ["sh", "-c", "apt-get -qq update && apt-get -qq install -y --no-install-recommends chromium"])
    for way in ways:
        print(f"fetching a browser: {' '.join(way)}", flush=True)
        env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        try:
            subprocess.run(way, env=env, check=True, capture_output=True, timeout=TIMEOUT, stdin=subprocess.DEVNULL)
        except (OSError, subprocess.SubprocessError) as error:
            print(f"no browser from there: {error}", file=sys.stderr)
        if browser():
            return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
