"""``flashlatte serve``: the engine behind uvicorn, from the start to the end of the process."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import ipaddress
import os
import signal
import socket
import sys
import threading
import time
from typing import Any

import uvicorn

from flashlatte.engine.arguments import create_engine
from flashlatte.engine.async_engine import AsyncEngine
from flashlatte.engine.engine import Engine
from flashlatte.engine.loading import load_tokenizer
from flashlatte.engine.paged import config_of
from flashlatte.serve import EXTRA_HINT
from flashlatte.serve.app import create_app
from flashlatte.serve.context import ServerContext, ServerLimits, max_context
from flashlatte.serve.metrics import ServerMetrics

API_KEY_VARIABLE = "FLASHLATTE_API_KEY"
# Minimum and maximum of options.
_RANGES: dict[str, tuple[int, int | None]] = {
    "port": (0, 65535),
    "max_model_len": (2, None),
    "max_queue": (0, None),
    "max_body_bytes": (1, None),
    "drain_seconds": (0, 3600),
    "num_pages": (1, None),
    "page_size": (1, None),
    "swap_space": (0, None),
    "max_num_batched_tokens": (1, None),
    "max_num_seqs": (1, None),
    "num_speculative_tokens": (0, None),
}
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# Idle connections that are accepted in addition to one for each output.
_IDLE_CONNECTIONS = 1024
# Seconds; longer than clients and proxies keep a connection: a request fails if the server closes its connection first.
_KEEP_ALIVE_SECONDS = 75
# Seconds that clients have to read the error after the remaining requests were ended.
_CLOSING_SECONDS = 5.0


def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code: 1 if the engine failed and cannot continue."""
    api_key = arguments.api_key or os.environ.get(API_KEY_VARIABLE) or None
    _check(arguments, api_key)
    if importlib.util.find_spec("jinja2") is None:
        raise ModuleNotFoundError(f"the server needs jinja2: {EXTRA_HINT}")
    # First, because transformers would look for a tokenizer of a missing directory on the network.
    config_of(arguments.model)
    leads = os.environ.get("RANK", "0") == "0"
    # Before the weights are loaded, which takes long.
    listener = _bind(arguments.host, arguments.port) if leads else None
    names = ("num_pages", "page_size", "swap_space", "max_num_batched_tokens", "max_num_seqs", "num_speculative_tokens")
    options = {name: getattr(arguments, name) for name in names}
    engine = create_engine(arguments, tokenizer=load_tokenizer(arguments.model), **options)
    if listener is None:
        for number in _STOP_SIGNALS:
            # torchrun sends the signals to all ranks. This rank must run until rank 0 has drained and ended ``follow``.
            signal.signal(number, signal.SIG_IGN)
        engine.follow()
        return 0
    with engine:
        return asyncio.run(_serve(engine, listener, api_key, arguments))


async def _serve(engine: Engine, listener: socket.socket, api_key: str | None, arguments: argparse.Namespace) -> int:
    limits = ServerLimits(max_body_bytes=arguments.max_body_bytes, drain_seconds=arguments.drain_seconds)
    context_length = _context_length(engine, arguments.max_model_len)
    async with AsyncEngine(engine, max_num_queued=arguments.max_queue) as shared:
        name = arguments.served_model_name or arguments.model.resolve().name
        context = ServerContext(shared, ServerMetrics(shared), name, context_length, limits)
        host, port = listener.getsockname()[:2]
        greeting = (
            f"flashlatte serve: {name} at http://{f'[{host}]' if ':' in host else host}:{port}/v1, "
            f"{context_length} tokens of context, {engine.pool.num_pages} pages of {engine.pool.page_size} tokens, "
            f"cache {engine.cache_format}"
        )
        if api_key is None and not _is_loopback(host):
            greeting += "\nflashlatte serve: no API key is set, and other machines can send requests"
        await EngineServer(context, api_key, greeting).serve([listener])
        return 0 if shared.is_running else 1


class EngineServer(uvicorn.Server):
    """A uvicorn server that stops with the engine, and ends requests with an error event after the drain time.

    Args:
        greeting: printed to stderr when clients can connect.
    """

    def __init__(self, context: ServerContext, api_key: str | None = None, greeting: str = "") -> None:
        self._context, self._drain_seconds, self._greeting = context, context.limits.drain_seconds, greeting
        self._ends_now = False
        super().__init__(
            uvicorn.Config(
                create_app(context, api_key),
                loop="asyncio",
                http="h11",
                ws="none",
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                limit_concurrency=context.engine.max_num_outputs + _IDLE_CONNECTIONS,
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=round(self._drain_seconds + _CLOSING_SECONDS),
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        # Only now can clients connect.
        print(self._greeting, end="\n" if self._greeting else "", file=sys.stderr, flush=True)

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or not self._context.engine.is_running

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Begin to stop; at a second Ctrl-C end the requests, which uvicorn would cancel without an error."""
        self._ends_now |= self.should_exit and sig == signal.SIGINT
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        drain = asyncio.ensure_future(self._end_requests())
        try:
            await super().shutdown(sockets)
        finally:
            drain.cancel()

    async def _end_requests(self) -> None:
        end = time.monotonic() + self._drain_seconds
        while not self._ends_now and (remaining := end - time.monotonic()) > 0:
            await asyncio.sleep(min(remaining, 0.1))
        await self._context.engine.abort_all("the server is stopping")

    def capture_signals(self) -> Any:
        return _StopOnSignal(self)


class _StopOnSignal:
    """Context manager in which SIGTERM and SIGINT stop the server. uvicorn's own context manager raises the signal
    again at the end, which would end the process before the engine is closed.
    """

    def __init__(self, server: uvicorn.Server) -> None:
        self._server = server
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():  # at which signals arrive
            self._previous = {number: signal.signal(number, self._server.handle_exit) for number in _STOP_SIGNALS}

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)


def _check(arguments: argparse.Namespace, api_key: str | None) -> None:
    for name, (low, high) in _RANGES.items():
        value = getattr(arguments, name)
        if value is not None and (not value >= low or (high is not None and value > high)):
            accepted = f"at least {low}" + ("" if high is None else f" and at most {high}")
            raise ValueError(f"--{name.replace('_', '-')} must be {accepted}, got {value}")
    if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
        raise ValueError("--api-key must have printable ASCII characters only")


def _context_length(engine: Engine, requested: int | None) -> int:
    longest = max_context(engine)
    if requested is None:
        return longest
    if not 2 <= requested <= longest:
        raise ValueError(
            f"--max-model-len must be from 2 to {longest}, which the model and the cache allow, got {requested}"
        )
    return requested


def _bind(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise OSError(f"--host and --port must be free to listen at, got {host} and {port}: {error.strerror}") from None
    return listener


def _is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host.partition("%")[0]).is_loopback
