"""Values that a model writes as bare text, in the types that the schema of a function asks for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sparkrt.text.tools.calls import dumps

_NAMES: dict[type, str] = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
_ALL = frozenset(("string", "boolean", "integer", "number", "array", "object", "null"))
DEPTH = 16  # of references and alternatives that are followed


def types_of(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """The types that `schema`, a part of `root`, lets a value have; all of them where it does not say."""
    schema = resolve(schema, root)
    if not isinstance(schema, Mapping) or depth > DEPTH:
        return _ALL
    named = schema.get("type")
    if named is not None:
        return frozenset([named] if isinstance(named, str) else map(str, named) if isinstance(named, list) else ()) or _ALL
    if isinstance(schema.get("enum"), list) or "const" in schema:
        values = schema.get("enum") or [schema.get("const")]
        return frozenset("null" if value is None else _NAMES.get(type(value), "string") for value in values)
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(parts := schema.get(key), list) and parts:
            kinds = [types_of(part, root, depth + 1) for part in parts]
            return frozenset.intersection(*kinds) or _ALL if key == "allOf" else frozenset.union(*kinds)
    return frozenset(["object"]) if "properties" in schema else _ALL


def resolve(schema: Any, root: Mapping[str, Any]) -> Any:
    """What `schema` refers to, at last; None if that is not within `root`."""
    for _ in range(DEPTH):
        if not isinstance(schema, Mapping) or not isinstance(ref := schema.get("$ref"), str):
            return schema
        schema = root if ref.startswith("#") else None
        for step in ref.split("/")[1:]:
            schema = schema.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(schema, Mapping) else None
    return None


def coerce(text: str, types: frozenset[str]) -> str:
    """The JSON of a value written as `text`, in one of `types` if it can be read as that; a string otherwise."""
    bare = text.strip()
    if "null" in types and bare.lower() in ("null", "none"):
        return "null"
    if "boolean" in types and bare.lower() in ("true", "false"):
        return bare.lower()
    value = loads(bare)
    if isinstance(value, float) and value.is_integer() and "integer" in types and "number" not in types:
        return str(int(value))  # 5.0 is an integer
    kind = _NAMES.get(type(value), "string")
    if kind in ("array", "object", "integer", "number") and (kind in types or (kind == "integer" and "number" in types)):
        return bare
    return dumps(text)


def loads(text: str) -> Any:
    """The value of JSON by the letter; None for the rest, and for null."""
    try:
        return json.loads(text, parse_constant=int)  # int refuses NaN and Infinity
    except (ValueError, RecursionError):
        return None
