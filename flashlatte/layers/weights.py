"""Access to the weights of modules that a fused operation replaces instead of calling them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from flashlatte.layers.quantized import dequantized_weight, is_quantized
from flashlatte.runtime import checks

# The module of transformers' hooks that collect hidden states on request. They stay registered after the first such
# call, and do nothing in other calls.
_OUTPUT_CAPTURING = "transformers.utils.output_capturing"


def has_hooks(module: Any, ignored: Collection[int] = ()) -> bool:
    """Whether the module has hooks that a call would run. ``ignored``: ids of the handles of hooks to ignore."""
    if (
        module._backward_hooks
        or module._backward_pre_hooks
        or any(key not in ignored for key in module._forward_pre_hooks)
    ):
        return True
    others = [hook for key, hook in module._forward_hooks.items() if key not in ignored]
    return any(getattr(hook, "__module__", None) != _OUTPUT_CAPTURING for hook in others)


def has_custom_call(module: Any) -> bool:
    """Whether a call of the module does anything else than its class's ``forward``."""
    return "forward" in module.__dict__ or has_hooks(module)


def has_custom_forward(module: Any) -> bool:
    """Whether the module's ``forward`` was replaced.

    accelerate's wrapper that only moves arguments to the weights' device (``device_map``) is ignored.
    """
    attributes = module.__dict__
    if "forward" not in attributes:
        return False
    before = getattr(attributes["forward"], "func", None)
    runs = getattr(attributes.get("_old_forward"), "__func__", None)
    is_accelerates = getattr(before, "__module__", None) == "accelerate.hooks" and runs is type(module).forward
    return not (is_accelerates and _only_moves_arguments(attributes.get("_hf_hook")))


def remove_accelerate_hooks(model: nn.Module) -> None:
    """Remove accelerate's hooks that move arguments to the weights' device (``device_map``) from a copied model."""
    for module in model.modules():
        attributes = module.__dict__
        if "_hf_hook" in attributes and not has_custom_forward(module):
            for name in ("forward", "_old_forward", "_hf_hook"):
                attributes.pop(name, None)


def _only_moves_arguments(hook: Any) -> bool:
    if type(hook).__name__ == "SequentialHook":
        return all(map(_only_moves_arguments, hook.hooks))
    return type(hook).__name__ == "AlignDevicesHook" and not hook.offload


def norm_weight(layer: Any, name: str) -> torch.Tensor:
    """The weight of a layer's norm ``name``, if reading it can replace a call of the module.

    The module's forward may be replaced, as by transformers' ``use_kernels``.

    Raises:
        TypeError: the module is wrapped (as by LoRA, which exposes the wrapped weight), offloaded, or has hooks.
    """
    module = getattr(layer, name)
    # A DataParallel replica keeps its parameters as attributes.
    weight = module._parameters.get("weight", module.__dict__.get("weight"))
    if weight is None:
        raise TypeError(_refusal(layer, name, type(module).__name__))
    if weight.is_meta and "_hf_hook" in module.__dict__:
        raise TypeError(_refusal(layer, name, "one that accelerate offloads"))
    if has_hooks(module):
        raise TypeError(_refusal(layer, name, "one with hooks"))
    return weight


def linear_weight(layer: Any, name: str, dtype: torch.dtype, *, of_subclass: bool = False) -> torch.Tensor:
    """The weight [n, inputs] of the linear layer ``name`` without bias, if reading it can replace a call of the module.

    Args:
        dtype: dtype of a dequantized weight; other weights keep theirs.
        of_subclass: whether subclasses of ``nn.Linear`` are accepted.

    Raises:
        TypeError: as ``norm_weight``; another class or forward, a bias, or a weight of another dtype.
    """
    weight, module = norm_weight(layer, name), getattr(layer, name)
    quantized = is_quantized(module, weight)
    if not quantized and type(module) is not nn.Linear and not (of_subclass and isinstance(module, nn.Linear)):
        raise TypeError(_refusal(layer, name, type(module).__name__))
    if has_custom_forward(module):
        raise TypeError(_refusal(layer, name, "one with another forward"))
    if module.bias is not None or not (quantized or weight.dtype in (*checks.FLOAT_DTYPES, torch.float64)):
        raise TypeError(_refusal(layer, name, f"a bias, or a weight of {weight.dtype}"))
    return dequantized_weight(module, dtype) if quantized else weight


def _refusal(layer: Any, name: str, got: str) -> str:
    where = f" of layer {layer.layer_idx}" if hasattr(layer, "layer_idx") else ""
    return (
        f"{name}{where} must be a plain module, since its weight is read without calling it, got {got}: merge "
        "adapters, remove hooks, and load its weight dequantized and not offloaded"
    )
