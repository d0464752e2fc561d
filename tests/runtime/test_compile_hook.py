"""Triton's hook after a compilation (``knobs.runtime.jit_post_compile_hook``), which vLLM always sets.

Triton writes all that a kernel was compiled for down as JSON for the hook, so every constant must be serializable.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
from typing import Any

import pytest

from flashlatte.runtime import machine

pytest.importorskip("triton")

from support.operation_calls import CALLS, OPERATIONS, use_hopper
from triton import knobs

from flashlatte.runtime.triton_kernel import Kernel

pytestmark = pytest.mark.skipif(machine.interpreting(), reason="compiles, which the interpreter does not")


def test_every_kernel_can_be_written_down(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Any] = []
    use_hopper(monkeypatch)
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda **about: compiled.append(about))
    for call in CALLS:
        call()
    for about in compiled:
        assert json.loads(about["compile"]["specialization_data"])["constant_vals"]
    assert {about["fn"].jit_function for about in compiled} == _kernels()


def _kernels() -> set[Any]:
    """All kernels of these operations."""
    found = set()
    for package in ("split_kv", "kernels.triton", *(f"ops.{name}" for name in OPERATIONS)):
        package = importlib.import_module(f"flashlatte.{package}")
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            values = vars(importlib.import_module(module.name)).values()
            found |= {value.jitted for value in values if isinstance(value, Kernel)}
    return found
