"""The command line of `sparkrt serve`: the field's flag names, checked here, one line and exit code 2 for what cannot be.

A flag is here if it does something today, or if scripts carry it and it can be accepted without lying; those of the second kind
are named at start-up.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, NoReturn

from sparkrt.engine.config import BLOCK_SIZES, DEVICES, DTYPES, LOAD_FORMATS, EngineConfig
from sparkrt.engine.params import MAX_LOGPROBS
from sparkrt.errors import LoadError

BUNDLED = "sparkrt-tiny"

_ENGINE_OPTIONS = {option.name for option in fields(EngineConfig)}

# flag → (takes a value, why it does nothing here)
_WITHOUT_EFFECT: dict[str, tuple[bool, str]] = {
    "--enable-chunked-prefill": (False, "prompts are always prefilled in chunks"),
    "--enable-prefix-caching": (False, "there is no prefix cache yet"),
    "--no-enable-prefix-caching": (False, "there is no prefix cache yet"),
    "--trust-remote-code": (False, "code from a checkpoint is never run"),
    "--disable-log-requests": (False, "requests are not logged unless asked for"),
    "--disable-uvicorn-access-log": (False, "there is no access log unless --enable-log-requests"),
    "--mamba-ssm-cache-dtype": (True, "recurrent state is always float32"),
    "--swap-space": (True, "nothing is swapped"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeArgs:
    """What the API process was asked to do; `engine` is for the other side."""

    engine: EngineConfig
    model: str  # as typed, or the bundled model's name
    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free one
    served_model_name: tuple[str, ...] = ()
    chat_template: str | None = None  # a file, or a template itself, replacing the model's
    default_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    max_logprobs: int = MAX_LOGPROBS
    max_num_queued_reqs: int | None = None
    stream_interval: int = 1
    shutdown_timeout: float = 5.0
    enable_log_requests: bool = False
    disable_log_stats: bool = False
    uvicorn_log_level: str = "warning"
    allowed_origins: tuple[str, ...] = ()
    without_effect: tuple[str, ...] = ()  # lines that say so

    @property
    def names(self) -> tuple[str, ...]:
        """Names the model answers to; the first is echoed."""
        return self.served_model_name or (self.model,)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: error: {message} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(2)


def parse(argv: list[str], prog: str = "sparkrt serve") -> ServeArgs:
    """Exits 2 with one line on stderr when `argv` is wrong."""
    parser = _build(prog)
    options = vars(parser.parse_args(argv))
    typed, named = options.pop("model"), options.pop("model_option")
    if typed and named and typed != named:
        parser.error(f"two models named: {typed} and {named}")
    model: str | None = typed or named
    ignored = options.pop("without_effect") or []
    tensor_parallel, kv_dtype = options.pop("tensor_parallel_size"), options.pop("kv_cache_dtype")
    if tensor_parallel != 1:
        parser.error(f"--tensor-parallel-size {tensor_parallel}: only 1 is supported yet")
    if kv_dtype != "auto":
        parser.error(f"--kv-cache-dtype {kv_dtype}: only auto is supported yet")
    if options["dtype"] in _DTYPE_ALIASES:
        options["dtype"] = _DTYPE_ALIASES[options["dtype"]]
    engine = {name: options.pop(name) for name in _ENGINE_OPTIONS & options.keys()}
    try:
        config = EngineConfig(model=model, **{name: value for name, value in engine.items() if value is not None})
    except LoadError as error:
        parser.error(_as_flag(str(error)))
    return ServeArgs(
        engine=config,
        model=model or BUNDLED,
        served_model_name=tuple(options.pop("served_model_name") or ()),
        allowed_origins=tuple(options.pop("allowed_origins")),
        without_effect=tuple(f"{flag} has no effect: {_WITHOUT_EFFECT[flag][1]}" for flag in dict.fromkeys(ignored)),
        **options,
    )


_DTYPE_ALIASES = {"half": "float16", "float": "float32", "fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}


def _as_flag(message: str) -> str:
    """An `EngineConfig` message begins with the option's name; here it is a flag."""
    name, _, rest = message.partition(" ")
    return f"--{name.replace('_', '-')} {rest}" if name.rstrip(":") in _ENGINE_OPTIONS else message


