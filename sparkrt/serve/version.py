"""The installed version of sparkrt."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("sparkrt")
except PackageNotFoundError:  # run from a source tree that was never installed
    VERSION = "0+source"
