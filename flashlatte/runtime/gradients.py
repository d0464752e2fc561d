"""Operations and layers without a backward warn where a gradient is expected of them."""

from __future__ import annotations

import sys
import warnings

import torch
from torch import nn
from torch.autograd import forward_ad

# A call of a module passes through PyTorch's frames.
_NOT_CALLERS = (__name__.split(".")[0], "torch")
_warned: set[str] = set()


def warn_if_dropped(operation: str, *inputs: torch.Tensor | None) -> None:
    """Warn, once for each operation, where gradients are recorded and one of its inputs requires one.

    A warning and not an error: queries made of parameters require a gradient whenever a model is served without
    ``torch.no_grad()``, and nothing is wrong with their attention.
    """
    refuse_tangents(operation, *inputs)
    if torch.is_grad_enabled():
        for given in inputs:
            if given is not None and given.requires_grad:
                _warn(operation)
                return


def warn_if_layer_drops(name: str, layer: nn.Module, hidden: torch.Tensor) -> None:
    """``warn_if_dropped`` for a layer whose input ``hidden``, or one of whose parameters, may require a gradient.

    Parameters are only looked at where gradients are recorded: there are a dozen of them in each layer.
    """
    warn_if_dropped(name, hidden, *(layer.parameters() if torch.is_grad_enabled() else ()))


def refuse_tangents(operation: str, *inputs: torch.Tensor | None) -> None:
    """Refuse inputs of forward-mode differentiation, which PyTorch would take for constants without a word.

    Raises:
        RuntimeError: one of them has a tangent.
    """
    if not torch.compiler.is_compiling() and has_tangents():
        for given in inputs:
            if given is not None and forward_ad.unpack_dual(given).tangent is not None:
                raise RuntimeError(f"{operation} has no forward-mode derivative, and one of its inputs has a tangent")


def has_tangents() -> bool:
    """Whether there may be tensors with tangents: within ``forward_ad.dual_level`` or ``torch.func.jvp``."""
    return forward_ad._current_level >= 0


def _warn(operation: str) -> None:
    if operation not in _warned:
        _warned.add(operation)
        warnings.warn(
            f"{operation} has no backward: no gradient flows to its inputs, and one of them requires it. Call it under "
            "torch.no_grad() or torch.inference_mode(), or detach its inputs.",
            stacklevel=_level_of_caller(),
        )


def _level_of_caller() -> int:
    """``stacklevel`` of the first function outside of the library and PyTorch, counted from the caller of this one."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in _NOT_CALLERS:
        frame, level = frame.f_back, level + 1
    return level


# What torch.compiler.assume_constant_result sets: the warning comes while a graph is traced. Calling it imports
# torch._dynamo, which takes as long as torch.
_warn._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
