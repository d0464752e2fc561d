"""Models with layers of linear attention under ``enable``: paged latents and transformers' states."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from integrations.test_transformers_families import HYBRID, SIZES, generate, logits

from flashlatte.integrations.transformers import disable, enable
from flashlatte.integrations.transformers.calls import CACHE

transformers: Any = pytest.importorskip("transformers")

FOUR_LAYERS = {
    "num_hidden_layers": 4,
    "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"],
    "mlp_layer_types": ["dense"] * 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 24,
}
KDA = {"q_lora_rank": None, "linear_head_dim": 16, "linear_num_heads": 2}
MODELS = {
    "ling3": ("BailingHybrid", {"head_dim": 16}),
    "ling3-four-layers": ("BailingHybrid", FOUR_LAYERS | {"head_dim": 32, "q_lora_rank": None}),
    "kimi-linear": ("KimiLinear", KDA),
    "kimi-linear-four-layers": ("KimiLinear", FOUR_LAYERS | KDA),
}


@pytest.fixture(params=MODELS)
def stock(request) -> Any:
    return make(request.param)


def make(name: str) -> Any:
    family, options = MODELS[name]
    if not hasattr(transformers, f"{family}Config"):
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES | HYBRID | options)
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


@pytest.mark.parametrize(
    "options", [{"num_beams": 3, "max_new_tokens": 8}, {"prefill_chunk_size": 11}], ids=["beams", "chunked prefill"]
)
def test_generate_gives_stock_tokens(stock, prompts, options):
    inputs = prompts((0, 0) if "prefill_chunk_size" in options else (5, 0, 13), length=40)
    enabled = enable(copy.deepcopy(stock), page_size=16)
    assert torch.equal(generate(enabled, inputs, **options), generate(stock, inputs, **options))


@torch.no_grad()
def test_a_callers_cache_without_layers(stock, prompts):
    """Stock attention needs ``DynamicCache(config=…)``; an enabled model knows its layers."""
    inputs = prompts((2, 0), length=20)
    cache = transformers.DynamicCache()
    enabled = enable(copy.deepcopy(stock))
    enabled(**inputs, **{CACHE: cache})
    step = torch.ones(2, 1, dtype=torch.int64)
    mask = torch.cat((inputs["attention_mask"], step), dim=1)
    got = enabled(step, attention_mask=mask, **{CACHE: cache}).logits
    history = stock(**inputs, use_cache=True).past_key_values
    torch.testing.assert_close(got, stock(step, attention_mask=mask, **{CACHE: history}).logits, rtol=1e-4, atol=2e-4)


@torch.no_grad()
def test_states_follow_the_requests_of_a_batch(prompts):
    """Repeating, selecting and resetting a batch applies to states and pages alike."""
    stock = make("kimi-linear")
    enabled = enable(copy.deepcopy(stock))
    ids = prompts((0, 0), length=20)["input_ids"]
    chosen = torch.tensor([1, 1, 0])
    cache = enabled(ids).past_key_values
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([2, 3, 0]))
    step = torch.tensor([[3], [4], [5]])
    expected = stock(torch.cat((ids[chosen], step), dim=1)).logits[:, -1:]
    torch.testing.assert_close(enabled(step, **{CACHE: cache}).logits, expected, rtol=1e-4, atol=2e-4)

    cache.reset()
    again = enabled(ids[chosen], **{CACHE: cache}).logits
    torch.testing.assert_close(again, stock(ids[chosen]).logits, rtol=1e-4, atol=2e-4)


@torch.no_grad()
def test_states_cannot_be_cropped(prompts):
    cache = enable(make("kimi-linear"))(prompts((0,), length=9)["input_ids"]).past_key_values
    assert not cache.is_croppable
    with pytest.raises(RuntimeError, match="does not track past states"):
        cache.crop(-2)
    assert cache.get_seq_length() == 9, "the pages must not be cropped either"


@torch.no_grad()
def test_a_cache_with_states_of_other_layers_is_refused(prompts):
    one, other = make("kimi-linear-four-layers"), make("kimi-linear-four-layers")
    other.config.layer_types = ["linear_attention", "linear_attention", "full_attention", "full_attention"]
    other = type(one)(other.config).eval()
    cache = enable(one)(prompts((0,), length=9)["input_ids"]).past_key_values
    with pytest.raises(ValueError, match="the cache has states of other layers than the model's"):
        enable(other)(torch.ones(1, 1, dtype=torch.int64), **{CACHE: cache})


def test_enabling_and_disabling_again(stock, prompts):
    inputs = prompts((5, 0), length=20)
    model = enable(copy.deepcopy(stock))
    expected = logits(stock, inputs)
    for served in (model, disable(model), enable(model, page_size=4)):
        for got, wanted in zip(logits(served, inputs), expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=2e-4)
