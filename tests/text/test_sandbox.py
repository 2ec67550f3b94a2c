"""Hostile templates: none reaches what it was not given, and none takes memory or time out of all proportion."""

from __future__ import annotations

import re
import resource
import sys
from contextlib import suppress

import pytest

from sparkrt.errors import LoadError, RequestError
from sparkrt.text.template import ChatTemplate

HI = [{"role": "user", "content": "Hi"}]


def render(text: str) -> str:
    return ChatTemplate({"default": text}, {}).render(HI)


def grown(step: str, start: str = "'x'", passes: int = 60, end: str = "") -> str:
    """`ns.x` is changed again and again."""
    loop = f"{{% for i in range({passes}) %}}{step}{{% endfor %}}"
    return f"{{% set ns = namespace(x={start}) %}}{loop}{end}"


BOMBS = [
    grown("{% set ns.x = ns.x ~ ns.x %}"),
    grown("{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}"),
    grown("{% set ns.x = ns.x * ns.x %}", "3"),
    grown("{% set ns.x = [ns.x, ns.x] %}", end="{{ ns.x }}"),
    grown("{% set ns.x = {'a': ns.x, 'b': ns.x} %}", end="{{ ns.x | tojson }}"),
    grown("{% set ns.x = [ns.x, ns.x] %}", passes=14, end="{{ ([ns.x] * 100000) | tojson }}"),
    grown("{% set ns.x = ns.x + [('x' * 1000000) | list] %}", "[]", 100_000),
    grown("{% set ns.x = ns.x + [('x' * 9999999).upper()[1:]] %}", "[]", 100_000),
    *(f"{{{{ {expression} }}}}" for expression in (
        "'x' | center(10 ** 9)", "'x'.center(10 ** 9)", "'x'.ljust(10 ** 9)", "'x'.zfill(10 ** 9)", "'x\\ny' | indent(10 ** 9)",
        "'%1000000000d' % 1", "'%*d' % (10 ** 9, 1)", "'%1000000000d' | format(1)", "'{:>1000000000}'.format(1)",
        "'{:>{w}}'.format(1, w=9 ** 9)", "('%(a)s' * 10 ** 6) % {'a': 'x' * 9999}", "('{a}' * 10 ** 6).format(a='x' * 9999)",
        "('x' * 10 ** 6) | replace('x', 'y' * 10 ** 6)", "('x' * 10 ** 6).replace('x', 'y' * 10 ** 6)",
        "('x' * 10 ** 6) | join('y' * 10 ** 6)", "('y' * 10 ** 6).join('x' * 10 ** 6)", "[1] | batch(10 ** 9, 'x') | list",
        "[1] | tojson(indent=10 ** 8)", "(5).to_bytes(10 ** 9, 'big')", "'\\t'.expandtabs(10 ** 9)", "'x'.encode() * 10 ** 9",
        "'x'.translate({120: 'y' * 10 ** 7})", "strftime_now('%Y' * 10 ** 7)", "lipsum(10 ** 6)", "([0] * 9999999) | sort",
        "('x' * 9999999) | sort", "range(100000) | map('center', 900) | join",
    )),
]  # fmt: skip


@pytest.mark.parametrize("text", BOMBS, ids=lambda text: text[-60:])
def test_bombs_are_refused(text: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(RequestError, match=r"chat template|undefined|unsafe"):
        render(text)
    if sys.platform == "linux":
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 700_000  # KiB


@pytest.mark.parametrize(
    "expression",
    [
        *("cycler.__init__.__globals__", "self._TemplateReference__context", "messages.__class__.__mro__[1].__subclasses__()"),
        *("''|attr('__class__')", "raise_exception.__globals__", "strftime_now.__closure__", "namespace.__init__.__globals__"),
        *(
            "messages | map(attribute='__class__') | list",
            "'{0.__class__}'.format(1)",
            "['{0.__class__}'] | map('format', 1) | list",
        ),
        *("range.__self__", "dict.__mro__", "messages[0].get.__self__.__class__", "joiner.__init__.__globals__['sys']"),
    ],
)
def test_nothing_leads_out(expression: str) -> None:
    with suppress(RequestError):
        assert not re.search("<class|<module|built-in", render(f"{{{{ {expression} }}}}"))


@pytest.mark.parametrize("text", ["{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "{% for i in [1] %}" * 30 + "{% endfor %}" * 30])
def test_what_is_nested_too_deep_is_no_template(text: str) -> None:
    with pytest.raises(LoadError, match="cannot be compiled"):
        render(text)


def test_what_real_templates_do_is_allowed() -> None:
    assert render("{{ '%5.1f|%-3s' % (1.25, 'a') }}{{ '{:>4} {a!r}'.format(1, a='x') }}") == "  1.2|a     1 'x'"
    assert render("{{ 'a,b'.split(',') | join('; ') }}{{ [1] | tojson(indent=2) }}") == "a; b[\n  1\n]"
