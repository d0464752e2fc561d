"""Reads bodies and writes streams, within limits and until the client disconnects."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from flashlatte.engine.output_stream import OutputStream
from flashlatte.serve.context import ServerLimits
from flashlatte.serve.errors import ApiError

T = TypeVar("T")


def to_json(values: Any) -> bytes:
    return json.dumps(values, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def json_response(values: Any, status: int = 200, headers: Any = None) -> Response:
    return Response(to_json(values), status, headers, media_type="application/json")


async def read_body(request: Request, limits: ServerLimits) -> bytes:
    """The body of a request.

    Raises:
        ApiError: it is not declared to be JSON, is too large, or does not arrive in time.
        ClientDisconnect: the client disconnected.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise ApiError(415, f"content-type must be application/json, got {media_type!r:.100}", param="content-type")
    declared = request.headers.get("content-length", "0")
    too_large = ApiError(413, f"the body must have at most {limits.max_body_bytes} bytes", code="body_too_large")
    if len(declared) > 18 or not declared.isdecimal() or int(declared) > limits.max_body_bytes:
        raise too_large

    async def read() -> bytes:
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > limits.max_body_bytes:
                raise too_large
        return bytes(body)

    try:
        return await within(limits.body_seconds, read())
    except asyncio.TimeoutError:
        raise ApiError(408, f"the body must arrive within {limits.body_seconds:g} seconds") from None


async def within(seconds: float, work: Coroutine[Any, Any, T]) -> T:
    """``asyncio.wait_for``, which before Python 3.12 loses a cancellation that arrives together with the result.

    Raises:
        asyncio.TimeoutError: ``work`` took longer, and was cancelled.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait((task,), timeout=seconds)
        if not task.done():
            raise asyncio.TimeoutError
        return task.result()
    finally:
        task.cancel()


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, which is cancelled if the client disconnects.

    Raises:
        ClientDisconnect: the client disconnected.
    """

    async def disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(disconnect())
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for one in (task, watch):
            one.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _sent(send: Send, message: dict[str, Any]) -> None:
    await send(message)


class EventStream(Response):
    """Server-sent events.

    The next event is generated when the last one has been written to the socket. A client that does not read for
    ``ServerLimits.write_seconds`` is disconnected.

    Args:
        events: the events' data.
        source: the stream that ``events`` reads; closed at the end, also if ``events`` was never started.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], source: OutputStream, limits: ServerLimits) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events, self._source, self._limits = events, source, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def write(message: dict[str, Any]) -> None:
            try:
                await within(self._limits.write_seconds, _sent(send, message))
            except asyncio.TimeoutError:
                raise ClientDisconnect from None

        async def stream() -> None:
            await write({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for event in self._events:
                await write({"type": "http.response.body", "body": b"data: " + event + b"\n\n", "more_body": True})
            await write({"type": "http.response.body", "body": b"", "more_body": False})

        async with contextlib.aclosing(self._source), contextlib.aclosing(self._events):
            # uvicorn closes the connection of a response that is not complete.
            with contextlib.suppress(ClientDisconnect):
                await unless_disconnected(receive, stream())
