"""Write tests/goldens/templates/: what `transformers` renders for the chat templates of real models.

    python -m tools.make_template_goldens      (in an environment with transformers and jinja2; no torch)

The templates come from the inputs that `tools/fetch_inputs.py` fetches. Those of the models sparkrt serves are committed beside
their rendered texts, in rendered.json; for the other templates of the collection others.json keeps only a hash of each text.
"""

from __future__ import annotations

import hashlib
import json
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import transformers
from jinja2 import TemplateError
from transformers.utils import chat_template_utils

from tests.text.gguf_metadata import read_metadata
from tools.fetch_inputs import fetch

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "tests" / "goldens" / "templates"
TINY = ROOT / "sparkrt" / "assets" / "sparkrt-tiny"
COMMITTED = {
    "qwen2.5": "Qwen-Qwen2.5-7B-Instruct.jinja",
    "qwen3": "Qwen-Qwen3-0.6B.jinja",
    "qwen3-coder": "Qwen3-Coder.jinja",
    "qwen3.5": "Qwen3.5-4B.jinja",
}
SPECIAL_TOKENS = {"bos_token": "<|begin|>", "eos_token": "<|end|>", "pad_token": "<|pad|>"}
NOW = "2026-02-03T04:05:06"

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": 'Weather <now> & "later" in a town\'s area: 20 °C, 東京',
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "A town"},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"], "default": "celsius"},
                "days": {"type": "integer", "minimum": 1},
            },
            "required": ["city"],
        },
    },
}
SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search",
        "parameters": {
            "type": "object",
            "properties": {
                "query": {"type": "string"},
                "filter": {"type": "object", "properties": {"tags": {"type": "array", "items": {"type": "string"}}}},
                "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            },
        },
    },
}


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def system(text: Any) -> dict[str, Any]:
    return {"role": "system", "content": text}


def assistant(text: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def call(name: str, arguments: Any, id_: str = "call00001") -> dict[str, Any]:
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}


def tool(text: Any, id_: str = "call00001") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id_, "content": text}


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


ASK = user("What is the weather in Paris?")
ONE_CALL = assistant(None, tool_calls=[call("get_weather", '{"city": "Paris", "days": 2}')])
TWO_CALLS = assistant(
    "Let me look.",
    tool_calls=[
        call("get_weather", '{"city": "Łódź", "unit": "celsius"}'),
        call(
            "search",
            '{"query": "a\\nb <c> & \\"d\\"", "filter": {"tags": ["x", "y"]}, "limit": null, "e": 1.5, "f": true}',
            "call00002",
        ),
    ],
)
TOOLS = {"tools": [WEATHER, SEARCH]}

# name -> (messages as an OpenAI client sends them, other arguments)
SCENARIOS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "user": ([user("Hello!")], {}),
    "system": ([system("Be brief."), user("Hello!")], {}),
    "turns": ([system("Be brief."), user("Hi"), assistant("Hello."), user(" Bye \n")], {}),
    "no generation prompt": ([user("Hi"), assistant("Hello.")], {"add_generation_prompt": False}),
    "unicode": ([user("<b>Ünï</b> & 'quotes' \"東京\" 👩‍👩‍👧 {{ x }} {% y %}")], {}),
    "empty content": ([system(""), user("")], {}),
    "tools": ([ASK], TOOLS),
    "tools and system": ([system("Be brief."), ASK], TOOLS),
    "one tool": ([ASK], {"tools": [WEATHER]}),
    "tool call": ([ASK, ONE_CALL, tool("Sunny")], TOOLS),
    "tool calls": ([system("S"), ASK, TWO_CALLS, tool('{"sky": "<blue>"}'), tool("none", "call00002")], TOOLS),
    "tool turns": ([ASK, ONE_CALL, tool("Sunny"), assistant("It is sunny."), user("And Rome?")], TOOLS),
    "call without arguments": ([ASK, assistant("", tool_calls=[call("search", "")]), tool("?")], TOOLS),
    "calls without tools": ([ASK, TWO_CALLS, tool("a"), tool("b", "call00002"), assistant("Done."), user("Thanks")], {}),
    "reasoning": ([user("2+2?"), assistant("4", reasoning_content="Two and two."), user("3+3?")], {}),
    "reasoning by another name": ([user("2+2?"), assistant("4", reasoning="Two and two.")], {"add_generation_prompt": False}),
    "reasoning inline": ([user("2+2?"), assistant("<think>\nTwo.\n</think>\n\n4"), user("3+3?")], {}),
    "reasoning last": ([user("2+2?"), assistant("<think>\nTwo.\n</think>\n\n4")], {"add_generation_prompt": False}),
    "reasoning with calls": (
        [ASK, assistant("", reasoning_content="Must look.", tool_calls=ONE_CALL["tool_calls"]), tool("Sunny")],
        TOOLS,
    ),
    "thinking off": ([user("Hello!")], {"enable_thinking": False}),
    "thinking on": ([user("Hello!")], {"enable_thinking": True}),
    "thinking off with tools": ([ASK, ONE_CALL, tool("Sunny")], {"enable_thinking": False, **TOOLS}),
    "parts": ([system(parts("Be ", "brief.")), user(parts("One.", " Two.")), assistant(parts("Yes")), user("Go")], {}),
    "tool parts": ([ASK, assistant(parts("Look."), tool_calls=ONE_CALL["tool_calls"]), tool(parts("Sun", "ny"))], TOOLS),
    "nulls": ([{"role": "user", "content": "Hi", "name": None, "tool_calls": None}, assistant(None), user("Go")], {}),
    "developer": ([{"role": "developer", "content": "Be brief."}, user("Hello!")], {}),
    "system late": ([user("Hello!"), system("Be brief.")], {}),
    "two systems": ([system("One."), system("Two."), user("Hello!")], {}),
    "assistant first": ([assistant("Welcome."), user("Hello!")], {}),
    "unknown role": ([user("Hello!"), {"role": "critic", "content": "Hm."}], {}),
    "continue": ([user("Count"), assistant("One, two,")], {"add_generation_prompt": False, "continue_final_message": True}),
    "continue after blank": (
        [user("Count"), assistant("One, \n")],
        {"add_generation_prompt": False, "continue_final_message": True},
    ),
    "continue thinking": (
        [user("Count"), assistant("<think>\nLet me")],
        {"add_generation_prompt": False, "continue_final_message": True},
    ),
}


