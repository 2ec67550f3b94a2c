"""`sparkrt bench serve`: load for a server that speaks OpenAI's API, and how it bore it."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from time import monotonic
from typing import Any

import msgspec

from sparkrt.bench.client import Client
from sparkrt.bench.dataset import Dataset, open_text
from sparkrt.bench.load import ENDPOINTS, arrivals, body_of, encode, run
from sparkrt.bench.progress import bar
from sparkrt.bench.report import DETAILS, block, figures, spread
from sparkrt.errors import SparkrtError
from sparkrt.limits import raise_file_limit

INFINITE = float("inf")  # requests a second: all at once
SHOWN = 10  # errors


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What `sparkrt bench serve` was asked to do, under the names of its options."""

    dataset: Dataset
    backend: str = "openai"
    base_url: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    endpoint: str | None = None  # None: the backend's
    allow_remote: bool = False
    header: list[tuple[str, str]] = field(default_factory=list)
    model: str | None = None  # None: the first that the server lists
    served_model_name: str | None = None
    tokenizer: str | None = None
    skip_chat_template: bool = False
    ready_check_timeout_sec: float = 0.0
    request_rate: float = INFINITE  # a second
    burstiness: float = 1.0
    max_concurrency: int | None = None
    num_warmups: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None
    sampling: dict[str, float] = field(default_factory=dict)  # temperature, top_p and so on
    extra_body: dict[str, Any] = field(default_factory=dict)
    request_id_prefix: str = "bench-"
    percentile_metrics: list[str] = field(default_factory=lambda: ["ttft", "tpot", "itl"])
    metric_percentiles: list[float] = field(default_factory=lambda: [99.0])
    goodput: list[tuple[str, float]] = field(default_factory=list)
    save_result: bool = False
    save_detailed: bool = False
    append_result: bool = False
    result_dir: str | None = None
    result_filename: str | None = None
    label: str | None = None
    metadata: list[tuple[str, str]] = field(default_factory=list)
    disable_tqdm: bool = False


def serve(args: Load) -> int:
    """Prints the result block; 1 if no request was answered. SparkrtError for what stands in the way of a load."""
    import uvloop

    raise_file_limit()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(args))


async def _serve(args: Load) -> int:
    dataset = args.dataset
    host = f"[{args.host}]" if ":" in args.host else args.host
    headers = dict(args.header)
    if "OPENAI_API_KEY" in os.environ:  # where clients of this API keep it
        headers.setdefault("authorization", f"Bearer {os.environ['OPENAI_API_KEY']}")
    client = Client(args.base_url or f"http://{host}:{args.port}", headers, args.allow_remote)
    endpoint = args.endpoint or ENDPOINTS[args.backend]
    served, root = await _first_model(client, args.ready_check_timeout_sec)
    model = args.served_model_name or args.model or served
    tokenizer, template = open_text(args.model or root, args.tokenizer)
    chat = args.backend == "openai-chat"
    wraps = template if dataset.name == "custom" and not (chat or args.skip_chat_template) else None
    samples = dataset.samples(tokenizer, wraps, text=chat)
    more: dict[str, Any] = dict(args.sampling)
    if args.ignore_eos or dataset.name == "random":  # as long as asked for, whatever is said
        more["ignore_eos"] = True
    if args.logprobs is not None:
        more |= {"logprobs": True, "top_logprobs": args.logprobs} if chat else {"logprobs": args.logprobs}
    more = {"model": model, **more, **args.extra_body}
    requests = [(sample, encode(body_of(args.backend, sample, more))) for sample in samples]
    load: dict[str, Any] = {"endpoint": endpoint, "max_concurrency": args.max_concurrency, "prefix": args.request_id_prefix}
    if args.num_warmups:
        warm = [requests[0]] * args.num_warmups
        await run(client, times=arrivals(len(warm), INFINITE, 1.0, 0), requests=warm, **load)
    with bar(len(requests), "requests", shown=not args.disable_tqdm) as done:
        times = arrivals(len(requests), args.request_rate, args.burstiness, dataset.seed)
        outcomes, duration = await run(client, times=times, requests=requests, on_done=lambda _: done(), **load)
    client.close()

    now, metrics, percentiles = datetime.now().strftime("%Y%m%d-%H%M%S"), args.percentile_metrics, args.metric_percentiles
    result: dict[str, Any] = {"date": now, "endpoint_type": args.backend, "backend": args.backend, "label": args.label}
    result |= {"model_id": model}
    result |= {"tokenizer_id": args.tokenizer or args.model or root, "num_prompts": len(requests), **dict(args.metadata)}
    result |= {"request_rate": "inf" if args.request_rate == INFINITE else args.request_rate}
    result |= {"burstiness": args.burstiness, "max_concurrency": args.max_concurrency}
    result |= figures(outcomes, duration, dict(args.goodput)) | spread(outcomes, metrics, percentiles)
    errors = [outcome.error for outcome in outcomes if outcome.error]
    print(*(f"failed: {error}" for error in errors[:SHOWN]), sep="\n", end="\n" if errors else "", file=sys.stderr)
    print(block(result, metrics, percentiles))
    if args.save_result or args.append_result:
        kept = {name: value for name, value in result.items() if args.save_detailed or name not in DETAILS}
        limit = "" if args.max_concurrency is None else f"-concurrency{args.max_concurrency}"
        name = f"{args.label or args.backend}-{args.request_rate:g}qps{limit}-{model.rpartition('/')[2]}-{now}.json"
        _save(Path(args.result_dir or ".") / (args.result_filename or name), kept, args.append_result)
    return 0 if result["completed"] else 1


class _Model(msgspec.Struct):
    id: str
    root: str | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


async def _first_model(client: Client, patience: float) -> tuple[str, str]:
    """The name and the root of the first model, asked for until the server answers or `patience` seconds have passed."""
    end = monotonic() + patience
    while True:
        try:
            reply = await client.send("GET", "/v1/models")
            if reply.status == 200:
                found = msgspec.json.decode(reply.body, type=_Models).data[0]
                return found.id, found.root or found.id
            error = f"HTTP {reply.status}: {reply.body[:300].decode(errors='replace')}"
        except OSError as failure:
            error = str(failure)
        except (msgspec.DecodeError, IndexError):
            error = "no model is listed there"
        if monotonic() >= end:
            raise SparkrtError(f"{client.base_url}/v1/models: {error}")
        await asyncio.sleep(min(1.0, patience))


def _save(file: Path, result: dict[str, Any], append: bool) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a" if append else "w", encoding="utf-8") as out:
            out.write(json.dumps(result) + "\n")
    except OSError as error:
        raise SparkrtError(f"the result cannot be saved: {error}") from None
