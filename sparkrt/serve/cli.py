"""The `sparkrt` command: `info`, and `serve` with the field's flag names, checked here.

Those that other engines have and this one does not are in foreign.py. Flags have no defaults of their own: those of `ServeArgs`
and `EngineConfig` hold.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from sparkrt.engine.config import EngineConfig, load_engine, load_text
from sparkrt.engine.flags import BUNDLED, RULES, Parser, add_engine, add_model, checked, port, positive, seconds, take_engine
from sparkrt.engine.params import MAX_LOGPROBS
from sparkrt.serve.foreign import add_foreign
from sparkrt.text.reasoning import PARSERS
from sparkrt.text.tools import FORMATS

try:
    VERSION = version("sparkrt")
except PackageNotFoundError:  # run from a source tree that was never installed
    VERSION = "0+source"
_USAGE = """usage: sparkrt COMMAND ...

commands:
  serve    serve a model over the OpenAI API (sparkrt serve --help)
  chat     talk to a model in a terminal (sparkrt chat --help)
  bench    load a server, or time the engine (sparkrt bench --help)
  info     say what this machine has, and what is missing to use its GPU"""
_TLS = ("ssl_certfile", "ssl_keyfile")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeArgs:
    """What the API process was asked to do; `engine` is for the other side."""

    engine: EngineConfig
    model: str  # as typed, or the bundled model's name
    names: list[str]  # the model answers to; the first is echoed
    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free one
    uds: str | None = None  # a Unix domain socket to listen on instead
    ssl_certfile: str | None = None  # with its key: HTTPS
    ssl_keyfile: str | None = None
    root_path: str = ""  # under which a proxy offers all this
    chat_template: str | None = None  # a file, or a template itself, replacing the model's
    default_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    tool_call_parser: str = "auto"  # as the chat template shows calls
    reasoning_parser: str = "auto"
    max_logprobs: int = MAX_LOGPROBS
    stream_interval: int = 1
    shutdown_timeout: float = 5.0
    enable_log_requests: bool = False
    access_log: str | None = None  # a file, "-": stdout
    enable_force_include_usage: bool = False
    disable_log_stats: bool = False
    uvicorn_log_level: str = "warning"
    allowed_origins: list[str] = field(default_factory=list)  # whose pages may ask (CORS)
    allowed_methods: list[str] = field(default_factory=lambda: ["*"])
    allowed_headers: list[str] = field(default_factory=lambda: ["*"])
    allow_credentials: bool = False
    api_keys: list[str] = field(default_factory=list)  # none: everybody may ask
    response_store: str | None = None  # a file for what /v1/responses keeps; memory, unless asked for: it holds what people say
    response_store_bytes: int = 64 * 2**20  # of it
    without_effect: list[str] = field(default_factory=list)  # flags that were given


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 done, 1 what was asked for cannot be served, 2 the command line is wrong."""
    command, *rest = (sys.argv[1:] if argv is None else argv) or [""]
    if command == "serve":
        try:
            from sparkrt.serve.server import run

            return run(parse(rest), load_engine, load_text)
        except KeyboardInterrupt:  # before anything was there to be stopped
            return 0
    if command == "chat":
        from sparkrt.chat.cli import main as chat

        return chat(rest)
    if command == "bench":
        from sparkrt.bench.cli import main as bench

        return bench(rest)
    if command == "info" and not rest:
        from sparkrt.runtime.report import report

        print(f"sparkrt {VERSION}", *(f"  {what:<12} {value}" for what, value in report()), sep="\n")
        return 0
    if command in ("-h", "--help", "help", "-V", "--version", "version"):
        print(f"sparkrt {VERSION}" if command in ("-V", "--version", "version") else _USAGE)
        return 0
    print(f"sparkrt: error: {f'unknown command {command!r}' if command else 'no command'} (see sparkrt --help)", file=sys.stderr)
    return 2


def parse(argv: list[str]) -> ServeArgs:
    """Exits 2 with one line on stderr when `argv` is wrong."""
    parser = _build()
    options = vars(parser.parse_args(argv))
    if (path := options.pop("config", None)) is not None:
        from sparkrt.serve.config_file import read_config

        typed = options
        if {"model", "model_option"} & {name for name, value in typed.items() if value}:
            typed = {"model": None, "model_option": None} | typed
        options = read_config(path, parser) | typed
    if more := options.pop("api_key_file", []):
        options["api_keys"] = [*options.get("api_keys", []), *more]
    if not all(key.strip() for key in options.get("api_keys", [])):
        parser.error("--api-key: a key must not be empty")
    for given, missing in ((a, b) for a in _TLS for b in _TLS):
        if given in options and missing not in options:
            parser.error(f"--{given.replace('_', '-')} needs --{missing.replace('_', '-')}")
    engine = take_engine(options, parser)
    model = engine.model or BUNDLED
    return ServeArgs(engine=engine, **{"model": model, "names": [model], **options})


