"""How this package compiles and launches Triton kernels."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import triton

from flashlatte.runtime.recording import is_recording, record_launch
from flashlatte.runtime.triton_internals import ClusterLaunch, join

_SCALAR_TYPES = ("int32", "int64", "float32")


def kernel(
    function: Callable[..., None] | None = None, *, by_element: Sequence[str] = (), cluster: ClusterLaunch | None = None
) -> Any:
    """``triton.jit`` for a kernel whose scalar arguments are run-time values of the annotated type.

    By default Triton compiles separate variants for scalars that are 1, divisible by 16, or beyond 32 bits, so a new
    batch size or stride could cost seconds. Compile-time values are ``tl.constexpr`` parameters, passed by name.

    Args:
        by_element: pointers of any alignment (such as lengths in the middle of a buffer) that are accessed element by
            element; specialising on their alignment would only add variants.
        cluster: the cluster that CTAs are launched in, if any.
    """
    return _compiled_by(triton.jit, function, by_element, cluster)


def gluon_kernel(
    function: Callable[..., None] | None = None, *, by_element: Sequence[str] = (), cluster: ClusterLaunch | None = None
) -> Any:
    """``kernel`` for Gluon."""
    from triton.experimental import gluon

    return _compiled_by(gluon.jit, function, by_element, cluster)


def _compiled_by(
    jit: Callable[..., Any],
    function: Callable[..., None] | None,
    by_element: Sequence[str],
    cluster: ClusterLaunch | None,
) -> Any:
    """A ``Kernel``, or an ``InterpretedKernel`` in Triton's interpreter; without ``function`` a decorator."""
    if function is None:
        return lambda decorated: _compiled_by(jit, decorated, by_element, cluster)
    jitted = jit(function, do_not_specialize=_scalars(function), do_not_specialize_on_alignment=list(by_element))
    if isinstance(jitted, triton.JITFunction):
        return Kernel(jitted, cluster)
    # Imported here: the interpreter's module needs NumPy.
    from flashlatte.runtime.interpreted_kernel import InterpretedKernel

    return InterpretedKernel(jitted)


_instead: Callable[[Any, tuple[Any, ...], dict[str, Any]], None] | None = None


@contextlib.contextmanager
def launching(instead: Callable[[Any, tuple[Any, ...], dict[str, Any]], None]) -> Iterator[None]:
    """Inside, launches call ``instead`` with the JITFunction and its arguments; nothing is compiled or launched."""
    global _instead
    before, _instead = _instead, instead
    try:
        yield
    finally:
        _instead = before


class Kernel:
    """A Triton or Gluon kernel: ``kernel[grid](q, CONSTANT=4)`` compiles it if necessary, and launches it.

    Triton's lookup of the compiled kernel by all arguments takes 50 µs. Faster operations repeat the launches of an
    earlier call (``repeat``), and use this path once per shape.

    Triton launches on the current device; this class makes the device of the arguments current.

    Attributes:
        jitted: Triton's ``JITFunction``.
        cluster: the cluster that CTAs are launched in, or None.
        arg_names: the kernel's parameters, including constants.
    """

    def __init__(self, jitted: Any, cluster: ClusterLaunch | None = None) -> None:
        self.jitted = jitted
        self.cluster = cluster
        self.arg_names = jitted.arg_names

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **kwargs: Any) -> None:
        jitted, cluster = self.jitted, self.cluster
        # Triton's default up to 3.9. Triton 3.10 changes it (3.9 warns), which would change results bitwise.
        kwargs.setdefault("enable_fp_fusion", True)
        if _instead is not None:
            return _instead(jitted, args, kwargs)
        with _current(_device_of((*args, *kwargs.values()))):
            compiled = jitted.run(*args, grid=grid, warmup=cluster is not None, **kwargs)
            if cluster is None and not is_recording():
                return
            options = kwargs.keys() - set(jitted.arg_names)
            named = {name: value for name, value in kwargs.items() if name not in options}
            arguments = list(jitted.signature.bind(*args, **named).arguments.values())
            if cluster is not None:
                join(compiled, cluster)
                compiled[(*grid, 1, 1)[:3]](*arguments)
        record_launch(compiled, grid, arguments)


def _scalars(function: Callable[..., None]) -> list[str]:
    """The parameters annotated as scalars, such as ``tl.int32`` or ``gl.int64``."""
    parameters = inspect.signature(function).parameters.values()
    return [item.name for item in parameters if str(item.annotation).rpartition(".")[2] in _SCALAR_TYPES]


def _device_of(arguments: Iterable[Any]) -> torch.device | None:
    """The GPU of a kernel's tensors, including those in tuples. Some of them may be in pinned host memory."""
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            device = argument.device if argument.device.type == "cuda" else None
        else:
            device = _device_of(argument) if isinstance(argument, tuple) else None
        if device is not None:
            return device
    return None


def _current(device: torch.device | None) -> contextlib.AbstractContextManager[Any]:
    """A context in which ``device`` is current."""
    if device is None or torch.cuda.current_device() == device.index:
        return contextlib.nullcontext()
    return torch.cuda.device(device)
