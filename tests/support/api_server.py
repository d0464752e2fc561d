"""The HTTP server in a thread, with a small random model."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import http.client
import json
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.engine_models import model
from support.letters import CHAT, save_letters

from flashlatte.engine import AsyncEngine, Engine
from flashlatte.engine.loading import load_tokenizer
from flashlatte.serve.command import EngineServer
from flashlatte.serve.context import ServerContext, ServerLimits, max_context
from flashlatte.serve.metrics import ServerMetrics

MODEL, CONTEXT = "tiny", 4096


@functools.cache
def tokenizer(chat_template: str | None = CHAT) -> Any:
    with tempfile.TemporaryDirectory() as path:
        save_letters(Path(path), chat_template)
        return load_tokenizer(path)


def engine(**options: Any) -> Engine:
    settings: dict[str, Any] = {"num_pages": 512, "page_size": 16, "max_num_seqs": 32, "tokenizer": tokenizer()}
    return Engine(model(max_position_embeddings=CONTEXT), **settings | options)


@dataclass
class TestServer:
    """``server`` and ``shared`` belong to the thread's event loop."""

    engine: Engine
    port: int
    server: EngineServer
    shared: AsyncEngine
    loop: asyncio.AbstractEventLoop

    # pytest looks for tests in classes of this name.
    __test__ = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def request(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """Status and JSON of a request. A body that is not bytes is sent as JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        with contextlib.closing(connection):
            data = body if body is None or isinstance(body, bytes) else json.dumps(body)
            connection.request(method, path, data, {"content-type": "application/json"} | headers)
            response = connection.getresponse()
            text = response.read().decode()
            is_json = "json" in response.headers.get("content-type", "")
            return response.status, json.loads(text) if is_json else text

    def wait_idle(self, seconds: float = 120.0) -> dict[str, float]:
        """Wait until no output is running, waiting or being read; returns the statistics."""
        end = time.monotonic() + seconds
        while (now := self.shared.statistics())["pages_in_use"] or now["accepted"]:
            assert time.monotonic() < end, now
            time.sleep(0.01)
        return now


@contextlib.contextmanager
def serving(
    served: Engine | None = None,
    *,
    api_key: str | None = None,
    max_queue: int = 128,
    limits: ServerLimits | None = None,
) -> Iterator[TestServer]:
    """A server that listens on a free port. Checks at its end that no page is in use."""
    served = served or engine()
    started = threading.Event()
    found: list[TestServer] = []

    async def main() -> None:
        async with AsyncEngine(served, max_num_queued=max_queue) as shared:
            context = ServerContext(shared, ServerMetrics(shared), MODEL, max_context(served), limits or ServerLimits())
            server = EngineServer(context, api_key)
            with socket.create_server(("127.0.0.1", 0)) as listener:
                # Small, so that a client that does not read is soon noticed.
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
                port = listener.getsockname()[1]
                found.append(TestServer(served, port, server, shared, asyncio.get_running_loop()))
                started.set()
                await server.serve([listener])

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    assert started.wait(120)
    try:
        yield found[0]
        if found[0].shared.is_running:
            found[0].wait_idle()
    finally:
        found[0].server.should_exit = True
        thread.join(120)
    assert not thread.is_alive()
    assert served.pool.in_use == 0
