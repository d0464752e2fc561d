"""``load.py`` for a short time; FLASHLATTE_LOAD_SECONDS makes it longer."""

from __future__ import annotations

import asyncio
import os

import pytest


@pytest.mark.full
@pytest.mark.usefixtures("serving", "openai")
def test_a_server_under_load_has_no_faults():
    from serve import load

    seconds = float(os.environ.get("FLASHLATTE_LOAD_SECONDS", "20"))
    with load.server() as url:
        result = asyncio.run(load.run(url, seconds, clients=64, seed=0))
    assert result["faults"] == []
    assert result["outputs"] > 20
    assert min(result[name] for name in ("left", "refused", "queue full", "preempted")) > 0
