"""Calls as Llama 3.1 and 3.2 write them: an answer that is bare JSON."""

from __future__ import annotations

import re
from collections.abc import Sequence

from sparkrt.text.grammar import escape_regex, quote
from sparkrt.text.incoming import BLANK, Incoming, Reading
from sparkrt.text.reasoning import BEGIN
from sparkrt.text.tools.calls import Calls, Tool, ToolFormat
from sparkrt.text.tools.free import any_text, loose
from sparkrt.text.tools.json_calls import call_rules, read_call

_TAG, _FIRST = "<|python_tag|>", '"name"'
_HEAD = '{"name": "NAME", "parameters": '


class Llama3Json(ToolFormat):
    """`{"name": NAME, "parameters": {...}}`, perhaps after a tag, and several with `;` between. Other answers are mere text."""

    marks = (_TAG,)

    def read(self, source: Incoming, calls: Calls) -> Reading[None]:
        before = yield from source.take(BLANK)
        if (yield from source.follows(_TAG)):
            before = yield from source.take(BLANK)
        while (yield from _is_call(source)):
            if (text := (yield from read_call(source, calls, bare=True))) is not None:
                before += text
                break
            before = ""
            yield from source.take(BLANK + ";")
        calls.say(before)
        yield from source.until((), calls.say)

    def grammar(self, tools: Sequence[Tool], parallel: bool) -> str:
        more = ' ("; " call)*' if parallel else ""
        return f"start: call{more}\n" + call_rules(tools, _HEAD, "}")

    def free_grammar(self, tools: Sequence[Tool], parallel: bool, may_think: bool) -> str:
        """An answer that is no call from its first word has none. What begins it is lazy: it ends before any text would."""
        more, blank = f" ({quote('; {' + _FIRST)} call)*" if parallel else "", f"[{BLANK}]*"
        begin = rf"{blank}(?:{re.escape(_TAG)}{blank})?\{{{blank}{_FIRST}"
        text = any_text([begin, *([f"{blank}{re.escape(BEGIN)}"] if may_think else [])])
        rules = f"start: TEXT? | begin call{more}\nTEXT: {text}\nbegin[lazy]: /{escape_regex(begin)}/\n"
        return rules + call_rules(loose(tools), _HEAD.removeprefix("{" + _FIRST), "}")


def _is_call(source: Incoming) -> Reading[bool]:
    """Whether an object is next whose first key is "name": other JSON need not wait for its end."""
    while (yield from source.peek()) == "{" and len(source.text[1:].lstrip(BLANK)) < len(_FIRST) and not source.ended:
        yield
    return source.text[:1] == "{" and source.text[1:].lstrip(BLANK).startswith(_FIRST)
