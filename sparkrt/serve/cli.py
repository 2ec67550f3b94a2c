"""The `sparkrt` command: one subcommand so far. Each imports what it needs when it is chosen."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version

_USAGE = "usage: sparkrt COMMAND ...\n\ncommands:\n  serve    serve a model over the OpenAI API (sparkrt serve --help)"
try:
    VERSION = version("sparkrt")
except PackageNotFoundError:  # run from a source tree that was never installed
    VERSION = "0+source"


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 done, 1 what was asked for cannot be served, 2 the command line is wrong."""
    command, *rest = (sys.argv[1:] if argv is None else argv) or [""]
    if command == "serve":
        try:
            from sparkrt.serve.server import serve

            return serve(rest)
        except KeyboardInterrupt:  # before anything was there to be stopped
            return 0
    if command in ("-h", "--help", "help", "-V", "--version", "version"):
        print(f"sparkrt {VERSION}" if command in ("-V", "--version", "version") else _USAGE)
        return 0
    print(f"sparkrt: error: {f'unknown command {command!r}' if command else 'no command'} (see sparkrt --help)", file=sys.stderr)
    return 2
