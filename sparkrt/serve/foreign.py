"""Flags that scripts for other engines carry: those that can be accepted without lying, and those that are refused by name."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

Nargs = int | str

# flag → (how many values it takes, why it does nothing here)
WITHOUT_EFFECT: dict[str, tuple[Nargs, str]] = {
    "--enable-chunked-prefill": (0, "prompts are always prefilled in chunks"),
    "--long-prefill-token-threshold": (1, "prompts share a step whatever their length"),
    "--enable-auto-tool-choice": (0, "calls are read wherever their format is known"),
    "--enable-prompt-tokens-details": (0, "usage always has them"),
    "--enable-cache-report": (0, "usage always has cached_tokens"),
    "--enable-per-request-metrics": (0, "answers carry none: /metrics and --access-log do"),
    "--enable-request-id-headers": (0, "every answer has its X-Request-Id"),
    "--enable-metrics": (0, "/metrics is always there"),
    "--trust-remote-code": (0, "code from a checkpoint is never run"),
    "--disable-log-requests": (0, "requests are not logged unless asked for"),
    "--disable-uvicorn-access-log": (0, "there is no access log unless --access-log names one"),
    "--skip-server-warmup": (0, "there is no warm-up"),
    "--mamba-ssm-cache-dtype": (1, "recurrent state is always float32"),
    "--mamba-cache-dtype": (1, "it is that of the model, and float32 for recurrent state"),
    "--mamba-cache-mode": (1, "snapshots of recurrent state do not depend on KV pages"),
    "--prefix-cache-retention-interval": (1, "snapshots are kept where prompts leave each other (see --state-cache-slots)"),
    "--prefix-caching-hash-algo": (1, "cached prompts are compared token by token"),
    "--kv-cache-dtype-skip-layers": ("+", "KV has the dtype of the model in every layer"),
    "--gdn-prefill-backend": (1, "the kernels are sparkrt's own"),
    "--attention-backend": (1, "the kernels are sparkrt's own"),
    "--max-cudagraph-capture-size": (1, "decode steps of every size up to --max-num-seqs are captured"),
    "--cudagraph-capture-sizes": ("+", "decode steps of every size up to --max-num-seqs are captured"),
    "--enable-expert-parallel": (0, "one device has all experts"),
    "--language-model-only": (0, "text is all there is"),
    "--limit-mm-per-prompt": (1, "text is all there is"),
    "--swap-space": (1, "requests that have to wait are swapped to the memory of --kv-offloading-size"),
}

_SPECULATION, _ADAPTERS, _ONE = "there is no speculation yet", "there are no adapters yet", "one device is all there is yet"

# flag, aliases → (how many values it takes, those that ask for nothing, why it is refused)
REFUSED: dict[tuple[str, ...], tuple[Nargs, tuple[str, ...], str]] = {
    ("--quantization", "-q"): (1, ("none", "None", "auto"), "weights are computed with in the model's float type"),
    ("--speculative-config", "-sc"): (1, ("null", "{}"), _SPECULATION),
    ("--spec-method", "--speculative-algorithm"): (1, (), _SPECULATION),
    ("--spec-model", "--speculative-draft-model-path"): (1, (), _SPECULATION),
    ("--spec-tokens", "--speculative-num-draft-tokens"): (1, ("0",), _SPECULATION),
    ("--enable-lora",): (0, (), _ADAPTERS),
    ("--lora-modules", "--lora-paths"): ("+", (), _ADAPTERS),
    ("--max-loras",): (1, (), _ADAPTERS),
    ("--max-lora-rank",): (1, (), _ADAPTERS),
    ("--pipeline-parallel-size", "-pp", "--pp-size"): (1, ("1",), _ONE),
    ("--data-parallel-size", "-dp", "--dp-size"): (1, ("1",), _ONE),
    ("--cpu-offload-gb",): (1, ("0",), "weights stay on the device"),
    ("--max-num-queued-tokens",): (1, (), "the queue is limited by --max-num-queued-reqs"),
    ("--no-enable-chunked-prefill",): (0, (), "prompts are always prefilled in chunks"),
    ("--middleware",): (1, (), "no code is loaded into the server"),
    ("--admin-api-key",): (1, (), "--api-key guards every route"),
}


def add_foreign(parser: argparse.ArgumentParser) -> None:
    """Those without effect are remembered in `without_effect`; those that are refused end the command, with code 2."""
    add = parser.add_argument_group("accepted, without effect").add_argument
    for flag, (nargs, why) in WITHOUT_EFFECT.items():
        add(flag, action=_Foreign, nargs=nargs, dest="without_effect", metavar="X", help=why)
    for flags, (nargs, neutral, why) in REFUSED.items():
        refusal: dict[str, Any] = {"neutral": neutral, "why": why}
        add(*flags, action=_Foreign, nargs=nargs, dest="without_effect", help=argparse.SUPPRESS, **refusal)


class _Foreign(argparse.Action):
    def __init__(self, *rest: Any, neutral: Sequence[str] | None = None, why: str = "", **more: Any) -> None:
        super().__init__(*rest, **more)
        self._neutral, self._why = neutral, why

    def __call__(self, parser: argparse.ArgumentParser, space: Any, values: Any, flag: str | None = None) -> None:
        if self._neutral is None:
            space.without_effect = [*getattr(space, "without_effect", ()), self.option_strings[0]]
        elif not values or not set(values) <= set(self._neutral):
            parser.error(f"{' '.join([flag or '', *values])}: this is not supported: {self._why}")
