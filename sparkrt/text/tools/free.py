"""Grammars of answers that may hold calls, for functions whose arguments have to be valid whenever they are called."""

from __future__ import annotations

import re
from collections.abc import Sequence

from sparkrt.text.grammar import escape_regex
from sparkrt.text.incoming import BLANK
from sparkrt.text.reasoning import BEGIN
from sparkrt.text.tools.calls import Tool


def any_text(but: Sequence[str]) -> str:
    """A terminal of Lark: every text that none of these regular expressions matches, at the text's first character."""
    return " & ".join(["/(?s:.*)/", *(f"~/{escape_regex(f'(?s:{pattern}.*)')}/" for pattern in but)])


def calls_in_text(begins: Sequence[tuple[str, str]], parallel: bool, may_think: bool) -> list[str]:
    """Rules of Lark: `start` is text in which each of `begins`, (tag, rule), is followed by what the rule says.

    A tag ends the text at once: the rules called `upto` are lazy. So no call can be written in what was taken for text.
    """
    tags = f"(?:{'|'.join(re.escape(tag) for tag, _ in begins)})"
    thinking = [f"[{BLANK}]*{re.escape(BEGIN)}"] if may_think else []
    rules = [f"REST: {any_text([f'.*{tags}'])}", f"ONLY: {any_text([f'.*{tags}', *thinking])}"]
    for i, (tag, _) in enumerate(begins):
        upto = escape_regex(f"(?s:.*){re.escape(tag)}")
        rules += [f"upto{i}[lazy]: /{upto}/", f"first{i}[lazy]: FIRST{i}", f"FIRST{i}: /{upto}/ & {any_text(thinking)}"]
    first, more = (" | ".join(f"{name}{i} {rule}" for i, (_, rule) in enumerate(begins)) for name in ("first", "upto"))
    rules += [f"called: {first}", f"more: {more}"]
    return [f"start: ONLY? | called {'more* ' if parallel else ''}REST?", *rules]


def loose(tools: Sequence[Tool]) -> list[Tool]:
    """The same functions; those that are not strict take any object."""
    return [tool if tool.strict else Tool(tool.name, {"type": "object"}) for tool in tools]
