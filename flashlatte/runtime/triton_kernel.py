"""Compiles and launches Triton kernels, without variants for scalar values."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from flashlatte.runtime import machine
from flashlatte.runtime.kernel_records import entry_of, flat_records, parameters_of, records_of
from flashlatte.runtime.recording import is_recording, record_launch
from flashlatte.runtime.source_hash import hash_source
from flashlatte.runtime.triton_internals import ClusterLaunch, join

# Whether kernels run in Triton's interpreter, which lacks inline PTX and some casts.
INTERPRETED = tl.constexpr(machine.interpreting())

_RUN_TIME_SCALARS = ("int32", "int64", "float32", "Int32", "Int64", "Float32", "OptionalInt32")


def kernel(
    function: Callable[..., None] | None = None,
    *,
    cluster: ClusterLaunch | None = None,
    same: Mapping[str, str] | None = None,
) -> Any:
    """``triton.jit`` for a kernel whose scalar arguments are run-time values of the annotated type.

    By default Triton compiles separate variants for scalars that are 1, divisible by 16, or beyond 32 bits, so a new
    batch size or stride could cost seconds. It also specializes on the alignment of pointers, unless they are annotated
    with ``kernel_records.ElementPointer``. Compile-time values are ``tl.constexpr`` parameters, passed by name.

    A parameter annotated with a named tuple is a record, whose fields ``kernel_records`` annotates. The launch passes
    an instance: ``kernel[grid](query, outputs, scale=0.1, CONFIG=config)``.

    Args:
        cluster: the cluster that CTAs are launched in, if any.
        same: fields of records, "outputs_tokens", that are the same value as another field, "key_lengths_tokens". The
            kernel then has one parameter for both, and divides by it once.
    """
    return _compiled_by(triton.jit, function, cluster, same or {})


def gluon_kernel(
    function: Callable[..., None] | None = None,
    *,
    cluster: ClusterLaunch | None = None,
    same: Mapping[str, str] | None = None,
) -> Any:
    """``kernel`` for Gluon."""
    from triton.experimental import gluon

    return _compiled_by(gluon.jit, function, cluster, same or {})


def _compiled_by(
    jit: Callable[..., Any],
    function: Callable[..., None] | None,
    cluster: ClusterLaunch | None,
    same: Mapping[str, str],
) -> Any:
    """A ``Kernel``, or an ``InterpretedKernel`` in Triton's interpreter; without ``function`` a decorator."""
    if function is None:
        return lambda decorated: _compiled_by(jit, decorated, cluster, same)
    records = records_of(function)
    parameters = parameters_of(function, records, same)
    jitted = jit(
        entry_of(function, records, same, jit(function)) if records else function,
        do_not_specialize=[item.name for item in parameters if item.kind in _RUN_TIME_SCALARS],
        do_not_specialize_on_alignment=[item.name for item in parameters if item.kind == "ElementPointer"],
    )
    if isinstance(jitted, triton.JITFunction):
        return Kernel(jitted, cluster, records, same)
    # Imported here: the interpreter's module needs NumPy.
    from flashlatte.runtime.interpreted_kernel import InterpretedKernel

    return InterpretedKernel(jitted, records, same)


_instead: Callable[[Any, tuple[Any, ...], dict[str, Any]], None] | None = None


@contextlib.contextmanager
def launching(instead: Callable[[Any, tuple[Any, ...], dict[str, Any]], None]) -> Iterator[None]:
    """Inside, launches of any thread call ``instead`` with the JITFunction and its arguments; nothing is compiled or
    launched."""
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
        records, same: the record class of each of the first parameters that is a record; as in ``kernel``.
        arg_names: the parameters of ``jitted``: fields of records, scalars, pointers and constants.
    """

    def __init__(
        self,
        jitted: Any,
        cluster: ClusterLaunch | None = None,
        records: Mapping[str, type[Any]] | None = None,
        same: Mapping[str, str] | None = None,
    ) -> None:
        self.jitted = jitted
        self.cluster = cluster
        self.records, self.same = records or {}, same or {}
        self.arg_names = jitted.arg_names

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **kwargs: Any) -> None:
        jitted, cluster = self.jitted, self.cluster
        args = flat_records(self.records, self.same, args)
        # Triton's default up to 3.9. Triton 3.10 changes it (3.9 warns), which would change results bitwise.
        kwargs.setdefault("enable_fp_fusion", True)
        hash_source(jitted)
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
