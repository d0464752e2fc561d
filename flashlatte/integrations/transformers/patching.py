"""Changes to the modules of a transformers model, in place, and how they are undone."""

from __future__ import annotations

import functools
from typing import Any, NoReturn

from torch import nn

from flashlatte.layers.weights import has_custom_forward

# All entry points of transformers' continuous batching call this method of the model.
_ENTRY = "init_continuous_batching"


def change_class(module: Any, new: type) -> None:
    """Change the class of a module in place."""
    object.__setattr__(module, "__class__", new)
    if "_old_forward" in vars(module):
        # accelerate calls it after moving the arguments to the module's device (``device_map``).
        module._old_forward = new.forward.__get__(module)  # pyright: ignore[reportAttributeAccessIssue]


def check_forward(module: Any, layer: int) -> None:
    """Raise ValueError if the forward of a layer's attention was replaced."""
    if has_custom_forward(module):
        raise ValueError(f"layer {layer}'s attention must have its class's forward, got one whose forward was replaced")


def refuse_continuous_batching(model: nn.Module) -> None:
    """Make the model's continuous batching (``generate_batch``) raise a ValueError with the reason."""
    if hasattr(model, _ENTRY):
        vars(model)[_ENTRY] = functools.partial(_raise_unsupported, type(model).__name__)


def restore_continuous_batching(model: nn.Module) -> None:
    """Undo ``refuse_continuous_batching``."""
    vars(model).pop(_ENTRY, None)


def _raise_unsupported(name: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise ValueError(
        f"generate_batch does not support an enabled {name}: transformers' continuous batching allocates keys and "
        "values of one width, for full and sliding attention only, and MLA caches latents. Call generate, or use "
        "flashlatte.engine.Engine"
    )
