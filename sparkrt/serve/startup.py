"""What a person sees at start-up: progress while the model loads, then what is served, where, and where the memory went."""

from __future__ import annotations

import sys
import textwrap
from dataclasses import fields
from types import TracebackType
from typing import TYPE_CHECKING, Self

from sparkrt.engine.config import EngineConfig
from sparkrt.serve.version import VERSION

if TYPE_CHECKING:
    from rich.progress import Progress

    from sparkrt.serve.client import EngineClient
    from sparkrt.serve.serving import Serving


class LoadingView:
    """A progress bar on a terminal, a line per phase elsewhere; on stderr."""

    def __init__(self, client: EngineClient) -> None:
        client.on_loading = self._show
        self._phase = ""
        self._progress: Progress | None = None

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import Progress

            self._progress = Progress(console=Console(stderr=True), transient=True)
            self._progress.add_task("starting", total=None)
            self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._progress is not None:
            self._progress.stop()

    def _show(self, what: str, done: int, total: int) -> None:
        if self._progress is not None:
            [task] = self._progress.task_ids
            self._progress.update(task, description=what, completed=done, total=total or None)
        elif what != self._phase:
            print(f"{what} ...", file=sys.stderr, flush=True)
        self._phase = what


def print_summary(serving: Serving, url: str, seconds: float) -> None:
    """To stdout, ending with the URL: scripts read it there, since the port may have been chosen here."""
    args, info = serving.args, serving.info
    options = {option.name for option in fields(EngineConfig)}
    config = " ".join(f"{name}={value}" for name, value in info.lines if name in options)
    lines = [
        ("model", f"{info.name} ({info.architecture}), answering to {', '.join(args.names)}"),
        ("dtype", f"{info.dtype} on {info.device}"),
        *((what, value) for what, value in info.lines if what not in options),
        ("options", textwrap.fill(config, 110, subsequent_indent=" " * 15, break_long_words=False)),
        *(("note", note) for note in (*info.warnings, *args.without_effect)),
        ("ready", f"in {seconds:.1f} s at {url}/v1"),
    ]
    print(f"sparkrt {VERSION}")
    for what, value in lines:
        print(f"  {what:<12} {value}")
    sys.stdout.flush()
