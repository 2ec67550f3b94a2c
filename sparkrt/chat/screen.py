"""Answers on a terminal, or as plain text where there is none."""

from __future__ import annotations

import sys
from typing import TextIO

from sparkrt.text.reply import ReplyDelta

BOLD, DIM, PLAIN = "\x1b[1m", "\x1b[2m", "\x1b[0m"
_CONTROLS = dict.fromkeys([*range(0x20), *range(0x7F, 0xA0)])  # what could steer a terminal
del _CONTROLS[ord("\n")], _CONTROLS[ord("\t")]


class Screen:
    """On a terminal thinking is shown, too, and what a model writes cannot steer it; elsewhere there are text and calls alone."""

    def __init__(self, out: TextIO, colour: bool = True) -> None:
        self._out, self.terminal = out, out.isatty()
        self._colour, self._part = colour and self.terminal, ""

    def show(self, delta: ReplyDelta) -> None:
        """Write what an answer gained."""
        if self.terminal:
            self._add("thinking", DIM, delta.reasoning)
        for part in delta.parts:
            if isinstance(part, str):
                self._add("text", "", part)
            else:
                name = f"call {part.index}"
                if part.name:
                    self._add(name, BOLD, f"→ {part.name} " if self.terminal else f"{part.name} ")
                self._add(name, "", part.arguments)
        self._out.flush()

    def end(self) -> None:
        """An answer is over."""
        if self._part:
            self._write("\n", "")
        self._part = ""
        self._out.flush()

    def note(self, text: str) -> None:
        """A line of ours, which plain output has not."""
        if self.terminal:
            self._write(text, DIM)
            self._write("\n", "")
            self._out.flush()

    def prompt(self, text: str) -> str:
        """`text` for `input`, marked so that readline knows what takes no room."""
        return f"\x01{BOLD}\x02{text}\x01{PLAIN}\x02" if self._colour else text

    def fault(self, text: str) -> None:
        print(f"error: {text.translate(_CONTROLS)}", file=sys.stderr, flush=True)

    def _add(self, part: str, style: str, text: str) -> None:
        if not text:
            return
        if self._part not in ("", part):
            self._write("\n\n" if self._part == "thinking" else "\n", "")
        self._part = part
        self._write(text, style)

    def _write(self, text: str, style: str) -> None:
        text = text.translate(_CONTROLS) if self.terminal else text
        self._out.write(f"{style}{text}{PLAIN}" if style and self._colour else text)
