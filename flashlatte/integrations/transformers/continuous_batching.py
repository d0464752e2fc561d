"""transformers' continuous batching (``generate_batch``), which has a cache of its own: refused on enabled models."""

from __future__ import annotations

import functools
from typing import Any, NoReturn

from torch import nn

# All of transformers' ways into continuous batching call this method of the model.
_ENTRY = "init_continuous_batching"


def refuse(model: nn.Module) -> None:
    """Let the model's continuous batching raise a ValueError with the reason, where transformers' error has none."""
    if hasattr(model, _ENTRY):
        vars(model)[_ENTRY] = functools.partial(_refuse, type(model).__name__)


def restore(model: nn.Module) -> None:
    """Undo ``refuse``."""
    vars(model).pop(_ENTRY, None)


def _refuse(name: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise ValueError(
        f"generate_batch cannot serve an enabled {name}: transformers' continuous batching allocates a cache of keys "
        "and values of one width, for full and sliding attention only, and MLA caches latents. Call generate, or use "
        "flashlatte.engine.Engine"
    )