def normal(message: dict[str, Any]) -> dict[str, Any]:
    """The same message in the plain form that transformers' users write."""
    message = dict(message)
    if message["role"] == "developer":
        message["role"] = "system"
    if isinstance(message["content"], list):
        message["content"] = "".join(part["text"] for part in message["content"])
    if message["content"] is None:
        message["content"] = ""
    if message.get("tool_calls"):
        message["tool_calls"] = [
            {**c, "function": {**c["function"], "arguments": json.loads(c["function"]["arguments"] or "{}")}}
            for c in message["tool_calls"]
        ]
    return message


class Clock(datetime):
    @classmethod
    def now(cls, tz: Any = None) -> Clock:
        return cls.fromisoformat(NOW)


def render_all(template: str) -> dict[str, Any]:
    """Scenario -> text, or {"error": what the template raised, None where transformers failed in another way}."""
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(TINY / "tokenizer.json"), **SPECIAL_TOKENS)
    tokenizer.chat_template = template
    results: dict[str, Any] = {}
    for name, (messages, arguments) in SCENARIOS.items():
        arguments = {"add_generation_prompt": True, **arguments}
        try:
            results[name] = tokenizer.apply_chat_template([normal(m) for m in messages], tokenize=False, **arguments)
        except Exception as error:
            results[name] = {"error": str(error) if type(error) is TemplateError else None}
    return results


def main() -> int:
    chat_template_utils.datetime = Clock
    collection = fetch("llama.cpp")
    smollm2 = read_metadata(fetch("smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf")
    texts = {name: (collection / file).read_text() for name, file in COMMITTED.items()}
    texts |= {"smollm2": smollm2["tokenizer.chat_template"], "sparkrt-tiny": (TINY / "chat_template.jinja").read_text()}
    OUT.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        if name != "sparkrt-tiny":
            (OUT / f"{name}.jinja").write_text(text)
    rendered = {
        "made_with": f"transformers {transformers.__version__}",
        "now": NOW,
        "special_tokens": SPECIAL_TOKENS,
        "scenarios": {name: {"messages": m, "arguments": a} for name, (m, a) in SCENARIOS.items()},
        "expected": {name: render_all(text) for name, text in sorted(texts.items())},
    }
    (OUT / "rendered.json").write_text(json.dumps(rendered, ensure_ascii=False, indent=1) + "\n")
    others = {}
    for file in sorted(set(collection.glob("*.jinja")) - {collection / file for file in COMMITTED.values()}):
        results = render_all(file.read_text())
        others[file.name] = {
            name: hashlib.sha256(text.encode()).hexdigest()[:16] if isinstance(text, str) else text
            for name, text in results.items()
        }
    (OUT / "others.json").write_text(json.dumps(others, ensure_ascii=False, indent=0, separators=(",", ":")) + "\n")
    print(f"{len(texts)} templates with their texts, {len(others)} others, {len(SCENARIOS)} scenarios: {OUT}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
