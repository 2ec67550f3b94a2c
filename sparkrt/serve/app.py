"""The routes, and the small endpoints. A handler gets what it serves, the decoded body and the request; it returns a struct."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from sparkrt.serve import protocol as p
from sparkrt.serve.answers import chat_completions, completions
from sparkrt.serve.cli import VERSION
from sparkrt.serve.client import SILENCE
from sparkrt.serve.http import decode, describe, error_body, json_response, read_body, require
from sparkrt.serve.serving import Serving, aside

RULE = (
    "Every field that is not required may be null, which equals absent. Fields not listed here are accepted and have no effect, "
    "except those that would change the answer, which are refused by name: "
    f"{', '.join(sorted({*p.CompletionBody.refused, *p.ChatBody.refused}))}."
)


@dataclass(frozen=True, slots=True)
class Operation:
    """One route: its handler, the struct of its request body (None: it has none) and of its answer."""

    method: str
    path: str
    handler: Callable[[Serving, Any, Request], Awaitable[Any]]
    body: type[p.Body] | None
    answer: Any
    summary: str


async def health(serving: Serving, body: None, request: Request) -> Any:
    """200 while the process is alive, loading included; 503 once the engine is gone, or silent for SILENCE seconds."""
    client = serving.client
    if client.error is not None:
        return json_response(p.Status(status="dead", reason=str(client.error)), 503)
    if client.silent_for > SILENCE:
        return json_response(p.Status(status="stuck", reason=f"the engine has said nothing for {client.silent_for:.0f} s"), 503)
    return p.Status(status="ok")


async def ready(serving: Serving, body: None, request: Request) -> Any:
    """200 once the model can answer; 503 before, and while shutting down."""
    return p.Status(status="ready") if serving.is_ready else json_response(p.Status(status="not ready"), 503)


async def version(serving: Serving, body: None, request: Request) -> Any:
    return p.Version(version=VERSION)


async def server_info(serving: Serving, body: None, request: Request) -> Any:
    """What is served, with which options, and how busy the engine is (its gauges after the last step)."""
    await serving.ready()
    info = serving.info
    return p.ServerInfo(version=VERSION, model=info, config=dict(info.lines), stats=serving.client.stats)


async def models(serving: Serving, body: None, request: Request) -> Any:
    await serving.ready()
    return p.ModelList(object="list", data=[_model(serving, name) for name in serving.args.names])


async def model(serving: Serving, body: None, request: Request) -> Any:
    await serving.ready()
    serving.check_model(request.path_params["name"])
    return _model(serving, request.path_params["name"])


def _model(serving: Serving, name: str) -> Any:
    about = {"object": "model", "created": serving.created, "owned_by": "sparkrt", "root": serving.args.model, "parent": None}
    return p.Model(id=name, max_model_len=serving.info.max_model_len, **about)


async def tokenize(serving: Serving, body: p.TokenizeBody, request: Request) -> Any:
    prompt, special, size = body.prompt, body.add_special_tokens is not False, request.state.size
    require((prompt is None) != (body.messages is None), "prompt", "either prompt or messages must be given")
    if prompt is None:
        ids = await serving.render(body, size)
    else:
        ids = await aside(size, lambda: serving.encode(prompt, special, "prompt"))
    names = [serving.tokenizer.token_str(i) for i in ids] if body.return_token_strs else None
    return p.Tokens(count=len(ids), max_model_len=serving.info.max_model_len, tokens=ids, token_strs=names)


async def detokenize(serving: Serving, body: p.DetokenizeBody, request: Request) -> Any:
    return p.Text(
        prompt=await aside(request.state.size, lambda: serving.tokenizer.decode(body.tokens, skip_special_tokens=False))
    )


OPERATIONS = (
    Operation("POST", "/v1/chat/completions", chat_completions, p.ChatBody, p.ChatCompletion, "Answer a conversation"),
    Operation("POST", "/v1/completions", completions, p.CompletionBody, p.Completion, "Continue a text"),
    Operation("GET", "/v1/models", models, None, p.ModelList, "The model, under each of its names"),
    Operation("GET", "/v1/models/{name:path}", model, None, p.Model, "One of them"),
    Operation("POST", "/tokenize", tokenize, p.TokenizeBody, p.Tokens, "Text or messages to token ids"),
    Operation("POST", "/detokenize", detokenize, p.DetokenizeBody, p.Text, "Token ids to text"),
    Operation("GET", "/health", health, None, p.Status, "Whether the server is alive"),
    Operation("GET", "/ready", ready, None, p.Status, "Whether the model can answer"),
    Operation("GET", "/version", version, None, p.Version, "The version of sparkrt"),
    Operation("GET", "/server_info", server_info, None, p.ServerInfo, "Configuration and gauges"),
)


def _endpoint(serving: Serving, op: Operation) -> Callable[[Request], Awaitable[Any]]:
    """The way of every request: its body read and checked, the handler, and what goes wrong turned into an error response."""

    async def answer(request: Request) -> Any:
        body = None
        try:
            if op.body is not None:
                raw = await read_body(request)
                request.state.size = len(raw)
                body = decode(raw, op.body)
                await serving.ready()
                serving.check_model(body.model)
            found = await op.handler(serving, body, request)
        except ClientDisconnect:
            return Response(status_code=499)  # goes nowhere
        except Exception as error:
            return json_response(*describe(error))
        return json_response(found) if isinstance(found, msgspec.Struct) else found

    return answer


@cache
def document() -> Response:
    """OpenAPI, from the structs that are decoded and encoded. Made once, at the first question."""
    types = dict.fromkeys([p.ErrorBody, *(t for op in OPERATIONS for t in (op.body, op.answer) if t is not None)])
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    content = {kind: {"application/json": {"schema": schema}} for kind, schema in zip(types, schemas, strict=True)}
    failure = {"description": "The request is wrong, or cannot be served now", "content": content[p.ErrorBody]}
    paths: dict[str, Any] = {}
    for op in OPERATIONS:
        responses = {"200": {"description": "The answer", "content": content[op.answer]}, "default": failure}
        entry: dict[str, Any] = {"summary": op.summary, "operationId": op.handler.__name__, "responses": responses}
        if op.body is not None:
            entry["requestBody"] = {"required": True, "content": content[op.body]}
        if names := re.findall(r"{(\w+)", op.path):
            entry["parameters"] = [{"name": n, "in": "path", "required": True, "schema": {"type": "string"}} for n in names]
        paths.setdefault(re.sub(r":\w+}", "}", op.path), {})[op.method.lower()] = entry
    info = {"title": "sparkrt", "version": VERSION, "description": RULE}
    return json_response({"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": components}})


async def _no_route(request: Request, error: Exception) -> Response:
    """404 and 405, in our words."""
    assert isinstance(error, HTTPException)
    hints = {404: f"there is no {request.url.path} here", 405: f"{request.method} is not allowed for {request.url.path}"}
    message = f"{hints.get(error.status_code, error.detail)}; /openapi.json lists what is"
    response = json_response(error_body(error.status_code, message), error.status_code)
    response.headers.update(error.headers or {})
    return response


def build_app(serving: Serving) -> Starlette:
    routes = [Route(op.path, _endpoint(serving, op), methods=[op.method]) for op in OPERATIONS]
    routes.append(Route("/openapi.json", lambda request: document()))
    origins = serving.args.allowed_origins
    cors = [Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])] if origins else []
    return Starlette(routes=routes, middleware=cors, exception_handlers={HTTPException: _no_route})
