"""Record a call: the kernels that it launches, the tensors that it allocates, and whether it does anything else.

``repeat`` records a call while it runs. Kernels report their launches (``record_launch``) and operations their tensor
operations (``watched``). Triton's launch hook counts all launches, including those of other projects' kernels.
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

# The namespace of this package's operations in torch.ops.
NAMESPACE = "flashlatte"


@dataclass(eq=False)
class Recording:
    """The effects of a call.

    Attributes:
        launches: compiled kernel, grid and arguments of each recorded launch.
        launched: number of launches that Triton's hook counted, including those of other projects' kernels.
        scratch: allocated tensors, each with whether it was zeroed.
        written: tensors that were written to.
        only_launches: whether no other tensor operation ran.
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
    counting_launches: Callable[[Callable[[object], None]], AbstractContextManager[None]],
) -> tuple[Any, Recording]:
    """The results of a call, and its recording. ``counting_launches`` is that of ``triton_internals``."""
    recording = _thread.recording = Recording()
    try:
        with counting_launches(recording.count), _Watch(recording):
            return function(*args, **kwargs), recording
    finally:
        _thread.recording = None


def is_recording() -> bool:
    """Whether a call is being recorded on this thread."""
    return _thread.recording is not None


def record_launch(compiled: Any, grid: tuple[int, ...], arguments: Sequence[Any]) -> None:
    """Add a launch with all its arguments, including constants, to the recording, if any."""
    if _thread.recording is not None:
        _thread.recording.launches.append((compiled, grid, arguments))


def record_writes(tensors: list[torch.Tensor]) -> None:
    """Increment the versions of written tensors, which a backward pass checks, and add them to the recording."""
    increment_version(tensors)
    if _thread.recording is not None:
        _thread.recording.written += tensors


def watched(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, with its tensor operations added to the recording, if any."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if _thread.recording is None:
            return function(*args, **kwargs)
        with _Watch(_thread.recording):
            return function(*args, **kwargs)

    return run


class _Watch(TorchDispatchMode):
    """Records the tensor operations of a call: allocations, views, and others."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == NAMESPACE:  # ``watched`` records inside it.
            return result
        if func in _ALLOCATIONS:
            self._recording.scratch.append((result, _ALLOCATIONS[func]))
        elif not func.is_view:
            self._recording.only_launches = False
        return result


# Operations that allocate, and whether they zero the memory.
_ALLOCATIONS = {
    torch.ops.aten.empty.memory_format: False,
    torch.ops.aten.empty_strided.default: False,
    torch.ops.aten.empty_like.default: False,
    torch.ops.aten.new_empty.default: False,
    torch.ops.aten.new_empty_strided.default: False,
    torch.ops.aten.zeros.default: True,
}
