"""A server for the tests of a file; they are skipped if the packages of the extra are missing."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture(scope="session")
def serving() -> Any:
    """``support.api_server.serving``."""
    for package in ("starlette", "uvicorn", "prometheus_client", "jinja2"):
        pytest.importorskip(package, reason=f"{package} is in the extra 'serve'")
    from support import api_server

    return api_server.serving


@pytest.fixture(scope="module")
def server(serving: Any) -> Iterator[Any]:
    with serving() as server:
        yield server


@pytest.fixture(scope="session")
def openai() -> ModuleType:
    return pytest.importorskip("openai", reason="openai is in the extra 'dev'")


@pytest.fixture
def client(openai: Any, server: Any) -> Iterator[Any]:
    with openai.OpenAI(base_url=server.url, api_key="unused", max_retries=0, timeout=120) as client:
        yield client
