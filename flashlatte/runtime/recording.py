"""What a call does: which kernels it launches, what it allocates, and whether it does anything else.

A call is recorded while it runs, for ``repeat``. Kernels tell of their launches (``note_launch``), operations let their
tensor operations be watched (``watched``); what neither sees, as a kernel of somebody else's, Triton tells of.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.utils._python_dispatch import TorchDispatchMode

# Of this package's operations in PyTorch: torch.ops.flashlatte.
NAMESPACE = "flashlatte"


@dataclass(eq=False)
class Recording:
    """What a call did.

    Attributes:
        launches: compiled kernel, grid and arguments of the launches that were noted.
        launched: how many Triton knows of, those of kernels that are not this package's too.
        scratch: tensors that were allocated, and whether with zeros.
        written: tensors that were written into.
        only_launches: whether nothing else touched a tensor.
    """

    launches: list[tuple[Any, tuple[int, ...], Sequence[Any]]] = field(default_factory=list)
    launched: int = 0
    scratch: list[tuple[torch.Tensor, bool]] = field(default_factory=list)
    written: list[torch.Tensor] = field(default_factory=list)
    only_launches: bool = True

    def count(self, _launch: object) -> None:
        if _thread.recording is self:
            self.launched += 1


class _Thread(threading.local):
    recording: Recording | None = None


_thread = _Thread()


def record(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    telling_of_launches: Callable[[Callable[[object], None]], AbstractContextManager[None]],
) -> tuple[Any, Recording]:
    """The results of a call, and what it did. ``telling_of_launches``: that of ``triton_internals``."""
    recording = _thread.recording = Recording()
    try:
        with telling_of_launches(recording.count), _Watch(recording):
            return function(*args, **kwargs), recording
    finally:
        _thread.recording = None


def is_recording() -> bool:
    """Whether launches are to be noted."""
    return _thread.recording is not None


def note_launch(compiled: Any, grid: tuple[int, ...], arguments: Sequence[Any]) -> None:
    """Tell the recording, if there is one, of a launch with all its arguments, constants too."""
    if _thread.recording is not None:
        _thread.recording.launches.append((compiled, grid, arguments))


def note_written(tensors: list[torch.Tensor]) -> None:
    """Tell PyTorch, whose backward pass refuses a kept tensor that was written into since, and the recording."""
    increment_version(tensors)
    if _thread.recording is not None:
        _thread.recording.written += tensors


def watched(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, with what it does beside launches told to the recording, if there is one."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if _thread.recording is None:
            return function(*args, **kwargs)
        with _Watch(_thread.recording):
            return function(*args, **kwargs)

    return run


class _Watch(TorchDispatchMode):
    """Sees the tensor operations of a call: what it allocates, views, and anything else."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == NAMESPACE:  # an operation of this package is ``watched`` itself
            return result
        if func in _ALLOCATIONS:
            self._recording.scratch.append((result, _ALLOCATIONS[func]))
        elif not func.is_view:
            self._recording.only_launches = False
        return result


# What allocates, and whether it writes zeros.
_ALLOCATIONS = {
    torch.ops.aten.empty.memory_format: False,
    torch.ops.aten.empty_strided.default: False,
    torch.ops.aten.empty_like.default: False,
    torch.ops.aten.new_empty.default: False,
    torch.ops.aten.new_empty_strided.default: False,
    torch.ops.aten.zeros.default: True,
}
