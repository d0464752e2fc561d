"""Repeat the launches of an earlier call.

All that an operation settles on the host (checks, the choice of an implementation, its plan, the strides of its
arguments) depends on the shapes, strides, dtypes, devices and alignment of its tensors and on its other arguments.
These are the key under which a call's launches are stored. The next call with the same key allocates its outputs and
launches again: with a decode kernel of 15 µs, Python would otherwise take most of the time.

A plan object that the caller makes and runs would save the key, 3 µs of 10, but would have to look at the same
properties of its tensors to be safe. FlashMLA's callers, who have no such plan, would still need this.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any, Literal, TypeVar

import torch
from torch._C import DisableTorchFunction
from torch._C._dynamo import guards
from torch._C._functorch import peek_interpreter_stack
from torch.autograd.graph import increment_version

from flashlatte.runtime import value_checks
from flashlatte.runtime.gradients import has_tangents
from flashlatte.runtime.recording import Recording, is_recording, record

# Entries of all operations together, of 14 KB each.
_MAX_ENTRIES = 8192
# The tensors whose launches are repeated, and PyTorch's number for the first device; the CPU has -1.
_DEVICE_TYPE, _FIRST_DEVICE = "cuda", 0
# The allocation of torch.compile's programs, (shape, stride, dtype): a third of the time of torch.empty_strided.
_allocate = getattr(guards, "_empty_strided_cuda", None)
_PLAIN_VALUES = frozenset({bool, int, float, str})
# Other subclasses may mean something else by an operation.
_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)

_Function = TypeVar("_Function", bound=Callable[..., Any])
# False: the call does more than launch kernels.
_entries: dict[tuple[Any, ...], _Repeat | Literal[False]] = {}
_entries_lock = threading.Lock()


class _NotRepeatable(Exception):
    pass


def repeats_launches(function: _Function) -> _Function:
    """Decorate an operation that launches kernels and returns their outputs: a tensor, a tuple of tensors, or None.

    ``function`` itself runs at every call under torch.compile, a tracing mode or a transform, on the CPU, where a
    gradient is recorded, and where it does more than launch. Modes of torch functions do not see a repeat, which would
    take twice as long under ``torch.set_default_device``.
    """
    if value_checks.ENABLED:
        return function

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not _eager():
            return function(*args, **kwargs)
        key: list[Any] = [function, *kwargs]
        tensors: list[torch.Tensor] = []
        # Reading an attribute of a tensor would pass through a mode, too.
        with DisableTorchFunction():
            try:
                addresses = _append(key, tensors, (*args, *kwargs.values()))
                # Which tensors begin where others do: an operation may refuse that, or depend on it.
                key.append(len(set(addresses)) == len(addresses) or tuple(map(addresses.index, addresses)))
                entry = _entries.get(tuple(key))
            except (_NotRepeatable, TypeError, RuntimeError):
                # TypeError: an argument without a hash; RuntimeError: a tensor without strides or an address.
                entry = False
            if entry and not entry.binds(addresses):
                entry = None
            if entry and entry.can_run():
                return entry(tensors, addresses)
        if entry is not None:
            return function(*args, **kwargs)
        results, entry = _recorded(function, args, kwargs, tensors)
        _store(tuple(key), entry)
        return results

    return call  # type: ignore[return-value]


def _append(key: list[Any], tensors: list[torch.Tensor], values: Iterable[Any]) -> list[int]:
    """Append to ``key`` what launches depend on, and the tensors to ``tensors``. Returns their addresses."""
    addresses: list[int] = []
    records_gradient = torch.is_grad_enabled()
    for value in values:
        if value is None:
            key.append(None)
            continue
        kind = type(value)
        if kind in _PLAIN_TENSORS:
            device, dtype, address = value.get_device(), value.dtype, value.data_ptr()
            if device < _FIRST_DEVICE or (records_gradient and value.requires_grad):
                raise _NotRepeatable
            # A part of complex numbers may be stored with the other sign.
            if dtype is torch.float32 and value.is_neg():
                raise _NotRepeatable
            tensors.append(value)
            addresses.append(address)
            key += (value.shape, value.stride(), dtype, device, address & 15)
        elif kind in _PLAIN_VALUES:
            # With the type: 1, 1.0 and True are equal.
            key += (kind, value)
        elif isinstance(value, (list, tuple)):
            # Also a named tuple: as a plain value it would keep its tensors alive and differ from others like it.
            key += (kind, len(value))
            addresses += _append(key, tensors, value)
        elif isinstance(value, torch.Tensor):
            raise _NotRepeatable
        else:
            key += (kind, value)
    return addresses


def _store(key: tuple[Any, ...], entry: _Repeat | Literal[False]) -> None:
    """Add an entry, in place of the oldest one where there are ``_MAX_ENTRIES``."""
    with _entries_lock:
        _entries.pop(key, None)
        if len(_entries) >= _MAX_ENTRIES:
            del _entries[next(iter(_entries))]
        _entries[key] = entry


def forget() -> None:
    """Remove all entries, as when an implementation is registered that might have been chosen."""
    with _entries_lock:
        _entries.clear()


class _Repeat:
    """The launches of a call, for other tensors like the call's.

    A launch's argument is bound to the tensor of the call that it is. A view or a TMA descriptor is bound to the tensor
    that begins at its address. Where another tensor of the call extends over that address, the view may as well be one
    from the middle of that tensor. Both are at one address again if the two tensors are as far apart as in the recorded
    call, and only such a call is repeated (``binds``).
    """

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
        given = {id(tensor): number for number, tensor in enumerate(tensors)}
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

        of_views: set[int] = set()

        def numbered(tensor: Any) -> int:
            number = given.get(id(tensor))
            if number is None:
                number = by_address.get(tensor.data_ptr())
                if number is None:
                    raise _NotRepeatable("a tensor that is neither given, nor scratch, nor a result")
                of_views.add(number)
            return number

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
        # (tensor, another one that extends over its beginning, bytes between their beginnings)
        self._distances = [
            (number, other, tensors[number].data_ptr() - tensor.data_ptr())
            for number in of_views
            if number < len(tensors)
            for other, tensor in enumerate(tensors)
            if 0 < tensors[number].data_ptr() - tensor.data_ptr() < _extent(tensor)
        ]

    def binds(self, addresses: Sequence[int]) -> bool:
        """Whether each argument of the launches is at the address of its tensor, for tensors at ``addresses``."""
        return not self._distances or all(
            addresses[number] - addresses[other] == distance for number, other, distance in self._distances
        )

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
) -> tuple[Any, _Repeat | Literal[False]]:
    """The results of a call, and what repeats it, if that is possible."""
    internals = _internals()
    if internals is None:
        return function(*args, **kwargs), False
    results, recording = record(function, args, kwargs, internals.telling_of_launches)
    try:
        with DisableTorchFunction():
            return results, _Repeat(internals, tensors, () if results is None else results, recording)
    except _NotRepeatable:
        return results, False


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
    return tensor.storage_offset() == 0 and _extent(tensor) >= tensor.untyped_storage().nbytes()


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last one."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


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
