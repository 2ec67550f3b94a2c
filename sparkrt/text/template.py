"""`ChatTemplate`: messages and tools to the prompt text a model was trained on, as `transformers` renders it.

The sandbox has the filters, globals and settings of `transformers`, and every render a budget: steps are counted, and what `+`,
`*` and `**` build, as the output itself, is bounded. That stops runaway templates; it is no licence to run those of strangers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from sparkrt.errors import LoadError, RequestError
from sparkrt.text.messages import bad, normalize_messages, plain
from sparkrt.text.tokenizer import Tokenizer, read_json

MAX_STEPS = 1_000_000  # of one render: passes of loops, calls of macros and the like; half a second or a few
MAX_CHARS = 32_000_000  # output of one render, and any string or list built on the way
MAX_BITS = 65_536  # of an integer power

_steps: ContextVar[list[int]] = ContextVar("steps left in this render")
now: Callable[[], datetime] = datetime.now  # tests put their own clock here
_OWN_ARGUMENTS = {"messages", "conversation", "tools", "add_generation_prompt", "continue_final_message", "chat_template"}
_CONTINUE_HERE = "\ue000continue here\ue001 "  # private-use characters; the blank tells whether the template trims


class ChatTemplate:
    """The chat templates of a model by name ("default", "tool_use", ...). Safe to share between threads.

    `special_tokens` are variables of a template (`bos_token`, ...). LoadError names `origin` and line of what is not Jinja.
    """

    def __init__(self, texts: Mapping[str, str], special_tokens: Mapping[str, str], origin: str = "chat template") -> None:
        self.texts, self._special_tokens, self._environment = dict(texts), dict(special_tokens), ChatEnvironment()
        self._compiled: dict[str, Template] = {}
        for name, text in self.texts.items():
            try:
                self._compiled[name] = self._environment.from_string(text)
            except TemplateSyntaxError as error:
                raise LoadError(f"{origin} {name!r}, line {error.lineno}: {error.message}") from None

    @classmethod
    def from_folder(cls, folder: str | Path, tokenizer: Tokenizer) -> ChatTemplate:
        """From `chat_template.jinja` with `additional_chat_templates/`, else `chat_template.json`, else tokenizer_config.json."""
        path = Path(folder)
        texts = {"default": _read(path / "chat_template.jinja")} if (path / "chat_template.jinja").is_file() else {}
        texts |= {file.stem: _read(file) for file in sorted(path.glob("additional_chat_templates/*.jinja"))}
        for name in ("chat_template.json", "tokenizer_config.json"):
            texts = texts or _by_name(read_json(path / name).get("chat_template"), path / name)
        return cls(texts, tokenizer.special_tokens, f"{path}: chat template")

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], tokenizer: Tokenizer) -> ChatTemplate:
        """From `tokenizer.chat_template` and the named `tokenizer.chat_template.NAME` of a GGUF file."""
        key = "tokenizer.chat_template"
        texts = {n.removeprefix(f"{key}."): str(text) for n, text in metadata.items() if n.startswith(f"{key}.")}
        texts |= {"default": str(metadata[key])} if key in metadata else {}
        return cls(texts, tokenizer.special_tokens, key)

    @classmethod
    def from_option(cls, option: str, tokenizer: Tokenizer) -> ChatTemplate:
        """From the `--chat-template` option: a file, or the template itself. LoadError if it is neither."""
        inline = any(mark in option for mark in ("{{", "{%", "{#", "\n"))
        if not inline and not Path(option).is_file():
            raise LoadError(f"--chat-template {option}: no such file, and not a Jinja template either")
        return cls({"default": option if inline else _read(Path(option))}, tokenizer.special_tokens, "--chat-template")

    def render(
        self,
        /,
        messages: object,
        tools: object = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """The prompt text; `kwargs` are variables of the template (see `check_kwargs`). RequestError if it cannot be rendered."""
        check_kwargs(kwargs)
        if continue_final_message and add_generation_prompt:
            raise bad("continue_final_message", "it and add_generation_prompt exclude each other: set one of them to false")
        chat, tools = normalize_messages(messages), plain(tools, "tools") or None
        if tools is not None and not isinstance(tools, list):
            raise bad("tools", "expected a list")
        final = chat[-1]["content"]
        if continue_final_message:
            chat[-1]["content"] = final + _CONTINUE_HERE
        variables = {**self._special_tokens, "documents": None, **plain(kwargs, "chat_template_kwargs")}
        variables |= {"messages": chat, "tools": tools, "add_generation_prompt": add_generation_prompt}
        template = (self._compiled.get("tool_use") if tools else None) or self._compiled.get("default")
        if template is None:
            names = ", ".join(sorted(self._compiled))
            lacks = f"several chat templates and no default one ({names})" if names else "no chat template: use --chat-template"
            raise RequestError(f"this model has {lacks}", param="messages")
        try:
            text = self._environment.render(template, variables)
        except Refusal as refusal:
            raise RequestError(refusal.message or "the chat template refuses these messages", param="messages") from None
        except Exception as error:  # undefined names, wrong types, recursion: all of them come from these messages
            raise RequestError(f"the chat template cannot render these messages: {error}", param="messages") from None
        return _cut_open(text, final) if continue_final_message else text


def check_kwargs(kwargs: object, param: str = "chat_template_kwargs") -> None:
    """RequestError unless `kwargs` are variables a request may set; a template of its own would be a program run inside us."""
    if not isinstance(kwargs, Mapping):
        raise bad(param, "expected an object")
    for name in kwargs.keys() & _OWN_ARGUMENTS:
        raise bad(f"{param}.{name}", "not allowed here")


def _cut_open(text: str, final: str) -> str:
    """Cut at the mark; where the template trims contents, the blanks before the mark go too."""
    at = text.rfind(_CONTINUE_HERE.strip())
    if at < 0 or final.strip() not in text:
        raise bad("continue_final_message", "the chat template changes the final message, so it cannot be continued")
    return text[:at] if text.startswith(_CONTINUE_HERE, at) else text[:at].rstrip()


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LoadError(f"{file}: cannot be read as text: {error}") from None


def _by_name(value: Any, file: Path) -> dict[str, str]:
    """The `chat_template` entry of a JSON file: a text, or a list of {name, template}."""
    if isinstance(value, str):
        return {"default": value}
    try:
        return {str(entry["name"]): str(entry["template"]) for entry in value or ()}
    except (TypeError, KeyError):
        raise LoadError(f"{file}: chat_template should be a text or a list of objects with name and template") from None


class Refusal(TemplateError):
    """A template called `raise_exception`, or went over its budget. The message is for the user."""


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """`from_string` compiles, `render` runs within the budget."""

    intercepted_binops = frozenset({"+", "*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"])
        self.code_generator_class = _CountingGenerator
        self.filters["tojson"] = _tojson
        self.globals |= {
            "raise_exception": _raise,
            "strftime_now": lambda format: now().strftime(format),
            "namespace": _Namespace,
        }

    def render(self, template: Template, variables: Mapping[str, Any]) -> str:
        """The text of `template`. Whatever the template does wrong comes out as the exception it raised."""
        token = _steps.set([MAX_STEPS])
        chunks, size = [], 0
        try:
            for chunk in template.generate(variables):
                size += len(chunk)
                if size > MAX_CHARS:
                    raise Refusal(f"the chat template writes more than {MAX_CHARS} characters")
                chunks.append(chunk)
            return "".join(chunks)
        finally:
            _steps.reset(token)

    def count_step(self) -> None:
        """Called by compiled templates whenever a block is entered: on every pass of a loop and call of a macro."""
        left = _steps.get()
        left[0] -= 1
        if left[0] < 0:
            raise Refusal(f"the chat template takes more than {MAX_STEPS} steps")

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        a, b = (len(side) if isinstance(side, str | list | tuple) else side for side in (left, right))
        if isinstance(left, int) and isinstance(right, int):
            if operator == "**" and right * left.bit_length() > MAX_BITS:
                raise Refusal("the chat template computes too large a power")
        elif isinstance(a, int) and isinstance(b, int) and (size := a * b if operator == "*" else a + b) > MAX_CHARS:
            raise Refusal(f"the chat template builds a value of {size} elements")
        return super().call_binop(context, operator, left, right)


class _CountingGenerator(CodeGenerator):
    """Puts `count_step` at the head of every block, as a bare line: through the sandbox it is ten times slower."""

    def blockvisit(self, nodes: Iterable[nodes.Node], frame: Frame) -> None:
        self.writeline("environment.count_step()")
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
        Namespace.__init__(args[0])
        for name, value in dict(*args[1:], **kwargs).items():
            args[0][name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"a chat template may not set {name!r} on a namespace")
        super().__setitem__(name, value)


def _tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
    """JSON without Jinja's HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: object) -> None:
    raise Refusal(str(message))
