"""Calls that repeat what an earlier call like them launched.

All that an operation settles on the host (checks, the choice of an implementation, its plan, its arguments' strides)
depends on the shapes, strides, dtypes and alignment of its tensors and on its other arguments. So the launches of a
call are remembered by these, and the next such call only allocates its outputs and launches again: with a decode
kernel of 15 µs, Python would otherwise take most of the time.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch._C._functorch import peek_interpreter_stack
from torch.utils._python_dispatch import TorchDispatchMode

# Calls that an operation remembers.
_REMEMBERED = 4096
# PyTorch's number for the first GPU; the CPU has -1.
_FIRST_DEVICE = 0
_UNKNOWN: Any = object()
# Other subclasses may mean something else by an operation.
_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)

_Function = TypeVar("_Function", bound=Callable[..., Any])
_forget: list[Callable[[], None]] = []


class _Thread(threading.local):
    recording: _Recording | None = None


def repeats_launches(function: _Function) -> _Function:
    """Decorate an operation that launches kernels and returns a tuple of what they write or None.

    Under torch.compile, a tracing mode or a transform, on the CPU, and where the work is more than launches,
    ``function`` itself runs at every call.
    """
    known: dict[tuple[Any, ...], _Repeat | None] = {}
    _forget.append(known.clear)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not _eager():
            return function(*args, **kwargs)
        tensors: list[torch.Tensor] = []
        key: list[Any] = [*kwargs]
        try:
            for value in (*args, *kwargs.values()):
                if isinstance(value, torch.Tensor):
                    device = value.get_device()
                    if device < _FIRST_DEVICE or type(value) not in _PLAIN_TENSORS:
                        return function(*args, **kwargs)
                    tensors.append(value)
                    key += (value.shape, value.stride(), value.dtype, device, value.data_ptr() % 16)
                else:
                    key += (type(value), value)
        except RuntimeError:  # a layout without strides or without an address
            return function(*args, **kwargs)
        try:
            repeat = known.get(tuple(key), _UNKNOWN)
        except TypeError:  # an argument without a hash
            return function(*args, **kwargs)
        if repeat is _UNKNOWN:
            if len(known) >= _REMEMBERED:
                known.clear()
            results, known[tuple(key)] = _recorded(function, args, kwargs, tensors)
            return results
        if repeat is None or not repeat.can_run():
            return function(*args, **kwargs)
        return repeat(tensors)

    return call  # type: ignore[return-value]


def forget() -> None:
    """Forget all calls, as when an implementation is registered that might have been chosen."""
    for clear in _forget:
        clear()


def note_launch(compiled: Any, grid: tuple[int, ...], args: Sequence[Any]) -> None:
    """Tell the recording, if there is one, of a launch with all its arguments, constants too."""
    if _thread.recording is not None:
        _thread.recording.launches.append((compiled, grid, args))


def watched(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, with what it does beside launches told to the recording, if there is one."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if _thread.recording is None:
            return function(*args, **kwargs)
        with _Watch(_thread.recording):
            return function(*args, **kwargs)

    return run


@dataclass
class _Recording:
    """``launches``: compiled kernel, grid and arguments; ``only_launches``: nothing else touched a tensor."""

    launches: list[tuple[Any, tuple[int, ...], Sequence[Any]]] = field(default_factory=list)
    scratch: list[torch.Tensor] = field(default_factory=list)
    only_launches: bool = True


_thread = _Thread()


class _Watch(TorchDispatchMode):
    """Sees the tensor operations of an implementation: scratch that it allocates, views, and anything else."""

    def __init__(self, recording: _Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_strided.default):
            self._recording.scratch.append(result)
        elif not func.is_view:
            self._recording.only_launches = False
        return result


class _Repeat:
    """The launches of a call, for other tensors like the call's."""

    def __init__(self, tensors: Sequence[torch.Tensor], results: Sequence[torch.Tensor], recording: _Recording) -> None:
        """Raises NotImplementedError if the recorded launches are not all there is to the call."""
        from flashlatte.runtime import triton_launch

        given = {id(tensor) for tensor in tensors}
        made = [tensor for tensor in (*results, *recording.scratch) if id(tensor) not in given]
        every = [*tensors, *made]
        by_address = {tensor.data_ptr(): number for number, tensor in enumerate(every)}
        if not recording.only_launches or not recording.launches:
            raise NotImplementedError("more than launches")
        if len(by_address) < len(every) or any(tensor.storage_offset() for tensor in made):
            raise NotImplementedError("tensors that share memory")

        def place(tensor: Any) -> triton_launch.Place:
            if tensor.data_ptr() not in by_address:
                raise NotImplementedError("a tensor that is neither given, nor scratch, nor a result")
            return triton_launch.Place(tensor.data_ptr(), tensor.dtype, by_address[tensor.data_ptr()])

        def unbound(argument: Any) -> Any:
            if isinstance(argument, torch.Tensor):
                return place(argument)
            if isinstance(argument, tuple) and any(isinstance(item, torch.Tensor) for item in argument):
                raise NotImplementedError("a tuple of tensors")
            if not triton_launch.is_descriptor(argument):
                return argument
            descriptor: Any = argument
            return replace(descriptor, base=place(descriptor.base))

        self._hooked = triton_launch.hooked
        self._launches = [
            triton_launch.RepeatableLaunch(compiled, grid, [unbound(argument) for argument in args])
            for compiled, grid, args in recording.launches
        ]
        self._made = [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in made]
        self._results = [next(n for n, tensor in enumerate(every) if tensor is result) for result in results]
        self._device = tensors[0].device

    def can_run(self) -> bool:
        """Whether the current device is the recorded one, and nobody (a profiler) wants to be told of launches."""
        return _current_device() == self._device.index and not self._hooked()

    def __call__(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...] | None:
        device = self._device
        every = [*tensors]
        for shape, stride, dtype in self._made:
            every.append(torch.empty_strided(shape, stride, dtype=dtype, device=device))
        addresses = [tensor.data_ptr() for tensor in every]
        stream = _current_stream(device.index)
        for launch in self._launches:
            launch(stream, addresses)
        return tuple([every[number] for number in self._results]) or None


def _recorded(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[torch.Tensor]
) -> tuple[Any, _Repeat | None]:
    """The results of a call, and what repeats it, if that can be."""
    recording = _thread.recording = _Recording()
    try:
        results = function(*args, **kwargs)
    finally:
        _thread.recording = None
    try:
        return results, _Repeat(tensors, results or (), recording)
    except NotImplementedError:
        return results, None


def _eager() -> bool:
    """Whether a call runs here and now, and is not part of a recording already."""
    return torch._C._len_torch_dispatch_stack() == 0 and peek_interpreter_stack() is None and _thread.recording is None


def _current_device() -> int:
    return torch._C._cuda_getDevice()


def _current_stream(device: int) -> int:
    return torch._C._cuda_getCurrentRawStream(device)
