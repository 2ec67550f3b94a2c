"""A server of OpenAI's API as a source of answers."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Generator, Iterator
from typing import Any
from urllib.parse import urlsplit

from sparkrt.chat.source import Asked, Said
from sparkrt.errors import RequestError, SparkrtError
from sparkrt.text.reply import ReplyDelta
from sparkrt.text.tools.calls import CallDelta

_LOOPBACK = {"localhost", "127.0.0.1", "::1"}
_PATIENCE = 600.0  # s without a word


class Remote:
    """A server at `url`, with or without /v1; `model`: the first that it lists, if None."""

    def __init__(self, url: str, model: str | None = None, key: str | None = None) -> None:
        """SparkrtError: no server is there, or it does not let us in."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise SparkrtError(f"--url {url}: expected an address such as http://127.0.0.1:8000")
        self._base = url.rstrip("/").removesuffix("/v1") + "/v1"
        self._headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
        proxies = [urllib.request.ProxyHandler({})] if parts.hostname in _LOOPBACK else []  # this machine is asked directly
        self._open = urllib.request.build_opener(*proxies).open
        with self._ask("/models") as response:
            listed = _read(response.read())
        try:
            self._model = model or str(listed["data"][0]["id"])
        except (LookupError, TypeError):
            raise SparkrtError(f"{self._base}/models lists no model: is this a server of OpenAI's API?") from None
        self.name = f"{self._model} at {parts.netloc.rpartition('@')[2]}"

    def answer(self, asked: Asked) -> Generator[Said, None, None]:
        body: dict[str, Any] = {"model": self._model, "messages": asked.messages, **asked.sampling, "stream": True}
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        if asked.tools:
            body["tools"] = asked.tools
        if asked.thinking is not None:
            body["chat_template_kwargs"] = {"enable_thinking": asked.thinking}
        tokens = 0
        with self._ask("/chat/completions", json.dumps(body).encode()) as response:
            for data in _events(response):
                chunk = _read(data)
                if error := chunk.get("error"):
                    raise SparkrtError(error.get("message") if isinstance(error, dict) else str(error))
                choice = (chunk.get("choices") or [{}])[0]
                delta = _delta(choice.get("delta") or {})
                tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens + bool(delta))
                yield Said(delta, tokens, choice.get("finish_reason"))

    def close(self) -> None:
        """Nothing is kept open between answers."""

    def _ask(self, path: str, body: bytes | None = None) -> http.client.HTTPResponse:
        try:
            found: http.client.HTTPResponse = self._open(
                urllib.request.Request(self._base + path, body, self._headers), timeout=_PATIENCE
            )
            return found
        except urllib.error.HTTPError as error:
            with error:
                raise RequestError(_reason(error), status=error.code) from None
        except (OSError, http.client.HTTPException) as error:
            raise SparkrtError(f"{self._base} cannot be reached: {getattr(error, 'reason', error)}") from None


def _events(response: http.client.HTTPResponse) -> Iterator[bytes]:
    try:
        for line in response:
            if line.startswith(b"data:"):
                if (data := line[5:].strip()) == b"[DONE]":
                    return
                yield data
    except (OSError, http.client.HTTPException) as error:
        raise SparkrtError(f"the connection broke off: {error}") from None
    raise SparkrtError("the connection broke off in the middle of the answer")


def _delta(delta: dict[str, Any]) -> ReplyDelta:
    found = ReplyDelta(delta.get("reasoning_content") or delta.get("reasoning") or "")
    if delta.get("content"):
        found.gain(delta["content"])
    for call in delta.get("tool_calls") or ():
        function = call.get("function") or {}
        found.gain(CallDelta(call.get("index", 0), call.get("id"), function.get("name"), function.get("arguments") or ""))
    return found


def _read(data: bytes) -> Any:
    try:
        found = json.loads(data)
        if isinstance(found, dict):
            return found
    except ValueError:
        pass
    raise SparkrtError(f"the server sent what is no JSON object: {data[:80]!r}")


def _reason(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.loads(error.read())["error"]["message"])
    except (ValueError, LookupError, TypeError, OSError):
        return f"HTTP {error.code} {error.reason}"
