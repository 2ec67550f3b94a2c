"""The page at `/`: a conversation with the model, and what the server is doing. Plain files, sent as they are.

They hold nothing that is anybody's, so they come without a key; what they ask of the API does need one.
"""

from __future__ import annotations

from hashlib import sha256
from mimetypes import types_map
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

# Nothing from elsewhere, nothing sent elsewhere, no text as script or markup, no frame around it.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # may be kept, and is asked for again: an update must not meet old scripts
}
_FILES = sorted(path for path in Path(__file__).parent.iterdir() if path.suffix in (".html", ".css", ".js", ".svg"))


def page_routes() -> list[Route]:
    return [_route("/" if path.name == "index.html" else f"/page/{path.name}", path) for path in _FILES]


def _route(url: str, path: Path) -> Route:
    content = path.read_bytes()
    headers = _HEADERS | {"etag": f'"{sha256(content).hexdigest()[:16]}"'}

    async def send(request: Request) -> Response:
        if request.headers.get("if-none-match") == headers["etag"]:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=types_map[path.suffix], headers=headers)

    return Route(url, send)
