"""All that this package assumes of Triton beyond what it documents.

``tests/runtime/test_triton_internals.py`` holds each assumption against every supported Triton, without a GPU. Where
one fails nothing goes wrong: launches go through Triton's own launcher, and there are no clusters.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton
from triton import knobs

from flashlatte.runtime import machine
from flashlatte.runtime.tma_descriptors import Address

# Argument lists that a launch remembers: one for each address of a TMA descriptor, as of the caches of all layers.
_REMEMBERED = 1024
# Where Triton's launchers take the stream.
_STREAM = 3
# What a CTA may have of an SM's shared memory.
_SHARED_BYTES = 232_448


@dataclass(frozen=True)
class Pointer:
    """Stands for a tensor among a launch's arguments: the tensor's number in a call."""

    number: int


@dataclass(frozen=True)
class Descriptor:
    """Stands for a TMA descriptor of tensor ``number``; ``like`` is the one of another tensor that it resembles."""

    number: int
    like: Any


class RepeatableLaunch:
    """A launch with everything worked out but the stream and the addresses of tensors.

    For a kernel with TMA descriptors Triton makes a Python function around the driver module's ``launch``, which
    encodes every descriptor anew at every launch: longer than the launch itself takes. Here Triton's launcher runs once
    for each set of descriptors, with a function in ``launch``'s place that notes its arguments.

    It assumes of ``CompiledKernel`` that ``run(x, y, z, stream, function, packed_metadata, launch_metadata,
    enter_hook, exit_hook, *arguments)`` launches it, which is how ``JITFunction.run`` does it; that pointers may be
    integers; and, of NVIDIA's launcher, what ``_innermost`` says.
    """

    def __init__(self, compiled: Any, grid: tuple[int, ...], arguments: Sequence[Any]) -> None:
        """``arguments``: all of them in order, constants too; ``Pointer`` and ``Descriptor`` where tensors come in."""
        self._compiled, self._arguments = compiled, arguments
        self._grid = (*grid, 1, 1)[:3]
        self._innermost = _innermost(compiled.run)
        self._launch = self._innermost or compiled.run
        # Since 3.7 the driver module takes a kernel's arguments as one list, the last argument.
        self._in_list = self._innermost is not None and hasattr(compiled.run, "kernel_signature")
        self._described = [argument.number for argument in arguments if isinstance(argument, Descriptor)]
        self._passed = functools.lru_cache(_REMEMBERED)(self._passed_with)

        passed = self._passed(*(item.like.base.data_ptr() for item in arguments if isinstance(item, Descriptor)))
        passed = passed[-1] if self._in_list else passed
        self._pointers = [(index, item.number) for index, item in enumerate(passed) if isinstance(item, Pointer)]
        self._tuples = [(index, item) for index, item in enumerate(passed) if _has_pointers(item)]

    def __call__(self, stream: int, addresses: Sequence[int]) -> None:
        """Launch with tensor ``number`` at ``addresses[number]``, of the alignment that the first launch's had."""
        passed = self._passed(*[addresses[number] for number in self._described]).copy()
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
        """What ``_launch`` takes, with descriptors of memory at these addresses."""
        addresses = iter(described)
        compiled = self._compiled
        arguments = [
            replace(item.like, base=replace(item.like.base, address=next(addresses)))
            if isinstance(item, Descriptor)
            else item
            for item in self._arguments
        ]
        passed = [*self._grid, None, compiled.function, compiled.packed_metadata, None, None, None, *arguments]
        if self._innermost is None:
            return passed
        noted: list[Any] = []
        metadata = getattr(compiled.metadata, "tensordesc_meta", None)
        wrap = inspect.getmodule(type(compiled.run)).wrap_handle_tensordesc  # type: ignore[union-attr]
        twin = copy.copy(compiled.run)
        twin.launch = wrap(lambda *all_arguments: noted.extend(all_arguments), compiled.src.signature, metadata)
        twin(*passed)
        if self._in_list:
            noted[-1] = list(noted[-1])
        return noted


