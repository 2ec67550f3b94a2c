"""uvicorn, with two of its manners changed: signals are ours, and what is not HTTP gets the error body everything else gets."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from sparkrt.serve.http import encode, error_body

KEEP_ALIVE = 75  # s; longer than clients keep theirs, so that none writes into a connection we are closing


class HttpServer(uvicorn.Server):
    def __init__(self, app: ASGIApp, log_level: str) -> None:
        quiet: dict[str, Any] = {"lifespan": "off", "log_config": None, "access_log": False, "server_header": False}
        config = uvicorn.Config(app, loop="none", http=_Protocol, log_level=log_level, timeout_keep_alive=KEEP_ALIVE, **quiet)
        super().__init__(config)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Protocol(HttpToolsProtocol):
    def send_400_response(self, msg: str) -> None:
        body = encode(error_body(400, msg))
        self.transport.write(
            b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
            b"content-length: %d\r\n\r\n%s" % (len(body), body)
        )
        self.transport.close()
