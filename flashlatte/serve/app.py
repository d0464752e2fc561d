"""The ASGI application: routes, authorization, and errors in OpenAI's shape."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
from collections.abc import AsyncIterator, Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from flashlatte.serve.chat import parse_chat
from flashlatte.serve.completions import parse_completion
from flashlatte.serve.context import ServerContext
from flashlatte.serve.errors import ApiError
from flashlatte.serve.generation import events, start, whole_answer
from flashlatte.serve.job import GenerationJob
from flashlatte.serve.metrics import ServerMetrics
from flashlatte.serve.responses import EventStream, json_response, read_body, unless_disconnected

# nginx's status for a client that has disconnected, which does not see it.
_CLIENT_CLOSED_REQUEST = 499


def create_app(context: ServerContext, api_key: str | None = None) -> Starlette:
    """The application, for one server that ``context.engine`` outlives.

    Args:
        api_key: key that requests below /v1 must have.
    """
    # Parsing takes long for large bodies: templates, tokenizer. In a thread it delays no other response.
    parser = ThreadPoolExecutor(1, thread_name_prefix="flashlatte-parser")

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        parser.shutdown(wait=False, cancel_futures=True)

    def generate(parse: Callable[[bytes, ServerContext], GenerationJob]) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Response:
            body = await read_body(request, context.limits)
            job = await asyncio.get_running_loop().run_in_executor(parser, parse, body, context)
            stream = await start(context, job)
            if job.stream:
                return EventStream(events(context, job, stream), stream, context.limits)
            async with contextlib.aclosing(stream):
                return json_response(await unless_disconnected(request.receive, whole_answer(context, job, stream)))

        return endpoint

    async def health(request: Request) -> Response:
        if not context.engine.is_running:
            raise ApiError(503, "the engine is not running")
        return json_response({"status": "ok"})

    async def metrics(request: Request) -> Response:
        text, media_type = context.metrics.text()
        return Response(text, headers={"content-type": media_type})

    async def models(request: Request) -> Response:
        return json_response({"object": "list", "data": [_model(context)]})

    async def model(request: Request) -> Response:
        context.check_name(request.path_params["name"])
        return json_response(_model(context))

    routes = [
        Route("/v1/completions", generate(parse_completion), methods=["POST"]),
        Route("/v1/chat/completions", generate(parse_chat), methods=["POST"]),
        Route("/v1/models", models, methods=["GET"]),
        Route("/v1/models/{name:path}", model, methods=["GET"]),
        Route("/health", health, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
    ]
    paths = {route.path for route in routes}
    app = Starlette(
        routes=routes,
        middleware=[Middleware(Gate, metrics=context.metrics, paths=paths, api_key=api_key)],
        exception_handlers={
            ApiError: _api_error,
            HTTPException: _http_error,
            ClientDisconnect: lambda request, error: Response(status_code=_CLIENT_CLOSED_REQUEST),
            Exception: lambda request, error: json_response(ApiError(500, "the server failed").body(), 500),
        },
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    return app


class Gate:
    """Refuses requests without the key, and counts the statuses of all responses, by path if it is one of ``paths``."""

    def __init__(self, app: ASGIApp, metrics: ServerMetrics, paths: Collection[str], api_key: str | None) -> None:
        self._app, self._metrics, self._paths = app, metrics, paths
        self._digest = None if api_key is None else _digest(api_key.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        path = scope["path"] if scope["path"] in self._paths else "other"
        responded = False

        async def counting(message: Message) -> None:
            nonlocal responded
            if message["type"] == "http.response.start":
                responded = True
                self._metrics.responded(path, message["status"])
            await send(message)

        if scope["path"].startswith("/v1/") and not self._may_pass(dict(scope["headers"]).get(b"authorization", b"")):
            error = ApiError(401, "the API key is missing or wrong", code="invalid_api_key")
            await json_response(error.body(), 401, {"www-authenticate": "Bearer"})(scope, receive, counting)
            return
        try:
            await self._app(scope, receive, counting)
        except Exception:
            if not responded:  # Starlette answers with status 500, outside of its middleware
                self._metrics.responded(path, 500)
            raise

    def _may_pass(self, authorization: bytes) -> bool:
        if self._digest is None:
            return True
        scheme, _, key = authorization.partition(b" ")
        # Digests have one length, and are compared in constant time.
        return hmac.compare_digest(_digest(key.strip()), self._digest) and scheme.lower() == b"bearer"


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _model(context: ServerContext) -> dict[str, Any]:
    return {
        "id": context.model_name,
        "object": "model",
        "created": context.created,
        "owned_by": "flashlatte",
        "max_model_len": context.max_model_len,
    }


def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return json_response(error.body(), error.status, error.headers)


def _http_error(request: Request, error: Exception) -> Response:
    """404 and 405 of the router."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path[:200]}: {error.detail}"
    return json_response(ApiError(error.status_code, message).body(), error.status_code, error.headers)
