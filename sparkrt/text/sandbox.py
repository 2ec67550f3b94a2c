"""The Jinja environment chat templates run in: what they may call, and how much they may do.

Filters, globals and settings are those of `transformers`, so that a template renders the same text here. Beyond that, every
render has a budget: loop passes and macro calls are counted, and what `+`, `*` and `**` build, as the output itself, is bounded.
That stops runaway templates; it is no licence to run templates of strangers, which is why requests cannot bring their own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.compiler import CodeGenerator, Frame, MacroRef
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_STEPS = 1_000_000  # of one render, about half a second; a pass of a loop is one step
MACRO_STEPS = 10  # a call of a macro
MAX_CHARS = 32_000_000  # output of one render, and any string or list built on the way
MAX_BITS = 65_536  # of an integer power

_steps: ContextVar[list[int]] = ContextVar("steps left in this render")


class Refusal(TemplateError):
    """A template called `raise_exception`, or went over its budget. The message is for the user."""


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """`from_string` compiles, `render` runs within the budget."""

    intercepted_binops = frozenset({"+", "*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"])
        self.code_generator_class = _CountingGenerator
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.globals["namespace"] = _Namespace

    def render(self, template: Template, variables: Mapping[str, Any]) -> str:
        """The text of `template`. Whatever the template does wrong comes out as the exception it raised."""
        token = _steps.set([MAX_STEPS])
        try:
            chunks, size = [], 0
            for chunk in template.generate(variables):
                size += len(chunk)
                if size > MAX_CHARS:
                    raise Refusal(f"the chat template writes more than {MAX_CHARS} characters")
                chunks.append(chunk)
            return "".join(chunks)
        finally:
            _steps.reset(token)

    def count_steps(self, steps: int) -> None:
        """Called by compiled templates on every pass of a loop and every call of a macro."""
        left = _steps.get()
        left[0] -= steps
        if left[0] < 0:
            raise Refusal(f"the chat template takes more than {MAX_STEPS} steps")

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            if right * left.bit_length() > MAX_BITS:
                raise Refusal("the chat template computes too large a power")
        elif isinstance(left, str | list | tuple) or isinstance(right, str | list | tuple):
            self._check_size(operator, left, right)
        return super().call_binop(context, operator, left, right)

    @staticmethod
    def _check_size(operator: str, left: Any, right: Any) -> None:
        sizes = [len(side) if isinstance(side, str | list | tuple) else side for side in (left, right)]
        if all(isinstance(size, int) for size in sizes):
            size = sizes[0] * sizes[1] if operator == "*" else sizes[0] + sizes[1]
            if size > MAX_CHARS:
                raise Refusal(f"the chat template builds a value of {size} elements")


class _CountingGenerator(CodeGenerator):
    """Puts `count_steps` at the head of every loop and macro body, as a bare line: through the sandbox it is ten times slower."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._costs: dict[int, int] = {}  # by the identity of a list of statements: the steps of going through it once

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        self._costs[id(node.body)] = 1
        super().visit_For(node, frame)

    def macro_body(self, node: nodes.Macro | nodes.CallBlock, frame: Frame) -> tuple[Frame, MacroRef]:
        self._costs[id(node.body)] = MACRO_STEPS
        return super().macro_body(node, frame)

    def blockvisit(self, nodes: Iterable[nodes.Node], frame: Frame) -> None:
        if cost := self._costs.get(id(nodes)):
            self.writeline(f"environment.count_steps({cost})")
        super().blockvisit(nodes, frame)


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks what the model wrote, for training; here it is only a scope."""

    tags = {"generation"}  # noqa: RUF012 (Jinja reads it from the class)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Namespace(Namespace):
    """Jinja's namespace, closed to underscored names, through which a template could pose as another type."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # `self` stays free for a keyword, as in Jinja's own
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a chat template may not set {name!r} on a namespace")


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without Jinja's HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> None:
    raise Refusal(str(message))


def _strftime_now(format: str) -> str:
    return now().strftime(format)


now: Callable[[], datetime] = datetime.now  # tests put their own clock here
