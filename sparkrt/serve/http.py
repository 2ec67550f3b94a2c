"""Bodies in, answers out: strict JSON both ways, errors in the shape of the API that was asked, server-sent events."""

from __future__ import annotations

import contextlib
import gc
import logging
import re
from collections.abc import AsyncGenerator, Sequence
from http import HTTPStatus
from typing import Any

import msgspec
import uvicorn
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from sparkrt.errors import CapacityError, EngineFatal, RequestError
from sparkrt.serve.protocol import REFUSED, AnthropicError, ErrorBody, ErrorDetail

log = logging.getLogger("sparkrt.serve")
MAX_BODY = 32 * 2**20  # bytes
LARGE = 2**20
MAX_HEAD = 2**16
KEEP_ALIVE = 75  # s; longer than clients keep theirs, so that none writes into a connection we are closing
encode = msgspec.json.Encoder().encode  # NaN and infinity become null: never invalid JSON
_NAMES = {
    400: "BadRequest",
    401: "Authentication",
    404: "NotFound",
    405: "MethodNotAllowed",
    413: "RequestTooLarge",
    415: "UnsupportedMediaType",
}
_NAMES |= {500: "InternalServer", 503: "ServiceUnavailable"}
_ANTHROPIC = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 405: "invalid_request_error"}
_ANTHROPIC |= {413: "request_too_large", 500: "api_error", 503: "overloaded_error"}
_KINDS = [(kind, msgspec.defstruct("Refused", [(name, Any, None) for name in REFUSED[kind]])) for kind in REFUSED]
_DECODERS = {kind: (msgspec.json.Decoder(kind), msgspec.json.Decoder(refused)) for kind, refused in _KINDS}
_PLACE = re.compile(r"^(?P<what>.*?) - at (?:`key` in )?`\$\.?(?P<path>.*)`$", re.DOTALL)


def require(holds: object, param: str, message: str) -> None:
    if not holds:
        raise RequestError(message, param=param)


def respelled(error: RequestError, spellings: Sequence[tuple[str, str]]) -> RequestError:
    """In the words of an API that calls some fields otherwise: (pattern, what to put there) of the beginnings of names."""
    param, message = error.param or "", error.message
    for pattern, new in spellings:
        param, message = re.sub(f"^{pattern}", new, param), re.sub(f"^{pattern}", new, message)
    return RequestError(message, param=param or None, code=error.code, status=error.status)


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> Any:
    """`code` is OpenAI's machine-readable reason where there is one, else the status."""
    kind = f"{_NAMES.get(status, 'BadRequest')}Error"
    return ErrorBody(error=ErrorDetail(message=message, type=kind, param=param, code=code or status))


def anthropic_error(status: int, message: str) -> Any:
    return AnthropicError(type="error", error={"type": _ANTHROPIC.get(status, "api_error"), "message": message})


def turned_away(scope: Scope, status: int, message: str, code: str | None = None) -> Response:
    """What a request is told that no handler sees, in the shape that clients of its path read."""
    path = scope["path"].removeprefix(scope.get("root_path", ""))
    anthropic = path.startswith("/v1/messages")
    return json_response(anthropic_error(status, message) if anthropic else error_body(status, message, code=code), status)


def describe(error: Exception) -> tuple[Any, int]:
    """The body and HTTP status of an exception. What is not ours to show is logged and becomes a plain 500."""
    if isinstance(error, RequestError):
        return error_body(error.status, error.message, error.param, error.code), error.status
    status, message = 503 if isinstance(error, CapacityError) else 500, str(error)
    if not isinstance(error, CapacityError | EngineFatal):
        log.error("unexpected error while answering a request", exc_info=error)
        message = "internal error: the server's log has the details"
    return error_body(status, message), status


def json_response(value: Any, status: int = 200) -> Response:
    return Response(encode(value), status, media_type="application/json")


async def read_body(request: Request) -> bytes:
    """The whole body. Raises RequestError (413) as soon as it is known to be too large, without reading on."""
    too_large = RequestError(f"the body is larger than {MAX_BODY} bytes", code="request_too_large", status=413)
    if int(request.headers.get("content-length", 0)) > MAX_BODY:
        raise too_large
    if request.headers.get("content-encoding", "identity") != "identity":
        raise RequestError("compressed bodies are not accepted", code="unsupported_encoding", status=415)
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY:
            raise too_large
    return bytes(body)


