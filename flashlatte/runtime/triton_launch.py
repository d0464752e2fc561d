"""A launch of a compiled Triton kernel that can be repeated with tensors at other addresses."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from triton import knobs

# Encodings of a TMA descriptor that a launch remembers: one for each address, as of the caches of a model's layers.
_REMEMBERED = 1024
# Where Triton's launchers take the stream.
_STREAM = 3


@dataclass(frozen=True)
class Address:
    """What a TMA descriptor needs of a tensor. It holds no memory: a descriptor may outlive what it was made for."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


@dataclass(frozen=True)
class Place(Address):
    """Stands for a tensor among a launch's arguments: the tensor's number in a call, and its address at first."""

    number: int


class RepeatableLaunch:
    """A launch with everything worked out but the stream and the addresses of tensors.

    At every launch Triton's launcher goes through all arguments and encodes each TMA descriptor anew, which takes it
    longer than the driver takes to launch. Here it does so once, and the driver's function is called with the result.
    """

    def __init__(self, compiled: Any, grid: tuple[int, ...], args: Sequence[Any]) -> None:
        """``args``: all arguments in order, constants too, with a ``Place`` for each tensor or base of a descriptor.

        Raises:
            NotImplementedError: a descriptor on a launcher that this class does not know.
        """
        columns, rows, layers = (*grid, 1, 1)[:3]
        head = (columns, rows, layers, None, compiled.function, compiled.packed_metadata, None, None, None)
        self._launch, self._head, self._args, self._nested = compiled.run, head, list(args), False
        self._encoders: list[tuple[int, int, Any]] = []
        descriptors = [index for index, argument in enumerate(args) if is_descriptor(argument)]
        driver = _driver(compiled.run)
        if driver is not None:
            expand = functools.partial(_expanded, driver, compiled, head)
            self._launch = _innermost(compiled.run)
            self._head, self._args, self._nested = expand(args)
            for index in descriptors:
                position = index + sum(2 * len(args[earlier].shape) for earlier in descriptors if earlier < index)
                encode = functools.lru_cache(_REMEMBERED)(functools.partial(_encoded, expand, args, index, position))
                self._encoders.append((position, args[index].base.number, encode))
        elif descriptors:
            raise NotImplementedError("TMA descriptors are repeated through Triton's launcher for NVIDIA GPUs only")
        self._places = [(position, arg.number) for position, arg in enumerate(self._args) if isinstance(arg, Place)]

    def __call__(self, stream: int, addresses: Sequence[int]) -> None:
        """Launch with tensor ``number`` at ``addresses[number]``, of the alignment that the first launch's had."""
        args = self._args.copy()
        for position, number in self._places:
            args[position] = addresses[number]
        for position, number, encode in self._encoders:
            args[position] = encode(addresses[number])
        head = self._head
        if self._nested:
            self._launch(*head[:_STREAM], stream, *head[_STREAM + 1 :], args)
        else:
            self._launch(*head[:_STREAM], stream, *head[_STREAM + 1 :], *args)


def is_descriptor(argument: Any) -> bool:
    """Whether an argument of a kernel is a TMA descriptor made on the host."""
    return hasattr(argument, "block_shape")


def hooked() -> bool:
    """Whether somebody (a profiler) wants to be called at launches."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool((enter and getattr(enter, "calls", True)) or (leave and getattr(leave, "calls", True)))


def _driver(run: Any) -> Any:
    """Triton's driver module for NVIDIA GPUs if ``run`` is its launcher and allocates nothing, else None."""
    driver = inspect.getmodule(type(run))
    known = driver is not None and driver.__name__ == "triton.backends.nvidia.driver"
    if not known or not hasattr(driver, "wrap_handle_tensordesc") or not hasattr(run, "launch"):
        return None
    return driver if run.global_scratch_size == run.profile_scratch_size == 0 else None


def _innermost(run: Any) -> Any:
    """What the launcher calls last: itself wrapped where a kernel takes descriptors."""
    return inspect.getclosurevars(run.launch).nonlocals["launcher"] if inspect.isfunction(run.launch) else run.launch


def _expanded(driver: Any, compiled: Any, head: tuple[Any, ...], args: Sequence[Any]) -> tuple[Any, list[Any], bool]:
    """The driver function's arguments before a kernel's own, those, and whether it takes them as one list."""
    passed: list[Any] = []
    twin = copy.copy(compiled.run)
    metadata = getattr(compiled.metadata, "tensordesc_meta", None)
    twin.launch = driver.wrap_handle_tensordesc(
        lambda *all_args: passed.extend(all_args), compiled.src.signature, metadata
    )
    twin(*head, *args)
    if isinstance(passed[-1], (list, tuple)):
        return tuple(passed[:-1]), list(passed[-1]), True
    count = len(args) + sum(2 * len(argument.shape) for argument in args if is_descriptor(argument))
    return tuple(passed[:-count]), passed[-count:], False


def _encoded(expand: Any, args: Sequence[Any], index: int, position: int, address: int) -> Any:
    """The encoding of the descriptor ``args[index]`` at another address."""
    changed = list(args)
    changed[index] = replace(args[index], base=replace(args[index].base, address=address))
    return expand(changed)[1][position]
