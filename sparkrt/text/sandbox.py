"""The sandbox of chat templates: that of `transformers` (filters, globals, settings), with a budget for every render.

Blocks entered and seconds are counted, and about the memory of everything built on the way: each value that an operator, a call,
a filter or a literal makes is charged. What could make a value out of all proportion to what it was given (widths, replacements,
formats, values nested in themselves) is measured before it runs. No operation takes more than a second or so; so neither memory
nor time run away, whatever the template says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from datetime import datetime
from functools import wraps
from time import monotonic
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_environment

MAX_STEPS = 1_000_000  # of one render: passes of loops, calls of macros and the like; half a second or a few
MAX_SECONDS = 5.0
MAX_CHARS = 32_000_000  # output of one render, and any string built on the way
MAX_ELEMENTS = 1_000_000  # of any list, and of a string whose characters a filter looks at one by one
MAX_NODES = 300_000  # of a value nested in others
MAX_BUILT = 16 * MAX_CHARS  # of all values together: a character counts 1, an element 8
MAX_BITS = 65_536  # of an integer
_MAX_WIDTH = 1_000  # of a column, an indentation
# nothing that chat templates use, and each could build or search what nobody can bound
_NO_FILTERS = ("pprint", "striptags", "urlize", "xmlattr")
_ONE_BY_ONE = ("batch", "groupby", "map", "max", "min", "reject", "rejectattr", "select", "selectattr", "slice", "sort", "unique")
_NO_METHODS = {"encode", "expandtabs", "format_map", "from_bytes", "maketrans", "to_bytes", "translate"}
_FIELD = re.compile(r"\{\w*(?:![rsa])?(?::[^{}\d]{0,4}\d{0,3}[^{}\d]{0,2}(?:\.\d{0,3})?[^{}\d]{0,2})?\}")
_WIDE = re.compile(r"%[^%a-zA-Z]*(?:\d{4}|\*)")

now: Callable[[], datetime] = datetime.now  # tests put their own clock here


class Refusal(TemplateError):
    """A template called `raise_exception`, or went over its budget. The message is for the user."""


_TOO_LONG = f"the chat template takes more than {MAX_STEPS} steps or {MAX_SECONDS:g} s"


class Budget:
    """What one render may still use."""

    __slots__ = ("deadline", "left", "steps")

    def __init__(self) -> None:
        self.steps, self.left, self.deadline = MAX_STEPS, MAX_BUILT, monotonic() + MAX_SECONDS

    def step(self) -> None:
        self.steps -= 1
        if self.steps < 0 or (not self.steps & 127 and monotonic() > self.deadline):
            raise Refusal(_TOO_LONG)

    def spend(self, value: Any) -> Any:
        """Charge for a value that was built, and return it."""
        if isinstance(value, str | list | tuple | dict | set):
            if not isinstance(value, str):
                check_size(len(value), MAX_ELEMENTS)
            self.left -= len(value) * (1 if isinstance(value, str) else 8)
            if self.left < 0:
                raise Refusal(f"the chat template builds more than {MAX_BUILT} characters on the way")
            if len(value) > 10_000 and monotonic() > self.deadline:
                raise Refusal(_TOO_LONG)
        return value


_budget: ContextVar[Budget] = ContextVar("budget of this render")  # none outside of one: nothing is folded at compile time


def check_size(size: int, most: int = MAX_CHARS) -> None:
    if size > most:
        raise Refusal(f"the chat template builds a value of {size} elements")


def check_nested(value: Any) -> None:
    """Refusal unless the parts of `value`, each counted as often as it occurs in it, are few; 1,024 characters count as one."""
    todo, count = [value], 0
    while todo:
        part = todo.pop()
        count += 1 + (len(part) // 1024 if isinstance(part, str) else 0)
        check_size(count + len(todo), MAX_NODES)
        if isinstance(part, Mapping):
            todo += part.keys()
            todo += part.values()
        elif isinstance(part, list | tuple | set):
            todo += part


def text_size(value: Any) -> int:
    """Characters of a value as text, at most about."""
    if isinstance(value, list | tuple | dict | set):
        check_nested(value)
    return len(value) if isinstance(value, str) else len(str(value))


def check_format(text: str, arguments: Iterable[Any], mark: str) -> None:
    """Refusal for fields wider than three digits say, for those that look into an argument, and for what gets too large."""
    if mark == "%":
        allowed = _WIDE.search(text) is None
    else:
        allowed = {"{", "}"}.isdisjoint(_FIELD.sub("", text.replace("{{", "").replace("}}", "")))
    if not allowed:
        raise Refusal("the chat template formats in a way that is not allowed")
    check_size(len(text) + text.count(mark) * (_MAX_WIDTH + max(map(text_size, arguments), default=0)))


def check_call(target: Any, arguments: tuple[Any, ...]) -> None:
    """Before a method of a string is called: Refusal if its result would be too large."""
    owner, name = getattr(target, "__self__", None), getattr(target, "__name__", "")
    if not isinstance(owner, str):
        return
    first = arguments[0] if arguments else None
    if name in ("center", "ljust", "rjust", "zfill") and isinstance(first, int):
        check_size(first)
    elif name == "replace" and len(arguments) > 1:
        check_replace(owner, first, arguments[1])
    elif name == "join" and isinstance(first, list | tuple | dict | str):
        check_size(len(owner) * len(first) + sum(len(part) for part in first if isinstance(part, str)))


def check_replace(text: Any, old: Any, new: Any) -> None:
    text, old, new = str(text), str(old), str(new)
    check_size(len(text) + (text.count(old) * len(new) if len(new) > len(old) else 0))


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """`from_string` compiles, `render` runs within the budget."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        more = [_GenerationTag, "jinja2.ext.loopcontrols"]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=more, finalize=_finalize)
        self.code_generator_class = _CountingGenerator
        self.filters |= {"tojson": _tojson, "join": _join, "indent": _indent(self.filters["indent"])}
        self.filters |= {"center": _bounded(self.filters["center"]), "batch": _bounded(self.filters["batch"])}
        self.filters |= {"slice": _bounded(self.filters["slice"]), "replace": _replace(self.filters["replace"])}
        self.filters["format"] = lambda text, *args, **kwargs: self.call_binop(None, "%", str(text), kwargs or args)
        for name in _NO_FILTERS:
            del self.filters[name]
        self.filters = {name: _charged(function, name in _ONE_BY_ONE) for name, function in self.filters.items()}
        del self.globals["lipsum"]
        self.globals |= {"raise_exception": _raise, "strftime_now": _strftime_now, "namespace": _Namespace}

    def render(self, template: Template, variables: Mapping[str, Any]) -> str:
        """The text of `template`. Whatever the template does wrong comes out as the exception it raised."""
        token = _budget.set(Budget())
        chunks, size = [], 0
        try:
            for chunk in template.generate(variables):
                size += len(chunk)
                if size > MAX_CHARS:
                    raise Refusal(f"the chat template writes more than {MAX_CHARS} characters")
                chunks.append(chunk)
            return "".join(chunks)
        finally:
            _budget.reset(token)

    def count_step(self) -> None:
        """Called by compiled templates whenever a block is entered: on every pass of a loop and call of a macro."""
        _budget.get().step()

    def concat(self, parts: Iterable[str]) -> str:
        """What blocks, macros and `~` build."""
        parts = list(parts)
        check_size(sum(map(len, parts)))
        text: str = _budget.get().spend("".join(parts))
        return text

    def join(self, parts: Iterable[Any]) -> str:
        return self.concat([str(_finalize(part)) for part in parts])

    def built(self, value: Any) -> Any:
        """A literal."""
        check_nested(value)
        return _budget.get().spend(value)

    def cut(self, value: Any) -> Any:
        """A slice."""
        return _budget.get().spend(value)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in _NO_METHODS and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if (wrapped := super().wrap_str_format(value)) is None:
            return None

        def checked(*args: Any, **kwargs: Any) -> str:
            check_format(value.__self__, [*args, *kwargs.values()], "{")
            text: str = wrapped(*args, **kwargs)
            return text

        return checked

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        check_call(__obj, args)
        return _budget.get().spend(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context | None, operator: str, left: Any, right: Any) -> Any:
        a, b = (len(side) if isinstance(side, str | list | tuple) else side for side in (left, right))
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            if bits > MAX_BITS:
                raise Refusal("the chat template computes too large a power or product")
        elif operator == "%" and isinstance(left, str):
            values = right.values() if isinstance(right, Mapping) else right if isinstance(right, tuple) else [right]
            check_format(left, values, "%")
        elif isinstance(a, int) and isinstance(b, int):
            most = MAX_CHARS if isinstance(left, str) or isinstance(right, str) else MAX_ELEMENTS
            check_size(a * b if operator == "*" else a + b, most)
        value = left % right if operator == "%" else super().call_binop(context, operator, left, right)  # type: ignore[arg-type]
        return _budget.get().spend(value)


