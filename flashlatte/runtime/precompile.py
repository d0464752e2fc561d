"""Compile kernels before their first call: collect the variants that calls would launch, and look them up in Triton's
cache.

Such calls assume a GPU (``assuming``), present or not, and launch nothing, in any thread of the process: others must
not call operations meanwhile. Assumptions about Triton: ``JITFunction.run(warmup=True)`` compiles as a launch does,
unless ``jit_cache_hook`` returns True; the compilation of a variant that is not in the cache begins with ``make_ir`` of
the function's ``ASTSource``; ``driver._active`` is the driver in use, None before Triton has looked for a GPU; a
function keeps its variants by the number of the device.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget

from flashlatte.runtime import machine
from flashlatte.runtime.triton_kernel import launching


class _NotCompiled(Exception):
    pass


def _stop(*_args: object, **_options: object) -> None:
    raise _NotCompiled


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


# Numbers of absent GPUs, which no GPU has: Triton would launch on it what was compiled for them.
_NUMBERS = itertools.count(1 << 20)


class _AbsentGPU:
    """The part of Triton's driver interface that compilation uses."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self._number = next(_NUMBERS)
        self._target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return self._number

    def get_current_stream(self, _device: int) -> int:
        return 0


@contextlib.contextmanager
def assuming(gpu: machine.GPU) -> Iterator[None]:
    """``machine.assuming``, in Triton too: inside, CPU tensors of this process are treated as tensors on ``gpu``."""
    with machine.assuming(gpu), _replaced(triton.runtime.driver, "_active", _AbsentGPU(gpu.capability)):
        yield


@dataclass(frozen=True, eq=False)
class Variant:
    """One compiled form of a kernel.

    Attributes:
        name: the kernel's name.
    """

    name: str
    _jitted: Any
    _arguments: tuple[Any, ...]
    _options: dict[str, Any]

    def compile(self) -> None:
        """Compile into Triton's cache, from which the first launch loads."""
        self._jitted.run(*self._arguments, grid=(1,), warmup=True, **self._options)

    def is_compiled(self) -> bool:
        """Whether the variant is in Triton's cache: start a compilation, and stop it if Triton generates code."""
        with _replaced(self._jitted.ASTSource, "make_ir", _stop):
            try:
                self.compile()
            except _NotCompiled:
                return False
        return True


@contextlib.contextmanager
def collected() -> Iterator[list[Variant]]:
    """Collect the variants that calls inside would launch, each once. Nothing is launched; results are undefined."""
    found: list[Variant] = []
    known: set[tuple[Any, str]] = set()

    def collect(jitted: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        def is_seen(key: Any, **_: Any) -> bool:
            if (jitted, str(key)) not in known:
                known.add((jitted, str(key)))
                found.append(Variant(jitted.__name__, jitted, arguments, options))
            return True  # Triton does not compile then.

        with _replaced(knobs.runtime, "jit_cache_hook", is_seen):
            jitted.run(*arguments, grid=(1,), warmup=True, **options)

    with launching(collect):
        yield found
