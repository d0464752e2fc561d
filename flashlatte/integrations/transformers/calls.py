"""Arguments of a decoder's call by name. Importing this imports transformers."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

import torch
import transformers
from transformers.modeling_outputs import BaseModelOutputWithPast

_BEFORE_5_24 = "past_key_values"
# transformers' name of the cache argument and output; calls also accept the older name.
CACHE = "cache" if any(field.name == "cache" for field in fields(BaseModelOutputWithPast)) else _BEFORE_5_24


def _names(model: Any) -> list[str]:
    return list(inspect.signature(type(model).forward).parameters)[1:]


def check_cache_argument(model: Any) -> None:
    """Raise ImportError if a decoder's cache argument has another name: stock attention would silently run instead."""
    if CACHE not in _names(model):
        raise ImportError(
            f"{type(model).__name__} must have an argument {CACHE}, got {', '.join(_names(model))}: "
            f"transformers {transformers.__version__} is not supported"
        )


def tokens_of(call: dict[str, Any]) -> torch.Tensor | None:
    """The input of a pass: ``input_ids`` [b, s], or else ``inputs_embeds`` [b, s, hidden_size]."""
    tokens = call.get("input_ids")
    return call.get("inputs_embeds") if tokens is None else tokens


def check_tokens(tokens: torch.Tensor) -> None:
    """Raise ValueError for a pass without requests or tokens."""
    if 0 in tokens.shape[:2]:
        name = "input_ids" if tokens.dim() == 2 else "inputs_embeds"
        raise ValueError(f"{name} must have at least one request and one token, got shape {list(tokens.shape)}")


def arguments(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a call of ``model`` by name; the cache under ``CACHE``."""
    call = dict(zip(_names(model), args, strict=False)) | kwargs
    if CACHE not in call and _BEFORE_5_24 in call:
        call[CACHE] = call.pop(_BEFORE_5_24)
    return call
