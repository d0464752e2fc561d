"""Registration of operations with PyTorch, so that torch.compile treats each as one call."""

from __future__ import annotations

import contextlib
import functools
import inspect
import typing
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec

import torch

from flashlatte.runtime.recording import NAMESPACE, record_writes, watched
from flashlatte.runtime.repeat import repeats_launches

_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
_AUTOCAST = ("cpu", "cuda", "xpu")

_Args = ParamSpec("_Args")


def register_op(name: str, *, mutates: Sequence[str]) -> Callable[[Callable[_Args, None]], Callable[_Args, None]]:
    """Register a function that returns nothing and writes to its arguments as ``torch.ops.flashlatte.<name>``.

    The schema is inferred from the function's annotations. If its first parameter is a named tuple, the registered
    operation takes the fields instead; the decorated function takes the named tuple. ``mutates`` names the tensors or
    fields that it writes.

    A call costs 6 µs. ``torch.library.custom_op`` has a Python wrapper, with which a call that mutates two arguments
    costs 80 µs, more than a decode kernel takes.
    """

    def register(function: Callable[_Args, None]) -> Callable[_Args, None]:
        first, *_ = inspect.signature(function, eval_str=True).parameters.values()
        is_record = hasattr(first.annotation, "_fields")
        flat = _with_fields(function, first.annotation) if is_record else function
        registered = _define(name, flat, mutates, _mutating_fake(_positions(flat, mutates)))
        if not is_record:
            return registered
        return lambda params, *others: registered(*params, *others)  # type: ignore[return-value]

    return register


def register_differentiable_op(
    name: str,
    *,
    fake: Callable[..., Any],
    backward: Callable[..., Any],
    setup_context: Callable[..., None] | None = None,
    record: type[tuple[Any, ...]] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function that writes to none of its arguments as a differentiable operation.

    Args:
        fake: takes the same arguments; returns empty tensors of the results' shapes, dtypes and strides.
        backward: takes (ctx, *gradients of the results), None for a result without a gradient; returns a gradient or
            None for each argument.
        setup_context: takes (ctx, inputs, output), and saves the tensors that ``backward`` needs.
        record: the class of the first parameter, a named tuple. The operation takes its fields instead.
    """

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.set_materialize_grads(False)
        if setup_context is not None:
            setup_context(ctx, inputs, output)

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        flat = function if record is None else _with_fields(function, record)
        operation = _define(name, flat, (), fake)
        torch.library.register_autograd(f"{NAMESPACE}::{name}", backward, setup_context=keep, lib=_LIBRARY)
        return operation

    return register


def records_gradient(*tensors: torch.Tensor) -> bool:
    """Whether autograd records operations on these tensors."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _define(
    name: str, function: Callable[..., Any], mutates: Sequence[str], fake: Callable[..., Any]
) -> Callable[..., Any]:
    _LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=mutates))
    # Compiled programs call this, not the public function, which may repeat launches itself.
    run = repeats_launches(watched(_isolated(function, mutates)))
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def _isolated(function: Callable[..., Any], mutates: Sequence[str]) -> Callable[..., Any]:
    """``function`` without autocast and autograd, and with the versions of its outputs incremented.

    Autocast would lower the reference's float32 precision. Autograd would record the reference's operations but no
    kernel; a differentiable operation has its own backward. PyTorch does not see the writes of kernels. Outside of
    inference mode it refuses those of references to inference tensors, so references run in it.
    """
    positions = _positions(function, mutates)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            if torch.is_grad_enabled():
                stack.enter_context(torch.no_grad())
            for device_type in _AUTOCAST:
                if torch.is_autocast_enabled(device_type):
                    stack.enter_context(torch.autocast(device_type, enabled=False))
            if any(tensor.is_inference() for tensor in _tensors_at(positions, args)):
                stack.enter_context(torch.inference_mode())
            result = function(*args, **kwargs)
        if positions:
            record_writes(_tensors_at(positions, args))
        return result

    return run


def _mutating_fake(positions: Sequence[int]) -> Callable[..., None]:
    """The fake of a function that writes to the arguments at ``positions``: specializes on their storage offsets.

    Inductor drops a symbolic storage offset, so the compiled program would write to the first row, cache or layer
    instead of the given one (PyTorch issue 198068).
    """

    def fake(*args: Any) -> None:
        for tensor in _tensors_at(positions, args):
            offset: Any = tensor.storage_offset()
            if isinstance(offset, torch.SymInt) and not offset.node.is_constant():
                # A product of sizes becomes constant when each of its sizes does.
                for symbol in offset.node.expr.free_symbols:
                    offset.node.shape_env.evaluate_expr(symbol)

    return fake


def _positions(function: Callable[..., Any], mutates: Sequence[str]) -> list[int]:
    names = list(inspect.signature(function).parameters)
    return [names.index(name) for name in mutates]


def _tensors_at(positions: Sequence[int], args: Sequence[Any]) -> list[torch.Tensor]:
    # PyTorch omits trailing arguments that have their default values.
    return [tensor for position in positions if position < len(args) for tensor in _tensors(args[position])]


def _tensors(value: torch.Tensor | Sequence[torch.Tensor] | None) -> Sequence[torch.Tensor]:
    return (value,) if isinstance(value, torch.Tensor) else value or ()


def _with_fields(function: Callable[..., Any], record: Any) -> Callable[..., Any]:
    """``function`` with the fields of ``record`` as parameters instead of its first parameter."""
    fields = [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=annotation)
        for name, annotation in typing.get_type_hints(record).items()
    ]

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        return function(record._make(args[: len(fields)]), *args[len(fields) :])

    signature = inspect.signature(function, eval_str=True)
    _, *others = signature.parameters.values()
    run.__signature__ = signature.replace(parameters=[*fields, *others])  # type: ignore[attr-defined]
    return run
