"""/openapi.json: its types come from the structs that are decoded and encoded, its ranges from `SamplingParams`, and its words
from openapi.toml.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec

from sparkrt.engine.params import SamplingParams
from sparkrt.serve import protocol as p
from sparkrt.serve.cli import VERSION
from sparkrt.serve.keys import OPEN_TO_ALL

JSON = dict[str, Any]
_KEYS: JSON = {"bearer": {"type": "http", "scheme": "bearer"}, "header": {"type": "apiKey", "in": "header", "name": "x-api-key"}}
_NOT_JSON = {str: "text/plain"}
_RANGES = {f.name: f.metadata["range"] for f in fields(SamplingParams) if "range" in f.metadata}
_REQUESTS = {kind.__name__ for kind in p.REFUSED}  # what ranges of sampling parameters are for


def document(operations: Sequence[tuple[Any, ...]]) -> JSON:
    """OpenAPI 3.1 of `operations`: rows of method, path, handler, struct of the body or None, struct of the answer, summary."""
    words = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    kinds = dict.fromkeys([p.ErrorBody, p.AnthropicError, *(kind for row in operations for kind in row[3:5] if kind)])
    made, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    schemas = dict(zip(kinds, made, strict=True))
    for name, schema in components.items():
        for field, about in schema.get("properties", {}).items():
            _describe(about, words["fields"].get(f"{name}.{field}", words["fields"].get(field, {})))
            if name in _REQUESTS and field in _RANGES and not _is_flag(about):
                about |= dict(zip(("minimum", "maximum"), _RANGES[field], strict=True))
    paths = dict[str, Any]()
    for method, route, handler, body, answer, summary in operations:
        path = re.sub(r":\w+}", "}", route)
        about = {"tag": "Operation", "description": handler.__doc__} | words.get(f"{method} {path}", {})
        entry: JSON = {"operationId": handler.__name__, "summary": summary, "tags": [about["tag"]]}
        if about["description"]:
            entry["description"] = about["description"]
        if body is not None:
            form = {"schema": schemas[body]} | ({"example": about["example"]} if "example" in about else {})
            entry["requestBody"] = {"required": True, "description": _others(body), "content": {"application/json": form}}
        if names := re.findall(r"{(\w+)", path):
            entry["parameters"] = [{"name": n, "in": "path", "required": True, "schema": {"type": "string"}} for n in names]
        if "query" in about:
            entry.setdefault("parameters", []).extend({"name": n, "in": "query", **rest} for n, rest in about["query"].items())
        entry["security"] = [] if OPEN_TO_ALL.fullmatch(path) else [{}, *({name: []} for name in _KEYS)]
        entry["responses"] = _responses(path, (body, answer), schemas, words["errors"], about)
        paths.setdefault(path, {})[method.lower()] = entry
    info = {"title": "sparkrt", "version": VERSION, "description": words["info"]["description"]}
    tags = [{"name": name, "description": text} for name, text in words["tags"].items()]
    parts = {"schemas": components | words["schemas"], "securitySchemes": _KEYS}
    return {"openapi": "3.1.0", "info": info, "tags": tags, "paths": paths, "components": parts}


def _others(body: Any) -> str:
    """What becomes of fields that a body's struct does not have."""
    rules = {"Accepted, without effect": p.WITHOUT_EFFECT.get(body, ()), "Refused by name": p.REFUSED.get(body, ())}
    said = [f"{rule}: {', '.join(f'`{name}`' for name in sorted(names))}." for rule, names in rules.items() if names]
    return " ".join([*said, "Any other field is accepted and has no effect."])


def _describe(schema: JSON, about: str | JSON) -> None:
    """Put words and narrower types into the schema of a field. `schema` or `items` in `about` name a component."""
    about = {"description": about} if isinstance(about, str) else dict(about)
    if schema.get("default", 0) is None:  # null equals absent everywhere
        del schema["default"]
    if (name := about.pop("schema", None)) is not None:
        schema["anyOf"] = [{"$ref": f"#/components/schemas/{name}"}, {"type": "null"}]
    if (name := about.pop("items", None)) is not None:
        schema["items"] = {"$ref": f"#/components/schemas/{name}"}
    schema |= about


def _is_flag(schema: JSON) -> bool:
    return {"type": "boolean"} in schema.get("anyOf", [schema])


def _responses(path: str, row: tuple[Any, Any], schemas: JSON, texts: JSON, about: JSON) -> JSON:
    """By status; `row`: the structs of body and answer. `about` may name the only `statuses` beside 200 and 401."""
    body, answer = row
    told = schemas[p.AnthropicError if path.startswith("/v1/messages") else p.ErrorBody]
    right, wrong = (
        {_NOT_JSON.get(answer, "application/json"): {"schema": schemas[answer]}},
        {"application/json": {"schema": told}},
    )
    asked = () if body is None else body.__struct_fields__
    streamed = (
        {"text/event-stream": {"schema": _event(schemas[answer], told, about.get("events"))}}
        if "stream" in asked and about.get("events") != []
        else {}
    )
    statuses: JSON = {"200": {"description": "The answer.", "content": right | streamed}}
    if "statuses" in about:
        statuses |= {status: {"description": text, "content": right} for status, text in about["statuses"].items()}
    else:
        found = ["500", "503"] + (["400", "413", "415"] if asked else ["400"] if "query" in about else [])
        found += ["404"] if "model" in asked or "{" in path else []
        said = {status: texts[status] for status in found} | about.get("errors", {})
        statuses |= {status: {"description": text, "content": wrong} for status, text in said.items()}
    if not OPEN_TO_ALL.fullmatch(path):
        statuses["401"] = {"description": texts["401"], "content": wrong}
    return dict(sorted(statuses.items()))


def _event(chunk: JSON, error: JSON, names: list[str] | None) -> JSON:
    """Each server-sent event: of these names, which are the `type` of its data, too; or a chunk, and [DONE] at the end."""
    if names is not None:
        kind = {"type": "object", "required": ["type"], "properties": {"type": {"enum": [*names, "error"]}}}
        data: JSON = {"type": "string", "contentMediaType": "application/json", "contentSchema": kind}
        properties = {"event": {"enum": [*names, "error"]}, "data": data}
    else:
        data = {"contentMediaType": "application/json", "contentSchema": {"anyOf": [chunk, error]}}
        properties = {"data": {"type": "string", "anyOf": [{"const": "[DONE]"}, data]}}
    return {"type": "object", "description": "Each event.", "required": list(properties), "properties": properties}
