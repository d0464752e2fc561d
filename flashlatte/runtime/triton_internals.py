"""The code that depends on undocumented behavior of Triton.

``tests/runtime/test_triton_internals.py`` checks each assumption with every supported Triton, without a GPU. If an
assumption does not hold, launches go through Triton's own launcher, and no clusters are used.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton
from triton import knobs

from flashlatte.runtime import machine
from flashlatte.runtime.tma_descriptors import Address

# Argument lists cached for each launch: one per address of a TMA descriptor, such as those of all layers' caches.
_MAX_CACHED_ARGUMENTS = 1024
# The position of the stream among the arguments of Triton's launchers.
_STREAM = 3
# The maximum shared memory of a CTA on SM90.
_SHARED_BYTES = 232_448


@dataclass(frozen=True)
class Pointer:
    """A placeholder for a tensor among a launch's arguments: the tensor's number in the call."""

    number: int


@dataclass(frozen=True)
class Descriptor:
    """A placeholder for a TMA descriptor of tensor ``number``; ``like`` is a descriptor with another address."""

    number: int
    like: Any


class RepeatableLaunch:
    """A prepared launch, which takes the stream and the addresses of tensors.

    For a kernel with TMA descriptors, Triton wraps the driver module's ``launch`` in a Python function that encodes
    every descriptor at every launch, which takes longer than the launch. This class runs Triton's launcher once for
    each set of descriptors, with ``launch`` replaced by a function that records its arguments.

    Assumptions: ``CompiledKernel.run(x, y, z, stream, function, packed_metadata, launch_metadata, enter_hook,
    exit_hook, *arguments)`` launches, as in ``JITFunction.run``; pointers may be integers; and those of ``_innermost``
    about NVIDIA's launcher.
    """

    def __init__(self, compiled: Any, grid: tuple[int, ...], arguments: Sequence[Any]) -> None:
        """``arguments``: all of them in order, including constants, with ``Pointer`` and ``Descriptor`` for tensors."""
        self._compiled, self._arguments = compiled, arguments
        self._grid = (*grid, 1, 1)[:3]
        self._innermost = _innermost(compiled.run)
        self._launch = self._innermost or compiled.run
        # Since 3.7 the driver module takes a kernel's arguments as one list, the last argument.
        self._in_list = self._innermost is not None and hasattr(compiled.run, "kernel_signature")
        self._passed = functools.lru_cache(_MAX_CACHED_ARGUMENTS)(self._passed_with)

        described = {item.number: item.like.base.data_ptr() for item in arguments if isinstance(item, Descriptor)}
        self._described = tuple(described)
        self._addresses_described = items_at(self._described)
        passed = self._passed(*described.values())
        passed = passed[-1] if self._in_list else passed
        self._pointers = [(index, item.number) for index, item in enumerate(passed) if isinstance(item, Pointer)]
        self._tuples = [(index, item) for index, item in enumerate(passed) if _has_pointers(item)]

    def __call__(self, stream: int, addresses: Sequence[int]) -> None:
        """Launch with tensor ``number`` at ``addresses[number]``, which has the alignment of the recorded one."""
        passed = self._passed(*self._addresses_described(addresses)).copy()
        passed[_STREAM] = stream
        arguments = passed
        if self._in_list:
            arguments = passed[-1] = passed[-1].copy()
        for index, number in self._pointers:
            arguments[index] = addresses[number]
        for index, items in self._tuples:
            arguments[index] = _filled(items, addresses)
        self._launch(*passed)

    def _passed_with(self, *described: int) -> list[Any]:
        """The arguments of ``_launch``, with descriptors of the tensors ``_described`` at these addresses."""
        addresses = dict(zip(self._described, described, strict=True))
        compiled = self._compiled
        arguments = [
            replace(item.like, base=replace(item.like.base, address=addresses[item.number]))
            if isinstance(item, Descriptor)
            else item
            for item in self._arguments
        ]
        passed = [*self._grid, None, compiled.function, compiled.packed_metadata, None, None, None, *arguments]
        if self._innermost is None:
            return passed
        recorded: list[Any] = []
        metadata = getattr(compiled.metadata, "tensordesc_meta", None)
        wrap = inspect.getmodule(type(compiled.run)).wrap_handle_tensordesc  # type: ignore[union-attr]
        twin = copy.copy(compiled.run)
        twin.launch = wrap(lambda *all_arguments: recorded.extend(all_arguments), compiled.src.signature, metadata)
        twin(*passed)
        if self._in_list:
            recorded[-1] = list(recorded[-1])
        return recorded


def is_descriptor(argument: Any) -> bool:
    """Whether an argument of a kernel is a TMA descriptor created on the host."""
    return hasattr(argument, "block_shape")


def without_memory(descriptor: Any) -> Any:
    """The same descriptor without a reference to its tensor's memory."""
    base = descriptor.base
    return replace(descriptor, base=Address(base.data_ptr(), base.dtype))