def is_descriptor(argument: Any) -> bool:
    """Whether an argument of a kernel is a TMA descriptor made on the host."""
    return hasattr(argument, "block_shape")


def without_memory(descriptor: Any) -> Any:
    """The same descriptor, which keeps nothing of the tensor alive."""
    base = descriptor.base
    return replace(descriptor, base=Address(base.data_ptr(), base.dtype))


def hooked() -> bool:
    """Whether somebody (a profiler) wants to be called at launches."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool((enter and getattr(enter, "calls", True)) or (leave and getattr(leave, "calls", True)))


@contextlib.contextmanager
def telling_of_launches(count: Callable[[object], None]) -> Iterator[None]:
    """Calls ``count`` at each launch, by whatever kernel; at none if Triton has no list of hooks."""
    chain: Any = knobs.runtime.launch_enter_hook
    if not hasattr(chain, "add"):
        yield
        return
    chain.add(count)
    try:
        yield
    finally:
        chain.remove(count)


def _innermost(run: Any) -> Any:
    """What NVIDIA's launcher ``run`` calls last, or None for another launcher, or one that does more than launch.

    It assumes that the launcher's attribute ``launch`` is the driver module's function, or, for a kernel with TMA
    descriptors, what the module's ``wrap_handle_tensordesc(launcher, signature, metadata)`` made of it.
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


def _has_pointers(item: Any) -> bool:
    return isinstance(item, tuple) and any(isinstance(part, Pointer) for part in item)


def _filled(items: tuple[Any, ...], addresses: Sequence[int]) -> tuple[Any, ...]:
    return tuple([addresses[item.number] if isinstance(item, Pointer) else item for item in items])


class Cluster(NamedTuple):
    """CTAs on neighbouring SMs with access to each other's shared memory.

    What Triton compiles for several CTAs a program has layouts that span them. Here each CTA of a cluster is compiled
    by itself, as ever, and only the launch says that they belong together; what they exchange is inline PTX.

    Attributes:
        size: CTAs of a cluster, neighbours in the grid, which then counts clusters.
        tail_bytes: of shared memory behind what Triton allocates; it ends where ``%dynamic_smem_size`` says.
    """

    size: int
    tail_bytes: int


def join(compiled: Any, cluster: Cluster) -> None:
    """Change what the launcher is told of a compiled kernel, once.

    It assumes that ``packed_metadata`` is (warps, CTAs of a cluster, bytes of shared memory) and that the launcher
    multiplies the grid by the second.
    """
    warps, ctas, shared = compiled.packed_metadata
    if ctas == 1:
        compiled.packed_metadata = warps, cluster.size, shared + cluster.tail_bytes


def clusters_fill(device: torch.device, size: int) -> bool:
    """Whether clusters of CTAs that take an SM each can be launched, and fill all SMs of a GPU."""
    return machine.device_type(device) == "cuda" and _clusters_fill(device, size)


@functools.cache
def _clusters_fill(device: torch.device, size: int) -> bool:
    if device.type != "cuda":  # a GPU that is not here, taken for one whose SMs all work
        return machine.compute_capability(device) == (9, 0)
    with torch.cuda.device(device):
        compiled = _nothing.warmup(grid=(1,))
        if not packs_clusters(triton.compiler.make_backend(compiled.metadata.target)):
            return False
        _ = compiled.run  # which loads it
        utils = triton.runtime.driver.active.utils  # type: ignore[attr-defined]
        clusters = utils.cuOccupancyMaxActiveClusters(compiled.function, _SHARED_BYTES, size)
    return clusters * size >= torch.cuda.get_device_properties(device).multi_processor_count


def packs_clusters(backend: Any) -> bool:
    """Whether what ``join`` assumes of packed metadata is so."""
    return backend.pack_metadata(SimpleNamespace(num_warps=4, num_ctas=1, shared=96)) == (4, 1, 96)


@triton.jit
def _nothing():
    pass
