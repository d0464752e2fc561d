"""A Hopper GPU as Triton sees it before it launches, where there is none."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import triton
from triton.backends.compiler import GPUTarget

STREAM = 77
_DEVICE = 97


class Hopper:
    """What Triton asks its driver: kernels are bound and compiled for Hopper."""

    def __init__(self, **utils: Any) -> None:
        self.utils = SimpleNamespace(**utils)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return _DEVICE

    def get_current_stream(self, _device: int) -> int:
        return STREAM


def use(monkeypatch: pytest.MonkeyPatch, **utils: Any) -> None:
    """Let Triton take this GPU for the active one."""
    monkeypatch.setattr(triton.runtime.driver, "_active", Hopper(**utils))


def use_without_compiling(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """``use``, with a stand-in for every compiled kernel."""
    use(monkeypatch)
    compiled = MagicMock(packed_metadata=(12, 1, 1000))
    del compiled.result  # which would make it a kernel that is still being compiled
    monkeypatch.setattr("triton.compiler.compile", lambda *_args, **_kwargs: compiled)
    return compiled


def use_launcher(monkeypatch: pytest.MonkeyPatch, launch: Callable[..., None]) -> Callable[[Any], Any]:
    """Let NVIDIA's launcher end in ``launch`` instead of the driver; returns what gives a compiled kernel its launcher.

    A TMA descriptor is encoded as a tuple of what it is made of.
    """
    from triton.backends.nvidia import driver

    # The driver's is no function of Python.
    launch = functools.partial(launch)

    def encoded(*facts: Any) -> tuple[Any, ...]:
        return "tensor map", *map(str, facts)

    use(
        monkeypatch,
        launch=launch,
        build_signature_metadata=tuple,
        fill_tma_descriptor=encoded,
        fill_tma_descriptor_tiled=encoded,
    )
    # Triton 3.6 compiles a launcher for each signature, later ones make objects of each argument's type.
    monkeypatch.setattr(driver, "compile_module_from_src", lambda **_: SimpleNamespace(launch=launch), raising=False)
    monkeypatch.setattr(driver, "library_dirs", list, raising=False)
    monkeypatch.setattr(driver, "PyKernelArg", lambda **facts: facts, raising=False)

    def load(compiled: Any) -> Any:
        compiled.function = 4321
        compiled._run = driver.CudaLauncher(compiled.src, compiled.metadata)
        return compiled

    return load
