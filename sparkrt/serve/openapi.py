"""The OpenAPI document, made from the structs that handlers decode and encode."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec

from sparkrt.serve.http import ErrorBody, Handler
from sparkrt.serve.protocol import CHAT_REFUSED, COMPLETION_REFUSED

_REFUSED = ", ".join(sorted({*COMPLETION_REFUSED, *CHAT_REFUSED}))
RULE = (
    "Every field that is not required may be null, which equals absent. Fields not listed here are accepted and have no effect, "
    f"except those that would change the answer, which are refused by name: {_REFUSED}."
)


@dataclass(frozen=True, slots=True)
class Operation:
    """One route: its handler, the struct of its request body (None: it has none) and of its answer."""

    method: str
    path: str
    handler: Handler
    body: type[msgspec.Struct] | None
    answer: type[msgspec.Struct]
    summary: str


@cache
def document(operations: Sequence[Operation], version: str) -> dict[str, Any]:
    """The document of `operations`. Made once, at the first question."""
    types = dict.fromkeys([ErrorBody, *(t for op in operations for t in (op.body, op.answer) if t is not None)])
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    schema = dict(zip(types, schemas, strict=True))
    failure = {"description": "The request is wrong, or cannot be served now", "content": _json(schema[ErrorBody])}
    paths: dict[str, Any] = {}
    for op in operations:
        entry: dict[str, Any] = {
            "summary": op.summary,
            "operationId": op.handler.__name__,
            "responses": {"200": {"description": "The answer", "content": _json(schema[op.answer])}, "default": failure},
        }
        if op.body is not None:
            entry["requestBody"] = {"required": True, "content": _json(schema[op.body])}
        if names := re.findall(r"{(\w+)", op.path):
            entry["parameters"] = [{"name": n, "in": "path", "required": True, "schema": {"type": "string"}} for n in names]
        paths.setdefault(re.sub(r":\w+}", "}", op.path), {})[op.method.lower()] = entry
    return {
        "openapi": "3.1.0",
        "info": {"title": "sparkrt", "version": version, "description": RULE},
        "paths": paths,
        "components": {"schemas": components},
    }


def _json(schema: Any) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
