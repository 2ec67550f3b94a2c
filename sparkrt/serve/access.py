"""What is the same for every request, whatever it asks: its id, and its line in the access log."""

from __future__ import annotations

import re
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Any, TextIO

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sparkrt.errors import LoadError
from sparkrt.serve.http import encode

_ID = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)  # of a client's own; another gets one of ours instead


class Access:
    """X-Request-Id in and out: as it came, or a new one. With a `log`, a line of JSON about every request that is over.

    `scope["access"]` is that line while it is written: handlers add what they know (`id` is the request's). It has neither
    prompts nor answers nor keys, and of the address only the path.
    """

    def __init__(self, app: ASGIApp, log: TextIO | None) -> None:
        self._app, self._log = app, log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, client = Headers(scope=scope), scope.get("client")
        given = headers.get("x-request-id", "")
        own = bool(_ID.fullmatch(given))
        line: dict[str, Any] = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "id": given if own else uuid.uuid4().hex,
        }
        line |= {"client": client[0] if client else None, "method": scope["method"], "path": scope["path"], "status": 499}
        scope["access"], scope["own_id"], began = line, own, time.monotonic()

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                line["status"] = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", line["id"].encode())]
            await send(message)

        try:
            await self._app(scope, receive, answer)
        finally:
            if self._log is not None:
                line["seconds"] = round(time.monotonic() - began, 6)
                with suppress(OSError):  # a full disk must not end a request
                    self._log.write(encode(line).decode() + "\n")


@contextmanager
def access_log(path: str | None) -> Iterator[TextIO | None]:
    """The log to write to, line by line; None without a path. Raises LoadError when it cannot be written."""
    if path is None or path == "-":
        yield None if path is None else sys.stdout
        return
    try:
        file = open(path, "a", buffering=1, encoding="utf-8")  # noqa: SIM115
    except OSError as error:
        raise LoadError(f"--access-log {path}: {error.strerror or error}") from None
    with file:
        yield file
