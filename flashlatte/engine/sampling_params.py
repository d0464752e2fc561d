"""``SamplingParams``: how the tokens of a request are chosen, with vLLM's names and meanings."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from flashlatte.runtime import checks

# OpenAI's and vLLM's range of a bias.
_MAX_BIAS = 100.0


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of a request are chosen, and when it ends. The names, meanings and defaults are those of vLLM.

    Attributes:
        n: number of outputs. With a seed, output i draws with seed + i.
        max_tokens: maximum number of generated tokens.
        min_tokens: number of tokens before which no stop token or stop string ends the output.
        temperature: logits are divided by it; 0 takes the most likely token (greedy sampling).
        top_k: sample from the ``top_k`` most likely tokens; 0 or -1: all.
        top_p: sample from the most likely tokens whose cumulative probability reaches ``top_p``, in (0, 1].
        min_p: minimum probability of a token, relative to that of the most likely token, in [0, 1].
        presence_penalty: subtracted from the logits of tokens that the output contains, in [-2, 2].
        frequency_penalty: subtracted as many times as the output contains the token, in [-2, 2].
        repetition_penalty: positive logits of tokens in the prompt or the output are divided by it, negative ones
            multiplied.
        seed: seed of the draws, 0 to 2^63 - 1. None: the number of outputs that were requested from the engine before,
            so that requests draw differently and a program is repeatable.
        stop: strings that end the output. They need an engine with a tokenizer.
        stop_token_ids: tokens that end the output, in addition to the model's end-of-sequence tokens.
        ignore_eos: continue after the end-of-sequence tokens of the model's generation config.
        bad_words: strings that are never completed. They need an engine with a tokenizer that encodes.
        include_stop_str_in_output: whether ``text`` contains the stop string or stop token.
        logprobs: number of most likely tokens to return with each token; 0: only the chosen token; -1: the whole
            vocabulary; None: no log-probabilities. They are those of the model, before all of the above.
        prompt_logprobs: the same for prompt tokens, which are then not taken from the prefix cache.
        logit_bias: values to add to the logits of tokens, clamped to [-100, 100].
        allowed_token_ids: the only tokens that can be chosen; None: all.
        suppress_tokens: tokens that are never chosen (transformers' argument of this name).
        skip_special_tokens: whether ``text`` leaves out special tokens.

    Raises:
        TypeError, ValueError: a value of a wrong type or out of range.
    """

    n: int = 1
    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: str | Iterable[str] | None = ()
    stop_token_ids: Iterable[int] | None = ()
    ignore_eos: bool = False
    bad_words: Iterable[str] | None = ()
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    allowed_token_ids: Iterable[int] | None = None
    suppress_tokens: Iterable[int] | None = ()
    skip_special_tokens: bool = True
    # Set by the engine: the model's end-of-sequence tokens unless ``ignore_eos``, and the tokens of ``bad_words``.
    _eos_token_ids: tuple[int, ...] = field(default=(), repr=False)
    _bad_words_token_ids: tuple[tuple[int, ...], ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        for name in ("n", "max_tokens"):
            checks.positive_int(name, getattr(self, name))
        checks.positive_int("min_tokens", self.min_tokens, or_zero=True)
        if self.top_k != -1:
            checks.positive_int("top_k", self.top_k, or_zero=True)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            checks.flag(name, getattr(self, name))
        for name in ("logprobs", "prompt_logprobs"):
            if (value := getattr(self, name)) is not None and checks.integer(name, value) < -1:
                raise ValueError(f"{name} must be None, -1 or at least 0, got {value}")
        self._check_ranges()
        # Iterators can be read only once.
        for name in ("suppress_tokens", "stop_token_ids", "allowed_token_ids"):
            if (value := getattr(self, name)) is not None or name != "allowed_token_ids":
                object.__setattr__(self, name, tuple(token_ids(name, value or ())))
        for name in ("stop", "bad_words"):
            object.__setattr__(self, name, _strings(name, getattr(self, name)))
        if self.allowed_token_ids == ():
            raise ValueError("allowed_token_ids must hold a token or be None, got none")
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens must be at most max_tokens {self.max_tokens}, got {self.min_tokens}")
        if self.n > 1 and self.temperature == 0:
            raise ValueError(f"n must be 1 where temperature is 0, as all outputs would be equal, got {self.n}")

    def _check_ranges(self) -> None:
        penalties = ("presence_penalty", "frequency_penalty")
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", *penalties):
            checks.number(name, getattr(self, name))
        seed = 0 if self.seed is None else self.seed
        ranges = {
            "temperature": (0 <= self.temperature < math.inf, "a finite number from 0"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "min_p": (0 <= self.min_p <= 1, "from 0 to 1"),
            "repetition_penalty": (0 < self.repetition_penalty < math.inf, "a finite number above 0"),
            "seed": (checks.positive_int("seed", seed, or_zero=True) < 2**63, "from 0 to 2^63 - 1"),
        } | {name: (-2 <= getattr(self, name) <= 2, "from -2 to 2") for name in penalties}
        for name, (fits, accepted) in ranges.items():
            if not fits:
                raise ValueError(f"{name} must be {accepted}, got {getattr(self, name)}")

    @property
    def all_stop_token_ids(self) -> tuple[int, ...]:
        """``stop_token_ids`` and the end-of-sequence tokens that apply."""
        return (*self.stop_token_ids, *self._eos_token_ids)  # type: ignore[misc]

    @property
    def uses_penalties(self) -> bool:
        """Whether sampling depends on the tokens that occurred."""
        return bool(self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty)


def token_ids(name: str, values: Iterable[Any]) -> list[int]:
    """The ints of a sequence or a 1-D tensor of tokens.

    Raises:
        TypeError: a value that is no int, or a string.
    """
    if isinstance(values, torch.Tensor):
        values = values.tolist()
    if not isinstance(values, Iterable) or isinstance(values, (str, bytes)):
        raise TypeError(f"{name} must be a sequence of ints, got {values!r}")
    tokens = []
    for value in values:
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise TypeError(f"{name} must hold ints, got {value!r}")
        tokens.append(operator.index(value))
    return tokens


def _strings(name: str, values: Any) -> tuple[str, ...]:
    """A string, several, or None as a tuple."""
    if values is not None and not isinstance(values, Iterable):
        raise TypeError(f"{name} must be a string or hold strings, got {values!r}")
    strings = (values,) if isinstance(values, str) else tuple(values or ())
    if not all(isinstance(text, str) for text in strings):
        raise TypeError(f"{name} must hold strings, got {strings!r}")
    if "" in strings:
        raise ValueError(f"{name} must hold strings that are not empty, got {strings!r}")
    return strings


def _biases(biases: Any) -> dict[int, float] | None:
    if biases is None:
        return None
    if not isinstance(biases, Mapping):
        raise TypeError(f"logit_bias must map tokens to numbers, got {biases!r}")
    tokens = token_ids("logit_bias", biases)
    values = [checks.number(f"logit_bias[{token}]", bias) for token, bias in zip(tokens, biases.values(), strict=True)]
    if any(math.isnan(value) for value in values):
        raise ValueError(f"logit_bias must hold no NaN, got {dict(biases)}")
    return {token: min(max(value, -_MAX_BIAS), _MAX_BIAS) for token, value in zip(tokens, values, strict=True)}
