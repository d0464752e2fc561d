"""Cache the launches of a call, and repeat them for later calls with similar arguments.

The host part of an operation (checks, choice of the implementation, launch configuration, strides) depends only on the
shapes, strides, dtypes, devices and alignment of its tensors and on its other arguments. These form the key under which
a call's launches are stored. A later call with the same key allocates its outputs and launches. Without this cache the
Python code would take longer than a decode kernel of 15 µs.

A launch plan held by the caller would save computing the key (3 of 10 µs), but for safety it would have to compare the
same properties. FlashMLA's interface has no such plan, so its callers would need this cache anyway.
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

# Entries of all operations together; an entry has about 14 KB.
_MAX_ENTRIES = 8192
# Launches are repeated for tensors of this type of device. Tensor.get_device() of the first one; of the CPU it is -1.
_DEVICE_TYPE, _FIRST_DEVICE = "cuda", 0
# The allocator of torch.compile's programs, (shape, stride, dtype), takes a third of the time of torch.empty_strided.
_allocate = getattr(guards, "_empty_strided_cuda", None)
_PLAIN_VALUES = frozenset({bool, int, float, str})
# Other subclasses may redefine operations.
_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)

_Function = TypeVar("_Function", bound=Callable[..., Any])
# False: the call does more than launch kernels.
_entries: dict[tuple[Any, ...], _Repeat | Literal[False]] = {}
_entries_lock = threading.Lock()


class _NotRepeatable(Exception):
    pass


def repeats_launches(function: _Function) -> _Function:
    """Decorate an operation that launches kernels and returns their outputs: a tensor, a tuple of tensors, or None.

    ``function`` itself runs at every call under torch.compile, a tracing mode or a transform, on the CPU, if a gradient
    is recorded, and if it does more than launch. A repeated call bypasses torch-function modes; with them it would take
    twice as long under ``torch.set_default_device``.
    """
    if value_checks.ENABLED:
        return function

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not _eager():
            return function(*args, **kwargs)
        key: list[Any] = [function, *kwargs]
        tensors: list[torch.Tensor] = []
        # Torch-function modes intercept attribute reads too.
        with DisableTorchFunction():
            try:
                addresses = _append(key, tensors, (*args, *kwargs.values()))
                # Which tensors share an address: an operation may refuse that, or depend on it.
                key.append(len(set(addresses)) == len(addresses) or tuple(map(addresses.index, addresses)))
                entry = _entries.get(tuple(key))
            except (_NotRepeatable, TypeError, RuntimeError):
                # TypeError: an unhashable argument; RuntimeError: a tensor without strides or an address.
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
    """Append what launches depend on to ``key``, and tensors to ``tensors``. Returns the tensors' addresses."""
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
            # The imaginary part of a conjugate view is stored negated.
            if dtype is torch.float32 and value.is_neg():
                raise _NotRepeatable
            tensors.append(value)
            addresses.append(address)
            key += (value.shape, value.stride(), dtype, device, address & 15)
        elif kind in _PLAIN_VALUES:
            # With the type: 1, 1.0 and True are equal.
            key += (kind, value)
        elif isinstance(value, (list, tuple)):
            # Also a named tuple: in the key it would keep its tensors alive and compare unequal to similar ones.
            key += (kind, len(value))
            addresses += _append(key, tensors, value)
        elif isinstance(value, torch.Tensor):
            raise _NotRepeatable
        else:
            key += (kind, value)
    return addresses


def _store(key: tuple[Any, ...], entry: _Repeat | Literal[False]) -> None:
    """Add an entry; if there are ``_MAX_ENTRIES``, it replaces the oldest."""
    with _entries_lock:
        _entries.pop(key, None)
        if len(_entries) >= _MAX_ENTRIES:
            del _entries[next(iter(_entries))]
        _entries[key] = entry


def forget() -> None:
    """Remove all entries, because another implementation may be chosen from now on."""
    with _entries_lock:
        _entries.clear()


