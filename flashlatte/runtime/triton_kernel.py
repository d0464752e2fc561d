"""How this package compiles and launches Triton kernels."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import triton

from flashlatte.runtime.recording import is_recording, note_launch
from flashlatte.runtime.triton_internals import Cluster, join

_RUN_TIME_NUMBERS = ("int32", "int64", "float32")


def kernel(
    function: Callable[..., None] | None = None, *, by_element: Sequence[str] = (), cluster: Cluster | None = None
) -> Any:
    """``triton.jit`` for a kernel whose numbers are all run-time values of the annotated type.

    Left alone, Triton compiles a kernel again for a number that is 1, that is divisible by 16, or that no longer
    fits 32 bits, so a new batch size or stride could cost a user seconds. What the generated code must know is a
    ``tl.constexpr``, passed by name.

    Args:
        by_element: pointers that may begin anywhere, as lengths that are a part of a buffer, and are read and written
            by the element: their alignment would only make more variants.
        cluster: CTAs that are launched together, if any are.
    """
    return _compiled_by(triton.jit, function, by_element, cluster)


def gluon_kernel(
    function: Callable[..., None] | None = None, *, by_element: Sequence[str] = (), cluster: Cluster | None = None
) -> Any:
    """``kernel`` for Gluon."""
    from triton.experimental import gluon

    return _compiled_by(gluon.jit, function, by_element, cluster)


def _compiled_by(
    jit: Callable[..., Any], function: Callable[..., None] | None, by_element: Sequence[str], cluster: Cluster | None
) -> Any:
    """A ``Kernel``, or an ``InterpretedKernel`` in Triton's interpreter; without ``function`` what decorates one."""
    if function is None:
        return lambda given: _compiled_by(jit, given, by_element, cluster)
    jitted = jit(
        function, do_not_specialize=_run_time_numbers(function), do_not_specialize_on_alignment=list(by_element)
    )
    if isinstance(jitted, triton.JITFunction):
        return Kernel(jitted, cluster)
    # Imported here: the interpreter's module needs NumPy.
    from flashlatte.runtime.interpreted_kernel import InterpretedKernel

    return InterpretedKernel(jitted)


_instead: Callable[[Any, tuple[Any, ...], dict[str, Any]], None] | None = None


@contextlib.contextmanager
def launching(instead: Callable[[Any, tuple[Any, ...], dict[str, Any]], None]) -> Iterator[None]:
    """Inside, nothing is compiled or launched: ``instead`` is called with the JITFunction and its arguments."""
    global _instead
    before, _instead = _instead, instead
    try:
        yield
    finally:
        _instead = before


class Kernel:
    """A kernel of Triton's or Gluon's: ``kernel[grid](q, CONSTANT=4)`` compiles it if need be, and launches it.

    Triton finds the compiled kernel of a launch by all of its arguments, which takes it 50 µs. Operations that must
    take less time repeat what an earlier call launched (``repeat``), and so come by here once for a shape.

    Triton launches on the current device, whichever its arguments are on; this makes theirs the current one.

    Attributes:
        jitted: Triton's ``JITFunction``.
        cluster: CTAs that are launched together.
        arg_names: the kernel's parameters, constants too.
    """

    def __init__(self, jitted: Any, cluster: Cluster | None = None) -> None:
        self.jitted = jitted
        self.cluster = cluster
        self.arg_names = jitted.arg_names

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **kwargs: Any) -> None:
        jitted, cluster = self.jitted, self.cluster
        # Triton's default until 3.9, which says with a warning that 3.10 has another: results would have other bits.
        kwargs.setdefault("enable_fp_fusion", True)
        if _instead is not None:
            return _instead(jitted, args, kwargs)
        with _current(_device_of((*args, *kwargs.values()))):
            compiled = jitted.run(*args, grid=grid, warmup=cluster is not None, **kwargs)
            if cluster is None and not is_recording():
                return
            options = kwargs.keys() - set(jitted.arg_names)
            given = {name: value for name, value in kwargs.items() if name not in options}
            arguments = list(jitted.signature.bind(*args, **given).arguments.values())
            if cluster is not None:
                join(compiled, cluster)
                compiled[(*grid, 1, 1)[:3]](*arguments)
        note_launch(compiled, grid, arguments)


def _run_time_numbers(function: Callable[..., None]) -> list[str]:
    """The parameters that are annotated as ``tl.int32``, ``gl.int64`` and the like."""
    parameters = inspect.signature(function).parameters.values()
    return [item.name for item in parameters if str(item.annotation).rpartition(".")[2] in _RUN_TIME_NUMBERS]


def _device_of(arguments: Iterable[Any]) -> torch.device | None:
    """The GPU that a kernel's tensors, also those in tuples, are on; some may be the host's memory, pinned."""
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            device = argument.device if argument.device.type == "cuda" else None
        else:
            device = _device_of(argument) if isinstance(argument, tuple) else None
        if device is not None:
            return device
    return None


def _current(device: torch.device | None) -> contextlib.AbstractContextManager[Any]:
    """Makes ``device`` the current one where it is not."""
    if device is None or torch.cuda.current_device() == device.index:
        return contextlib.nullcontext()
    return torch.cuda.device(device)
