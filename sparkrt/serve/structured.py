"""What a request wants an answer's text to follow, under each of the names the field has for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparkrt.serve.http import require
from sparkrt.text.grammar import Body, body_of, structure

_GUIDED = {f"guided_{kind}": kind for kind in ("json", "regex", "choice", "grammar")}


def asked_structure(body: Any) -> tuple[Body, str] | None:
    """The grammar and the field that asks for it; None where any text will do. RequestError for two, or what is none."""
    found = list[tuple[Body, str]]()
    if (given := body_of(body.structured_outputs, "structured_outputs")) is not None:
        found.append((given, "structured_outputs"))
    for name, kind in _GUIDED.items():
        if (value := getattr(body, name)) is not None and value != []:
            found.append((structure(kind, value, name), name))
    if body.response_format is not None:
        found += _response_format(body.response_format)
    if len(found) > 1:
        require(False, found[1][1], f"{found[0][1]} and {found[1][1]} exclude each other")
    return found[0] if found else None


def _response_format(asked: Mapping[str, Any]) -> list[tuple[Body, str]]:
    name, kind = "response_format", asked.get("type")
    require(kind in ("text", "json_object", "json_schema"), name, f"{name}.type: expected text, json_object or json_schema")
    if kind == "text":
        return []
    if kind == "json_object":
        return [(structure("json_object", True, name), name)]
    details = asked.get("json_schema")
    require(isinstance(details, Mapping), name, f"{name}.json_schema: expected an object with a name and a schema")
    assert isinstance(details, Mapping)
    schema = details.get("schema", {})  # OpenAI lets it be absent: any JSON then
    return [(structure("json", schema, name), name)]
