"""Creates the engine's model from a transformers model or checkpoint, on one or several ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from flashlatte.distributed.model.ranks import Ranks
from flashlatte.distributed.model.rendezvous import Rendezvous
from flashlatte.engine.formats import check_cache_format
from flashlatte.engine.model import Model
from flashlatte.engine.model_types import MODEL_TYPES
from flashlatte.engine.paged import PagedModel, check_type, config_of
from flashlatte.engine.text_part import text_config
from flashlatte.engine.v4 import V4Model
from flashlatte.layers.v4.config import MODEL_TYPE as V4_MODEL_TYPE


def create_model(
    model: Any,
    tensor_parallel: int = 1,
    context_parallel: int = 1,
    options: Mapping[str, object] | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> PagedModel:
    """Create a ``Model`` or ``V4Model`` from a transformers model or checkpoint. A ``PagedModel`` is returned
    unchanged.

    Args:
        options: arguments of the engine, which must be equal on all ranks.
        dtype, device: for a checkpoint's weights, as in ``Model``.

    Raises:
        ModuleNotFoundError, OSError, ValueError: as ``Model``; other numbers of ranks than a ``PagedModel`` has,
            or than the model supports; ranks with different arguments.
        RuntimeError: another rank failed or did not start.
    """
    requested = tensor_parallel, context_parallel
    single = requested == (1, 1)
    if isinstance(model, PagedModel):
        made_for = model.ranks.size, model.ranks.kv_ranks
        if made_for == requested:
            return model
        with model.ranks.failing_together() if made_for != (1, 1) else Rendezvous(joins=True):
            raise ValueError(
                f"tensor_parallel and context_parallel must be {made_for}, as in the Model, got {requested}"
            )
    with Rendezvous(joins=not single) as rendezvous:
        config = text_config(config_of(model))
        check_type(config, (*MODEL_TYPES, V4_MODEL_TYPE))
        if options and options.get("cache_format") is not None:
            stored = (config if isinstance(model, (str, Path)) else model).dtype
            check_cache_format(config, options["cache_format"], dtype or stored)
        kind = V4Model if config.model_type == V4_MODEL_TYPE else Model
        if not single:
            if kind is V4Model and context_parallel != 1:
                raise ValueError(f"context_parallel must be 1 for {V4_MODEL_TYPE}, got {context_parallel}")
            ranks = Ranks(*requested, rendezvous=rendezvous, facts={**(options or {}), **_facts(config)})
            with ranks.failing_together():
                return kind(model, dtype=dtype, device=device, ranks=ranks)
        rendezvous.agree({"tensor_parallel": 1, "context_parallel": 1})
    return kind(model, dtype=dtype, device=device)


def _facts(config: Any) -> dict[str, str]:
    """The config fields that ranks compare, without paths and runtime options of transformers."""
    return {
        f"config.{name}": str(value)
        for name, value in config.to_dict().items()
        if not name.startswith("_") and name not in ("dtype", "transformers_version")
    }
