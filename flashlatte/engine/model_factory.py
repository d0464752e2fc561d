"""Which of the engine's models a transformers model is, and on which ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flashlatte.distributed.model.meeting import Meeting
from flashlatte.distributed.model.ranks import Ranks
from flashlatte.engine.formats import check_cache_format
from flashlatte.engine.model import MODEL_TYPES, Model
from flashlatte.engine.paged import PagedModel, check_type, config_of
from flashlatte.engine.v4 import V4Model
from flashlatte.layers.v4.config import MODEL_TYPE as V4_MODEL_TYPE


def create_model(
    model: Any, tensor_parallel: int = 1, context_parallel: int = 1, options: Mapping[str, object] | None = None
) -> PagedModel:
    """A model of the engine's as it is, or one of a transformers model or checkpoint, over so many ranks.

    Args:
        options: of the engine, which all ranks must say alike.

    Raises:
        ModuleNotFoundError, OSError, ValueError: as ``Model``; other ranks than the model's, or that it cannot have;
            ranks that differ.
        RuntimeError: another rank failed, or does not come.
    """
    asked = tensor_parallel, context_parallel
    alone = asked == (1, 1)
    if isinstance(model, PagedModel):
        made_for = model.ranks.size, model.ranks.keys_over
        if made_for == asked:
            return model
        with model.ranks.failing_together() if made_for != (1, 1) else Meeting(joins=True):
            raise ValueError(
                f"tensor_parallel and context_parallel must be {made_for}, which the Model was made for, got {asked}"
            )
    with Meeting(joins=not alone) as meeting:
        config = config_of(model)
        check_type(config, (*MODEL_TYPES, V4_MODEL_TYPE))
        if options and options.get("cache_format") is not None:
            dtype = (config if isinstance(model, (str, Path)) else model).dtype
            check_cache_format(config, options["cache_format"], dtype)
        made = V4Model if config.model_type == V4_MODEL_TYPE else Model
        if not alone:
            if made is V4Model and context_parallel != 1:
                raise ValueError(f"context_parallel must be 1 for {V4_MODEL_TYPE}, got {context_parallel}")
            ranks = Ranks(*asked, meeting=meeting, facts={**(options or {}), **_facts(config)})
            with ranks.failing_together():
                return made(model, ranks=ranks)
        meeting.agree({"tensor_parallel": 1, "context_parallel": 1})
    return made(model)


def _facts(config: Any) -> dict[str, str]:
    """What a model is, without what names its place or how transformers runs it."""
    return {
        f"config.{name}": str(value)
        for name, value in config.to_dict().items()
        if not name.startswith("_") and name not in ("dtype", "transformers_version")
    }