def decode(raw: bytes, kind: Any) -> Any:
    """`raw` as a `kind`. Raises RequestError naming a field of a wrong type or refused, and for anything not strict JSON."""
    if paused := len(raw) > LARGE:
        gc.disable()  # it would walk a million new objects over and over: 22 MiB of tools held everybody up for 2.5 s
    try:
        raw.decode()  # also what the decoders would skip
        body, extras = (decoder.decode(raw) for decoder in _DECODERS[kind])
    except UnicodeDecodeError:
        raise RequestError("the body is not valid UTF-8") from None
    except msgspec.ValidationError as error:
        raise _explain(str(error)) from None
    except msgspec.DecodeError as error:
        hint = " (is there half a surrogate pair?)" if rb"\ud" in raw.lower() else ""
        raise RequestError(f"the body is not valid JSON: {error}{hint}") from None
    except RecursionError:
        raise RequestError("the body is nested too deeply") from None
    finally:
        if paused:
            gc.enable()
    for name, harmless in REFUSED[kind].items():
        value = getattr(extras, name)
        asks = value is not None and (type(value), value) not in [(type(x), x) for x in harmless]  # True equals 1
        require(not asks, name, f"{name} is not supported by this server")
    return body


def _explain(message: str) -> RequestError:
    """From msgspec's "Expected `int | null`, got `str` - at `$.n`" to "n: expected int, got str"."""
    place = _PLACE.match(message)
    what, path = (place["what"], place["path"]) if place else (message, "")
    what = what.replace(" | null", "").replace("`", "").replace("array", "list")
    if missing := re.search(r"missing required field (\S+)", what):
        path, what = f"{path}.{missing[1]}".lstrip("."), "this field is required"
    param = re.sub(r"(\[[^\]]*\])+$", "", path) or None
    return RequestError(f"{path or 'the body'}: {what[0].lower()}{what[1:]}", param=param)


def event_stream(events: AsyncGenerator[list[Any]], named: bool = False) -> ASGIApp:
    """Server-sent events as a plain ASGI response: those of a list are written at once, as it comes.

    `named`: each carries the name that is its `type`, and none says that it was the last.
    """
    headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
    headers.append((b"x-accel-buffering", b"no"))  # a proxy that collects a stream defeats it

    async def respond(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async with contextlib.aclosing(events):
            async for values in events:
                block = b"".join((_name(value) if named else b"") + b"data: " + encode(value) + b"\n\n" for value in values)
                await send({"type": "http.response.body", "body": block, "more_body": True})
        await send({"type": "http.response.body", "body": b"" if named else b"data: [DONE]\n\n"})

    return respond


def _name(value: Any) -> bytes:
    return b"event: %s\n" % (value["type"] if isinstance(value, dict) else value.type).encode()


class HttpServer(uvicorn.Server):
    """uvicorn with some of its manners changed: signals are ours, and what is not HTTP gets the error body all else gets."""

    capture_signals = contextlib.nullcontext  # type: ignore[assignment]

    def __init__(self, app: ASGIApp, log_level: str, **more: Any) -> None:
        options: dict[str, Any] = {"lifespan": "off", "log_config": None, "access_log": False, "server_header": False}
        options |= {"http": _Protocol, "log_level": log_level, "timeout_keep_alive": KEEP_ALIVE} | more
        super().__init__(uvicorn.Config(app, loop="none", **options))


class _Protocol(HttpToolsProtocol):
    """With our error body for what is not HTTP, and a limit to what comes before a body: uvicorn would collect it for ever."""

    _in_head, _head = False, 0  # bytes

    def on_message_begin(self) -> None:
        self._in_head, self._head = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_head and not self.transport.is_closing():
            self._head += len(data)
            if self._head > MAX_HEAD:
                self._refuse(431, f"address and headers are larger than {MAX_HEAD} bytes")

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg)

    def _refuse(self, status: int, message: str) -> None:
        body, reason = encode(error_body(status, message)), HTTPStatus(status).phrase
        head = f"HTTP/1.1 {status} {reason}\r\ncontent-type: application/json\r\nconnection: close\r\n"
        self.transport.write(head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body)
        self.transport.close()