def hooked() -> bool:
    """Whether a launch hook (of a profiler) is installed."""
    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool((enter and getattr(enter, "calls", True)) or (leave and getattr(leave, "calls", True)))


_hooks = threading.Lock()


@contextlib.contextmanager
def counting_launches(count: Callable[[object], None]) -> Iterator[None]:
    """Call ``count`` at each launch of any Triton kernel; never, if Triton has no list of hooks.

    The list is replaced, not changed: while another thread launches, it iterates over the list, and would skip a hook
    if an earlier one were removed.
    """
    chain: Any = knobs.runtime.launch_enter_hook
    if not hasattr(chain, "calls"):
        yield
        return
    with _hooks:
        chain.calls = [*chain.calls, count]
    try:
        yield
    finally:
        with _hooks:
            chain.calls = [hook for hook in chain.calls if hook != count]


def _innermost(run: Any) -> Any:
    """The driver module's launch function that NVIDIA's launcher ``run`` calls; None if ``run`` is another launcher, or
    does more than launch.

    Assumes that the launcher's attribute ``launch`` is the driver module's function, or, for a kernel with TMA
    descriptors, the result of the module's ``wrap_handle_tensordesc(launcher, signature, metadata)``.
    """
    module = inspect.getmodule(type(run))
    if getattr(module, "__name__", None) != "triton.backends.nvidia.driver" or not hasattr(run, "launch"):
        return None
    if not hasattr(module, "wrap_handle_tensordesc") or getattr(run, "gsan_enabled", False):
        return None
    if getattr(run, "global_scratch_size", 1) or getattr(run, "profile_scratch_size", 1):
        return None
    if not inspect.isfunction(run.launch):
        return run.launch
    return inspect.getclosurevars(run.launch).nonlocals.get("launcher")


def items_at(numbers: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """A function that returns the items of a sequence at ``numbers``, as a sequence. It runs no Python code."""
    if len(numbers) > 1:
        return operator.itemgetter(*numbers)
    first = numbers[0] if numbers else 0
    return operator.itemgetter(slice(first, first + len(numbers)))


def _has_pointers(item: Any) -> bool:
    return isinstance(item, tuple) and any(isinstance(part, Pointer) for part in item)


def _filled(items: tuple[Any, ...], addresses: Sequence[int]) -> tuple[Any, ...]:
    return tuple([addresses[item.number] if isinstance(item, Pointer) else item for item in items])


class ClusterLaunch(NamedTuple):
    """How to launch a kernel in clusters, whose CTAs can access each other's shared memory.

    Triton's own programs of several CTAs have layouts that span them. Here each CTA is compiled as a program of one,
    the launch groups them in clusters, and they communicate by inline PTX.

    Attributes:
        size: CTAs in a cluster, adjacent in the grid; the launch's grid counts clusters.
        tail_bytes: extra shared memory after Triton's allocation, up to ``%dynamic_smem_size``.
    """

    size: int
    tail_bytes: int


def join(compiled: Any, cluster: ClusterLaunch) -> None:
    """Make the launcher launch a compiled kernel in clusters. Later calls for the kernel change nothing.

    Assumes that ``packed_metadata`` is (warps, CTAs per cluster, bytes of shared memory), and that the launcher
    multiplies the grid by the second.
    """
    warps, ctas, shared = compiled.packed_metadata
    if ctas == 1:
        compiled.packed_metadata = warps, cluster.size, shared + cluster.tail_bytes


def clusters_fill(device: torch.device, size: int) -> bool:
    """Whether clusters of ``size`` CTAs, each with a whole SM, can be launched and fill all SMs of a GPU."""
    return machine.device_type(device) == "cuda" and _clusters_fill(device, size)


@machine.cached
def _clusters_fill(device: torch.device, size: int) -> bool:
    if device.type != "cuda":  # An assumed GPU: all of its SMs are available to clusters.
        return machine.compute_capability(device) == (9, 0)
    with torch.cuda.device(device):
        compiled = _nothing.warmup(grid=(1,))
        if not packs_clusters(triton.compiler.make_backend(compiled.metadata.target)):
            return False
        _ = compiled.run  # loads the kernel
        utils = triton.runtime.driver.active.utils  # type: ignore[attr-defined]
        clusters = utils.cuOccupancyMaxActiveClusters(compiled.function, _SHARED_BYTES, size)
    return clusters * size >= torch.cuda.get_device_properties(device).multi_processor_count


def packs_clusters(backend: Any) -> bool:
    """Whether the assumption of ``join`` about packed metadata holds."""
    return backend.pack_metadata(SimpleNamespace(num_warps=4, num_ctas=1, shared=96)) == (4, 1, 96)


@triton.jit
def _nothing():
    pass
