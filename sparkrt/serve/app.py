"""The routes, and the small endpoints. A handler gets what it serves, the decoded body and the request; it returns a struct."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import cache
from typing import Any, TextIO

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from sparkrt.serve import protocol as p
from sparkrt.serve.access import Access
from sparkrt.serve.anthropic import count_tokens, describe_error, messages
from sparkrt.serve.chat import chat_completions
from sparkrt.serve.cli import VERSION
from sparkrt.serve.completions import completions
from sparkrt.serve.engine import SILENCE
from sparkrt.serve.generate import generate
from sparkrt.serve.http import decode, describe, json_response, read_body, require, turned_away
from sparkrt.serve.keys import KeyGuard
from sparkrt.serve.openapi import document
from sparkrt.serve.page import page_routes
from sparkrt.serve.responses import routes as responses
from sparkrt.serve.serving import Serving

Handler = Callable[[Serving, Any, Request], Awaitable[Any]]


async def health(serving: Serving, body: None, request: Request) -> Any:
    """200 while the process is alive, loading included; 503 once the engine is gone, or silent for SILENCE seconds."""
    error, silence = serving.client.error, serving.client.silent_for
    if error is None and silence <= SILENCE:
        return p.Status(status="ok")
    reason = f"the engine has said nothing for {silence:.0f} s" if error is None else str(error)
    return json_response(p.Status(status="stuck" if error is None else "dead", reason=reason), 503)


async def ready(serving: Serving, body: None, request: Request) -> Any:
    """200 once the model can answer; 503 before, in its sleep, and while shutting down."""
    client = serving.client
    if serving.opened.done() and client.error is None and not (client.draining or client.asleep):
        return p.Status(status="ready")
    return json_response(p.Status(status="asleep" if client.asleep else "not ready"), 503)


async def version(serving: Serving, body: None, request: Request) -> Any:
    return p.Version(version=VERSION)


async def server_info(serving: Serving, body: None, request: Request) -> Any:
    """What is served, with which options, and how busy the engine is (its gauges after the last step)."""
    info = serving.info
    return p.ServerInfo(version=VERSION, model=info, config=dict(info.lines), stats=serving.client.stats)


async def metrics(serving: Serving, body: None, request: Request) -> Any:
    return Response(serving.metrics.text(), media_type=CONTENT_TYPE_LATEST)


async def models(serving: Serving, body: None, request: Request) -> Any:
    return p.ModelList(object="list", data=[_model(serving, name) for name in serving.args.names])


async def model(serving: Serving, body: None, request: Request) -> Any:
    serving.check_model(request.path_params["name"])
    return _model(serving, request.path_params["name"])


def _model(serving: Serving, name: str) -> Any:
    about = {"object": "model", "created": serving.created, "owned_by": "sparkrt", "root": serving.args.model, "parent": None}
    return p.Model(id=name, max_model_len=serving.info.max_model_len, **about)


async def tokenize(serving: Serving, body: Any, request: Request) -> Any:
    require((body.prompt is None) != (body.messages is None), "prompt", "either prompt or messages must be given")
    if body.prompt is None:
        _, ids = await asyncio.to_thread(serving.render, body)
    else:
        ids = await asyncio.to_thread(serving.encode, body.prompt, body.add_special_tokens is not False, "prompt")
    names = [serving.tokenizer.token_str(i) for i in ids] if body.return_token_strs else None
    return p.Tokens(count=len(ids), max_model_len=serving.info.max_model_len, tokens=ids, token_strs=names)


async def openapi(serving: Serving, body: None, request: Request) -> Any:
    root = serving.args.root_path
    return json_response(_document() | ({"servers": [{"url": root}]} if root else {}))


async def reset_prefix_cache(serving: Serving, body: None, request: Request) -> Any:
    serving.client.reset_prefix_cache()
    return p.Status(status="ok")


async def flush_cache(serving: Serving, body: None, request: Request) -> Any:
    return await reset_prefix_cache(serving, body, request)


async def abort_request(serving: Serving, body: Any, request: Request) -> Any:
    """`rid` or `request_ids`: ids of answers, or X-Request-Ids; `abort_all`: everything. Unknown ids are ignored."""
    ids = {*([] if body.rid is None else [body.rid]), *(body.request_ids or ())}
    require(ids or body.abort_all, "rid", "rid, request_ids or abort_all must be given")
    return p.Aborted(aborted=serving.client.abort(None if body.abort_all else ids))


async def sleep(serving: Serving, body: None, request: Request) -> Any:
    """Give the device's memory back: KV, and the weights: `level` 1 (the default) keeps them in host memory, 2 discards them.

    Nothing new is taken from now on. `mode` wait (the default) lets finish what runs, abort ends it.
    """
    level, mode = request.query_params.get("level", "1"), request.query_params.get("mode", "wait")
    require(level in ("1", "2"), "level", "level must be 1 (weights kept in host memory) or 2 (discarded)")
    require(mode in ("wait", "abort"), "mode", "mode must be wait or abort")
    require(serving.args.engine.enable_sleep_mode, "level", "the server must be started with --enable-sleep-mode")
    if mode == "abort":
        serving.client.abort(None)
    await serving.client.sleep(int(level))
    return p.Sleep(is_sleeping=True)


async def wake_up(serving: Serving, body: None, request: Request) -> Any:
    """Take the memory again, and answer as before."""
    require("tags" not in request.query_params, "tags", "tags is not supported: everything wakes up")
    await serving.client.sleep(0)
    return p.Sleep(is_sleeping=False)


async def is_sleeping(serving: Serving, body: None, request: Request) -> Any:
    return p.Sleep(is_sleeping=serving.client.asleep)


async def detokenize(serving: Serving, body: Any, request: Request) -> Any:
    require(len(body.tokens) <= MAX_TOKENS, "tokens", f"tokens takes at most {MAX_TOKENS} ids, got {len(body.tokens)}")
    return p.Text(prompt=await asyncio.to_thread(serving.tokenizer.decode, body.tokens, False))


# method, path, handler, struct of the request body (None: it has none), struct of the answer, summary
OPERATIONS: tuple[tuple[str, str, Handler, Any, Any, str], ...] = (
    ("POST", "/v1/chat/completions", chat_completions, p.ChatBody, p.ChatCompletion, "Answer a conversation"),
    ("POST", "/v1/completions", completions, p.CompletionBody, p.Completion, "Continue a text"),
    ("POST", "/v1/responses", responses.create_response, p.ResponsesBody, p.Response, "Answer a conversation, in items"),
    (
        "POST",
        "/v1/responses/input_tokens",
        responses.count_input_tokens,
        p.ResponsesBody,
        p.InputTokens,
        "How long its prompt is",
    ),
    ("GET", "/v1/responses/{response_id}", responses.get_response, None, p.Response, "A response that was stored"),
    ("DELETE", "/v1/responses/{response_id}", responses.delete_response, None, p.Deleted, "Forget it"),
    (
        "GET",
        "/v1/responses/{response_id}/input_items",
        responses.list_input_items,
        None,
        p.ResponseItems,
        "What it was made from",
    ),
    (
        "POST",
        "/v1/responses/{response_id}/cancel",
        responses.cancel_response,
        None,
        p.Response,
        "Refused: nothing runs in the background",
    ),
    ("POST", "/v1/messages", messages, p.MessagesBody, p.Message, "Answer a conversation, in Anthropic's way"),
    ("POST", "/v1/messages/count_tokens", count_tokens, p.CountTokensBody, p.TokenCount, "How long its prompt is"),
    ("POST", "/generate", generate, p.GenerateBody, p.Generated | list[p.Generated], "Continue a text, in SGLang's way"),
    ("GET", "/v1/models", models, None, p.ModelList, "The model, under each of its names"),
    ("GET", "/v1/models/{name:path}", model, None, p.Model, "One of them"),
    ("POST", "/tokenize", tokenize, p.TokenizeBody, p.Tokens, "Text or messages to token ids"),
    ("POST", "/detokenize", detokenize, p.DetokenizeBody, p.Text, "Token ids to text"),
    ("POST", "/reset_prefix_cache", reset_prefix_cache, None, p.Status, "Forget what is cached of prompts"),
    ("POST", "/flush_cache", flush_cache, None, p.Status, "The same, as SGLang calls it"),
    ("POST", "/abort_request", abort_request, p.AbortBody, p.Aborted, "End requests"),
    ("POST", "/sleep", sleep, None, p.Sleep, "Give the device's memory back"),
    ("POST", "/wake_up", wake_up, None, p.Sleep, "Take it again"),
    ("GET", "/is_sleeping", is_sleeping, None, p.Sleep, "Whether the model is asleep"),
    ("GET", "/health", health, None, p.Status, "Whether the server is alive"),
    ("GET", "/ready", ready, None, p.Status, "Whether the model can answer"),
    ("GET", "/version", version, None, p.Version, "The version of sparkrt"),
    ("GET", "/metrics", metrics, None, str, "Counters, gauges and histograms for Prometheus"),
    ("GET", "/server_info", server_info, None, p.ServerInfo, "Configuration and gauges"),
    ("GET", "/openapi.json", openapi, None, dict[str, Any], "This document"),
)
MAX_TOKENS = 2**20  # of /detokenize
# These need no model.
AT_ONCE = (health, ready, version, metrics, openapi)


@cache
def _document() -> dict[str, Any]:
    """Made once, at the first question."""
    return document(OPERATIONS)


def _endpoint(serving: Serving, handler: Handler, kind: Any) -> Callable[[Request], Awaitable[Any]]:
    """The way of every request: its body read and checked, the handler, and what goes wrong turned into an error response."""

    async def answer(request: Request) -> Any:
        body = None
        try:
            if kind is not None:
                body = decode(await read_body(request), kind)
            if handler not in AT_ONCE:
                await asyncio.shield(serving.opened)
            serving.check_model(getattr(body, "model", None))
            found = await handler(serving, body, request)
        except ClientDisconnect:
            return Response(status_code=499)  # goes nowhere
        except Exception as error:
            return json_response(*(describe_error if handler in (messages, count_tokens) else describe)(error))
        return json_response(found) if isinstance(found, msgspec.Struct) else found

    return answer


async def _no_route(request: Request, error: Exception) -> Response:
    """404 and 405, in our words."""
    assert isinstance(error, HTTPException)
    hints = {404: f"there is no {request.url.path} here", 405: f"{request.method} is not allowed for {request.url.path}"}
    message = f"{hints.get(error.status_code, error.detail)}; /openapi.json lists what is"
    response = turned_away(request.scope, error.status_code, message)
    response.headers.update(error.headers or {})
    return response


def build_app(serving: Serving, log_to: TextIO | None = None) -> Starlette:
    """`log_to`: where the access log is written."""
    routes = [Route(path, _endpoint(serving, handler, body), methods=[method]) for method, path, handler, body, *_ in OPERATIONS]
    args, around = serving.args, [Middleware(Access, log=log_to)]
    if args.allowed_origins:
        rules: dict[str, Any] = {"allow_origins": args.allowed_origins, "allow_methods": args.allowed_methods}
        rules |= {"allow_headers": args.allowed_headers, "allow_credentials": args.allow_credentials}
        around.append(Middleware(CORSMiddleware, expose_headers=["x-request-id"], **rules))
    if args.api_keys:  # inside: a browser's preflight request brings no key
        around.append(Middleware(KeyGuard, keys=args.api_keys))
    routes += page_routes()
    return Starlette(routes=routes, middleware=around, exception_handlers={HTTPException: _no_route})
