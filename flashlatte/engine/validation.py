"""Checks of an engine's requests and options against its model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import torch

from flashlatte.engine.batch import EngineLimits
from flashlatte.engine.paged import PagedModel
from flashlatte.engine.request import Request
from flashlatte.engine.sampling_params import SamplingParams, token_ids
from flashlatte.runtime import checks

# A string, for an engine with a tokenizer, or its tokens: ints, or a tensor [n] of them.
Prompt = str | Sequence[int] | torch.Tensor
_SEEDS = 2**63


def new_requests(
    request_id: str,
    number: int,
    prompt: Prompt,
    sampling_params: SamplingParams | None,
    priority: int,
    cache_salt: str,
    model: PagedModel,
    tokenizer: Any,
) -> list[Request]:
    """Check a request, and make a ``Request`` for each of its ``n`` outputs.

    Args:
        number: outputs that were requested from the engine before, which replaces a seed that is None.

    Raises:
        TypeError, ValueError: the model cannot serve the request.
    """
    for argument, text in (("request_id", request_id), ("cache_salt", cache_salt)):
        if not isinstance(text, str):
            raise TypeError(f"{argument} must be a string, got {text!r}")
    checks.integer("priority", priority)
    if isinstance(prompt, str):
        if not hasattr(tokenizer, "encode"):
            raise TypeError("prompt must be tokens for an engine without a tokenizer that encodes, got a string")
        prompt = tokenizer.encode(_checked_text("prompt", prompt))
    if isinstance(prompt, (Set, Mapping)):
        raise TypeError(f"prompt must hold its tokens in order, got {prompt!r}")
    tokens = checked_tokens("prompt", prompt, model)
    params = SamplingParams() if sampling_params is None else sampling_params
    if not isinstance(params, SamplingParams):
        raise TypeError(f"sampling_params must be SamplingParams or None, got {type(params).__name__}")
    params = _checked_sampling(params, model, tokenizer)
    if len(tokens) + params.max_tokens > model.max_position:
        raise ValueError(
            f"prompt and max_tokens of request {request_id!r} must not pass the model's {model.max_position} "
            f"positions, got {len(tokens)} + {params.max_tokens}"
        )
    requests = []
    for index in range(params.n):
        seed = number if params.seed is None else params.seed
        sampling = dataclasses.replace(params, seed=(seed + index) % _SEEDS)
        name = request_id if params.n == 1 else f"{request_id}#{index}"
        scores = index == 0 and params.prompt_logprobs is not None
        requests.append(Request(name, tokens, params.max_tokens, priority, cache_salt, sampling, scores))
    return requests


def _checked_sampling(params: SamplingParams, model: PagedModel, tokenizer: Any) -> SamplingParams:
    """The parameters with the end-of-sequence tokens and the tokens of bad words."""
    if params.stop and tokenizer is None:
        raise ValueError("stop needs an engine with a tokenizer; stop_token_ids does not")
    if params.bad_words and not hasattr(tokenizer, "encode"):
        raise ValueError("bad_words needs an engine with a tokenizer that encodes; suppress_tokens does not")
    for name in ("stop_token_ids", "suppress_tokens", "allowed_token_ids", "logit_bias"):
        checked_tokens(name, getattr(params, name) or (), model)
    for name in ("logprobs", "prompt_logprobs"):
        if (getattr(params, name) or 0) > model.vocabulary:
            raise ValueError(f"{name} must be at most the vocabulary's {model.vocabulary}, got {getattr(params, name)}")
    eos_token_ids = () if params.ignore_eos else model.eos_token_ids
    if not _leaves_token(params, model.vocabulary, params.suppress_tokens or ()):
        raise ValueError("suppress_tokens must leave a token to choose, got all of them")
    excluded = (*(params.suppress_tokens or ()), *(params.stop_token_ids or ()), *eos_token_ids)
    if params.min_tokens and not _leaves_token(params, model.vocabulary, excluded):
        raise ValueError("min_tokens must leave a token to choose, and all tokens that are allowed end the output")
    texts = [_checked_text("bad_words", word) for word in params.bad_words or ()]
    words = tuple(tokens for word in texts for tokens in _bad_word_tokens(word, tokenizer))
    for tokens in words:
        checked_tokens("bad_words", tokens, model)
    return dataclasses.replace(params, _eos_token_ids=tuple(eos_token_ids), _bad_words_token_ids=words)


def _leaves_token(params: SamplingParams, vocabulary: int, excluded: Iterable[int]) -> bool:
    """Whether a token of the vocabulary is allowed and not excluded."""
    if params.allowed_token_ids is None:
        return len({token for token in excluded if token < vocabulary}) < vocabulary
    return bool(set(params.allowed_token_ids).difference(excluded))


def _bad_word_tokens(word: str, tokenizer: Any) -> list[tuple[int, ...]]:
    """The tokens of a word at the start of a text; also after a space, if it then has equally many, different tokens
    (as in vLLM)."""
    first = tuple(tokenizer.encode(word.lstrip(), add_special_tokens=False))
    spaced = tuple(tokenizer.encode(" " + word.lstrip(), add_special_tokens=False))
    found = [first] if first else []
    if spaced and spaced[:1] != first[:1] and len(spaced) == len(first):
        found.append(spaced)
    return found


def pair_with_sampling(
    prompts: Iterable[Prompt], sampling_params: SamplingParams | Iterable[SamplingParams] | None
) -> list[tuple[Prompt, SamplingParams | None]]:
    """Each prompt with its sampling parameters, which may be the same for all."""
    if isinstance(prompts, str) or not isinstance(prompts, Iterable):
        raise TypeError(f"prompts must be a sequence of prompts, got {prompts!r}")
    if isinstance(sampling_params, (Mapping, str)):
        got = type(sampling_params).__name__
        raise TypeError(f"sampling_params must be SamplingParams, a list of them or None, got {got}")
    prompts = list(prompts)
    each = list(sampling_params) if isinstance(sampling_params, Iterable) else [sampling_params] * len(prompts)
    if len(each) != len(prompts):
        raise ValueError(f"sampling_params must be one or one for each of {len(prompts)} prompts, got {len(each)}")
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
    """Raise TypeError or ValueError for sizes below 1, options that the model does not support, or no tokenizer."""
    for name, value in (dataclasses.asdict(limits) | {"starvation_limit": starvation_limit}).items():
        checks.positive_int(name, value, or_zero=name in ("swap_space", "num_speculative_tokens", "num_snapshots"))
    if limits.num_speculative_tokens and model.batch_invariant:
        raise ValueError(
            f"num_speculative_tokens must be 0 for a batch_invariant model, got {limits.num_speculative_tokens}"
        )
    if limits.num_speculative_tokens and model.has_states:
        raise ValueError(
            f"num_speculative_tokens must be 0 for a {model.name}, whose states of linear attention cannot be rolled "
            f"back to the last accepted token, got {limits.num_speculative_tokens}"
        )
    checks.flag("enable_prefix_caching", enable_prefix_caching)
    checks.flag("cuda_graphs", cuda_graphs)
    if tokenizer is not None and not callable(getattr(tokenizer, "decode", None)):
        got = repr(tokenizer) if isinstance(tokenizer, str) else type(tokenizer).__name__
        raise TypeError(f"tokenizer must have decode, as AutoTokenizer.from_pretrained(…) has, got {got}")


def _checked_text(name: str, text: str) -> str:
    """A string that tokenizers can encode, which raise an error without the argument's name for others."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name} must be a string without lone surrogates, got {text!r}") from None
    return text


def checked_tokens(name: str, values: Iterable[Any], model: PagedModel) -> list[int]:
    """The tokens as ints. Raises TypeError or ValueError if one is not in the model's vocabulary."""
    tokens = token_ids(name, values)
    wrong = next((token for token in tokens if not 0 <= token < model.vocabulary), None)
    if wrong is not None:
        raise ValueError(f"{name} must hold tokens from 0 to {model.vocabulary - 1}, got {wrong}")
    return tokens
