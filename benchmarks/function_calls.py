"""How often a served model calls the right function with the right arguments.

    python -m benchmarks.function_calls DIALOGUES [--url URL] [--tool-choice required]

DIALOGUES: JSON lines of {messages, tools, expected: {name, arguments}}, cut where a call is due. Without --url the bundled model
is served for it. Greedy; a call counts if it is the first of its answer.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import jsonschema

PARALLEL, LIMIT, PATIENCE = 8, 256, 300.0  # requests at once, tokens of an answer, s


def first_call(http: httpx.Client, dialogue: dict[str, Any], tool_choice: str) -> tuple[str | None, Any]:
    """(name, arguments) of the first call of an answer; (None, None) where it calls nothing."""
    body = {"messages": dialogue["messages"], "tools": dialogue["tools"], "tool_choice": tool_choice}
    response = http.post("/v1/chat/completions", json={**body, "temperature": 0, "max_tokens": LIMIT})
    response.raise_for_status()
    for call in response.json()["choices"][0]["message"].get("tool_calls", []):
        return call["function"]["name"], json.loads(call["function"]["arguments"])
    return None, None


def score(url: str, dialogues: list[dict[str, Any]], tool_choice: str) -> dict[str, int]:
    with httpx.Client(base_url=url, timeout=PATIENCE) as http, ThreadPoolExecutor(PARALLEL) as pool:
        calls = list(pool.map(lambda dialogue: first_call(http, dialogue, tool_choice), dialogues))
    wanted = [(dialogue["expected"]["name"], dialogue["expected"]["arguments"]) for dialogue in dialogues]
    named = sum(call[0] == right[0] for call, right in zip(calls, wanted, strict=True))
    valid = sum(fits(*call, dialogue["tools"]) for call, dialogue in zip(calls, dialogues, strict=True))
    right = sum(map(tuple.__eq__, calls, wanted))
    return {"dialogues": len(dialogues), "right_function": named, "right_arguments": right, "valid_arguments": valid}


def fits(name: str | None, arguments: Any, tools: list[dict[str, Any]]) -> bool:
    """Whether a tool of this name was offered and its schema allows the arguments."""
    schemas = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in tools}
    return name in schemas and jsonschema.Draft202012Validator(schemas[name]).is_valid(arguments)


def main() -> int:
    parser = argparse.ArgumentParser(description="How often a served model calls the right function.")
    parser.add_argument("dialogues", type=Path)
    parser.add_argument("--url", help="a running server (default: one with the bundled model)")
    parser.add_argument("--tool-choice", default="auto", choices=("auto", "required"))
    arguments = parser.parse_args()
    dialogues = [json.loads(line) for line in arguments.dialogues.read_text(encoding="utf-8").splitlines()]
    if arguments.url:
        print(json.dumps(score(arguments.url, dialogues, arguments.tool_choice)))
        return 0
    command = [sys.executable, "-m", "sparkrt.serve", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = next(line.split(" at ")[1].removesuffix("/v1\n") for line in server.stdout if " at http" in line)
            print(json.dumps(score(url, dialogues, arguments.tool_choice)))
        finally:
            server.terminate()
    return 0


if __name__ == "__main__":
    sys.exit(main())
