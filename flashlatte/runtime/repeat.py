"""Cache the launches of a call, and repeat them for later calls with similar arguments.

The host part of an operation (checks, choice of the implementation, launch configuration, strides) depends only on the
shapes, strides, dtypes, devices and alignment of its tensors and on its other arguments. A later call in which these
are equal allocates its outputs and launches. Without this cache the Python code would take longer than a decode kernel
of 15 µs.

An entry is found by the arguments that are cheap to read (``_append``). PyTorch's C++ code then compares all other
properties of the tensors (``_matcher``), in a tenth of the time of reading them in Python.

A launch plan held by the caller would save this comparison (2 of 8 µs), but for safety it would have to compare the
same properties. FlashMLA's interface has no such plan, so its callers would need this cache anyway.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch._C import DisableTorchFunction
from torch._C._dynamo import guards
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version
from torch.compiler import is_dynamo_compiling

from flashlatte.runtime import value_checks
from flashlatte.runtime.recording import Recording, is_recording, record

# Keys of all operations together, and entries of a key. An entry has about 14 KB.
_MAX_KEYS, _MAX_ENTRIES_OF_KEY = 8192, 8
# Launches are repeated for tensors of this type of device. Tensor.get_device() of the first one; of the CPU it is -1.
_DEVICE_TYPE, _FIRST_DEVICE = "cuda", 0
# (shape, stride, dtype) → a tensor on the current device. That of torch.compile's programs takes a third of the time.
_allocate: Callable[..., torch.Tensor] = getattr(
    guards,
    "_empty_strided_cuda",
    lambda shape, stride, dtype: torch.empty_strided(shape, stride, dtype=dtype, device=_DEVICE_TYPE),
)
# Functions of C without a Python wrapper; the first two are missing from PyTorch for CPUs.
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: -1)
_current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0)
# torch.compile's guards on tensors. Without them nothing is repeated.
_Guards: Any = getattr(guards, "TensorGuards", None)
_dispatch_modes = torch._C._len_torch_dispatch_stack
_tracing_state = torch._C._get_tracing_state
_PLAIN_VALUES = frozenset({bool, int, float, str})
# Other subclasses may redefine operations.
_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)

_Function = TypeVar("_Function", bound=Callable[..., Any])
# Newest first. ``forget`` replaces the dict, so that a call that began before stores its entry in the old one.
_entries: dict[tuple[Any, ...], tuple[_Entry, ...]] = {}
_entries_lock = threading.Lock()


class _NotRepeatable(Exception):
    pass


def repeats_launches(function: _Function) -> _Function:
    """Decorate an operation that launches kernels and returns their outputs: a tensor, a tuple of tensors, or None.

    ``function`` itself runs at every call under torch.compile, a tracing mode or a transform, on the CPU, if a gradient
    is recorded, and if it does more than launch. A repeated call bypasses torch-function modes; with them it would take
    twice as long under ``torch.set_default_device``.
    """
    if value_checks.ENABLED or _Guards is None:
        return function

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling() or not _eager():
            return function(*args, **kwargs)
        known = _entries
        key: list[Any] = [function, torch.is_grad_enabled(), *kwargs]
        tensors: list[torch.Tensor] = []
        # Torch-function modes intercept attribute reads too.
        with DisableTorchFunction():
            try:
                addresses = _append(key, tensors, (*args, *kwargs.values()) if kwargs else args)
                # Which tensors share an address: an operation may refuse that, or depend on it.
                key.append(len(set(addresses)) == len(addresses) or tuple(map(addresses.index, addresses)))
                entries = known.get(tuple(key), ())
            except (_NotRepeatable, TypeError, RuntimeError):
                # TypeError: an unhashable argument; RuntimeError: a tensor without strides or an address.
                entries = None
            for entry in entries or ():
                if entry.matches(*tensors) and (not entry.distances or entry.binds(addresses)):
                    if entry.can_run():
                        return entry(tensors, addresses)
                    entries = None
                    break
        if entries is None or is_recording() or not _recordable(tensors):
            return function(*args, **kwargs)
        results, entry = _recorded(function, args, kwargs, tensors)
        _store(known, tuple(key), entry)
        return results

    return call  # type: ignore[return-value]


def _append(key: list[Any], tensors: list[torch.Tensor], values: Iterable[Any]) -> list[int]:
    """Append arguments to ``key`` (for a tensor, only the properties that distinguish most calls), and tensors to
    ``tensors``.

    Returns the tensors' addresses.
    """
    addresses: list[int] = []
    for value in values:
        if value is None:
            key.append(None)
            continue
        kind = type(value)
        if kind in _PLAIN_TENSORS:
            address = value.data_ptr()
            tensors.append(value)
            addresses.append(address)
            key += (value.shape, address & 15)
        elif kind in _PLAIN_VALUES:
            # With the type: 1, 1.0 and True are equal. As text, -0.0 differs from 0.0, and NaN equals itself.
            key += (kind, value.hex() if kind is float else value)
        elif isinstance(value, (list, tuple)):
            # Also a named tuple: in the key it would keep its tensors alive and compare unequal to similar ones.
            key += (kind, len(value))
            addresses += _append(key, tensors, value)
        elif isinstance(value, torch.Tensor):
            raise _NotRepeatable
        else:
            key += (kind, value)
    return addresses


def _matcher(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """A function that compares tensors of the same shapes with these, in all that a key does not contain.

    It compares types, dtypes, devices, strides, ``requires_grad``, and dispatch keys, which distinguish negated, sparse
    and wrapped tensors. These are torch.compile's guards; they refuse a tensor that is passed twice.
    """
    firsts = [next(n for n, other in enumerate(tensors) if other is tensor) for tensor in tensors]
    numbers = list(dict.fromkeys(firsts))
    if len(numbers) < len(tensors):
        matches = _matcher([tensors[number] for number in numbers])
        pairs = [(number, first) for number, first in enumerate(firsts) if number != first]
        return lambda *others: (
            all(others[n] is others[first] for n, first in pairs) and matches(*[others[number] for number in numbers])
        )
    # TensorGuards ends the process if it is called without the two lists.
    return _Guards(
        *tensors,
        # Of any size.
        dynamic_dims_sizes=[[None] * tensor.dim() for tensor in tensors],
        dynamic_dims_strides=[list(tensor.stride()) for tensor in tensors],
    ).check


def _recordable(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether launches with such tensors may be repeated."""
    records_gradient = torch.is_grad_enabled()
    with DisableTorchFunction():
        return len(tensors) > 0 and all(
            tensor.get_device() >= _FIRST_DEVICE
            # The imaginary part of a conjugate view is stored negated.
            and not tensor.is_neg()
            and not (records_gradient and tensor.requires_grad)
            for tensor in tensors
        )


