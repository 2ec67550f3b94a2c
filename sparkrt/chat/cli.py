"""`sparkrt chat [MODEL] [--url URL] ...`"""

from __future__ import annotations

import argparse
import json
import os
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

from sparkrt.chat.screen import Screen
from sparkrt.chat.session import SETTINGS, Session
from sparkrt.chat.source import Local, Source
from sparkrt.engine.flags import ENGINE_OPTIONS, RULES, Parser, add_engine, add_model, checked, take_engine
from sparkrt.errors import SparkrtError


def main(argv: list[str]) -> int:
    """Exit codes: 0 done, 1 there is no answer, 2 the command line is wrong."""
    parser = build()
    options = vars(parser.parse_args(argv))
    try:
        source = _source(options, parser)
        with closing(source):
            for stream in (sys.stdin, sys.stdout, sys.stderr):
                stream.reconfigure(errors="replace")  # type: ignore[union-attr]
            screen = Screen(sys.stdout, colour="NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb")
            session = Session(source, screen, **options)
            if sys.stdin.isatty() and screen.terminal:
                import readline  # noqa: F401  # from here on `input` has history and editing

                session.run()
            elif (text := sys.stdin.read().strip()) and not session.say(text):  # one message, whatever it looks like
                return 130
            return 0
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # who read has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except SparkrtError as error:
        print(f"sparkrt chat: error: {error}", file=sys.stderr)
        return 1


def build() -> Parser:
    parser = Parser("sparkrt chat", description="Talk to a model in a terminal, or ask it one thing by a pipe.", **RULES)
    add_model(parser)
    add = parser.add_argument_group("conversation").add_argument
    add("--url", metavar="URL", help="ask a server, such as http://127.0.0.1:8000, and load nothing; MODEL: its name there")
    add("--api-key", metavar="KEY", help="for that server (default: OPENAI_API_KEY)")
    add("--system", metavar="TEXT", help="the system prompt")
    add("--tools", type=_tools, metavar="FILE", help="functions that may be called: a JSON list in OpenAI's form")
    add("--thinking", action=argparse.BooleanOptionalAction, help="whether a model that can do either thinks first")
    add = parser.add_argument_group("sampling").add_argument
    for name, (kind, what) in SETTINGS.items():
        letter, noun = ("N", "a whole number") if kind is int else ("X", "a number")
        add(f"--{name.replace('_', '-')}", type=checked(kind, lambda value: True, noun), metavar=letter, help=what)
    add_engine(parser)
    return parser


def _source(options: dict[str, Any], parser: Parser) -> Source:
    """What is asked, and `options` without what was meant for it. SparkrtError: it is not there."""
    url, key = options.pop("url", None), options.pop("api_key", None)
    given = sorted(ENGINE_OPTIONS & options.keys() - {"model"})
    config = take_engine(options, parser)
    if url is None:
        if key is not None:
            parser.error("--api-key is for --url")
        return Local(config, _progress)
    if given:
        parser.error(f"--{given[0].replace('_', '-')} is for a model in this process, not for --url")
    from sparkrt.chat.remote import Remote

    return Remote(url, config.model, key or os.environ.get("OPENAI_API_KEY"))


def _progress(what: str, done: int, total: int) -> None:
    if sys.stderr.isatty():
        share = "" if done == total > 0 else f"{what} {100 * done // total} %" if total else f"{what} ..."
        print(f"\x1b[K{share}", end="\r", file=sys.stderr, flush=True)


def _tools(path: str) -> list[Any]:
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{path}: cannot be read: {error}") from None
    if not isinstance(found, list):
        raise argparse.ArgumentTypeError(f"{path}: expected a JSON list of functions")
    return found
