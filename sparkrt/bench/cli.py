"""`sparkrt bench serve|latency|throughput`, with the options of the field's tools of these names."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from sparkrt.engine.config import EngineConfig
from sparkrt.engine.flags import (
    RULES,
    Parser,
    add_engine,
    add_model,
    checked,
    natural,
    number,
    port,
    positive,
    seconds,
    take_engine,
)
from sparkrt.errors import SparkrtError

if TYPE_CHECKING:
    from sparkrt.bench.dataset import Dataset

_USAGE = """usage: sparkrt bench COMMAND ...

commands:
  serve       load a server of OpenAI's API and report how it bore it (sparkrt bench serve --help)
  latency     time one batch through the engine, without a server
  throughput  time a dataset through the engine, without a server"""
_GOALS = ("ttft", "tpot", "e2el")
_METRICS = ("ttft", "tpot", "itl", "e2el", "client_queue_time")
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
_DATASET = {"dataset_name": "name", "dataset_path": "path"} | {n: n for n in ("num_prompts", "input_len", "output_len")}
_DATASET |= {"random_range_ratio": "range_ratio", "random_prefix_len": "prefix_len"}


def main(argv: list[str]) -> int:
    """Exit codes: 0 done, 1 it could not be, 2 the command line is wrong."""
    command, *rest = argv or [""]
    if command in ("-h", "--help", "help"):
        print(_USAGE)
        return 0
    if command not in _COMMANDS:
        what = f"unknown command {command!r}" if command else "no command"
        print(f"sparkrt bench: error: {what} (see sparkrt bench --help)", file=sys.stderr)
        return 2
    try:
        return int(_COMMANDS[command](rest))
    except KeyboardInterrupt:
        return 130
    except SparkrtError as error:
        print(f"sparkrt bench {command}: error: {error}", file=sys.stderr)
        return 1


def _serve(argv: list[str]) -> int:
    parser = _parser("serve", "Load a server of OpenAI's API with streamed requests, and report how it bore it.")
    add = parser.add_argument_group("server").add_argument
    add("--backend", choices=("openai", "vllm", "openai-chat"), help="completions (the first two; default) or chat")
    add("--base-url", metavar="URL", help="instead of --host and --port")
    add("--host", help="default: 127.0.0.1")
    add("--port", type=port, help="default: 8000")
    add("--endpoint", metavar="PATH", help="default: that of the backend")
    add("--allow-remote", action="store_true", help="load another machine than this one: only with its owner's consent")
    add("--header", type=_pair, nargs="*", metavar="KEY=VALUE", help="sent along (a key: OPENAI_API_KEY)")
    add("--model", metavar="NAME", help="default: the first that the server lists")
    add("--served-model-name", metavar="NAME", help="what requests call it")
    add("--tokenizer", metavar="PATH", help="where the tokenizer lies, if not with the model")
    add("--ready-check-timeout-sec", type=seconds, metavar="S", help="wait so long for the server")
    _add_dataset(parser)
    add = parser.add_argument_group("traffic").add_argument
    add("--request-rate", type=_above_zero, metavar="R", help="requests a second (default: all at once)")
    add("--burstiness", type=_above_zero, metavar="B", help="1 (default): Poisson; below: in bursts; above: more evenly")
    add("--max-concurrency", type=positive, metavar="N", help="most requests under way at once")
    add("--num-warmups", type=natural, metavar="N", help="requests beforehand that do not count")
    add("--seed", type=int, help="of prompts and arrivals (default: 0)")
    add = parser.add_argument_group("requests").add_argument
    add("--ignore-eos", action="store_true", help="answers as long as asked for (always with random prompts)")
    add("--logprobs", type=natural, metavar="N")
    for name in _SAMPLING:
        add(f"--{name.replace('_', '-')}", type=int if name == "top_k" else number, metavar="X")
    add("--skip-chat-template", action="store_true", help="custom prompts as they are, for completions")
    add("--extra-body", type=_object, metavar="JSON", help="more fields of every request")
    add("--request-id-prefix", metavar="TEXT")
    add = parser.add_argument_group("result").add_argument
    add("--percentile-metrics", type=_metrics, metavar="LIST", help=f"of {', '.join(_METRICS)} (default: the first three)")
    add("--metric-percentiles", type=_shares, metavar="LIST", help="for example 50,90,99 (default: 99)")
    add("--goodput", type=_goal, nargs="+", metavar="METRIC:MS", help=f"most for a good request: {', '.join(_GOALS)}")
    add("--save-result", action="store_true", help="to a JSON file")
    add("--save-detailed", action="store_true", help="with the figures of every request")
    add("--append-result", action="store_true", help="as another line of the file")
    add("--result-dir", metavar="DIR")
    add("--result-filename", metavar="FILE")
    add("--label", metavar="TEXT", help="begins the file's name (default: the backend)")
    add("--metadata", type=_pair, nargs="*", metavar="KEY=VALUE", help="kept with the result")
    add("--disable-tqdm", action="store_true", help="no progress bar")
    options = vars(parser.parse_args(argv))
    sampling = {name: options.pop(name) for name in _SAMPLING if name in options}
    dataset = _dataset(options, options.pop("seed", 0), parser)
    from sparkrt.bench.serve import Load, serve

    return serve(Load(dataset=dataset, sampling=sampling, **options))


def _latency(argv: list[str]) -> int:
    parser = _parser("latency", "Time one batch through the engine, from its prompts to its last token.")
    add_model(parser)
    add = parser.add_argument_group("batch").add_argument
    add("--input-len", type=positive, metavar="N", help="tokens of a prompt (default: 32)")
    add("--output-len", type=positive, metavar="N", help="tokens of an answer (default: 128)")
    add("--batch-size", type=positive, metavar="N", help="prompts (default: 8)")
    add("--num-iters-warmup", type=natural, metavar="N", help="rounds that do not count (default: 10)")
    add("--num-iters", type=positive, metavar="N", help="rounds (default: 30)")
    options, config = _engine(parser, argv)
    from sparkrt.bench.offline import Batch, latency

    return latency(Batch(**options), config)


def _throughput(argv: list[str]) -> int:
    parser = _parser("throughput", "Time a dataset through the engine, all of it handed in at once.")
    add_model(parser)
    _add_dataset(parser)
    options, config = _engine(parser, argv)
    dataset = _dataset(options, config.seed, parser)
    from sparkrt.bench.offline import Answers, throughput

    return throughput(Answers(**options), config, dataset)


_COMMANDS = {"serve": _serve, "latency": _latency, "throughput": _throughput}


def _parser(command: str, what: str) -> Parser:
    """Flags have no defaults of their own: those of `Load`, `Dataset`, `Batch` and `EngineConfig` hold."""
    return Parser(f"sparkrt bench {command}", description=what, **RULES)


def _add_dataset(parser: Parser) -> None:
    add = parser.add_argument_group("dataset").add_argument
    add("--dataset-name", choices=("random", "sharegpt", "custom"), help='random (default); custom: lines of {"prompt": text}')
    add("--dataset-path", metavar="FILE")
    add("--num-prompts", type=positive, metavar="N", help="default: 1000")
    add("--input-len", "--random-input-len", type=positive, metavar="N", help="of random prompts (default: 1024)")
    lengths = ("--output-len", "--random-output-len", "--sharegpt-output-len", "--custom-output-len")
    add(*lengths, type=positive, metavar="N", help="default: 128, as in the file, or 256")
    add("--random-range-ratio", type=_ratio, metavar="R", help="random lengths vary by this share (default: 0)")
    add("--random-prefix-len", "--prefix-len", type=natural, metavar="N", help="tokens all random prompts begin with")


def _dataset(options: dict[str, Any], seed: int, parser: Parser) -> Dataset:
    """What `_add_dataset` found, taken out of `options`."""
    from sparkrt.bench.dataset import Dataset

    given = {name: options.pop(option) for option, name in _DATASET.items() if option in options}
    dataset = Dataset(**given, seed=seed)
    if (dataset.name == "random") != (dataset.path is None):
        parser.error(f"--dataset-name {dataset.name} {'takes no' if dataset.path else 'needs a'} --dataset-path")
    return dataset


def _engine(parser: Parser, argv: list[str]) -> tuple[dict[str, Any], EngineConfig]:
    """The options of a command without a server, and those of its engine. A prompt that comes again is computed again."""
    add = parser.add_argument_group("answers and result").add_argument
    add("--n", type=positive, metavar="N", help="answers to each prompt (default: 1)")
    add("--disable-detokenize", action="store_true", help="token ids only")
    add("--output-json", metavar="FILE", help="keep the result there")
    add("--disable-tqdm", action="store_true", help="no progress bar")
    add_engine(parser)
    parser.set_defaults(enable_prefix_caching=False)
    options = vars(parser.parse_args(argv))
    return options, take_engine(options, parser)


def _read_goal(text: str) -> tuple[str, float]:
    name, _, most = text.partition(":")
    return name, float(most)


_pair = checked(lambda text: tuple(text.split("=", 1)), lambda pair: len(pair) == 2 and pair[0], "KEY=VALUE")
_ratio = checked(float, lambda x: 0 <= x < 1, "a number from 0 to less than 1")
_above_zero = checked(float, lambda x: x > 0, "a number above 0")
_object = checked(json.loads, lambda value: isinstance(value, dict), "a JSON object")
_goal = checked(_read_goal, lambda goal: goal[0] in _GOALS and goal[1] >= 0, f"METRIC:MS with a metric of {', '.join(_GOALS)}")
_metrics = checked(lambda text: text.split(","), lambda names: {*names} <= {*_METRICS}, f"a list of {', '.join(_METRICS)}")
_shares = checked(
    lambda text: [float(part) for part in text.split(",")],
    lambda shares: all(0 <= share <= 100 for share in shares),
    "a list of numbers from 0 to 100",
)
