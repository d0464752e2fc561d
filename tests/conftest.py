from __future__ import annotations

import functools
import gc
import importlib
import re
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import hypothesis
import pytest

# PyTorch is imported only in processes that collect tests, not in the one that only distributes them to workers.

pytest_plugins = ["support.progress", "support.isolation", "support.emulator.fixture"]

# ``make test`` is quick; ``make test-full`` uses the other profile with --hypothesis-profile full.
COMMON = hypothesis.settings(deadline=None, derandomize=True, database=None)
hypothesis.settings.register_profile("quick", COMMON, max_examples=6)
hypothesis.settings.register_profile("full", COMMON, max_examples=100)
hypothesis.settings.load_profile("quick")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore paths whose imports, half of a run's start-up time, the interpreter's tests do not need."""
    only_interpreted = config.option.markexpr.startswith("interpreter")
    is_test = collection_path.name.startswith("test_")
    return True if only_interpreted and is_test and "interpreter" not in collection_path.read_text() else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect garbage neither during imports nor, later, in what they created: that is a third of a collection."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    from flashlatte.runtime import machine

    if machine.interpreting():
        from support import quick_interpreter

        quick_interpreter.install()
    items.sort(key=_compiles, reverse=True)
    needs = {
        "gpu": (torch.cuda.is_available(), "needs a CUDA GPU"),
        "interpreter": (machine.interpreting(), "needs TRITON_INTERPRET=1"),
    }
    for item in items:
        item.runtest = functools.partial(_run_in_one_stack_chunk, item.runtest)
        for marker, (available, reason) in needs.items():
            if item.get_closest_marker(marker) and not available:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Seed PyTorch's generator, so that a test's numbers do not depend on the tests before it."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


def _run_in_one_stack_chunk(run: Callable[[], None]) -> None:
    """Run a test on a stack of frames that does not grow.

    CPython's stack of frames consists of chunks of 16 KiB. A call that does not fit in the current chunk maps a new
    one, and its return unmaps it, so that a loop of such calls enters the kernel twice in each iteration: half of
    the time of tests in Triton's interpreter. This function's frame takes 512 KiB, and so gets a chunk of 1 MiB.
    """
    run()


_run_in_one_stack_chunk.__code__ = _run_in_one_stack_chunk.__code__.replace(co_stacksize=2**16)


def _compiles(item: pytest.Item) -> bool:
    """Whether a test reads machine code. Such tests are grouped, so that one worker compiles each kernel once."""
    return item.path.stem in ("test_launches", "test_machine_code") or bool(re.search("hopper|compile", item.path.stem))


@pytest.fixture(autouse=True)
def reset_torch_compile() -> Iterator[None]:
    """Reset torch.compile, which limits the number of compilations of a function in a process."""
    yield
    if "torch._dynamo" in sys.modules:
        # import_module waits while another thread, for example a server's, still imports it.
        importlib.import_module("torch._dynamo").reset()
