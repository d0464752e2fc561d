"""What may be asked of an engine: tokens that its model has, no more of them than it has positions, limits from 1."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import torch

from flashlatte.engine.batch import EngineLimits
from flashlatte.engine.paged import PagedModel
from flashlatte.engine.request import Request
from flashlatte.engine.sampling import SamplingParams, token_ids
from flashlatte.runtime import checks

# A text, for an engine with a tokenizer, or its tokens: ints, or a tensor [n] of them.
Prompt = str | Sequence[int] | torch.Tensor


def new_request(
    name: str,
    number: int,
    prompt: Prompt,
    sampling: SamplingParams | None,
    priority: int,
    cache_salt: str,
    model: PagedModel,
    tokenizer: Any,
) -> Request:
    """The request, the engine's so-many-th, if the model can serve it; TypeError or ValueError that says why not."""
    for argument, text in (("id", name), ("cache_salt", cache_salt)):
        if not isinstance(text, str):
            raise TypeError(f"{argument} must be a text, got {text!r}")
    checks.integer("priority", priority)
    if isinstance(prompt, str):
        if not hasattr(tokenizer, "encode"):
            raise TypeError("prompt must be tokens, as the engine has no tokenizer that encodes, got a text")
        prompt = tokenizer.encode(prompt)
    if isinstance(prompt, (Set, Mapping)):
        raise TypeError(f"prompt must hold its tokens in order, got {prompt!r}")
    tokens = _checked_tokens("prompt", prompt, model)
    sampling = SamplingParams() if sampling is None else sampling
    if not isinstance(sampling, SamplingParams):
        raise TypeError(f"sampling must be SamplingParams or None, got {type(sampling).__name__}")
    if sampling.stop and tokenizer is None:
        raise ValueError("stop needs an engine with a tokenizer; stop_tokens does not")
    if len(set(_checked_tokens("suppress_tokens", sampling.suppress_tokens, model))) == model.vocabulary:
        raise ValueError("suppress_tokens must leave a token to choose, got all of them")
    ends = () if sampling.ignore_eos else model.eos_token_ids
    seed = number if sampling.seed is None else sampling.seed
    sampling = dataclasses.replace(sampling, seed=seed, stop_tokens=(*sampling.stop_tokens, *ends))
    request = Request(name, tokens, sampling.max_new_tokens, priority, cache_salt, sampling)
    if request.max_length > model.max_position:
        raise ValueError(
            f"prompt of {len(tokens)} tokens and max_new_tokens {request.max_tokens} of request {name!r} must not "
            f"pass the model's {model.max_position} positions"
        )
    return request


def with_sampling(
    prompts: Iterable[Prompt], sampling: SamplingParams | Iterable[SamplingParams] | None
) -> list[tuple[Prompt, SamplingParams | None]]:
    """Each prompt with its parameters, which may be the same for all."""
    if isinstance(prompts, str) or not isinstance(prompts, Iterable):
        raise TypeError(f"prompts must be a sequence of prompts, got {prompts!r}")
    if isinstance(sampling, (Mapping, str)):
        raise TypeError(f"sampling must be SamplingParams, a list of them or None, got {type(sampling).__name__}")
    prompts = list(prompts)
    each = list(sampling) if isinstance(sampling, Iterable) else [sampling] * len(prompts)
    if len(each) != len(prompts):
        raise ValueError(f"sampling must be one for all or one for each of {len(prompts)} prompts, got {len(each)}")
    return list(zip(prompts, each, strict=True))


def check_options(
    model: PagedModel,
    limits: EngineLimits,
    tokenizer: object,
    *,
    starvation_limit: int,
    enable_prefix_caching: bool,
    cuda_graphs: bool,
) -> None:
    """Raise TypeError, ValueError for sizes below 1, options that the model does not take, and no tokenizer."""
    for name, value in (dataclasses.asdict(limits) | {"starvation_limit": starvation_limit}).items():
        checks.positive_int(name, value, or_zero=name in ("swap_space", "num_speculative_tokens"))
    if limits.num_speculative_tokens and model.batch_invariant:
        raise ValueError(
            f"num_speculative_tokens must be 0 for a batch_invariant model, got {limits.num_speculative_tokens}"
        )
    checks.flag("enable_prefix_caching", enable_prefix_caching)
    checks.flag("cuda_graphs", cuda_graphs)
    if tokenizer is not None and not callable(getattr(tokenizer, "decode", None)):
        got = repr(tokenizer) if isinstance(tokenizer, str) else type(tokenizer).__name__
        raise TypeError(f"tokenizer must have decode, as AutoTokenizer.from_pretrained(…) has, got {got}")


def _checked_tokens(name: str, values: Iterable[Any], model: PagedModel) -> list[int]:
    tokens = token_ids(name, values)
    wrong = next((token for token in tokens if not 0 <= token < model.vocabulary), None)
    if wrong is not None:
        raise ValueError(f"{name} must hold tokens from 0 to {model.vocabulary - 1}, got {wrong}")
    return tokens
