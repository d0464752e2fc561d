"""A transformers model and its copy under ``enable``, which must generate the same tokens."""

import copy

import torch

from flashlatte.integrations.transformers import enable


def pair(model, **options):
    """The unchanged model, and an enabled copy of it."""
    return model, enable(copy.deepcopy(model), **options)


def generate(model, inputs, seed=0, **options):
    torch.manual_seed(seed)
    return model.generate(**inputs, **{"max_new_tokens": 24} | options)


def assert_same_tokens(stock, enabled, inputs, **options):
    expected = generate(stock, inputs, **options)
    assert expected[0, inputs["input_ids"].shape[1] :].unique().numel() > 5, "the reference must not be degenerate"
    torch.testing.assert_close(generate(enabled, inputs, **options), expected, rtol=0, atol=0)
