"""`ChatTemplate`: messages and tools to the prompt text a model was trained on, as `transformers` renders it.

A template is a program: it comes with the model or from the server's owner, never from a request, and runs in a sandbox.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateSyntaxError

from sparkrt.errors import LoadError, RequestError
from sparkrt.text.messages import bad, normalize_messages, plain
from sparkrt.text.sandbox import ChatEnvironment, Refusal
from sparkrt.text.tokenizer import Tokenizer, read_json

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
            except Exception as error:  # nested deeper than Jinja or Python can compile
                raise LoadError(f"{origin} {name!r} cannot be compiled: {type(error).__name__}: {error}") from None

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
