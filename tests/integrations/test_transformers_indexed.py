"""DeepseekV32 and GlmMoeDsa under ``enable``: behavior specific to their indexers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from integrations.test_transformers_families import EXPERTS, GLM5, INDEXED, SIZES, caches_each_head, generate

from flashlatte.integrations.transformers import disable, enable
from flashlatte.integrations.transformers.calls import CACHE

transformers: Any = pytest.importorskip("transformers")
V32_SIZES = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}


def make(family: str, options: dict[str, Any], implementation: str = "sdpa") -> Any:
    if not hasattr(transformers, f"{family}Config"):
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES | EXPERTS | options)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    model.set_attn_implementation(implementation)
    # With the padding token's zeros every index score would be zero, and the selection arbitrary.
    model.get_input_embeddings().weight.data[0].normal_(0.0, 0.3)
    return model


FAMILIES = {"v32": ("DeepseekV32", INDEXED), "glm5": ("GlmMoeDsa", GLM5)}


@pytest.fixture(params=FAMILIES)
def stock(request) -> Any:
    return make(*FAMILIES[request.param])


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"do_sample": True, "temperature": 1.5}, marks=pytest.mark.full),
        {"num_beams": 3, "max_new_tokens": 8},
        pytest.param({"prefill_chunk_size": 11}, marks=pytest.mark.full),
        {"prompt_lookup_num_tokens": 3},
    ],
    ids=["sampled", "beams", "chunked prefill", "prompt lookup"],
)
def test_generate_gives_stock_attention_s_tokens(stock, prompts, options):
    one = "prompt_lookup_num_tokens" in options
    inputs = prompts((0,) if one else (5, 0, 13), length=40)
    enabled = enable(copy.deepcopy(stock), page_size=16)
    assert torch.equal(generate(enabled, inputs, **options), generate(stock, inputs, **options))


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0},
        pytest.param({"rope_type": "dynamic", "factor": 4.0}, marks=pytest.mark.full),
        pytest.param(
            {
                "rope_type": "longrope",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "short_factor": [1.0, 1.5, 2.0, 2.5],
                "long_factor": [2.0, 3.0, 4.0, 5.0],
            },
            marks=pytest.mark.full,
        ),
    ],
    ids=["linear", "dynamic", "longrope"],
)
def test_rotations_that_only_transformers_supports(prompts, rope):
    model = make("DeepseekV32", INDEXED | {"rope_parameters": rope | {"rope_theta": 10000.0}})
    inputs = prompts((5, 0), length=30)
    expected = generate(model, inputs)
    assert torch.equal(generate(enable(model), inputs), expected)


def test_eager_attention_computes_prefill(prompts):
    model = make(*FAMILIES["glm5"], implementation="eager")
    inputs = prompts((5, 0), length=30)
    expected = generate(model, inputs)
    assert torch.equal(generate(enable(model), inputs), expected)


def test_stock_attention_continues_with_index_keys(stock, prompts):
    """If index keys were lost, a shared selection would come from another pass."""
    if caches_each_head(stock):
        pytest.skip("stock attention of this transformers does not go on with latents")
    inputs = prompts((3, 0), length=50)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    enabled = enable(copy.deepcopy(stock))
    with torch.no_grad():
        cache = enabled(ids[:, :40], attention_mask=mask[:, :40]).past_key_values
        disable(enabled)
        got = enabled(ids[:, 40:], attention_mask=mask, **{CACHE: cache}).logits
        torch.testing.assert_close(got, stock(ids, attention_mask=mask).logits[:, 40:], rtol=1e-4, atol=2e-4)
    assert type(cache.layers[0]).__name__ == "DynamicIndexedLayer"
    assert cache.layers[0].indexer_keys.shape[:2] == (2, 50)


# Of the logits' standard deviation, the median of tokens that choose; seen: 0.107, 0.041 and 0.245.
BOUNDS = {None: 0.12, "index_bf16": 0.05, "index_mxfp4": 0.28}


@pytest.mark.parametrize("index_format", BOUNDS)
def test_v32_pages_with_quantized_index_keys(prompts, index_format):
    stock = make("DeepseekV32", INDEXED | V32_SIZES | {"initializer_range": 0.1})
    inputs = prompts((0, 0), length=60)
    enabled = enable(copy.deepcopy(stock), cache_format="v32", index_format=index_format)
    with torch.no_grad():
        expected = stock(**inputs).logits
        difference = (enabled(**inputs, use_cache=True).logits - expected).square().mean(dim=-1).sqrt() / expected.std()
    topk = INDEXED["index_topk"]
    assert difference[:, :topk].max() < 0.05, "the first tokens choose all"
    assert difference[:, topk:].median() < BOUNDS[index_format]


def test_formats_that_do_not_fit_are_refused(make_model):
    model = make(*FAMILIES["v32"])
    with pytest.raises(ValueError, match="cache_format 'fp8' cannot be read token by token"):
        enable(model, cache_format="fp8")
    with pytest.raises(ValueError, match="cache_format must be one of"):
        enable(model, index_format="index_fp16")
    with pytest.raises(ValueError, match=r"index_format must be index_fp8, .*, got 'bf16'"):
        enable(model, index_format="bf16")
    with pytest.raises(ValueError, match="index_format belongs to models with an indexer, got 'index_fp8'"):
        enable(make_model(), index_format="index_fp8")


def test_a_cache_of_another_indexer_is_refused(prompts):
    inputs = prompts((0,), length=20)
    with torch.no_grad():
        cache = enable(make("DeepseekV3", {}))(**inputs).past_key_values
        with pytest.raises(ValueError, match="the cache holds index keys of another indexer, or none"):
            enable(make(*FAMILIES["v32"]))(**inputs, **{CACHE: cache})


@pytest.mark.full
def test_a_model_compiled_for_any_length(prompts):
    model = make(*FAMILIES["v32"])
    compiled = torch.compile(enable(copy.deepcopy(model)), backend="eager", dynamic=True)
    cache, of_stock = (transformers.DynamicCache(config=model.config) for _ in range(2))
    for part in prompts((0,), length=20)["input_ids"].split((17, 1, 2), dim=1):
        with torch.no_grad():
            expected = model(part, **{CACHE: of_stock}).logits
            torch.testing.assert_close(compiled(part, **{CACHE: cache}).logits, expected, rtol=1e-3, atol=1e-3)
