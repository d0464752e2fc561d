"""Fails a test that leaves one of its functions in a module of the library.

Modules of implementations are imported when they first run. If that is while a test replaces ``machine.num_sms``, a
module with ``from machine import num_sms`` keeps the replacement, which ``monkeypatch`` does not restore. Tests replace
the facts that such a function reads instead, for example with ``machine.assuming``.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

TESTS = str(Path(__file__).parents[1])
# Files whose functions replace others for the whole run.
_PERMANENT = {str(Path(__file__).with_name(f"{name}.py")) for name in ("quick_interpreter", "vllm_counts")}
_checked: set[str] = set()
_num_modules = 0


def functions_of_tests(modules: Iterable[ModuleType]) -> Iterator[str]:
    """Names of attributes that are functions of a file in ``tests``, or mocks."""
    for module in modules:
        # A copy, since another thread may still execute the module.
        for name, value in vars(module).copy().items():
            if _is_of_a_test(value):
                yield f"{module.__name__}.{name}"


def _is_of_a_test(value: Any) -> bool:
    file = getattr(getattr(value, "__code__", None), "co_filename", "")
    is_of_a_test = isinstance(file, str) and file.startswith(TESTS) and file not in _PERMANENT
    return is_of_a_test or type(value).__module__ == "unittest.mock"


def _new_modules() -> list[ModuleType]:
    global _num_modules
    # A copy, since a server's thread may import modules meanwhile.
    modules = sys.modules.copy()
    if len(modules) == _num_modules:
        return []
    _num_modules = len(modules)
    new = {name for name in modules if name.startswith("flashlatte.")} - _checked
    _checked.update(new)
    return [modules[name] for name in new]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown() -> Generator[None, object, object]:
    result = yield
    kept = sorted(functions_of_tests(_new_modules()))
    assert not kept, f"this test imported modules that keep functions it had replaced: {', '.join(kept)}"
    return result
