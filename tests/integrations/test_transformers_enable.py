"""``enable`` and ``disable``: changes, restoration, and rejected models and arguments."""

import copy
import sys

import pytest
import torch
from support.transformers_pairs import assert_same_tokens, generate, pair

from flashlatte.integrations.transformers import disable, enable
from flashlatte.integrations.transformers.calls import CACHE

pytest.importorskip("transformers")

from transformers import DynamicCache, StaticCache
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from flashlatte.integrations.transformers import calls as calls_by_name


def test_disable_restores_the_model(make_model, prompts):
    model = make_model()
    expected = generate(model, prompts((3, 0)), do_sample=False)
    before = dict(vars(model.model)), [dict(vars(layer.self_attn)) for layer in model.model.layers]
    assert disable(enable(model)) is model
    assert (dict(vars(model.model)), [dict(vars(layer.self_attn)) for layer in model.model.layers]) == before
    assert all(type(layer.self_attn) is DeepseekV3Attention for layer in model.model.layers)
    assert not model.model._forward_pre_hooks
    assert not model.model._forward_hooks
    assert torch.equal(generate(model, prompts((3, 0)), do_sample=False), expected)
    assert disable(model) is model
    assert type(generate(model, prompts((0,)), return_dict_in_generate=True).past_key_values) is DynamicCache


def test_enable_again_changes_the_settings(make_model, prompts, calls):
    model = enable(make_model(), "v32")
    enable(model, page_size=16)
    generate(model, prompts((0,)), max_new_tokens=3)
    assert calls == {"dense_decode": 4, "sparse_decode": 0}
    disable(model)
    generate(model, prompts((0,)), max_new_tokens=3)
    assert calls == {"dense_decode": 4, "sparse_decode": 0}


def test_a_copy_of_an_enabled_model_is_independent(make_model, prompts, calls):
    stock, enabled = pair(make_model())
    copied = disable(copy.deepcopy(enabled))
    assert_same_tokens(stock, copied, prompts((0,)), do_sample=False)
    assert calls["dense_decode"] == 0
    assert_same_tokens(stock, enabled, prompts((0,)), do_sample=False)
    assert calls["dense_decode"] > 0


def test_saving_an_enabled_model(make_model, prompts, tmp_path):
    stock, enabled = pair(make_model())
    enabled.save_pretrained(tmp_path)
    loaded = type(stock).from_pretrained(tmp_path)
    assert_same_tokens(stock, enable(loaded), prompts((0, 2)), do_sample=False)


def test_continuous_batching_is_refused_until_disable(make_model):
    """In stock transformers each request ends with an error of index_copy_."""
    model = copy.deepcopy(enable(enable(make_model())))
    reason = (
        "^generate_batch does not support an enabled DeepseekV3ForCausalLM: transformers' continuous batching allocates"
    )
    with pytest.raises(ValueError, match=reason):
        model.generate_batch([[1, 2, 3]], max_new_tokens=2)
    with pytest.raises(ValueError, match=reason), model.continuous_batching_context_manager():
        pass
    disable(model)
    assert model.init_continuous_batching.__func__ is type(model).init_continuous_batching


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache_format": "int4"}, "cache_format must be one of .*got 'int4'"),
        (
            {"cache_format": "model1"},
            "stores kv_lora_rank 448 .* the model has 512 and 64: accepted for it are bf16 and fp16 and fp32 and fp8 "
            "and v32 and nvfp4_ds_mla$",
        ),
        ({"page_size": 0}, "page_size must be at least 1"),
        ({"backend": "cuda"}, "backend must be one of .*got 'cuda'"),
        ({"backend": "hopper"}, "backend='hopper' cannot serve this call of dense_decode: it (needs|takes)"),
        ({"backend": "hopper", "cache_format": "v32"}, "backend='hopper' cannot serve this call of sparse_decode: it"),
        ({"k_scale": 2.0}, "k_scale belongs to cache_format 'fp8'"),
        ({"cache_format": "fp8", "k_scale": 0.0}, "k_scale must be a finite number above 0, got 0.0"),
    ],
)
def test_refused_settings_do_not_change_the_model(make_model, options, message):
    model = make_model()
    with pytest.raises(ValueError, match=message):
        enable(model, **options)
    assert all(type(layer.self_attn) is DeepseekV3Attention for layer in model.model.layers)


