"""Warnings of operations and layers without a backward pass whose inputs require a gradient."""

from __future__ import annotations

import sys
import warnings

import torch
from torch import nn
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad

# PyTorch's frames are between a module's forward and its caller.
_NOT_CALLERS = (__name__.split(".")[0], "torch")
_warned: set[str] = set()


def warn_if_dropped(operation: str, *inputs: torch.Tensor | None) -> None:
    """Warn, once per operation, if gradients are enabled and one of the inputs requires one.

    This is not an error: when a model is served without ``torch.no_grad()``, queries computed from parameters require a
    gradient although no backward pass follows.
    """
    refuse_tangents(operation, *inputs)
    if torch.is_grad_enabled():
        for tensor in inputs:
            if tensor is not None and tensor.requires_grad:
                _warn(operation)
                return


def warn_if_layer_drops(name: str, layer: nn.Module, hidden: torch.Tensor) -> None:
    """``warn_if_dropped`` for a layer's input ``hidden`` and its parameters.

    Parameters (a dozen in each layer) are read only if gradients are enabled.
    """
    warn_if_dropped(name, hidden, *(layer.parameters() if torch.is_grad_enabled() else ()))


def refuse_tangents(operation: str, *inputs: torch.Tensor | None) -> None:
    """Refuse inputs with forward-mode tangents, which PyTorch would silently treat as constants.

    Raises:
        RuntimeError: an input has a tangent.
    """
    if not torch.compiler.is_compiling() and has_tangents():
        for tensor in inputs:
            if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
                raise RuntimeError(f"{operation} has no forward-mode derivative, and one of its inputs has a tangent")


def refuse_transforms(operation: str, *inputs: torch.Tensor) -> None:
    """``refuse_tangents``, and refuse gradients under the transforms of ``torch.func``, as PyTorch does.

    PyTorch's error, which comes later, does not name the operation.

    Raises:
        RuntimeError: an input has a tangent, or requires a gradient under a transform.
    """
    refuse_tangents(operation, *inputs)
    if torch.compiler.is_compiling() or peek_interpreter_stack() is None:
        return
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
        raise RuntimeError(
            f"{operation} has no gradient under torch.func (grad, vjp, vmap, …): use backward() or torch.autograd.grad"
        )


def has_tangents() -> bool:
    """Whether tensors may have tangents: inside ``forward_ad.dual_level`` or ``torch.func.jvp``."""
    return forward_ad._current_level >= 0


def _warn(operation: str) -> None:
    if operation not in _warned:
        _warned.add(operation)
        warnings.warn(
            f"{operation} has no backward: no gradient flows to its inputs, but one of them requires it. Call it under "
            "torch.no_grad() or torch.inference_mode(), or detach its inputs.",
            stacklevel=_level_of_caller(),
        )


def _level_of_caller() -> int:
    """``stacklevel`` of the first frame outside the library and PyTorch, from this function's caller."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in _NOT_CALLERS:
        frame, level = frame.f_back, level + 1
    return level


# Set as torch.compiler.assume_constant_result does, so that the warning is given while a graph is traced. The function
# itself would import torch._dynamo, which takes as long as importing torch.
_warn._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
