"""uvicorn, with two of its manners changed: signals are ours, and what is not HTTP gets the error body everything else gets."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from sparkrt.serve.http import encode, error_body


class HttpServer(uvicorn.Server):
    def __init__(self, app: ASGIApp, log_level: str) -> None:
        super().__init__(
            uvicorn.Config(
                app, http=_Protocol, loop="none", lifespan="off", log_config=None, log_level=log_level, access_log=False,
                server_header=False,
            )
        )  # fmt: skip

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
