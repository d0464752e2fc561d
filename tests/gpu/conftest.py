from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

KEPT_BYTES = 4 * 2**30


@pytest.fixture(autouse=True)
def memory_given_back() -> Iterator[None]:
    """Free cached memory after each test, for tests of other processes on the same GPU."""
    yield
    if torch.cuda.is_available() and torch.cuda.memory_reserved() > KEPT_BYTES:
        gc.collect()
        torch.cuda.empty_cache()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    if call.excinfo is not None and "CUDA error" in str(call.excinfo.value):
        item.session.shouldstop = "a CUDA error spoils the process: what comes after it says nothing"
    return (yield)
