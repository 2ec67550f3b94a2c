"""The `sparkrt` command: one subcommand so far. Each imports what it needs when it is chosen."""

from __future__ import annotations

import sys

_USAGE = """\
usage: sparkrt COMMAND ...

commands:
  serve    serve a model over the OpenAI API (sparkrt serve --help)
"""


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 done, 1 what was asked for cannot be served, 2 the command line is wrong."""
    words = sys.argv[1:] if argv is None else argv
    command, rest = (words[0], words[1:]) if words else ("", [])
    if command == "serve":
        try:
            from sparkrt.serve.server import serve

            return serve(rest)
        except KeyboardInterrupt:  # before anything was there to be stopped
            return 0
    if command in ("-h", "--help", "help"):
        print(_USAGE, end="")
        return 0
    if command in ("-V", "--version", "version"):
        from sparkrt.serve.version import VERSION

        print(f"sparkrt {VERSION}")
        return 0
    print(f"sparkrt: error: {f'unknown command {command!r}' if command else 'no command'} (see sparkrt --help)", file=sys.stderr)
    return 2
