"""Which of the engine's models a transformers model is, and on which ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flashlatte.engine.model import MODEL_TYPES, AnyModel, Model, check_type, load, model_config
from flashlatte.engine.ranks import Ranks
from flashlatte.engine.v4 import V4Model
from flashlatte.layers.v4.config import MODEL_TYPE as V4_MODEL_TYPE


def as_model(model: Any, tensor_parallel: int = 1, context_parallel: int = 1) -> AnyModel:
    """A model of the engine's as it is, or one of a transformers model or checkpoint, over so many ranks.

    Raises:
        ModuleNotFoundError, OSError, ValueError: as ``Model``; other ranks than the model's, or that it cannot have.
    """
    asked = tensor_parallel, context_parallel
    if isinstance(model, (Model, V4Model)):
        made_for = (1, 1) if model.ranks is None else (model.ranks.size, model.ranks.keys_over)
        if made_for != asked:
            raise ValueError(
                f"tensor_parallel and context_parallel must be {made_for}, which the Model was made for, got {asked}"
            )
        return model
    known = (*MODEL_TYPES, V4_MODEL_TYPE)
    config = model_config(model) if isinstance(model, (str, Path)) else model.config
    check_type(config, known)
    if config.model_type == V4_MODEL_TYPE:
        if asked != (1, 1):
            raise ValueError(f"tensor_parallel and context_parallel must be 1 for {V4_MODEL_TYPE}, got {asked}")
        return V4Model(load(model, known=known) if isinstance(model, (str, Path)) else model)
    return Model(model) if asked == (1, 1) else Model(model, ranks=Ranks(*asked))