class _Repeat:
    """The launches of a recorded call, to repeat with other tensors.

    Each launch argument is bound to a tensor of the call: by identity, or, for a view or a TMA descriptor, to the
    tensor that begins at its address. If another tensor extends over that address, the view may belong to either. The
    call is repeated only if the distance between these two tensors is the recorded one (``binds``): the view then has
    the same address in both cases.
    """

    def __init__(
        self,
        internals: Any,
        tensors: Sequence[torch.Tensor],
        results: torch.Tensor | Sequence[torch.Tensor],
        recording: Recording,
    ) -> None:
        """Raises _NotRepeatable if the call did more than the recorded launches."""
        self._is_single = isinstance(results, torch.Tensor)
        if isinstance(results, torch.Tensor):
            results = (results,)
        if not recording.only_launches or not 0 < recording.launched == len(recording.launches):
            raise _NotRepeatable("more than launches")
        if not tensors or tensors[0].device.type != _DEVICE_TYPE:
            raise _NotRepeatable("not a device of torch.cuda")
        arguments_by_id = {id(tensor): number for number, tensor in enumerate(tensors)}
        by_address: dict[int, int] = {}
        for number, tensor in enumerate(tensors):
            by_address.setdefault(tensor.data_ptr(), number)
        allocated = {tensor.data_ptr(): tensor for tensor, _ in recording.scratch}
        zeroed = {tensor.data_ptr() for tensor, is_zero in recording.scratch if is_zero}
        # A result may be a view of a whole allocation.
        allocated |= {tensor.data_ptr(): tensor for tensor in results if id(tensor) not in arguments_by_id}
        every = [*tensors, *allocated.values()]
        if not allocated.keys().isdisjoint(by_address) or not all(map(_is_whole, allocated.values())):
            raise _NotRepeatable("tensors that share memory")
        by_address |= {address: number for number, address in enumerate(allocated, len(tensors))}

        of_views: set[int] = set()

        def number_of(tensor: Any) -> int:
            number = arguments_by_id.get(id(tensor))
            if number is None:
                number = by_address.get(tensor.data_ptr())
                if number is None:
                    raise _NotRepeatable("a tensor that is neither an argument, nor scratch, nor a result")
                of_views.add(number)
            return number

        def without_tensors(argument: Any) -> Any:
            if isinstance(argument, torch.Tensor):
                return internals.Pointer(number_of(argument))
            if isinstance(argument, tuple) and any(isinstance(item, torch.Tensor) for item in argument):
                return tuple(without_tensors(item) for item in argument)
            if not internals.is_descriptor(argument):
                return argument
            descriptor: Any = argument
            return internals.Descriptor(number_of(descriptor.base), internals.without_memory(descriptor))

        self._hooked = internals.hooked
        self._launches = [
            internals.RepeatableLaunch(compiled, grid, [without_tensors(argument) for argument in arguments])
            for compiled, grid, arguments in recording.launches
        ]
        self._allocations = [
            (tuple(tensor.shape), tensor.stride(), tensor.dtype, address in zeroed)
            for address, tensor in allocated.items()
        ]
        self._results = [next(n for n, tensor in enumerate(every) if tensor is result) for result in results]
        # Fresh allocations need no version increment.
        written = {tensor.untyped_storage().data_ptr() for tensor in recording.written}
        self._written = [n for n, tensor in enumerate(tensors) if tensor.untyped_storage().data_ptr() in written]
        self._device = tensors[0].device
        # (tensor, another tensor that extends over its address, bytes between their addresses)
        self._distances = [
            (number, other, tensors[number].data_ptr() - tensor.data_ptr())
            for number in of_views
            if number < len(tensors)
            for other, tensor in enumerate(tensors)
            if 0 < tensors[number].data_ptr() - tensor.data_ptr() < _extent(tensor)
        ]

    def binds(self, addresses: Sequence[int]) -> bool:
        """Whether every launch argument would be at the address of its tensor, for tensors at ``addresses``."""
        return not self._distances or all(
            addresses[number] - addresses[other] == distance for number, other, distance in self._distances
        )

    def can_run(self) -> bool:
        """Whether the current device is the recorded one, and no launch hook (of a profiler) is installed."""
        return _current_device() == self._device.index and not self._hooked()

    def __call__(
        self, tensors: list[torch.Tensor], addresses: list[int]
    ) -> torch.Tensor | tuple[torch.Tensor, ...] | None:
        """Run with ``tensors`` at ``addresses``; allocated tensors are appended to both lists."""
        device = self._device
        for shape, stride, dtype, zeroed in self._allocations:
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
            # A backward pass that saved one of them checks its version.
            increment_version([tensors[number] for number in self._written])
        if self._is_single:
            return tensors[self._results[0]]
        return tuple([tensors[number] for number in self._results]) or None


def _recorded(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[torch.Tensor]
) -> tuple[Any, _Repeat | Literal[False]]:
    """The results of a call, and its cache entry: False if it cannot be repeated."""
    internals = _internals()
    if internals is None:
        return function(*args, **kwargs), False
    results, recording = record(function, args, kwargs, internals.counting_launches)
    try:
        with DisableTorchFunction():
            return results, _Repeat(internals, tensors, () if results is None else results, recording)
    except _NotRepeatable:
        return results, False


@functools.cache
def _internals() -> ModuleType | None:
    """``triton_internals``, imported at the first launch; None if Triton is not installed."""
    try:
        from flashlatte.runtime import triton_internals
    except ImportError:
        return None
    return triton_internals


def _is_whole(tensor: torch.Tensor) -> bool:
    """Whether a tensor covers its whole storage, so that an allocation of its shape and strides can replace it."""
    return tensor.storage_offset() == 0 and _extent(tensor) >= tensor.untyped_storage().nbytes()


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last one."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _eager() -> bool:
    """Whether a call executes eagerly, and is not already inside a recording."""
    return (
        torch._C._len_torch_dispatch_stack() == 0
        and peek_interpreter_stack() is None
        and not has_tangents()
        and not is_recording()
        # torch.jit.trace treats results that PyTorch did not compute as constants.
        and torch._C._get_tracing_state() is None
    )


def _current_device() -> int:
    return torch._C._cuda_getDevice()


def _current_stream(device: int) -> int:
    return torch._C._cuda_getCurrentRawStream(device)
