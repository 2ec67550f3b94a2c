"""The engine's options as command line flags, for every command that loads a model. They have no defaults: `EngineConfig` has."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import fields
from typing import Any, NoReturn

from sparkrt.engine.config import BLOCK_SIZES, DEVICES, DTYPES, LOAD_FORMATS, SCHEDULING_POLICIES, EngineConfig
from sparkrt.errors import LoadError

BUNDLED = "sparkrt-tiny"
ENGINE_OPTIONS = {option.name for option in fields(EngineConfig)}
RULES: dict[str, Any] = {"allow_abbrev": False, "argument_default": argparse.SUPPRESS}
_DTYPE_ALIASES = {"half": "float16", "float": "float32", "fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
_ONLY = {"tensor_parallel_size": "1", "kv_cache_dtype": "auto"}  # all there is yet


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, after `where` it stands, and exits 2."""

    where = ""

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: error: {self.where}{message} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(2)


def checked(read: Callable[[str], Any], accepts: Callable[[Any], bool], what: str) -> Callable[[str], Any]:
    """A converter that says "'x' is not `what`"."""

    def convert(text: str) -> Any:
        try:
            if accepts(value := read(text)):
                return value
        except ValueError:
            pass
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")

    return convert


positive = checked(int, lambda n: 1 <= n < 2**31, "a whole number of at least 1")
natural = checked(int, lambda n: 0 <= n < 2**31, "a whole number of at least 0")
port = checked(int, lambda n: 0 <= n < 2**16, "a port (0 to 65535)")
number = checked(float, lambda x: True, "a number")
seconds = checked(float, lambda x: 0 <= x <= 86400, "a number of seconds (0 to 86400)")
_seed = checked(int, lambda n: -(2**63) <= n < 2**63, "a whole number of 64 bits")


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help=f"folder, GGUF file or hub id (default: the bundled {BUNDLED})")
    parser.add_argument("--model", "--model-path", dest="model_option", metavar="MODEL", help="the same, as a flag")


def add_engine(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("engine").add_argument
    add("--device", choices=DEVICES)
    add("--dtype", choices=(*DTYPES, *_DTYPE_ALIASES))
    add("--load-format", choices=LOAD_FORMATS, help="dummy: random weights from the configuration alone")
    add("--max-model-len", "--context-length", metavar="N", help="tokens; 32k works; auto or -1: as many as fit")
    add("--max-num-seqs", "--max-running-requests", metavar="N", help="sequences that run at once")
    add("--max-num-batched-tokens", "--chunked-prefill-size", metavar="N", help="tokens per step")
    add("--block-size", "--page-size", type=int, choices=BLOCK_SIZES, help="tokens per KV page")
    add("--num-gpu-blocks-override", metavar="N", help="KV pages, instead of what memory allows")
    add("--gpu-memory-utilization", "--mem-fraction-static", type=number, metavar="F", help="share of GPU memory to use")
    add("--kv-cache-memory-bytes", metavar="N", help="bytes for the KV cache; 2G works")
    add("--seed", "--random-seed", type=_seed, help="seed of seeds, and of dummy weights")
    add("--enforce-eager", "--disable-cuda-graph", action="store_true", help="no graphs")
    add("--enable-sleep-mode", action="store_true", help="let the model be put to sleep (/sleep, /wake_up)")
    add("--batch-invariant", action="store_true", help="one reduction order whatever the batch")
    add("--nvtx", action="store_true", help="name layers and operators for a profiler (with --enforce-eager)")
    add("--async-scheduling", action=argparse.BooleanOptionalAction, help="launch a step before the last is read")
    add("--tensor-parallel-size", "-tp", "--tp-size", metavar="N", help="1 is all there is yet")
    add("--enable-prefix-caching", action=argparse.BooleanOptionalAction, help="begin prompts where earlier ones end")
    add("--state-cache-slots", metavar="N", help="snapshots of recurrent state for that (default: half as many as sequences)")
    add("--kv-offloading-size", type=number, metavar="GiB", help="host memory for what that evicts (default: none)")
    add("--kv-offloading-dir", metavar="DIR", help="a folder for it, too: found again after a restart (default: none)")
    add("--kv-offloading-disk-size", type=number, metavar="GiB", help="how much that folder may hold")
    add("--scheduling-policy", choices=SCHEDULING_POLICIES, help="priority: requests of a lower `priority` first")
    add(
        "--max-num-queued-reqs",
        "--max-queued-requests",
        type=natural,
        metavar="N",
        help="answer 503 when more sequences wait (default: no limit)",
    )
    add("--request-timeout", type=seconds, metavar="S", help="seconds until a request ends with an error (default: no limit)")
    add("--kv-cache-dtype", metavar="DTYPE", help="auto is all there is yet")


def take_engine(options: dict[str, Any], parser: Parser) -> EngineConfig:
    """What `add_model` and `add_engine` found, taken out of `options`. Exits 2 with one line for what cannot be."""
    typed, named = options.pop("model", None), options.pop("model_option", None)
    if typed and named and typed != named:
        parser.error(f"two models named: {typed} and {named}")
    for name, only in _ONLY.items():
        if (value := options.pop(name, only)) != only:
            parser.error(f"--{name.replace('_', '-')} {value}: only {only} is supported yet")
    if (dtype := options.get("dtype")) in _DTYPE_ALIASES:
        options["dtype"] = _DTYPE_ALIASES[dtype]
    engine = {name: options.pop(name) for name in ENGINE_OPTIONS & options.keys()}
    try:
        return EngineConfig(model=typed or named, **engine)
    except LoadError as error:  # it begins with the option's name; here it is a flag
        name, _, rest = str(error).partition(" ")
        parser.error(f"--{name.replace('_', '-')} {rest}" if name.rstrip(":") in ENGINE_OPTIONS else str(error))
