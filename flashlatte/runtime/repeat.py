"""Calls that repeat what an earlier call like them launched.

All that an operation settles on the host (checks, the choice of an implementation, its plan, its arguments' strides)
depends on the shapes, strides, dtypes and alignment of its tensors and on its other arguments. So the launches of a
call are remembered by these, and the next such call only allocates its outputs and launches again: with a decode
kernel of 15 µs, Python would otherwise take most of the time.

A plan that the caller makes and runs would save the making of the key, 3 µs of 10, and would have to look at the same
facts of its tensors to be safe; and FlashMLA's callers, who have no such plan, would still need this.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch._C import DisableTorchFunction
from torch._C._dynamo import guards
from torch._C._functorch import peek_interpreter_stack
from torch.autograd.graph import increment_version

from flashlatte.runtime import value_checks
from flashlatte.runtime.gradients import has_tangents
from flashlatte.runtime.recording import Recording, is_recording, record

# Calls that an operation remembers.
_REMEMBERED = 4096
# The tensors whose launches are repeated, and PyTorch's number for the first device; the CPU has -1.
_DEVICE_TYPE, _FIRST_DEVICE = "cuda", 0
# What programs of torch.compile allocate with, (shape, stride, dtype): a third of the time of torch.empty_strided.
_allocate = getattr(guards, "_empty_strided_cuda", None)
_UNKNOWN: Any = object()
_PLAIN_VALUES = frozenset({type(None), bool, int, float, str})
# Other subclasses may mean something else by an operation.
_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)

_Function = TypeVar("_Function", bound=Callable[..., Any])
_forget: list[Callable[[], None]] = []


class _NotRepeatable(Exception):
    pass


def repeats_launches(function: _Function) -> _Function:
    """Decorate an operation that launches kernels and returns what they write, a tensor or a tuple, or None.

    Launches are told tensors by their addresses. So kernels take tensors of the call, or of its own making, from their
    beginning: a view from the middle of one would pass for another that begins there.

    ``function`` itself runs at every call under torch.compile, a tracing mode or a transform, on the CPU, where a
    gradient is recorded, and where the work is more than launches. Modes of torch functions are not told of a repeat:
    that would double its time under ``torch.set_default_device``.
    """
    if value_checks.ENABLED:
        return function
    known: dict[tuple[Any, ...], _Repeat | None] = {}
    _forget.append(known.clear)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not _eager():
            return function(*args, **kwargs)
        tensors: list[torch.Tensor] = []
        key: list[Any] = [*kwargs]
        # Attributes of tensors, too, would pass through a mode.
        with DisableTorchFunction():
            try:
                addresses = _append(key, tensors, (*args, *kwargs.values()))
                # Which tensors begin where others do: what an operation may refuse, or plan for.
                key.append(len(set(addresses)) == len(addresses) or tuple(map(addresses.index, addresses)))
                repeat = known.get(tuple(key), _UNKNOWN)
            except (_NotRepeatable, TypeError, RuntimeError):
                # TypeError: an argument without a hash; RuntimeError: a tensor without strides or an address.
                repeat = None
            if repeat is not None and repeat is not _UNKNOWN and repeat.can_run():
                return repeat(tensors, addresses)
        if repeat is not _UNKNOWN:
            return function(*args, **kwargs)
        results, repeat = _recorded(function, args, kwargs, tensors)
        if len(known) >= _REMEMBERED:
            known.clear()
        known[tuple(key)] = repeat
        return results

    return call  # type: ignore[return-value]


def _append(key: list[Any], tensors: list[torch.Tensor], values: Iterable[Any]) -> list[int]:
    """Append to ``key`` what launches depend on, and to ``tensors`` the tensors, whose addresses are returned."""
    addresses: list[int] = []
    records_gradient = torch.is_grad_enabled()
    for value in values:
        kind = type(value)
        if kind in _PLAIN_VALUES:
            key += (kind, value)
        elif kind in _PLAIN_TENSORS:
            device = value.get_device()
            if device < _FIRST_DEVICE or (records_gradient and value.requires_grad):
                raise _NotRepeatable
            address, dtype = value.data_ptr(), value.dtype
            # A part of complex numbers may be stored with the other sign.
            if dtype is torch.float32 and value.is_neg():
                raise _NotRepeatable
            tensors.append(value)
            addresses.append(address)
            key += (value.shape, value.stride(), dtype, device, address & 15)
        elif isinstance(value, (list, tuple)):
            # A named one, too: as a value its tensors would be kept alive, and told apart from others like them.
            key += (kind, len(value))
            addresses += _append(key, tensors, value)
        elif isinstance(value, torch.Tensor):
            raise _NotRepeatable
        else:
            key += (kind, value)
    return addresses


def forget() -> None:
    """Forget all calls, as when an implementation is registered that might have been chosen."""
    for clear in _forget:
        clear()


class _Repeat:
    """The launches of a call, for other tensors like the call's."""

    def __init__(
        self,
        internals: Any,
        tensors: Sequence[torch.Tensor],
        results: torch.Tensor | Sequence[torch.Tensor],
        recording: Recording,
    ) -> None:
        """Raises _NotRepeatable if the noted launches are not all there is to the call."""
        self._is_single = isinstance(results, torch.Tensor)
        if isinstance(results, torch.Tensor):
            results = (results,)
        if not recording.only_launches or not 0 < recording.launched == len(recording.launches):
            raise _NotRepeatable("more than launches")
        if not tensors or tensors[0].device.type != _DEVICE_TYPE:
            raise _NotRepeatable("another device than one of torch.cuda")
        given = {id(tensor) for tensor in tensors}
        by_address: dict[int, int] = {}
        for number, tensor in enumerate(tensors):
            by_address.setdefault(tensor.data_ptr(), number)
        made = {tensor.data_ptr(): tensor for tensor, _ in recording.scratch}
        zeroed = {tensor.data_ptr() for tensor, is_zero in recording.scratch if is_zero}
        # A result may be a view of all of what was allocated.
        made |= {tensor.data_ptr(): tensor for tensor in results if id(tensor) not in given}
        every = [*tensors, *made.values()]
        if not made.keys().isdisjoint(by_address) or not all(map(_is_whole, made.values())):
            raise _NotRepeatable("tensors that share memory")
        by_address |= {address: number for number, address in enumerate(made, len(tensors))}

        def numbered(tensor: Any) -> int:
            if tensor.data_ptr() not in by_address:
                raise _NotRepeatable("a tensor that is neither given, nor scratch, nor a result")
            return by_address[tensor.data_ptr()]

        def without_tensors(argument: Any) -> Any:
            if isinstance(argument, torch.Tensor):
                return internals.Pointer(numbered(argument))
            if isinstance(argument, tuple) and any(isinstance(item, torch.Tensor) for item in argument):
                return tuple(without_tensors(item) for item in argument)
            if not internals.is_descriptor(argument):
                return argument
            descriptor: Any = argument
            return internals.Descriptor(numbered(descriptor.base), internals.without_memory(descriptor))

        self._hooked = internals.hooked
        self._launches = [
            internals.RepeatableLaunch(compiled, grid, [without_tensors(argument) for argument in arguments])
            for compiled, grid, arguments in recording.launches
        ]
        self._made = [
            (tuple(tensor.shape), tensor.stride(), tensor.dtype, address in zeroed) for address, tensor in made.items()
        ]
        self._results = [next(n for n, tensor in enumerate(every) if tensor is result) for result in results]
        # Of what was made, nobody has kept an earlier version.
        written = {tensor.untyped_storage().data_ptr() for tensor in recording.written}
        self._written = [n for n, tensor in enumerate(tensors) if tensor.untyped_storage().data_ptr() in written]
        self._device = tensors[0].device

    def can_run(self) -> bool:
        """Whether the current device is the recorded one, and nobody (a profiler) wants to be told of launches."""
        return _current_device() == self._device.index and not self._hooked()

    def __call__(
        self, tensors: list[torch.Tensor], addresses: list[int]
    ) -> torch.Tensor | tuple[torch.Tensor, ...] | None:
        """Run with ``tensors`` at ``addresses``; both lists are extended by what is allocated."""
        device = self._device
        for shape, stride, dtype, zeroed in self._made:
            tensor = (
                torch.empty_strided(shape, stride, dtype=dtype, device=device)
                if _allocate is None
                else _allocate(shape, stride, dtype)
            )
            if zeroed:
                tensor.zero_()
            tensors.append(tensor)
            addresses.append(tensor.data_ptr())
        stream = _current_stream(device.index)
        for launch in self._launches:
            launch(stream, addresses)
        if self._written:
            # A backward pass that has kept one of them has to know.
            increment_version([tensors[number] for number in self._written])
        if self._is_single:
            return tensors[self._results[0]]
        return tuple([tensors[number] for number in self._results]) or None


