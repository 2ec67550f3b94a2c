"""The conversation: what is typed, what is kept, and the commands that begin with a slash."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from sparkrt.chat.screen import Screen
from sparkrt.chat.source import Asked, Said, Source
from sparkrt.errors import SparkrtError

# name of a setting → its type and what it means; flags of `sparkrt chat`, and what /set takes
SETTINGS: dict[str, tuple[Callable[[str], float], str]] = {
    "temperature": (float, "0: always the likeliest token"),
    "top_p": (float, "draw from the likeliest tokens that have this share together"),
    "top_k": (int, "draw from this many of the likeliest tokens"),
    "min_p": (float, "draw from tokens at least this likely, compared with the likeliest"),
    "repetition_penalty": (float, "above 1: less of what was there before"),
    "presence_penalty": (float, "above 0: less of what the answer has already"),
    "frequency_penalty": (float, "above 0: less of it the more often"),
    "max_tokens": (int, "most tokens of an answer"),
}
HELP = """/system [TEXT]     show or set the system prompt
/set [NAME VALUE]  show how answers are drawn, or set it; without a value: as the model has it
                   {names}
                   thinking (on, off)
/clear             begin anew
/save FILE         write the conversation to a new file, as JSON
/quit              end (Ctrl-D, too)
A line that ends in a backslash goes on in the next. Ctrl-C stops an answer.
Where the model calls a function, type what it returns."""
_THINKING = {"on": True, "off": False}


class Quit(Exception):
    """Somebody said /quit."""


@dataclass(slots=True)
class _Taken:
    """What there is of an answer."""

    content: str = ""
    reasoning: str = ""
    calls: dict[int, dict[str, Any]] = field(default_factory=dict)
    reason: str | None = None
    tokens: int = 0
    began: float = field(default_factory=perf_counter)
    first: tuple[float, int] | None = None  # when the first words came, and how many tokens they were
    last: float = 0.0

    def take(self, said: Said) -> None:
        if said.delta:
            self.last = perf_counter()
            self.first = self.first or (self.last, said.tokens)
        self.reasoning += said.delta.reasoning
        self.content += said.delta.content
        for call in said.delta.calls:
            kept = self.calls.setdefault(call.index, {"id": call.id, "name": call.name, "arguments": ""})
            kept["arguments"] += call.arguments
        self.tokens, self.reason = said.tokens, said.reason or self.reason

    def message(self) -> dict[str, Any] | None:
        """As OpenAI spells it; None if nothing was said. A call that was cut cannot be sent back and is left out."""
        made = [
            {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
            for call in self.calls.values()
            if _is_json(call["arguments"])
        ]
        if not (self.content or made):
            return None
        found: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            found["reasoning_content"] = self.reasoning
        return found | ({"tool_calls": made} if made else {})

    def facts(self, stopped: bool) -> str:
        said = ["stopped"] if stopped else ["cut at the token limit"] if self.reason == "length" else []
        said.append(f"{self.tokens} token{'' if self.tokens == 1 else 's'}")
        if self.first is not None:
            at, tokens = self.first
            if self.last > at and self.tokens > tokens:
                said.append(f"{(self.tokens - tokens) / (self.last - at):.1f} tokens/s")
            said.append(f"first after {1000 * (at - self.began):.0f} ms")
        return " · ".join(said)


class Session:
    """One conversation with `source`, shown on `screen`."""

    def __init__(
        self, source: Source, screen: Screen, system: str = "", tools: Sequence[Mapping[str, Any]] = (), **settings: Any
    ) -> None:
        """`settings`: some of SETTINGS, and `thinking`, whether a model that can do either should."""
        self._source, self._screen, self._tools, self._system = source, screen, tools, system
        self._thinking: bool | None = settings.pop("thinking", None)
        self._settings: dict[str, float] = settings
        self.messages: list[dict[str, Any]] = []

    def run(self) -> None:
        """Talk until there is nothing more to read."""
        self._screen.note(f"{self._source.name} · /help for commands, Ctrl-D to end")
        while True:
            try:
                self._obey(self._read())
            except KeyboardInterrupt:  # of the line that was being typed
                self._screen.end()
                print()
            except SparkrtError as error:
                self._screen.fault(str(error))
            except (EOFError, Quit):
                return

    def say(self, text: str) -> bool:
        """One turn; False: Ctrl-C stopped the answer. SparkrtError, and the conversation is as it was, if there is none."""
        calls = self._open_calls()
        before = len(self.messages)
        if calls:
            self.messages.append({"role": "tool", "tool_call_id": calls[0]["id"], "content": text})
            if calls[1:]:
                return True
        else:
            self.messages.append({"role": "user", "content": text})
        system = [{"role": "system", "content": self._system}] if self._system else []
        asked = Asked([*system, *self.messages], self._tools, self._settings, self._thinking)
        taken, stopped = _Taken(), False
        try:
            with closing(self._source.answer(asked)) as answer:
                for said in answer:
                    taken.take(said)
                    self._screen.show(said.delta)
        except KeyboardInterrupt:
            stopped = True
        except SparkrtError:
            self._screen.end()
            del self.messages[before:]
            raise
        self._screen.end()
        self._screen.note(taken.facts(stopped))
        if (message := taken.message()) is not None:
            self.messages.append(message)
        else:
            del self.messages[before:]
        return not stopped

    def _open_calls(self) -> list[dict[str, Any]]:
        """The calls at the end of the conversation that have no result yet."""
        last: dict[str, Any] = next((message for message in reversed(self.messages) if message["role"] != "tool"), {})
        known = {message.get("tool_call_id") for message in self.messages}
        return [call for call in last.get("tool_calls", ()) if call["id"] not in known]

    def _read(self) -> str:
        calls = self._open_calls()
        lines = [input(self._screen.prompt(f"{calls[0]['function']['name']} returns> " if calls else "> "))]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(input(self._screen.prompt(". ")))
        return "\n".join(lines).strip()

    def _obey(self, line: str) -> None:
        if not line.startswith("/"):
            if line:
                self.say(line)
            return
        name, _, rest = line[1:].partition(" ")
        commands = {"help": self._help, "system": self._set_system, "clear": self._clear, "set": self._set, "save": self._save}
        if name == "quit":
            raise Quit
        if name not in commands:
            raise SparkrtError(f"there is no command /{name} (see /help)")
        commands[name](rest.strip())

    def _help(self, rest: str) -> None:
        self._screen.note(HELP.format(names=", ".join(SETTINGS)))

    def _set_system(self, rest: str) -> None:
        self._system = rest or self._system
        self._screen.note(f"system: {self._system or '(none)'}")

    def _clear(self, rest: str) -> None:
        self.messages.clear()
        self._screen.note("a new conversation")

    def _set(self, rest: str) -> None:
        name, _, value = rest.partition(" ")
        name, value = name.replace("-", "_"), value.strip()
        if name == "thinking":
            if value not in ("", *_THINKING):
                raise SparkrtError(f"/set thinking: expected on or off, got {value}")
            self._thinking = _THINKING.get(value)
        elif name in SETTINGS:
            self._settings.pop(name, None)
            if value:
                try:
                    self._settings[name] = SETTINGS[name][0](value)
                except ValueError:
                    raise SparkrtError(f"/set {name}: expected a number, got {value}") from None
        elif name:
            raise SparkrtError(f"/set {name}: there is no such setting ({', '.join([*SETTINGS, 'thinking'])})")
        shown = [f"{name} {value}" for name, value in self._settings.items()]
        shown += [] if self._thinking is None else [f"thinking {'on' if self._thinking else 'off'}"]
        self._screen.note(", ".join(shown) or "everything as the model has it")

    def _save(self, rest: str) -> None:
        if not rest:
            raise SparkrtError("/save: expected the name of a file")
        system = [{"role": "system", "content": self._system}] if self._system else []
        try:
            with Path(rest).expanduser().open("x", encoding="utf-8") as file:
                json.dump({"messages": [*system, *self.messages]}, file, ensure_ascii=False, indent=1)
        except OSError as error:
            raise SparkrtError(f"/save {rest}: {error.strerror}") from None
        self._screen.note(f"saved in {rest}")


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
