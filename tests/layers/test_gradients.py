"""Layers without a backward pass warn once if a gradient is required."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from flashlatte import kv_cache
from flashlatte.layers import (
    MLAAttention,
    MLAConfig,
    MLAMetadataBuilder,
    Rope,
    V4Attention,
    V4Cache,
    V4Config,
    V4IndexerConfig,
    V4Step,
)
from flashlatte.runtime import gradients

PAGES = torch.arange(4, dtype=torch.int32).view(1, 4)
TOKENS = 5


def mla() -> tuple[torch.nn.Module, Callable[[torch.Tensor], torch.Tensor]]:
    config = MLAConfig(
        hidden_size=16,
        num_attention_heads=2,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
        rope=Rope(max_position=16),
    )
    layer = MLAAttention(config)
    cache = kv_cache.allocate("fp32", 4, 4, head_dim=config.head_dim)
    metadata = MLAMetadataBuilder(4, 1, TOKENS, 16, "cpu", cache_format="fp32").build([0, TOKENS], [TOKENS], PAGES)
    return layer, lambda hidden: layer(hidden, cache, metadata)


def v4() -> tuple[torch.nn.Module, Callable[[torch.Tensor], torch.Tensor]]:
    config = V4Config(
        hidden_size=16,
        q_lora_rank=8,
        num_attention_heads=2,
        head_dim=16,
        rope_dim=4,
        o_groups=1,
        o_lora_rank=4,
        window=4,
        indexer=V4IndexerConfig(2, 32, 2),
    )
    layer = V4Attention(config)
    step = V4Step.from_spans([(0, TOKENS)], PAGES, {4: (PAGES, PAGES)}, window=4, page_size=4)
    cache = V4Cache.allocate(config, 4, 4, state_pages=4, cache_format="fp32")
    return layer, lambda hidden: layer(hidden, step, cache)


LAYERS: dict[str, Any] = {"MLAAttention": mla, "V4Attention": v4}


@pytest.fixture(params=LAYERS)
def name(request, monkeypatch):
    monkeypatch.setattr(gradients, "_warned", set())
    return request.param


@pytest.fixture
def layer_and_call(name):
    layer, call = LAYERS[name]()
    for parameter in layer.parameters():
        parameter.fill_(0.1)
    return layer, call


def warnings_of(call: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert not call(hidden).requires_grad
    return [warning for warning in caught if "has no backward" in str(warning.message)]


@pytest.mark.parametrize("of", ["the input", "a parameter"])
def test_warns_once_and_points_to_the_call(name, layer_and_call, of):
    layer, call = layer_and_call
    hidden = torch.ones(TOKENS, 16, requires_grad=of == "the input")
    next(layer.parameters()).requires_grad_(of == "a parameter")
    (warning,) = warnings_of(call, hidden)
    assert str(warning.message).startswith(f"{name} has no backward: no gradient flows")
    assert warning.filename == __file__
    assert not warnings_of(call, hidden)


def test_inference_is_silent(layer_and_call):
    layer, call = layer_and_call
    assert not warnings_of(call, torch.ones(TOKENS, 16))
    layer.requires_grad_(True)
    hidden = torch.ones(TOKENS, 16, requires_grad=True)
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            assert not warnings_of(call, hidden)


# torch.func.jvp imports what PyTorch calls deprecated.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_forward_mode_is_refused(name, layer_and_call):
    hidden = torch.ones(TOKENS, 16)
    with pytest.raises(RuntimeError, match=f"^{name} has no forward-mode derivative"):
        torch.func.jvp(layer_and_call[1], (hidden,), (hidden,))
