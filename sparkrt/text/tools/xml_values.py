"""Grammars of bare values: texts that `coerce` turns into what a schema allows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparkrt.text.grammar import escape_regex, json_schema, quote
from sparkrt.text.messages import bad
from sparkrt.text.tools.calls import dumps
from sparkrt.text.tools.coerce import DEPTH, resolve, types_of

END = "\n</parameter>\n"
_END = r"\n<\/parameter>\n"
# no other tag is part of a text: it would end the value, too, when that is read
_TAGS = r"~/(?s:.*)(<parameter=|<\/function>|<\/tool_call>|[^\n]<\/parameter>|<\/parameter>[^\n])(?s:.*)/"
TEXT_RULES = [f"TEXT: /(?s:.*){_END}/ & {_TAGS}", "text[lazy]: TEXT"]  # any text, and the tag that ends it


def value_rules(name: str, schema: Any, root: Mapping[str, Any], param: str) -> list[str]:
    """Rules of Lark, the first called `name`: a value that `schema`, a part of `root`, allows, and the tag that ends it."""
    literals, texts, rest = list[str](), list[str](), list[Any]()
    _collect(schema, root, literals, texts, rest)
    options, rules = [quote(literal + END) for literal in dict.fromkeys(literals)], list[str]()
    for i, text in enumerate(dict.fromkeys(texts)):
        options.append(f"{name}_text{i}" if text else "text")
        if text:
            terminal = f"{name.upper()}_TEXT{i}"
            rules += [f"{name}_text{i}[lazy]: {terminal}", f"{terminal}: {text} & {_TAGS}"]
    if rest:
        shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
        schema = {**(rest[0] if len(rest) == 1 else {"anyOf": rest}), **shared}
        options.append(f"{name}_json {quote(END)}")
        rules.append(f"{name}_json: %json {dumps(json_schema(schema, param))}")
    if not options:
        raise bad(param, "nothing can satisfy it")
    return [f"{name}: {' | '.join(options)}", *rules]


def _collect(
    schema: Any, root: Mapping[str, Any], literals: list[str], texts: list[str], rest: list[Any], depth: int = 0
) -> None:
    """Sorts what `schema` allows into literals, terminals of strings ("": any string) and schemas of other JSON."""
    schema = resolve(schema, root)
    if not isinstance(schema, Mapping) or depth > DEPTH:
        texts += [] if schema is False else [""]
        return
    if "enum" in schema or "const" in schema:
        values = schema.get("enum") or [schema.get("const")]
        literals += [value if isinstance(value, str) else dumps(value) for value in values if "\n</" not in str(value)]
        return
    for key in ("anyOf", "oneOf"):
        if isinstance(parts := schema.get(key), list):
            for part in parts:
                _collect(part, root, literals, texts, rest, depth + 1)
            return
    types = types_of(schema, root)
    if "string" in types:  # beside other types, too: every value is a text
        texts.append(_text(schema))
        return
    literals += ["null"] * ("null" in types) + ["true", "false"] * ("boolean" in types)
    if others := sorted(types - {"null", "boolean"}):
        rest.append({**schema, "type": others[0] if len(others) == 1 else others} if "type" in schema else schema)


def _text(schema: Mapping[str, Any]) -> str:
    """A terminal of Lark for a string with a pattern or bounds, and the tag after it; "" for any string."""
    parts, pattern = list[str](), schema.get("pattern")
    least, most = schema.get("minLength"), schema.get("maxLength")
    if isinstance(least, int) or isinstance(most, int):
        parts.append(f"/(?s:.{{{least or 0},{most if isinstance(most, int) else ''}}}){_END}/")
    if isinstance(pattern, str):
        before, after = "" if pattern.startswith("^") else "(?s:.*)", "" if pattern.endswith("$") else "(?s:.*)"
        parts.append(f"/{before}({escape_regex(pattern.removeprefix('^').removesuffix('$'))}){after}{_END}/")
    return " & ".join(parts)
