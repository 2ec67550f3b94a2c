"""`ChatTemplate`: messages and tools to the prompt text a model was trained on, as `transformers` renders it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateSyntaxError

from sparkrt.errors import LoadError, RequestError
from sparkrt.text.messages import normalize_messages, plain
from sparkrt.text.sandbox import ChatEnvironment, Refusal
from sparkrt.text.tokenizer import Tokenizer, read_json

_OWN_ARGUMENTS = ("messages", "conversation", "tools", "add_generation_prompt", "continue_final_message", "chat_template")
_CONTINUE_HERE = "\ue000continue here\ue001 "  # private-use characters; the blank tells whether the template trims


class ChatTemplate:
    """The chat template of a model: one text, or several by name ("default", "tool_use", ...).

    `special_tokens` are variables of the template (`bos_token`, ...). Safe to share between threads.
    LoadError names `origin` and the line if a text is not a Jinja template.
    """

    def __init__(self, texts: Mapping[str, str], special_tokens: Mapping[str, str], origin: str = "chat template") -> None:
        self.texts = dict(texts)
        self._special_tokens = dict(special_tokens)
        self._environment = ChatEnvironment()
        self._compiled = {name: self._compile(text, f"{origin} {name!r}") for name, text in self.texts.items()}

    @classmethod
    def from_folder(cls, folder: str | Path, tokenizer: Tokenizer) -> ChatTemplate:
        """From `chat_template.jinja` (with `additional_chat_templates/`), else `chat_template.json`, else tokenizer_config.json.

        A folder without any gives a template that refuses to render.
        """
        path = Path(folder)
        texts = {}
        if (file := path / "chat_template.jinja").is_file():
            texts["default"] = _read(file)
        for file in sorted((path / "additional_chat_templates").glob("*.jinja")):
            texts[file.stem] = _read(file)
        for name in ("chat_template.json", "tokenizer_config.json"):
            texts = texts or _by_name(read_json(path / name).get("chat_template"), path / name)
        return cls(texts, tokenizer.special_tokens, f"{path}: chat template")

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], tokenizer: Tokenizer) -> ChatTemplate:
        """From `tokenizer.chat_template` and the named `tokenizer.chat_template.NAME` of a GGUF file."""
        key = "tokenizer.chat_template"
        texts = {name.removeprefix(f"{key}."): str(text) for name, text in metadata.items() if name.startswith(f"{key}.")}
        if key in metadata:
            texts["default"] = str(metadata[key])
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
        """The prompt text. `kwargs` are variables of the template (`enable_thinking=False`, ...), checked by `check_kwargs`.

        `continue_final_message` leaves the last message open for the model to go on with.
        RequestError if a message is malformed or the template refuses the conversation.
        """
        check_kwargs(kwargs)
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other: set one of them to false",
                param="continue_final_message",
            )
        chat = normalize_messages(messages)
        tools = plain(tools, "tools") or None
        if tools is not None and not isinstance(tools, list):
            raise RequestError("tools: expected a list", param="tools")
        final = _open_final(chat) if continue_final_message else ""
        variables = {
            **self._special_tokens,
            "documents": None,
            **plain(kwargs, "chat_template_kwargs"),
            "messages": chat,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        text = self._run(self._choose(tools is not None), variables)
        return _cut_open(text, final) if continue_final_message else text

    def _choose(self, with_tools: bool) -> Template:
        if not self._compiled:
            raise RequestError("this model has no chat template: start the server with --chat-template", param="messages")
        for name in (["tool_use"] if with_tools else []) + ["default"]:
            if name in self._compiled:
                return self._compiled[name]
        names = ", ".join(sorted(self._compiled))
        raise RequestError(f"this model has several chat templates and no default one ({names})", param="messages")

    def _compile(self, text: str, origin: str) -> Template:
        try:
            return self._environment.from_string(text)
        except TemplateSyntaxError as error:
            raise LoadError(f"{origin}, line {error.lineno}: {error.message}") from None

    def _run(self, template: Template, variables: dict[str, Any]) -> str:
        try:
            return self._environment.render(template, variables)
        except Refusal as refusal:
            raise RequestError(refusal.message or "the chat template refuses these messages", param="messages") from None
        except Exception as error:  # undefined names, wrong types, recursion: all of them come from these messages
            raise RequestError(f"the chat template cannot render these messages: {error}", param="messages") from None


def check_kwargs(kwargs: object, param: str = "chat_template_kwargs") -> None:
    """RequestError unless `kwargs` is an object of variables a request may set.

    A template of the request's own is refused: it would be a program of the client's run inside the server.
    """
    if not isinstance(kwargs, Mapping):
        raise RequestError(f"{param}: expected an object", param=param)
    for name in kwargs:
        if name in _OWN_ARGUMENTS:
            raise RequestError(f"{param}.{name}: not allowed here", param=f"{param}.{name}")


def _open_final(chat: list[dict[str, Any]]) -> str:
    """Mark the end of the last message's content; returns the content."""
    final = chat[-1].get("content")
    if not isinstance(final, str):
        where = f"messages[{len(chat) - 1}].content"
        raise RequestError(f"{where}: continue_final_message needs a text to go on with", param=where)
    chat[-1]["content"] = final + _CONTINUE_HERE
    return final


def _cut_open(text: str, final: str) -> str:
    """Cut at the mark; where the template trims contents, the blanks before the mark go too."""
    at = text.rfind(_CONTINUE_HERE.strip())
    if at < 0 or final.strip() not in text:
        raise RequestError(
            "continue_final_message: the chat template changes the final message, so it cannot be continued",
            param="continue_final_message",
        )
    kept = text[:at]
    return kept if text.startswith(_CONTINUE_HERE, at) else kept.rstrip()


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LoadError(f"{file}: cannot be read as text: {error}") from None


def _by_name(value: Any, file: Path) -> dict[str, str]:
    """The `chat_template` entry of a JSON file: a text, or a list of {name, template}."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    try:
        return {str(entry["name"]): str(entry["template"]) for entry in value}
    except (TypeError, KeyError):
        raise LoadError(f"{file}: chat_template should be a text or a list of objects with name and template") from None
