"""Which of the engine's models a transformers model is, and on which ranks."""

from __future__ import annotations

from typing import Any

from flashlatte.distributed.model.ranks import Ranks
from flashlatte.engine.model import MODEL_TYPES, Model
from flashlatte.engine.paged import PagedModel, check_type, config_of
from flashlatte.engine.v4 import V4Model
from flashlatte.layers.v4.config import MODEL_TYPE as V4_MODEL_TYPE


def as_model(model: Any, tensor_parallel: int = 1, context_parallel: int = 1) -> PagedModel:
    """A model of the engine's as it is, or one of a transformers model or checkpoint, over so many ranks.

    Raises:
        ModuleNotFoundError, OSError, ValueError: as ``Model``; other ranks than the model's, or that it cannot have.
    """
    asked = tensor_parallel, context_parallel
    if isinstance(model, PagedModel):
        made_for = model.ranks.size, model.ranks.keys_over
        if made_for != asked:
            raise ValueError(
                f"tensor_parallel and context_parallel must be {made_for}, which the Model was made for, got {asked}"
            )
        return model
    config = config_of(model)
    check_type(config, (*MODEL_TYPES, V4_MODEL_TYPE))
    if asked == (1, 1):
        return V4Model(model) if config.model_type == V4_MODEL_TYPE else Model(model)
    if config.model_type == V4_MODEL_TYPE:
        raise ValueError(f"tensor_parallel and context_parallel must be 1 for {V4_MODEL_TYPE}, got {asked}")
    ranks = Ranks(*asked)
    with ranks.failing_together():
        return Model(model, ranks=ranks)