class _CountingGenerator(CodeGenerator):
    """Puts `count_step` at the head of every block, as a bare line: through the sandbox it is ten times slower."""

    def blockvisit(self, nodes: Iterable[nodes.Node], frame: Frame) -> None:
        self.writeline("environment.count_step()")
        super().blockvisit(nodes, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self._wrapped("join", lambda: self._tuple(node.nodes, frame))

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        self._wrapped("built", lambda: CodeGenerator.visit_List(self, node, frame))

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self._wrapped("built", lambda: CodeGenerator.visit_Dict(self, node, frame))

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        if node.ctx == "load":
            self._wrapped("built", lambda: CodeGenerator.visit_Tuple(self, node, frame))
        else:
            super().visit_Tuple(node, frame)

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        if isinstance(node.arg, nodes.Slice):
            self._wrapped("cut", lambda: CodeGenerator.visit_Getitem(self, node, frame))
        else:
            super().visit_Getitem(node, frame)

    def _tuple(self, parts: Iterable[nodes.Node], frame: Frame) -> None:
        self.write("(")
        for part in parts:
            self.visit(part, frame)
            self.write(", ")
        self.write(")")

    def _wrapped(self, method: str, write: Callable[[], None]) -> None:
        self.write(f"environment.{method}(")
        write()
        self.write(")")


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks what the model wrote, for training; here it is only a scope."""

    tags = {"generation"}  # noqa: RUF012 (Jinja reads it from the class)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Namespace(Namespace):
    """Jinja's namespace, closed to underscored names, through which a template could pose as another type."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # `self` stays free for a keyword, as in Jinja's own
        Namespace.__init__(args[0])
        for name, value in dict(*args[1:], **kwargs).items():
            args[0][name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"a chat template may not set {name!r} on a namespace")
        super().__setitem__(name, value)


def _finalize(value: Any) -> Any:
    """Before a value becomes text."""
    if isinstance(value, list | tuple | dict | set):
        check_nested(value)
    return value


def _charged(function: Callable[..., Any], one_by_one: bool) -> Callable[..., Any]:
    """A filter whose results count. Outside of a render, where Jinja would fold constants, it fails, and nothing is folded."""

    @wraps(function)  # with the marks that say what else a filter is given
    def charged(*args: Any, **kwargs: Any) -> Any:
        budget = _budget.get()
        for argument in args if one_by_one else ():
            if isinstance(argument, str):
                check_size(len(argument), MAX_ELEMENTS)
        return budget.spend(function(*args, **kwargs))

    return charged


def _bounded(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def bounded(value: Any, count: int = 80, *more: Any) -> Any:
        if isinstance(count, int) and count > _MAX_WIDTH:
            raise Refusal(f"the chat template asks for more than {_MAX_WIDTH} columns or rows")
        return function(value, count, *more)

    return bounded


def _indent(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def indent(text: str, width: int | str = 4, *more: Any, **kwargs: Any) -> Any:
        check_size((len(width) if isinstance(width, str) else int(width)) * (str(text).count("\n") + 1))
        return function(text, width, *more, **kwargs)

    return indent


def _replace(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def replace(context: Any, text: Any, old: Any, new: Any, count: int | None = None) -> Any:
        check_replace(text, old, new)
        return function(context, text, old, new, count)

    return replace


@pass_environment
def _join(environment: Any, value: Iterable[Any], d: Any = "", attribute: Any = None) -> str:
    if attribute is not None:
        value = map(make_attrgetter(environment, attribute), value)
    parts = [str(_finalize(part)) for part in value]
    check_size(sum(map(len, parts)) + len(str(d)) * len(parts))
    return str(d).join(parts)


def _tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
    """JSON without Jinja's HTML escapes."""
    check_nested(value)
    if len(str(indent)) > 8 or len(str(separators)) > 40 or (isinstance(indent, int) and indent > 16):
        raise Refusal("the chat template indents JSON further than is allowed")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(format: str) -> str:
    if len(format) > _MAX_WIDTH:
        raise Refusal("the chat template asks for too long a date")
    return now().strftime(format)


def _raise(message: object) -> None:
    raise Refusal(str(message))
