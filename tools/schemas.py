"""Whether answers that must follow random JSON schemas do: `python -m tools.schemas [--count 200] [--url URL] [--seed 0]`.

Each schema is asked of a server, the bundled model's unless one is named, at temperature 1: so the model wants all sorts of
things. Texts and lists are bounded; decimals and trees are not, and a penalty on repetition keeps a small model from going on
with them for ever. Prints what does not validate; the exit status is 1 then.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import jsonschema

PARALLEL, PATIENCE = 4, 600.0  # requests at once, s
WORDS = ("name", "size", "when", "tags", "at", "kind", "note", "größe", "a b", "x")
FORMATS = {
    "date": r"^\d{4}-\d{2}-\d{2}$",
    "code": "^[A-Z]{2,4}-[0-9]{1,6}$",
    "word": "^[a-zäöü]{1,9}$",
    "hex": "^(0x)?[0-9a-f]{2}$",
}
Schema = dict[str, Any]


def random_schema(rng: random.Random, depth: int = 3) -> Schema:
    """An object's schema: typed, bounded, with unions, enumerations, patterns, references and a recursive part."""
    defs = {
        "point": _object(rng, 0),
        "tree": {"type": "object", "properties": {"v": _scalar(rng), "next": {"$ref": "#/$defs/tree"}}},
    }
    defs["tree"] |= {"required": ["v"], "additionalProperties": False}
    return {**_object(rng, depth), "$defs": defs}


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(WORDS, rng.randint(1, 4))
    required = [name for name in names if rng.random() < 0.7]
    properties = {name: _value(rng, depth - 1) for name in names}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _value(rng: random.Random, depth: int) -> Schema:
    if depth <= 0 or rng.random() < 0.5:
        return _scalar(rng)
    kind = rng.choice(("object", "array", "anyOf", "$ref", "tuple"))
    if kind == "object":
        return _object(rng, depth)
    if kind == "array":
        low = rng.randint(0, 2)
        return {"type": "array", "items": _value(rng, depth - 1), "minItems": low, "maxItems": low + rng.randint(0, 2)}
    if kind == "tuple":
        return {"type": "array", "prefixItems": [_scalar(rng), _scalar(rng)], "items": False, "minItems": 2}
    if kind == "anyOf":
        return {"anyOf": [_value(rng, depth - 1), {"type": "null"}]}
    return {"$ref": f"#/$defs/{rng.choice(('point', 'tree'))}"}


def _scalar(rng: random.Random) -> Schema:
    low = rng.randint(-50, 50)
    return rng.choice(
        [
            {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 1000)},
            {"type": "number", "minimum": low, "exclusiveMaximum": low + rng.randint(1, 9)},
            {"type": "string", "maxLength": rng.randint(0, 20)},
            {"type": "string", "minLength": rng.randint(0, 5), "maxLength": rng.randint(5, 12)},
            {"type": "string", "pattern": rng.choice(list(FORMATS.values()))},
            {"type": "string", "format": rng.choice(["date", "uuid", "ipv4", "date-time", "time"])},
            {"type": rng.choice(["boolean", "null"])},
            {"type": ["integer", "null"], "minimum": 0, "maximum": 99},
            {"enum": rng.sample(["red", "green", 5, None, True, 'a "b"', 2.5, "é\n"], rng.randint(1, 4))},
            {"const": rng.choice(["fixed", 7, False])},
        ]
    )


def ask(http: httpx.Client, schema: Schema, seed: int) -> str | None:
    """What is wrong with the answer; None: nothing."""
    shape = {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema, "strict": True}}
    body = {"messages": [{"role": "user", "content": "Tell me of a thing."}], "temperature": 1, "seed": seed, "max_tokens": 1500}
    body["frequency_penalty"] = 1.0
    response = http.post("/v1/chat/completions", json={**body, "response_format": shape})
    if response.status_code != 200:
        return response.text
    choice = response.json()["choices"][0]
    try:
        checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
        jsonschema.Draft202012Validator(schema, format_checker=checker).validate(json.loads(choice["message"]["content"]))
    except (ValueError, jsonschema.ValidationError) as error:
        return f"{choice['finish_reason']}: {choice['message']['content']!r}: {error}"
    return None


def check(url: str, count: int, seed: int) -> int:
    rng = random.Random(seed)
    schemas = [random_schema(rng) for _ in range(count)]
    with httpx.Client(base_url=url, timeout=PATIENCE) as http, ThreadPoolExecutor(PARALLEL) as pool:
        wrong = [(s, w) for s, w in zip(schemas, pool.map(lambda i: ask(http, schemas[i], i), range(count)), strict=True) if w]
    for schema, what in wrong:
        print(json.dumps(schema), what, sep="\n  ")
    print(f"{count - len(wrong)} of {count} answers follow their schemas")
    return 1 if wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--url", help="a running server (default: one with the bundled model)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.url:
        return check(args.url, args.count, args.seed)
    command = [sys.executable, "-m", "sparkrt.serve", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = next(line.split(" at ")[1].removesuffix("/v1\n") for line in server.stdout if " at http" in line)
            return check(url, args.count, args.seed)
        finally:
            server.terminate()


if __name__ == "__main__":
    sys.exit(main())