def test_refused_models(make_model):
    families = r"model must be a transformers model of one of the families AXK1, .*, DeepseekV4, got Linear"
    with pytest.raises(TypeError, match=families):
        enable(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"model must be bfloat16, float16 or float32, got torch.float64"):
        enable(make_model().double())
    model = make_model()
    model.model.layers[1].self_attn.kv_b_proj = torch.nn.Sequential(model.model.layers[1].self_attn.kv_b_proj)
    with pytest.raises(TypeError, match=r"kv_b_proj of layer 1 must be a plain module, .* got Sequential"):
        enable(model)


def test_a_model_on_the_meta_device_is_refused(make_model):
    model = make_model()
    stock = type(model.model.layers[0].self_attn)
    with pytest.raises(ValueError, match=r"^model must have weights, .*, got model\.embed_tokens\.weight on the meta"):
        enable(model.to("meta"))
    assert type(model.model.layers[0].self_attn) is stock


@pytest.mark.parametrize("call", [enable, disable])
@pytest.mark.parametrize(
    ("model", "got"), [("deepseek-ai/DeepSeek-V3", "'deepseek-ai/DeepSeek-V3'"), (torch.nn.Linear, "type")]
)
def test_objects_that_are_not_models_are_rejected(call, model, got):
    with pytest.raises(TypeError, match=rf"^model must be a transformers model, as from_pretrained .*, got {got}$"):
        call(model)


def test_an_adapter_added_later_is_refused(make_model, prompts):
    model = enable(make_model())
    model.model.layers[1].self_attn.kv_b_proj = torch.nn.Sequential(model.model.layers[1].self_attn.kv_b_proj)
    with pytest.raises(TypeError, match="kv_b_proj of layer 1"):
        generate(model, prompts((0,)))


# Which transformers makes a stream for, as PyTorch was built.
WITHOUT_ITS_GPU = torch.version.cuda is not None and not torch.cuda.is_available()


@pytest.mark.parametrize(
    "implementation",
    [
        "static",
        pytest.param("offloaded", marks=pytest.mark.skipif(WITHOUT_ITS_GPU, reason="PyTorch for CUDA, and no GPU")),
    ],
)
def test_other_cache_implementations_are_refused(make_model, prompts, implementation):
    with pytest.raises(ValueError, match=r"(cache|past_key_values) must be None or a DynamicCache"):
        generate(enable(make_model()), prompts((0,)), cache_implementation=implementation)


def test_other_caches_are_refused(make_model, prompts):
    model = enable(make_model())
    cache = StaticCache(config=model.config, max_cache_len=200)
    with pytest.raises(ValueError, match="got StaticCache: leave cache_implementation unset, or disable"):
        generate(model, prompts((0,)), seed=0, **{CACHE: cache})


@pytest.mark.parametrize(
    ("of_first", "of_second", "message"),
    [
        (
            {"kv_lora_rank": 32, "qk_rope_head_dim": 16},
            {"kv_lora_rank": 40, "qk_rope_head_dim": 8},
            r"has rows of kv_lora_rank 32 .* filled by another model",
        ),
        ({}, {"num_hidden_layers": 3}, "the cache has 2 layers, and the model 3: it was filled by another model"),
    ],
)
def test_the_cache_of_another_model_is_refused(make_model, prompts, of_first, of_second, message):
    first, second = enable(make_model(**of_first)), enable(make_model(**of_second))
    with torch.no_grad():
        cache = first(**prompts((0,))).past_key_values
        with pytest.raises(ValueError, match=message):
            second(prompts((0,))["input_ids"][:, :1], **{CACHE: cache})


def test_a_decoder_whose_cache_has_another_name_is_refused(make_model, monkeypatch):
    monkeypatch.setattr(calls_by_name, "CACHE", "keys")
    with pytest.raises(ImportError, match=r"^DeepseekV3Model must have an argument keys, got input_ids, "):
        enable(make_model())


def test_without_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"needs transformers 5.17 or later: pip install"):
        enable(torch.nn.Linear(2, 2))
