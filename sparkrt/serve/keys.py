"""Who may ask: `--api-key` and `--api-key-file`."""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterable
from hashlib import sha256
from itertools import repeat

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from sparkrt.serve.http import turned_away

# load balancers carry no key; the page must be there to ask for one
OPEN_TO_ALL = re.compile(r"/(health|ready|(page/[\w.]+)?)")


class KeyGuard:
    """Answers 401 to whoever brings none of `keys`, as `Authorization: Bearer KEY` or `x-api-key: KEY`.

    Digests are compared, each of them, in constant time: how long it takes says nothing of the keys, nor which one it was.
    """

    def __init__(self, app: ASGIApp, keys: Iterable[str]) -> None:
        self._app, self._digests = app, [sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (
            scope["type"] != "http"
            or OPEN_TO_ALL.fullmatch(scope["path"].removeprefix(scope.get("root_path", "")))
            or self._knows(Headers(scope=scope))
        ):
            await self._app(scope, receive, send)
            return
        message = "a key is needed: Authorization: Bearer KEY, or x-api-key: KEY"
        response = turned_away(scope, 401, message, "invalid_api_key")
        response.headers["www-authenticate"] = "Bearer"
        await response(scope, receive, send)

    def _knows(self, headers: Headers) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        digest = sha256(given.encode("latin-1", "replace")).digest()
        return sum(map(hmac.compare_digest, self._digests, repeat(digest))) > 0  # all of them are compared
