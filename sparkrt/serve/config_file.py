"""`--config FILE`: flags from a YAML file, with their names as keys. What the command line says as well, it decides."""

from __future__ import annotations

import argparse
import difflib
import json
from pathlib import Path
from typing import Any

from sparkrt.engine.flags import Parser


def read_config(path: str, parser: Parser) -> dict[str, Any]:
    """The options that the file gives, as `parser` would from a command line. Exits 2 with a line that names file and key."""
    parser.where = f"{path}: "
    known = {name.removeprefix("--"): action for name, action in parser._option_string_actions.items() if name.startswith("--")}
    argv = list[str]()
    for key, value in _read(Path(path), parser).items():
        name = str(key).replace("_", "-")
        if name not in known or name in ("help", "config"):
            near = difflib.get_close_matches(name, known, 1)
            parser.error(f"{key!r} is not a flag" + (f": is {near[0]} meant?" if near else ""))
        if value is not None:
            argv += _flag(name, value, known[name], parser)
    options = vars(parser.parse_args(argv))
    parser.where = ""
    return options


def _read(path: Path, parser: Parser) -> dict[Any, Any]:
    import yaml  # type: ignore[import-untyped]  # an import that only this needs

    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        parser.error(f"it cannot be read: {error}")
    except yaml.YAMLError as error:
        parser.error(f"it is not YAML: {' '.join(str(error).split())}")
    if not isinstance(found, dict | None):
        parser.error(f"flags and their values are expected, got a {type(found).__name__}")
    return found or {}


def _flag(name: str, value: Any, action: argparse.Action, parser: Parser) -> list[str]:
    """A flag with its value as a command line has them."""
    if action.nargs == 0:
        if not isinstance(value, bool):
            parser.error(f"{name} must be true or false, got {value!r}")
        negated = f"--no-{name}"
        return [f"--{name}"] if value else [negated] if negated in action.option_strings else []
    if action.nargs == "+":
        return [f"--{name}", *map(_text, value if isinstance(value, list) else [value])]
    return [f"--{name}={_text(value)}"]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