def _store(known: dict[tuple[Any, ...], tuple[_Entry, ...]], key: tuple[Any, ...], entry: _Entry) -> None:
    """Add an entry. If there are too many keys, or too many entries of the key, it replaces the oldest."""
    with _entries_lock:
        others = known.pop(key, ())
        if len(known) >= _MAX_KEYS:
            del known[next(iter(known))]
        known[key] = (entry, *others[: _MAX_ENTRIES_OF_KEY - 1])


def forget() -> None:
    """Remove all entries, because another implementation may be chosen from now on."""
    global _entries
    _entries = {}


class _Entry:
    """A recorded call, which is not repeated because it does more than launch kernels."""

    # (tensor, another tensor, the distance between their addresses) that a call must have
    distances: Sequence[tuple[int, int, int]] = ()

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.matches = _matcher(tensors)

    def binds(self, addresses: Sequence[int]) -> bool:
        """Whether tensors at ``addresses`` have the recorded distances."""
        return all(addresses[number] - addresses[other] == distance for number, other, distance in self.distances)

    def can_run(self) -> bool:
        return False

    def __call__(self, tensors: list[torch.Tensor], addresses: list[int]) -> Any:
        raise NotImplementedError("a call that is not repeated")


class _Repeat(_Entry):
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
        super().__init__(tensors)
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
        returned = [next(n for n, tensor in enumerate(every) if tensor is result) for result in results]
        self._results_of = internals.items_at(returned)
        # Fresh allocations need no version increment.
        written = {tensor.untyped_storage().data_ptr() for tensor in recording.written}
        numbers = [n for n, tensor in enumerate(tensors) if tensor.untyped_storage().data_ptr() in written]
        self._written_of = internals.items_at(numbers) if numbers else None
        self._device = tensors[0].device.index
        # (tensor, another tensor that extends over its address, bytes between their addresses)
        self.distances = [
            (number, other, tensors[number].data_ptr() - tensor.data_ptr())
            for number in of_views
            if number < len(tensors)
            for other, tensor in enumerate(tensors)
            if 0 < tensors[number].data_ptr() - tensor.data_ptr() < _extent(tensor)
        ]

    def can_run(self) -> bool:
        """Whether the current device is the recorded one, and no launch hook (of a profiler) is installed."""
        return _current_device() == self._device and not self._hooked()

    def __call__(
        self, tensors: list[torch.Tensor], addresses: list[int]
    ) -> torch.Tensor | tuple[torch.Tensor, ...] | None:
        """Run with ``tensors`` at ``addresses``; allocated tensors are appended to both lists."""
        for shape, stride, dtype, zeroed in self._allocations:
            tensor = _allocate(shape, stride, dtype)
            if zeroed:
                tensor.zero_()
            tensors.append(tensor)
            addresses.append(tensor.data_ptr())
        stream = _current_stream(self._device)
        for launch in self._launches:
            launch(stream, addresses)
        if self._written_of:
            # A backward pass that saved one of them checks its version.
            increment_version(self._written_of(tensors))
        results = self._results_of(tensors)
        return results[0] if self._is_single else tuple(results) or None


def _recorded(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[torch.Tensor]
) -> tuple[Any, _Entry]:
    """The results of a call, and its entry."""
    internals = _internals()
    if internals is None:
        return function(*args, **kwargs), _Entry(tensors)
    results, recording = record(function, args, kwargs, internals.counting_launches)
    with DisableTorchFunction():
        try:
            return results, _Repeat(internals, tensors, () if results is None else results, recording)
        except _NotRepeatable:
            return results, _Entry(tensors)


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
    """Whether a call executes eagerly: without a mode, a transform, tangents, or a trace.

    torch.jit.trace treats results that PyTorch did not compute as constants.
    """
    return (
        _dispatch_modes() == 0
        and peek_interpreter_stack() is None
        and _tracing_state() is None
        # ``gradients.has_tangents`` without a call
        and forward_ad._current_level < 0
    )