def _build(prog: str) -> argparse.ArgumentParser:
    parser = _Parser(prog=prog, allow_abbrev=False, description="Serve a model over the OpenAI API.")
    parser.add_argument("model", nargs="?", metavar="MODEL", help=f"folder, GGUF file or hub id (default: the bundled {BUNDLED})")
    parser.add_argument("--model", "--model-path", dest="model_option", metavar="MODEL", help="the same, as a flag")

    group = parser.add_argument_group("server")
    add = group.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s; 0.0.0.0 for all)")
    add("--port", type=_port, default=8000, help="port (default: %(default)s; 0 picks a free one and prints it)")
    add("--served-model-name", nargs="+", metavar="NAME", help="names the model answers to; the first is echoed")
    add(
        "--max-num-queued-reqs", type=_natural, metavar="N", help="answer 503 when more than N sequences wait (default: no limit)"
    )
    add("--stream-interval", type=_positive, default=1, metavar="N", help="tokens per streamed chunk (default: %(default)s)")
    add(
        "--max-logprobs",
        type=_logprobs,
        default=20,
        metavar="N",
        help="most alternatives a request may ask for (default: %(default)s)",
    )
    add(
        "--allowed-origins",
        type=_json_list,
        default=[],
        metavar="JSON",
        help="CORS origins, for example '[\"*\"]' (default: none)",
    )
    add(
        "--shutdown-timeout",
        type=_seconds,
        default=5.0,
        metavar="S",
        help="seconds that running requests get at the end (default: 5)",
    )
    add("--enable-log-requests", action="store_true", help="log a line per request (never its prompt)")
    add("--disable-log-stats", action="store_true", help="no line of throughput every 10 s")
    add("--uvicorn-log-level", choices=("critical", "error", "warning", "info", "debug"), default="warning")

    add = parser.add_argument_group("text").add_argument
    add("--tokenizer", metavar="PATH", help="where another tokenizer than the model's lies")
    add("--chat-template", metavar="FILE", help="a Jinja file, or a template itself, replacing the model's")
    add(
        "--default-chat-template-kwargs", type=_json_object, default={}, metavar="JSON", help="variables every chat template gets"
    )
    add("--generation-config", metavar="WHERE", help="sampling defaults: auto (the model's), vllm (none) or a folder")
    add("--override-generation-config", type=_json_object, metavar="JSON", help="for example '{\"temperature\": 0.5}'")

    add = parser.add_argument_group("engine").add_argument
    add("--device", choices=DEVICES)
    add("--dtype", choices=(*DTYPES, *_DTYPE_ALIASES))
    add("--load-format", choices=LOAD_FORMATS, help="dummy: random weights from the configuration alone")
    add(
        "--max-model-len", "--context-length", metavar="N", help="context in tokens; 32k works; auto or -1: the largest that fits"
    )
    add("--max-num-seqs", "--max-running-requests", metavar="N", help="sequences that run at once")
    add("--max-num-batched-tokens", "--chunked-prefill-size", metavar="N", help="tokens per step")
    add("--block-size", "--page-size", type=int, choices=BLOCK_SIZES, help="tokens per KV page")
    add("--num-gpu-blocks-override", metavar="N", help="KV pages, instead of what memory allows")
    add("--gpu-memory-utilization", "--mem-fraction-static", type=_number, metavar="F", help="share of GPU memory to use")
    add("--kv-cache-memory-bytes", metavar="N", help="bytes for the KV cache; 2G works")
    add("--seed", type=_seed, help="seed of seeds, and of dummy weights")
    add("--enforce-eager", action="store_true", default=None, help="no graphs")
    add("--batch-invariant", action="store_true", default=None, help="one reduction order whatever the batch")
    add("--async-scheduling", action=argparse.BooleanOptionalAction, help="launch a step before the last is read")
    add("--tensor-parallel-size", "-tp", "--tp-size", type=_positive, default=1, metavar="N", help="1 is all there is yet")
    add("--kv-cache-dtype", default="auto", metavar="DTYPE", help="auto is all there is yet")

    add = parser.add_argument_group("accepted, without effect").add_argument
    for flag, (takes_value, why) in _WITHOUT_EFFECT.items():
        add(flag, nargs=1 if takes_value else 0, action=_Note, dest="without_effect", metavar="X", help=why)
    return parser


class _Note(argparse.Action):
    """Remembers that the flag was given."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        namespace.without_effect = [*(namespace.without_effect or []), option]


def _whole(text: str, low: int, high: int, what: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = low - 1
    if not low <= value <= high:
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return value


_port = partial(_whole, low=0, high=65535, what="a port (0 to 65535)")
_positive = partial(_whole, low=1, high=2**31 - 1, what="a whole number of at least 1")
_natural = partial(_whole, low=0, high=2**31 - 1, what="a whole number of at least 0")
_logprobs = partial(_whole, low=0, high=MAX_LOGPROBS, what=f"a whole number from 0 to {MAX_LOGPROBS}")
_seed = partial(_whole, low=-(2**63), high=2**63 - 1, what="a whole number of 64 bits")


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def _seconds(text: str) -> float:
    value = _number(text)
    if not 0 <= value <= 86400:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds (0 to 86400)")
    return value


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None


def _json_object(text: str) -> dict[str, Any]:
    value = _json(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value


def _json_list(text: str) -> list[str]:
    value = _json(text)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON list of strings")
    return value
