"""A fake compiled kernel that adds on the CPU, and operations that launch it and repeat their launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from triton import knobs

from flashlatte.runtime import recording, repeat

STREAM = 77


class Add:
    """Fake compiled kernel: writes a + b + number to ``out``; it looks tensors up by address."""

    def __init__(self) -> None:
        self.function, self.packed_metadata = "function", "metadata"
        self.memory: dict[int, torch.Tensor] = {}
        self.launches = 0

    def run(self, *arguments: Any) -> None:
        columns, rows, layers, stream, function, metadata, _, _, _, out, a, b, number = arguments
        assert (columns, rows, layers, stream, function, metadata) == (3, 1, 1, STREAM, "function", "metadata")
        self.launches += 1
        with _disable_current_modes():  # a GPU kernel is not a PyTorch operation
            self.memory[out].copy_(self.memory[a] + self.memory[b] + number)

    def known(self, *tensors: torch.Tensor) -> None:
        self.memory |= {tensor.data_ptr(): tensor for tensor in tensors}


def launch(compiled: Add, out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, number: float) -> None:
    compiled.known(out, a, b)
    compiled.run(
        3, 1, 1, STREAM, "function", "metadata", None, None, None, *(x.data_ptr() for x in (out, a, b)), number
    )
    knobs.runtime.launch_enter_hook(None)  # as Triton's launcher does
    recording.record_launch(compiled, (3,), (out, a, b, number))


def operation(compiled: Add, implementation: Callable[..., None] | None = None) -> tuple[Any, list[int]]:
    """An operation that calls ``launch``, and a list that grows with every call that runs its Python code."""
    ran: list[int] = []
    work = recording.watched(implementation or (lambda *args: launch(compiled, *args)))

    @repeat.repeats_launches
    def add(a: torch.Tensor, b: torch.Tensor, *, number: float = 0.0, out: torch.Tensor | None = None) -> Any:
        ran.append(1)
        if isinstance(number, bool):
            raise TypeError("number must be a number")
        result = torch.empty_strided(a.shape, a.stride()) if out is None else out
        work(result, a, b, number)
        return (result,)

    return add, ran


def numbers(compiled: Add, *shape: int) -> torch.Tensor:
    x = torch.randn(*shape)
    compiled.known(x)
    return x