def _build() -> Parser:
    parser = Parser("sparkrt serve", description="Serve a model over the OpenAI API.", **RULES)
    add_model(parser)
    add = parser.add_argument_group("server").add_argument
    add("--host", help="address to listen on (default: 127.0.0.1; 0.0.0.0 for all)")
    add("--port", type=port, help="port (default: 8000; 0 picks a free one and prints it)")
    add("--uds", metavar="PATH", help="listen on a Unix domain socket instead")
    add("--ssl-certfile", metavar="FILE", help="certificate (PEM): serve HTTPS")
    add("--ssl-keyfile", metavar="FILE", help="its private key")
    add("--root-path", type=_prefix, metavar="PATH", help="path under which a proxy offers the server, which it strips")
    add("--config", metavar="FILE", help="more flags, from YAML with their names as keys; the command line wins")
    add("--served-model-name", dest="names", nargs="+", metavar="NAME", help="names the model answers to; the first is echoed")
    add("--stream-interval", type=positive, metavar="N", help="tokens per streamed chunk (default: 1)")
    add("--max-logprobs", type=_logprobs, metavar="N", help=f"most alternatives of a token (default: {MAX_LOGPROBS})")
    add("--allowed-origins", type=_strings, metavar="JSON", help="CORS origins, for example '[\"*\"]' (default: none)")
    add("--allowed-methods", type=_strings, metavar="JSON", help="methods that those may use (default: '[\"*\"]')")
    add("--allowed-headers", type=_strings, metavar="JSON", help="headers that those may send (default: '[\"*\"]')")
    add("--allow-credentials", action="store_true", help="those may send cookies")
    add("--api-key", dest="api_keys", nargs="+", metavar="KEY", help="keys that requests must bring one of (default: none)")
    add("--api-key-file", type=_keys, metavar="FILE", help="a file of more of them, one a line; other users cannot see it in ps")
    add("--response-store", metavar="FILE", help="where /v1/responses keeps its answers (default: in memory, until the end)")
    add("--response-store-bytes", type=_bytes, metavar="N", help="how much of them; 1G works; 0: nothing (default: 64M)")
    add("--shutdown-timeout", type=seconds, metavar="S", help="seconds that running requests get at the end (default: 5)")
    add("--enable-log-requests", action="store_true", help="log a line per request (never its prompt)")
    add("--access-log", metavar="FILE", help="write a line of JSON per request, never its prompt (-: to stdout)")
    add("--enable-force-include-usage", action="store_true", help="send usage at the end of every stream")
    add("--disable-log-stats", action="store_true", help="no line of throughput every 10 s")
    add("--uvicorn-log-level", choices=("critical", "error", "warning", "info", "debug"))
    add = parser.add_argument_group("text").add_argument
    add("--tokenizer", metavar="PATH", help="where another tokenizer than the model's lies")
    add("--chat-template", metavar="FILE", help="a Jinja file, or a template itself, replacing the model's")
    add("--default-chat-template-kwargs", type=_object, metavar="JSON", help="variables every chat template gets")
    add(
        "--tool-call-parser",
        choices=("auto", "none", *FORMATS),
        help="how calls are written (default: as in the template)",
    )
    add("--reasoning-parser", choices=("auto", "none", *PARSERS), help="how thinking is marked (default: as in the template)")
    add("--generation-config", metavar="WHERE", help="sampling defaults: auto (the model's), vllm (none) or a folder")
    add("--override-generation-config", type=_object, metavar="JSON", help="for example '{\"temperature\": 0.5}'")
    add_engine(parser)
    add_foreign(parser)
    return parser


def _scaled(text: str) -> int:
    unit = {"K": 2**10, "M": 2**20, "G": 2**30}.get(text[-1:].upper(), 1)
    return int(text if unit == 1 else text[:-1]) * unit


def _keys(path: str) -> list[str]:
    try:
        found = Path(path).read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(f"{path}: cannot be read: {error}") from None
    if not found:
        raise argparse.ArgumentTypeError(f"{path}: there is no key in it")
    return found


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None


_bytes = checked(_scaled, lambda n: 0 <= n < 2**48, "a number of bytes, such as 64M")
_prefix = checked(str, lambda path: bool(re.fullmatch(r"(/[^/\s]+)+", path)), "a path such as /llm")
_logprobs = checked(int, lambda n: 0 <= n <= MAX_LOGPROBS, f"a whole number from 0 to {MAX_LOGPROBS}")
_object = checked(_json, lambda value: isinstance(value, dict), "a JSON object")
_strings = checked(_json, lambda value: isinstance(value, list) and {*map(type, value)} <= {str}, "a JSON list of strings")
