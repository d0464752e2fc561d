"""What may be asked of an engine: tokens that its model has, and no more of them than it has positions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from flashlatte.engine.paged import PagedModel
from flashlatte.engine.request import Request
from flashlatte.engine.sampling import SamplingParams, token_ids

# A text, for an engine with a tokenizer, or its tokens: ints, or a tensor [n] of them.
Prompt = str | Sequence[int] | torch.Tensor


def prompt_tokens(prompt: Prompt, model: PagedModel, tokenizer: Any) -> list[int]:
    """A prompt's tokens; TypeError, ValueError if the model does not have them."""
    if isinstance(prompt, str):
        if tokenizer is None:
            raise TypeError("prompt must be tokens, as the engine has no tokenizer, got a text")
        prompt = tokenizer.encode(prompt)
    return _checked_tokens("prompt", prompt, model)


def checked_sampling(sampling: SamplingParams | None, model: PagedModel, tokenizer: Any) -> SamplingParams:
    """The parameters, or the usual ones; ValueError for stops that cannot be read, and where no token is left."""
    sampling = SamplingParams() if sampling is None else sampling
    if not isinstance(sampling, SamplingParams):
        raise TypeError(f"sampling must be SamplingParams or None, got {type(sampling).__name__}")
    if sampling.stop and tokenizer is None:
        raise ValueError("stop needs an engine with a tokenizer; stop_tokens does not")
    suppressed = _checked_tokens("suppress_tokens", sampling.suppress_tokens, model)
    if len(set(suppressed)) == model.vocabulary:
        raise ValueError("suppress_tokens must leave a token to choose, got all of them")
    return sampling


def check_names(**names: str) -> None:
    """Raise TypeError for what is no text."""
    for name, value in names.items():
        if not isinstance(value, str):
            raise TypeError(f"{name} must be a text, got {value!r}")


def check_length(request: Request, model: PagedModel) -> None:
    """Raise ValueError for a request longer than the model's texts."""
    if request.most_tokens > model.max_position:
        raise ValueError(
            f"prompt of {len(request.prompt)} tokens and max_new_tokens {request.max_new_tokens} of request "
            f"{request.id!r} must not pass the model's {model.max_position} positions"
        )


def _checked_tokens(name: str, values: Iterable[Any], model: PagedModel) -> list[int]:
    tokens = token_ids(name, values)
    wrong = next((token for token in tokens if not 0 <= token < model.vocabulary), None)
    if wrong is not None:
        raise ValueError(f"{name} must hold tokens from 0 to {model.vocabulary - 1}, got {wrong}")
    return tokens
