"""The routes, and the small endpoints that say how the server is."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from sparkrt.errors import RequestError
from sparkrt.serve.chat import chat_completions
from sparkrt.serve.client import SILENCE
from sparkrt.serve.completions import completions
from sparkrt.serve.http import error_body, error_response, guarded, json_response
from sparkrt.serve.openapi import Operation, document
from sparkrt.serve.protocol import (
    ChatBody,
    ChatCompletion,
    Completion,
    CompletionBody,
    DetokenizeBody,
    Model,
    ModelList,
    ServerInfo,
    Status,
    Text,
    TokenizeBody,
    Tokens,
    Version,
)
from sparkrt.serve.serving import Serving
from sparkrt.serve.tokens import detokenize, tokenize
from sparkrt.serve.version import VERSION


async def health(request: Request) -> Response:
    """200 while the process is alive, loading included; 503 once the engine is gone, or silent for SILENCE seconds."""
    client = request.app.state.serving.client
    if client.error is not None:
        return json_response(Status(status="dead", reason=str(client.error)), 503)
    if client.silent_for > SILENCE:
        return json_response(Status(status="stuck", reason=f"the engine has said nothing for {client.silent_for:.0f} s"), 503)
    return json_response(Status(status="ok"))


async def ready(request: Request) -> Response:
    """200 once the model can answer; 503 before, and while shutting down."""
    if request.app.state.serving.is_ready:
        return json_response(Status(status="ready"))
    return json_response(Status(status="not ready"), 503)


async def version(request: Request) -> Response:
    return json_response(Version(version=VERSION))


async def server_info(request: Request) -> Response:
    """What is served, with which options, and how busy the engine is (its gauges after the last step)."""
    serving: Serving = request.app.state.serving
    await serving.ready()
    return json_response(
        ServerInfo(version=VERSION, model=serving.info, config=dict(serving.info.lines), stats=serving.client.stats)
    )


async def models(request: Request) -> Response:
    serving: Serving = request.app.state.serving
    await serving.ready()
    return json_response(ModelList(object="list", data=[_model(serving, name) for name in serving.args.names]))


async def model(request: Request) -> Response:
    serving: Serving = request.app.state.serving
    await serving.ready()
    name = request.path_params["name"]
    serving.check_model(name)
    return json_response(_model(serving, name))


def _model(serving: Serving, name: str) -> Model:
    return Model(
        id=name,
        object="model",
        created=serving.created,
        owned_by="sparkrt",
        root=serving.args.model,
        parent=None,
        max_model_len=serving.info.max_model_len,
    )


async def openapi(request: Request) -> Response:
    return json_response(document(OPERATIONS, VERSION))


OPERATIONS = (
    Operation("POST", "/v1/chat/completions", chat_completions, ChatBody, ChatCompletion, "Answer a conversation"),
    Operation("POST", "/v1/completions", completions, CompletionBody, Completion, "Continue a text"),
    Operation("GET", "/v1/models", models, None, ModelList, "The model, under each of its names"),
    Operation("GET", "/v1/models/{name:path}", model, None, Model, "One of them"),
    Operation("POST", "/tokenize", tokenize, TokenizeBody, Tokens, "Text or messages to token ids"),
    Operation("POST", "/detokenize", detokenize, DetokenizeBody, Text, "Token ids to text"),
    Operation("GET", "/health", health, None, Status, "Whether the server is alive"),
    Operation("GET", "/ready", ready, None, Status, "Whether the model can answer"),
    Operation("GET", "/version", version, None, Version, "The version of sparkrt"),
    Operation("GET", "/server_info", server_info, None, ServerInfo, "Configuration and gauges"),
)


async def _no_route(request: Request, error: Exception) -> Response:
    """404 and 405, in our words."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        message = f"{request.method} is not allowed for {request.url.path}"
    else:
        message = f"there is no {request.url.path} here; /openapi.json lists what is"
    response = json_response(error_body(error.status_code, message), error.status_code)
    response.headers.update(error.headers or {})
    return response


async def _failure(request: Request, error: Exception) -> Response:
    return error_response(error)


def build_app(serving: Serving) -> Starlette:
    routes = [Route(op.path, guarded(op.handler), methods=[op.method]) for op in OPERATIONS]
    routes.append(Route("/openapi.json", openapi))
    origins = serving.args.allowed_origins
    cors = Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    app = Starlette(
        routes=routes,
        middleware=[cors] if origins else [],
        exception_handlers={HTTPException: _no_route, RequestError: _failure},
    )
    app.state.serving = serving
    return app
