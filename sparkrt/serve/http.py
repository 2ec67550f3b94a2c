"""Bodies in, answers out: strict JSON both ways, OpenAI's error shape always, server-sent events that notice a gone client."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sparkrt.errors import CapacityError, EngineFatal, RequestError
from sparkrt.serve.client import Answers, ClientGone

log = logging.getLogger("sparkrt.serve")

MAX_BODY = 32 * 2**20  # bytes
DONE = b"data: [DONE]\n\n"

T = TypeVar("T")
encode = msgspec.json.Encoder().encode  # NaN and infinity become null: never invalid JSON

_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
}
_PLACE = re.compile(r"^(?P<what>.*?) - at (?:`key` in )?`\$\.?(?P<path>.*)`$", re.DOTALL)


class ErrorDetail(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | int


class ErrorBody(msgspec.Struct):
    error: ErrorDetail


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> ErrorBody:
    """`code` is OpenAI's machine-readable reason where there is one, else the status."""
    return ErrorBody(ErrorDetail(message, _TYPES.get(status, "BadRequestError"), param, code or status))


def describe(error: Exception) -> tuple[int, ErrorBody]:
    """The HTTP status and body of an exception. What is not ours to show is logged and becomes a plain 500."""
    if isinstance(error, RequestError):
        return error.status, error_body(error.status, error.message, error.param, error.code)
    if isinstance(error, CapacityError):
        return 503, error_body(503, str(error))
    if isinstance(error, EngineFatal):
        return 500, error_body(500, str(error))
    log.error("unexpected error while answering a request", exc_info=error)
    return 500, error_body(500, "internal error: the server's log has the details")


def json_response(value: Any, status: int = 200) -> Response:
    return Response(encode(value), status, media_type="application/json")


def error_response(error: Exception) -> Response:
    status, body = describe(error)
    return json_response(body, status)


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


def decode(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """`body` as the decoder's struct. Raises RequestError naming the field for a wrong type, and for anything not strict JSON."""
    try:
        body.decode()  # also what the decoder would skip
        return decoder.decode(body)
    except UnicodeDecodeError:
        raise RequestError("the body is not valid UTF-8") from None
    except msgspec.ValidationError as error:
        raise _explain(str(error)) from None
    except msgspec.DecodeError as error:
        hint = " (is there half a surrogate pair?)" if rb"\ud" in body.lower() else ""
        raise RequestError(f"the body is not valid JSON: {error}{hint}") from None
    except RecursionError:
        raise RequestError("the body is nested too deeply") from None


def _explain(message: str) -> RequestError:
    """From msgspec's "Expected `int | null`, got `str` - at `$.n`" to "n: expected int, got str"."""
    place = _PLACE.match(message)
    what, path = (place["what"], place["path"]) if place else (message, "")
    what = what.replace(" | null", "").replace("`", "").replace("array", "list")
    if missing := re.search(r"missing required field (\S+)", what):
        path, what = f"{path}.{missing[1]}".lstrip("."), "this field is required"
    what = what[0].lower() + what[1:]
    param = re.sub(r"(\[[^\]]*\])+$", "", path) or None
    return RequestError(f"{path}: {what}" if path else f"the body: {what}", param=param)


async def wait_for(answer: Awaitable[T], answers: Answers, receive: Receive) -> T:
    """Await `answer` while watching the connection: when the client goes, `answers` end, and with them `answer`."""
    watcher = asyncio.ensure_future(_watch(receive, answers))
    try:
        return await answer
    finally:
        watcher.cancel()
        answers.close()


async def _watch(receive: Receive, answers: Answers) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    answers.disconnect()


_STREAM_START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),  # a proxy that collects a stream defeats it
    ],
}


class EventStream:
    """Server-sent events, as a plain ASGI response: each block of `events` is written as it comes.

    An error after the first byte cannot change the status any more: it is sent as an event, then [DONE], and the stream ends.
    """

    def __init__(self, events: AsyncGenerator[bytes], answers: Answers) -> None:
        self._events = events
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(ClientGone):
            await wait_for(self._write(send), self._answers, receive)

    async def _write(self, send: Send) -> None:
        await send(_STREAM_START)
        async with contextlib.aclosing(self._events) as events:
            try:
                async for block in events:
                    await send({"type": "http.response.body", "body": block, "more_body": True})
            except ClientGone:
                raise
            except Exception as error:
                await send({"type": "http.response.body", "body": event(describe(error)[1]), "more_body": True})
        await send({"type": "http.response.body", "body": DONE, "more_body": False})


def event(value: Any) -> bytes:
    return b"data: " + encode(value) + b"\n\n"


Handler = Callable[[Request], Awaitable[Response | EventStream]]


def guarded(handler: Handler) -> Handler:
    """`handler`, with its exceptions turned into error responses."""

    async def answer(request: Request) -> Response | EventStream:
        try:
            return await handler(request)
        except (ClientGone, ClientDisconnect):
            return Response(status_code=499)  # goes nowhere
        except Exception as error:
            return error_response(error)

    return answer
