"""The class of a module, changed in place."""

from __future__ import annotations

from typing import Any

from flashlatte.layers.weights import is_replaced


def change_class(module: Any, new: type) -> None:
    object.__setattr__(module, "__class__", new)
    if "_old_forward" in vars(module):
        # What accelerate calls when it has moved the arguments to the module's device (``device_map``).
        module._old_forward = new.forward.__get__(module)  # pyright: ignore[reportAttributeAccessIssue]


def check_forward(module: Any, layer: int) -> None:
    """Raise ValueError for a layer's attention that runs something else than its class's forward."""
    if is_replaced(module):
        raise ValueError(
            f"layer {layer}'s attention must have its class's forward, and something has put another in its place"
        )
