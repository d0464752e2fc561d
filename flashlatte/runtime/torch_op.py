"""Registration of operations with PyTorch, so that torch.compile and CUDA graphs see them as one call."""

from __future__ import annotations

import contextlib
import functools
import inspect
import typing
from collections.abc import Callable, Sequence
from typing import Any

import torch

from flashlatte.runtime.recording import NAMESPACE, note_written, watched
from flashlatte.runtime.repeat import repeats_launches

_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
_AUTOCAST = ("cpu", "cuda", "xpu")


def register_op(
    name: str, *, mutates: Sequence[str], record: type[tuple[Any, ...]] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a function that only writes into its arguments the operation ``torch.ops.flashlatte.<name>``.

    The schema comes from the function's annotations; ``mutates`` names the tensors it writes. It returns nothing. With
    ``record``, a named tuple, the function takes one of these first, and the operation its fields.

    This is what ``torch.library.custom_op`` does, less its Python wrapper: that costs 80 µs a call on two
    mutated arguments, more than a whole decode kernel, and this 6 µs.
    """

    def register(function: Callable[..., None]) -> Callable[..., None]:
        of_fields = function if record is None else _of_fields(function, record)
        return _define(name, of_fields, mutates, _writing(_places(of_fields, mutates)))

    return register


def register_differentiable_op(
    name: str,
    *,
    fake: Callable[..., Any],
    backward: Callable[..., Any],
    setup_context: Callable[..., None] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a function that writes into none of its arguments an operation through which gradients flow.

    Args:
        fake: same arguments; returns empty tensors of the results' shapes, dtypes and strides.
        backward: (ctx, *gradients of the results), with None for a result that has no gradient; returns one for each
            argument.
        setup_context: (ctx, inputs, output), to keep what ``backward`` needs.
    """

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.set_materialize_grads(False)
        if setup_context is not None:
            setup_context(ctx, inputs, output)

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        operation = _define(name, function, (), fake)
        torch.library.register_autograd(f"{NAMESPACE}::{name}", backward, setup_context=keep, lib=_LIBRARY)
        return operation

    return register


def records_gradient(*tensors: torch.Tensor) -> bool:
    """Whether a result computed from these tensors takes part in a backward pass."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _define(
    name: str, function: Callable[..., Any], mutates: Sequence[str], fake: Callable[..., Any]
) -> Callable[..., Any]:
    _LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=mutates))
    # Compiled programs come by here, and not by the operation's public function, which may repeat launches itself.
    run = repeats_launches(watched(_by_itself(function, mutates)))
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def _by_itself(function: Callable[..., Any], mutates: Sequence[str]) -> Callable[..., Any]:
    """``function``, whatever mode its caller is in, and its writes known to PyTorch, which sees none of a kernel.

    Autocast would take the reference's float32 from it. And its gradient is the operation's, if that has one: recorded
    within, one would flow through the reference and through no kernel.
    """
    places = _places(function, mutates)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            if torch.is_grad_enabled():
                stack.enter_context(torch.no_grad())
            for device_type in _AUTOCAST:
                if torch.is_autocast_enabled(device_type):
                    stack.enter_context(torch.autocast(device_type, enabled=False))
            result = function(*args, **kwargs)
        if places:
            note_written(_tensors_at(places, args))
        return result

    return run


def _writing(places: Sequence[int]) -> Callable[..., None]:
    """The fake of a function that only writes: where it writes becomes a number that a compiled program is made for.

    Inductor forgets an offset that stands for any number, and the program writes to the first row, cache or layer
    whichever it is given (PyTorch's issue 198068).
    """

    def fake(*args: Any) -> None:
        for tensor in _tensors_at(places, args):
            offset: Any = tensor.storage_offset()
            if isinstance(offset, torch.SymInt) and not offset.node.is_constant():
                # A product of sizes is no number before each of them is.
                for symbol in offset.node.expr.free_symbols:
                    offset.node.shape_env.evaluate_expr(symbol)

    return fake


def _places(function: Callable[..., Any], mutates: Sequence[str]) -> list[int]:
    names = list(inspect.signature(function).parameters)
    return [names.index(name) for name in mutates]


def _tensors_at(places: Sequence[int], args: Sequence[Any]) -> list[torch.Tensor]:
    # PyTorch leaves out what has its default.
    return [tensor for place in places if place < len(args) for tensor in _tensors(args[place])]


def _tensors(value: torch.Tensor | Sequence[torch.Tensor] | None) -> Sequence[torch.Tensor]:
    return (value,) if isinstance(value, torch.Tensor) else value or ()


def _of_fields(function: Callable[..., None], record: Any) -> Callable[..., None]:
    """``function`` with the fields of ``record`` as arguments instead of its first one."""
    fields = [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=annotation)
        for name, annotation in typing.get_type_hints(record).items()
    ]

    @functools.wraps(function)
    def run(*args: Any) -> None:
        function(record._make(args[: len(fields)]), *args[len(fields) :])

    _, *others = inspect.signature(function, eval_str=True).parameters.values()
    run.__signature__ = inspect.Signature([*fields, *others], return_annotation=None)  # type: ignore[attr-defined]
    return run
