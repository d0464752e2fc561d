"""vLLM's engine with attention without rotated keys: rows of 512 elements, as in GLM-5.3-Flash."""

import pytest
from support import tiny_checkpoints, vllm_glm5next_model, vllm_nope_model
from support.vllm_engine import MIXED, NEW_TOKENS, Generated, engine, largest_difference, prompts

CLOSE = 5e-5
FAMILIES = {"v3": "DeepseekV3ForCausalLM", "v32": "DeepseekV32ForCausalLM"}


@pytest.fixture(scope="module")
def models(checkpoint, tmp_path_factory):
    """vLLM's model of a family, and the tokens that transformers generates with it."""

    def make(family, **changes):
        theirs, vllms = vllm_nope_model.write(checkpoint(family, **changes), tmp_path_factory.mktemp(family) / "nope")
        stock = [Generated(*tiny_checkpoints.greedy(theirs, ids, NEW_TOKENS)) for ids in prompts(MIXED)]
        return vllms, stock

    return make


def generated(model, family, **options):
    override = {FAMILIES[family]: f"{vllm_nope_model.__name__}:{FAMILIES[family]}"}
    with engine(model, model_class_overrides=override, max_num_batched_tokens=96, **options) as vllm:
        return vllm.generate(prompts(MIXED))


@pytest.mark.parametrize("family", FAMILIES)
def test_generates_the_tokens_of_transformers(models, exact_indexer, family):
    model, stock = models(family)
    ours = generated(model, family)
    assert [one.tokens for one in ours] == [other.tokens for other in stock]
    assert largest_difference(ours, stock) < CLOSE


# Largest difference of a logprob from float32, all tokens selected. vLLM's fp8_ds_mla keeps room for rotated keys.
@pytest.mark.parametrize(("family", "cache"), [("v3", "fp8"), ("v32", "fp8_ds_mla")])
def test_fewer_bits(models, family, cache):
    model, stock = models(family, first_k_dense_replace=3, **({"index_topk": 512} if family == "v32" else {}))
    ours = generated(model, family, kv_cache_dtype=cache)
    assert 0 < largest_difference(ours, stock) < 0.25


@pytest.mark.parametrize("cache", ["auto", "fp8_ds_mla"])
def test_layers_of_glm_5_3(models, tmp_path, own_process, cache):
    """vLLM's own layer class, with a selection that has gaps."""
    deepseek, stock = models("v3", first_k_dense_replace=3)
    model, name = vllm_glm5next_model.write(deepseek, tmp_path / "glm"), vllm_glm5next_model.NAME
    override = {name: f"{vllm_glm5next_model.__name__}:{name}"}
    options = {"max_num_batched_tokens": 96, "attention_backend": "CUSTOM", "kv_cache_dtype": cache}
    with engine(model, model_class_overrides=override, **options) as vllm:
        ours = vllm.generate(prompts(MIXED))
        assert vllm.calls()[0].keys() >= {"attend_selected_rows"}
    if cache == "auto":
        assert [one.tokens for one in ours] == [other.tokens for other in stock]
    assert largest_difference(ours, stock) < (CLOSE if cache == "auto" else 0.25)
