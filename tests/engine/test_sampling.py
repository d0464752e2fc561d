"""Sampling from logits: filters compared with values computed by hand, and frequencies of draws."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.choosing import choose
from support.marks import mostly_full

from flashlatte.engine import SamplingParams
from flashlatte.engine.sampling import _filtered

LOGITS = torch.log(torch.tensor([0.5, 0.25, 0.15, 0.06, 0.04]))


def frequencies(params: SamplingParams, draws: int = 20_000) -> torch.Tensor:
    tokens = choose(LOGITS.expand(draws, -1), [params] * draws, range(draws))
    return torch.bincount(tokens, minlength=5) / draws


def expected(weights: list[float]) -> torch.Tensor:
    return torch.tensor(weights) / sum(weights)


FILTERED: dict[str, tuple[dict[str, Any], list[float]]] = {
    "all": ({}, [0.5, 0.25, 0.15, 0.06, 0.04]),
    "temperature": ({"temperature": 0.5}, [0.25, 0.0625, 0.0225, 0.0036, 0.0016]),
    "top_k": ({"top_k": 2}, [0.5, 0.25, 0, 0, 0]),
    "top_p": ({"top_p": 0.76}, [0.5, 0.25, 0.15, 0, 0]),
    "tiny top_p": ({"top_p": 1e-9}, [1, 0, 0, 0, 0]),
    "min_p": ({"min_p": 0.25}, [0.5, 0.25, 0.15, 0, 0]),
    "both": ({"top_k": 4, "top_p": 0.9}, [0.5, 0.25, 0.15, 0, 0]),
    "suppressed": ({"suppress_tokens": (0, 3)}, [0, 0.25, 0.15, 0, 0.04]),
}


@pytest.mark.parametrize("name", mostly_full(FILTERED, "temperature", "both"))
def test_draws_have_the_filtered_frequencies(name):
    options, weights = FILTERED[name]
    filters: dict[str, Any] = {"temperature": 1.0} | options
    params = SamplingParams(**filters)
    assert torch.allclose(frequencies(params), expected(weights), atol=0.015)


@pytest.mark.parametrize("temperature", [1e-45, 1e-320, 1e-38])
def test_a_temperature_near_0_takes_the_likeliest_token(temperature):
    params = SamplingParams(temperature=temperature, suppress_tokens=(0,))
    logits = torch.tensor([[1e4, 0.5, 3.5, 3.25, -2e4], [9.0, 0.0, -0.25, -1.0, -4.0]])
    assert choose(logits, [params, params]).tolist() == [2, 1]


@pytest.mark.parametrize("temperature", mostly_full([1e30, 1e39, 1e308], 1e39))
def test_a_huge_temperature_draws_uniformly_from_allowed_tokens(temperature):
    params = SamplingParams(temperature=temperature, suppress_tokens=(0, 3))
    assert torch.allclose(frequencies(params), expected([0, 1, 1, 0, 1]), atol=0.015)


@pytest.mark.parametrize("temperature", [0.0, 1e-9])
@pytest.mark.parametrize(("penalty", "token"), [(1e-320, 2), (1e-39, 2), (1e39, 4), (1e300, 4)])
def test_a_penalty_beyond_float32_keeps_the_order_of_tokens(temperature, penalty, token):
    logits = torch.tensor([[4.0, 2.0, 5.0, 0.0, 1.0]])
    params = SamplingParams(temperature=temperature, repetition_penalty=penalty)
    assert choose(logits, [params], prompt=range(4)).item() == token


def test_sampled_rows_do_not_affect_greedy_rows():
    params = [SamplingParams(temperature=0), SamplingParams(temperature=5.0)]
    tokens = choose(LOGITS.expand(200, -1), params * 100, range(200))
    assert tokens[::2].tolist() == [0] * 100
    assert len(set(tokens[1::2].tolist())) > 2


def test_tokens_are_suppressed_only_in_rows_that_request_it():
    params = [SamplingParams(temperature=0, suppress_tokens=tokens) for tokens in ((), (0, 1), (1,))]
    assert choose(LOGITS.expand(3, -1), params, range(3)).tolist() == [0, 2, 0]


def test_draws_depend_only_on_seed_and_position():
    def draw(seed: int, positions: Sequence[int]) -> list[int]:
        params = [SamplingParams(temperature=1.0, seed=seed)] * len(positions)
        return choose(LOGITS.expand(len(positions), -1), params, positions).tolist()

    together = draw(3, range(100))
    assert together == [draw(3, [position])[0] for position in range(100)]
    assert together != draw(4, range(100))


def test_noise_never_chooses_an_excluded_token_of_a_large_vocabulary():
    # The hash of this token has 24 leading ones.
    seed, position, token = 0, 62, 117_932
    logits = torch.zeros(1, 129_280)
    logits[0, 5] = 100.0
    for excluded in ({"top_k": 1}, {"suppress_tokens": (token,)}, {}):
        filters: dict[str, Any] = {"temperature": 1.0, "seed": seed} | excluded
        assert choose(logits, [SamplingParams(**filters)], [position]).item() == 5


def test_filters_of_a_row_do_not_affect_other_rows():
    torch.manual_seed(0)
    logits = torch.randn(1, 100_000) * 3  # float32 sums of these probabilities exceed 1 before the last
    unfiltered, filtered = SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_k=5)
    assert torch.equal(_filtered(logits, [unfiltered]), logits)
    assert torch.equal(_filtered(logits.expand(2, -1), [unfiltered, filtered])[:1], logits)


def test_iterators_are_read_once():
    given: dict[str, Any] = {"suppress_tokens": iter([1, 2]), "stop_token_ids": torch.tensor([3]), "stop": iter("ab")}
    assert SamplingParams(**given) == SamplingParams(suppress_tokens=(1, 2), stop_token_ids=(3,), stop=("a", "b"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"temperature": -1.0}, "temperature must be a finite number from 0, got -1.0"),
        ({"temperature": math.nan}, "temperature"),
        ({"top_k": -2}, "top_k"),
        ({"n": 0}, "n must be at least 1, got 0"),
        ({"n": 2, "temperature": 0}, "n must be 1 where temperature is 0, .* got 2"),
        ({"presence_penalty": 2.5}, "presence_penalty must be from -2 to 2, got 2.5"),
        ({"frequency_penalty": -3}, "frequency_penalty must be from -2 to 2, got -3"),
        ({"min_tokens": 17}, "min_tokens must be at most max_tokens 16, got 17"),
        ({"logit_bias": [1]}, r"logit_bias must map tokens to numbers, got \[1\]"),
        ({"logit_bias": {1: "x"}}, r"logit_bias\[1\] must be a number, got str"),
        ({"logit_bias": {1: math.nan}}, "logit_bias must hold no NaN"),
        ({"allowed_token_ids": ()}, "allowed_token_ids must hold a token or be None, got none"),
        ({"bad_words": [5]}, r"bad_words must hold strings, got \(5,\)"),
        ({"top_p": 0.0}, "top_p"),
        ({"min_p": 1.5}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"max_tokens": 2.5}, "max_tokens must be an int, got float"),
        ({"top_k": 1.5}, "top_k must be an int, got float"),
        ({"temperature": "1"}, "temperature must be a number, got str"),
        ({"logprobs": -2}, "logprobs must be None, -1 or at least 0, got -2"),
        ({"logprobs": True}, "logprobs must be an int, got bool"),
        ({"prompt_logprobs": 0.5}, "prompt_logprobs must be an int, got float"),
        ({"stop_token_ids": 5}, "stop_token_ids must be a sequence of ints, got 5"),
        ({"suppress_tokens": (1.5,)}, "suppress_tokens must hold ints, got 1.5"),
        ({"stop": ""}, "stop must hold strings that are not empty"),
        ({"stop": 5}, "stop must be a string or hold strings, got 5"),
        ({"stop": ("",)}, "stop must hold strings that are not empty"),
    ],
)
def test_errors_name_the_parameter(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        SamplingParams(**options)
