"""Weights that layers read themselves, where a fused operation stands for the call of the module that has them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from flashlatte.layers.quantised import is_quantised, matrix_of
from flashlatte.runtime import checks

# Of transformers' hooks that collect hidden states where a call asks for them. They stay for good after the first such
# call, and do nothing in others.
_COLLECTORS = "transformers.utils.output_capturing"


def has_hooks(module: Any) -> bool:
    """Whether a call of the module does something before or after its ``forward``."""
    if module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return True
    return any(getattr(hook, "__module__", None) != _COLLECTORS for hook in module._forward_hooks.values())


def is_watched(module: Any) -> bool:
    """Whether a call of the module does something beside its class's ``forward``, or in its place."""
    return "forward" in module.__dict__ or has_hooks(module)


def is_replaced(module: Any) -> bool:
    """Whether a call of the module runs another ``forward`` than its class's.

    What accelerate puts before that one moves arguments to the device where the weights are (``device_map``).
    """
    attributes = module.__dict__
    if "forward" not in attributes:
        return False
    before = getattr(attributes["forward"], "func", None)
    runs = getattr(attributes.get("_old_forward"), "__func__", None)
    is_accelerates = getattr(before, "__module__", None) == "accelerate.hooks" and runs is type(module).forward
    return not (is_accelerates and _only_moves(attributes.get("_hf_hook")))


def forget_devices(model: nn.Module) -> None:
    """Take out of a copied model what accelerate put in to move arguments to where weights were (``device_map``)."""
    for module in model.modules():
        attributes = module.__dict__
        if "_hf_hook" in attributes and not is_replaced(module):
            for name in ("forward", "_old_forward", "_hf_hook"):
                attributes.pop(name, None)


def _only_moves(hook: Any) -> bool:
    if type(hook).__name__ == "SequentialHook":
        return all(map(_only_moves, hook.hooks))
    return type(hook).__name__ == "AlignDevicesHook" and not hook.offload


def own_weight(layer: Any, name: str) -> torch.Tensor:
    """The weight of a layer's norm ``name``, where a call would make no more of it than a norm does.

    Its forward may be another, as transformers' ``use_kernels`` gives it a kernel's.

    Raises:
        TypeError: a call would: something wraps the module (as LoRA does, and shows the weight of what it wraps), or
            hooks watch it.
    """
    module = getattr(layer, name)
    # A replica (DataParallel) has its parameters among its attributes.
    weight = module._parameters.get("weight", module.__dict__.get("weight"))
    if weight is None:
        raise TypeError(_refusal(layer, name, type(module).__name__))
    if weight.is_meta and "_hf_hook" in module.__dict__:
        raise TypeError(_refusal(layer, name, "one that accelerate offloads"))
    if has_hooks(module):
        raise TypeError(_refusal(layer, name, "one with hooks"))
    return weight


def own_matrix(layer: Any, name: str, dtype: torch.dtype, *, of_subclass: bool = False) -> torch.Tensor:
    """The weight [n, inputs] of the linear layer ``name`` without bias, likewise.

    Args:
        dtype: in which a quantised weight is wanted; others are what they are.
        of_subclass: whether its class may be one of ``nn.Linear``'s subclasses.

    Raises:
        TypeError: as ``own_weight``; another class or forward, a bias, or a weight whose dtype says nothing.
    """
    weight, module = own_weight(layer, name), getattr(layer, name)
    quantised = is_quantised(module, weight)
    if not quantised and type(module) is not nn.Linear and not (of_subclass and isinstance(module, nn.Linear)):
        raise TypeError(_refusal(layer, name, type(module).__name__))
    if is_replaced(module):
        raise TypeError(_refusal(layer, name, "one with another forward"))
    if module.bias is not None or not (quantised or weight.dtype in checks.FLOAT_DTYPES):
        raise TypeError(_refusal(layer, name, f"a bias, or a weight of {weight.dtype}"))
    return matrix_of(module, dtype) if quantised else weight


def _refusal(layer: Any, name: str, got: str) -> str:
    place = f" of layer {layer.layer_idx}" if hasattr(layer, "layer_idx") else ""
    return (
        f"{name}{place} must be a plain module, since its weight is read where its forward is not called, got {got}: "
        "merge adapters, remove hooks, and load its weight dequantised and not offloaded"
    )
