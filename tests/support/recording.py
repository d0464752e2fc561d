"""Records the launches of an operation as on a given GPU, without a GPU; nothing runs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.compile import Compiled, Launch, compile_gluon, compile_launch, variant_key
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.runtime.jit import KernelInterface

from flashlatte.runtime import dispatch, machine, triton_kernel
from flashlatte.runtime.kernel_records import flat_records

NUM_SMS = 132


@dataclass(frozen=True)
class Recorded:
    """One launch: the kernel as Triton's JITFunction, and its launch.

    Attributes:
        shared_beside: bytes of shared memory that a cluster takes in addition to Triton's.
    """

    kernel: Any
    launch: Launch
    shared_beside: int = 0

    @property
    def name(self) -> str:
        return self.kernel.__name__

    @property
    def variant(self) -> str:
        """The key of the variant in Triton's cache of compiled kernels."""
        return f"{self.name} {variant_key(self.kernel, self.launch)}"

    def compile(self, arch: int = 90) -> Compiled:
        if isinstance(self.kernel, GluonJITFunction):
            return compile_gluon(self.kernel, self.launch)
        return compile_launch(self.kernel, self.launch, arch)


class Recording:
    """Calls implementations as on a GPU of a given architecture, and returns their launches.

    ``arch`` is a compute capability (90 for 9.0), or None for an AMD GPU.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_sms: int = NUM_SMS) -> None:
        self._patch, self._num_sms = monkeypatch, num_sms
        self._found: list[Recorded] = []
        for interface in {KernelInterface, getattr(triton_kernel, "Kernel", KernelInterface)}:
            monkeypatch.setattr(interface, "__getitem__", lambda kernel, grid: self._subscript(kernel, grid))

    def __call__(
        self, operation: str, backend: str, *arguments: Any, arch: int | None = 90, **named: Any
    ) -> list[Recorded]:
        run = dispatch.implementation(operation, backend)
        self._found = []
        with self.assuming(arch):
            run(*arguments, **named)
        return self._found

    @contextlib.contextmanager
    def assuming(self, arch: int | None) -> Iterator[None]:
        """Treat CPU tensors as tensors on such a GPU."""
        capability = (0, 0) if arch is None else divmod(arch, 10)
        with self._patch.context() as patch:
            if arch is None:
                patch.setattr(torch.version, "hip", "7.0")
            with machine.assuming(machine.GPU(capability, self._num_sms)):
                yield

    def _subscript(self, kernel: Any, grid: tuple[int, ...]) -> Any:
        return functools.partial(self._record, kernel, grid)

    def _record(self, launched: Any, grid: tuple[int, ...], *args: Any, **kwargs: Any) -> None:
        kernel = getattr(launched, "jitted", launched)
        _, beside = getattr(launched, "cluster", None) or (1, 0)
        names = [parameter.name for parameter in kernel.params]
        flat = flat_records(getattr(launched, "records", {}), getattr(launched, "same", {}), args)
        arguments = dict(zip(names, flat, strict=False))
        options = {name: kwargs.pop(name) for name in list(kwargs) if name not in names}
        self._found.append(Recorded(kernel, Launch(grid, arguments | kwargs, options), beside))