def _recorded(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[torch.Tensor]
) -> tuple[Any, _Repeat | None]:
    """The results of a call, and what repeats it, if that can be."""
    internals = _internals()
    if internals is None:
        return function(*args, **kwargs), None
    results, recording = record(function, args, kwargs, internals.telling_of_launches)
    try:
        with DisableTorchFunction():
            return results, _Repeat(internals, tensors, () if results is None else results, recording)
    except _NotRepeatable:
        return results, None


@functools.cache
def _internals() -> ModuleType | None:
    """``triton_internals``, which only operations that launch need; None where Triton is not installed."""
    try:
        from flashlatte.runtime import triton_internals
    except ImportError:
        return None
    return triton_internals


def _is_whole(tensor: torch.Tensor) -> bool:
    """Whether a tensor is all of its memory, so that an allocation like it has room for it."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    storage = tensor.untyped_storage().nbytes()
    return tensor.storage_offset() == 0 and (last + 1) * tensor.element_size() >= storage


def _eager() -> bool:
    """Whether a call runs here and now, and is not part of a recording already."""
    return (
        torch._C._len_torch_dispatch_stack() == 0
        and peek_interpreter_stack() is None
        and not has_tangents()
        and not is_recording()
        # torch.jit.trace sees what passes through PyTorch, and takes any other result for a constant.
        and torch._C._get_tracing_state() is None
    )


def _current_device() -> int:
    return torch._C._cuda_getDevice()


def _current_stream(device: int) -> int:
    return torch._C._cuda_getCurrentRawStream(device)
