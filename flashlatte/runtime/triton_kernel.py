"""How this package compiles and launches Triton kernels."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton

from flashlatte.runtime.repeat import note_launch
from flashlatte.runtime.triton_clusters import join
from flashlatte.runtime.triton_launch import hooked, is_descriptor

# Launches that a kernel remembers, of which only strides in tuples can make many.
_REMEMBERED = 4096
_RUN_TIME_NUMBERS = ("tl.int32", "tl.int64", "tl.float32")


def kernel(function: Callable[..., None]) -> Any:
    """``triton.jit`` for a kernel whose numbers are all run-time values of the annotated type, launched leanly.

    Left alone, Triton compiles a kernel again for a number that is 1, that is divisible by 16, or that no longer
    fits 32 bits, so a new batch size or stride could cost a user seconds. What the generated code must know is a
    ``tl.constexpr``, passed by name.
    """
    return lean(triton.jit(function, do_not_specialize=_run_time_numbers(function)))  # type: ignore[call-overload]


def gluon_kernel(function: Callable[..., None], by_element: Sequence[str]) -> Any:
    """``kernel`` for Gluon.

    Args:
        by_element: pointers that are read and written by the element, whose alignment would only make more variants.
    """
    from triton.experimental import gluon

    return lean(
        gluon.jit(
            function,
            do_not_specialize=_run_time_numbers(function),
            do_not_specialize_on_alignment=list(by_element),
        )
    )


def _run_time_numbers(function: Callable[..., None]) -> list[str]:
    parameters = inspect.signature(function).parameters
    return [name for name, parameter in parameters.items() if parameter.annotation in _RUN_TIME_NUMBERS]


def lean(jitted: Any) -> Any:
    """Let a ``JITFunction`` launch by ``LeanLaunch``; anything else (an interpreted function) stays as it is."""
    if isinstance(jitted, triton.JITFunction):
        jitted.__class__ = _lean_class(type(jitted))
    return jitted


class LeanLaunch:
    """Launches of a ``JITFunction`` at a fraction of the host time.

    For each launch Triton binds the arguments by name, classifies each, and looks the compiled kernel up by a text
    made of all that. Here the compiled kernel is found by what it can depend on: the constants, and of the other
    arguments dtype, 16-byte alignment and which are None; not by arguments that Triton was told not to specialise on.
    """

    # Programs of a cluster, and bytes of shared memory that each has beside Triton's (``triton_clusters``).
    cluster: tuple[int, int] | None = None

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if "_launches" not in self.__dict__:
            self._launches = {}
            self._specialised = [
                index for index, parameter in enumerate(self.params) if not parameter.do_not_specialize
            ]
        launch_args = list(args)
        key: list[Any] = [torch.cuda.current_device(), len(args), *kwargs, *kwargs.values()]
        for index in self._specialised:
            if index >= len(args):
                break
            argument = args[index]
            if isinstance(argument, torch.Tensor):
                # An address costs the launcher a tenth of what asking a tensor for it does.
                launch_args[index] = address = argument.data_ptr()
                key += (argument.dtype, address % 16 == 0)
            else:
                key.append(_trait(argument))
        known = None if warmup or self.pre_run_hooks or hooked() else self._launches.get(tuple(key))
        if known is None:
            if self.cluster is not None and tuple(key) not in self._launches:
                join(super().run(*args, grid=grid, warmup=True, **kwargs), *self.cluster)  # type: ignore[misc]
            compiled = super().run(*args, grid=grid, warmup=warmup, **kwargs)  # type: ignore[misc]
            if not warmup:
                if len(self._launches) >= _REMEMBERED:
                    self._launches.clear()
                constants = tuple(kwargs[name] for name in self.arg_names[len(args) :])
                self._launches[tuple(key)] = compiled, constants
                note_launch(compiled, grid, (*args, *constants))
            return compiled
        compiled, constants = known
        columns, rows, layers = (*grid, 1, 1)[:3]
        compiled.run(
            columns,
            rows,
            layers,
            triton.runtime.driver.active.get_current_stream(key[0]),  # type: ignore[attr-defined]
            compiled.function,
            compiled.packed_metadata,
            None,  # what hooks would be told, and the two hooks
            None,
            None,
            *launch_args,
            *constants,
        )
        note_launch(compiled, grid, (*args, *constants))
        return compiled


@functools.cache
def _lean_class(cls: type) -> type:
    return type(cls.__name__, (LeanLaunch, cls), {})


def _trait(argument: Any) -> Any:
    """What a compiled kernel depends on in an argument; of a constant, the value."""
    if argument is None or isinstance(argument, (bool, str, torch.dtype)):
        return argument
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, tuple):
        return tuple(map(_trait, argument))
    if is_descriptor(argument):
        return argument.base.dtype, tuple(argument.block_shape)
    return argument


_NOTHING = contextlib.nullcontext()


def launching_on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Makes ``device`` current where it is not: Triton launches on the current device."""
    if device.type != "cuda" or torch.cuda.current_device() == device.index:
        return _NOTHING
    return torch.cuda.device(device)
