"""A fake Hopper GPU for Triton, up to the launch of a kernel."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget

STREAM = 77
# Triton caches compiled kernels by device.
_DEVICES = itertools.count(100)


class Hopper:
    """Fake Triton driver, for which kernels are bound and compiled for Hopper."""

    def __init__(self, **utils: Any) -> None:
        self.utils = SimpleNamespace(**utils)
        self._device = next(_DEVICES)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return self._device

    def get_current_stream(self, _device: int) -> int:
        return STREAM


def use(monkeypatch: pytest.MonkeyPatch, **utils: Any) -> None:
    """Make the fake GPU Triton's active device."""
    monkeypatch.setattr(triton.runtime.driver, "_active", Hopper(**utils))


class Compiled:
    """Fake compiled kernel that appends its launches to a list."""

    packed_metadata = (12, 1, 1000)

    def __init__(self, name: str, launches: list[tuple[Any, ...]]) -> None:
        self.function = name
        self._launches = launches

    def launch_metadata(self, *_: Any) -> None:
        return None

    def run(self, x: int, y: int, z: int, stream: int, function: Any, packed_metadata: Any, *rest: Any) -> None:
        _, enter_hook, _, *arguments = rest
        if enter_hook is not None:
            enter_hook(None)
        self._launches.append(((x, y, z), stream, function, packed_metadata, *arguments))

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        hook = knobs.runtime.launch_enter_hook
        return lambda *args: self.run(*grid, STREAM, self.function, self.packed_metadata, None, hook, None, *args)


def use_without_compiling(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """``use``, with a fake for every compiled kernel; returns the list of launches."""
    launches: list[tuple[Any, ...]] = []
    use(monkeypatch)
    monkeypatch.setattr("triton.compiler.compile", lambda source, **_: Compiled(source.fn.__name__, launches))
    return launches


def use_launcher(monkeypatch: pytest.MonkeyPatch, launch: Callable[..., None]) -> Callable[[Any], Any]:
    """Make Triton's NVIDIA launcher call ``launch`` instead of the driver; returns a function that sets a compiled
    kernel's launcher.

    A TMA descriptor is encoded as a tuple of its fields.
    """
    from triton.backends.nvidia import driver

    # The driver's function is not a Python function.
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
