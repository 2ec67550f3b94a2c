"""How models write calls of functions: a format is how they are read, and the grammar that makes a model write them."""

from __future__ import annotations

from sparkrt.text.reasoning import BEGIN, END
from sparkrt.text.tools.calls import Calls, ToolFormat
from sparkrt.text.tools.hermes import Hermes
from sparkrt.text.tools.llama3_json import Llama3Json
from sparkrt.text.tools.mistral import Mistral
from sparkrt.text.tools.qwen3_coder import Qwen3Coder

FORMATS: dict[str, type[ToolFormat]] = {
    "qwen3_coder": Qwen3Coder,
    "qwen3_xml": Qwen3Coder,
    "hermes": Hermes,
    "llama3_json": Llama3Json,
    "mistral": Mistral,
}
MARKS = {BEGIN, END, *(mark for format in FORMATS.values() for mark in format.marks)}  # texts that mean something to us
_SIGNS = (  # of a template that shows calls in that format; the first that is found decides
    ("<function=", "qwen3_coder"),
    ("[TOOL_CALLS]", "mistral"),
    ("<arg_key>", ""),  # others that write <tool_call>, and no JSON in it
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama3_json"),
    ('{"name": function name, "parameters"', "llama3_json"),
)


def tool_format(name: str, template: str) -> ToolFormat | None:
    """The format called `name`; "auto": what `template` shows, None if it shows none we know; "none": none."""
    if name == "auto":
        name = next((name for sign, name in _SIGNS if sign in template), "")
    return FORMATS[name](template) if name in FORMATS else None


__all__ = ["FORMATS", "MARKS", "Calls", "ToolFormat", "tool_format"]
