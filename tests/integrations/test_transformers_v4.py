"""DeepSeek-V4 models of transformers, enabled and stock: the same logits for every token, in float32."""

from __future__ import annotations

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")

from support.transformers_v4 import CSA, HCA, logits_by_steps, model_of, tokens  # noqa: E402
from transformers.cache_utils import DynamicCache  # noqa: E402

from flashlatte.integrations.transformers import disable, enable  # noqa: E402
from flashlatte.integrations.transformers.calls import CACHE  # noqa: E402
from flashlatte.integrations.transformers.v4.store import V4Store  # noqa: E402
from flashlatte.layers.v4 import WorkspaceLimits  # noqa: E402
from flashlatte.ops.sparse_prefill import sparse_prefill  # noqa: E402


@pytest.fixture(scope="module")
def stock():
    return model_of()


@pytest.fixture(scope="module")
def enabled(stock):
    return enable(copy.deepcopy(stock), page_size=4)


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param([41], id="whole"),
        pytest.param([5, 1, 1, 1, 1, 13, 1, 18], id="chunks"),
        pytest.param([1] * 41, id="tokens", marks=pytest.mark.full),
    ],
)
def test_every_token(stock, enabled, sizes):
    """Chunks end within groups, and single tokens cross their boundaries."""
    ids = tokens(2, 41)
    expected, _ = logits_by_steps(stock, ids, sizes)
    found, cache = logits_by_steps(enabled, ids, sizes)
    assert cache is not None
    assert type(cache).__name__ == "PagedV4Cache"
    assert cache.get_seq_length() == 41
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param([41], id="whole"),
        pytest.param([21, 1, 1, 1, 17], id="chunks"),
        pytest.param([17] + [1] * 24, id="tokens", marks=pytest.mark.full),
    ],
)
def test_padding_on_the_left(stock, enabled, sizes):
    ids, mask = tokens(3, 41), torch.ones(3, 41, dtype=torch.int64)
    mask[0, :7] = mask[2, :13] = 0
    expected, _ = logits_by_steps(stock, ids, sizes, mask)
    found, _ = logits_by_steps(enabled, ids, sizes, mask)
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("padding", [0, 9])
def test_a_prefill_over_a_workspace(stock, enabled, padding, monkeypatch):
    """With this many tokens the visible keys are gathered first, also after a prefix, and without padding."""
    over_workspaces = []

    def counted(q, *args, **kwargs):
        over_workspaces.append(q.shape[0])
        return sparse_prefill(q, *args, **kwargs)

    monkeypatch.setattr("flashlatte.layers.v4.cache_attention.sparse_prefill", counted)
    monkeypatch.setattr(V4Store, "workspaces", WorkspaceLimits(min_queries=100))
    ids, mask = tokens(2, 290), torch.ones(2, 290, dtype=torch.int64)
    mask[1, :padding] = 0
    sizes, mask_or_none = [139, 3, 147, 1], mask if padding else None
    expected, _ = logits_by_steps(stock, ids, sizes, mask_or_none)
    found, cache = logits_by_steps(enabled, ids, sizes, mask_or_none)
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], rtol=1e-3, atol=1e-3)
    assert cache is not None
    assert cache.get_seq_length() == 290
    assert over_workspaces == [2 * 139] * 3 + [2 * 147] * 3


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="greedy"),
        pytest.param({"num_beams": 3, "num_return_sequences": 2}, id="beams", marks=pytest.mark.full),
    ],
)
def test_generate(stock, enabled, options):
    ids = tokens(2, 11)
    call = {"max_new_tokens": 14, "do_sample": False, "pad_token_id": 0, "eos_token_id": None, **options}
    assert enabled.generate(ids, **call).equal(stock.generate(ids, **call))


def test_positions_beyond_the_configs(stock, enabled):
    """transformers supports any position, regardless of max_position_embeddings."""
    short = copy.deepcopy(stock)
    short.config.max_position_embeddings = 16
    paged, ids = enable(short, page_size=4), tokens(2, 40)
    expected, _ = logits_by_steps(stock, ids, [9, 1, 29, 1])
    found, _ = logits_by_steps(paged, ids, [9, 1, 29, 1])
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    far = torch.arange(300, 340)[None]
    assert paged(ids, position_ids=far).logits.equal(enabled(ids, position_ids=far).logits)


def test_inference_mode_then_no_grad(stock, enabled):
    ids = tokens(2, 30)
    expected = stock(ids).logits[:, 11:]
    with torch.inference_mode():
        cache = enabled(ids[:, :9]).past_key_values
        cache.reorder_cache(torch.arange(2))
        enabled(ids[:, 9:11], **{CACHE: cache})
    found = enabled(ids[:, 11:], **{CACHE: cache}).logits
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_model1(stock):
    """Logits stay close with e4m3 keys; model1 supports rows of 512 elements only."""
    config = copy.deepcopy(stock.config)
    config.head_dim, config.partial_rotary_factor, config.qk_rope_head_dim = 512, 0.125, 64
    config.index_head_dim, config.index_topk = 128, 32
    for parameters in config.rope_parameters.values():
        parameters["partial_rotary_factor"] = 0.125
    torch.manual_seed(0)
    model = transformers.DeepseekV4ForCausalLM(config).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 or "sinks" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    ids, sizes = tokens(1, 30), [13, 1, 16]
    expected, _ = logits_by_steps(model, ids, sizes)
    found, _ = logits_by_steps(enable(model, "model1"), ids, sizes)
    error = (found - expected).norm() / expected.norm()
    assert 1e-6 < error < 2.0**-4


def test_stock_attention_computes_passes_without_a_paged_cache(stock, enabled):
    ids = tokens(1, 9)
    torch.testing.assert_close(enabled(ids, use_cache=False).logits, stock(ids, use_cache=False).logits)
    out = enabled(ids, output_attentions=True, use_cache=True)
    assert out.attentions is not None
    assert type(out.past_key_values) is DynamicCache
    cache = enabled(ids, use_cache=True).past_key_values
    with pytest.raises(ValueError, match=r"^the cache was filled by FlashLatte"):
        enabled(ids, **{CACHE: cache}, output_attentions=True)


def test_disable(stock, enabled):
    model = enable(copy.deepcopy(stock))
    ids = tokens(1, 9)
    cache = model(ids).past_key_values
    with pytest.raises(ValueError, match=r"^generate_batch does not support an enabled DeepseekV4ForCausalLM: "):
        model.generate_batch([[1, 2, 3]], max_new_tokens=2)
    disable(model)
    assert "init_continuous_batching" not in vars(model)
    assert [type(layer.self_attn) for layer in model.model.layers] == [
        type(layer.self_attn) for layer in stock.model.layers
    ]
    assert type(model(ids).past_key_values) is DynamicCache
    with pytest.raises(ValueError, match=r"^the cache was filled by FlashLatte"):
        model(ids, **{CACHE: cache})


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"cache_format": "fp8"}, ValueError, "^cache_format must be model1, bf16, fp16 or fp32 for DeepSeek-V4"),
        ({"cache_format": "bf16"}, ValueError, "^cache_format must be model1 or that of the model's torch.float32"),
        ({"cache_format": "model1"}, ValueError, "^head_dim of format model1 is 512, got 32$"),
        ({"k_scale": 2.0}, ValueError, "^k_scale must be None for DeepSeek-V4, got 2.0$"),
        ({"page_size": 0}, ValueError, "^page_size must be at least 1"),
    ],
)
def test_settings_that_do_not_fit(stock, change, error, message):
    with pytest.raises(error, match=message):
        enable(stock, **change)
    assert "_flashlatte_hooks" not in vars(stock.model)


@pytest.mark.parametrize(
    "name", ["o_a_proj", "q_a_norm", "kv_norm", "compressor.kv_norm", "compressor.indexer.kv_norm"]
)
def test_hooks_on_modules_that_are_not_called_are_rejected(stock, name):
    """Before the model is changed, and in the forward pass if they are added later."""
    model = copy.deepcopy(stock)
    hook = model.model.layers[1].self_attn.get_submodule(name).register_forward_hook(lambda *called: 2 * called[2])
    with pytest.raises(TypeError, match=f"^{name.split('.')[-1]}( of layer 1)? must be a plain module"):
        enable(model, page_size=4)
    assert "_flashlatte_hooks" not in vars(model.model)
    hook.remove()
    enable(model, page_size=4)
    model.model.layers[1].self_attn.get_submodule(name).register_forward_pre_hook(lambda *called: None)
    with pytest.raises(TypeError, match="must be a plain module"):
        model(tokens(1, 9))


def test_yarn_that_scales_cosines():
    """With a config that names both rotations; a flat yarn, as in checkpoints, scales nothing."""
    scaled = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "partial_rotary_factor": 0.25}
    main, compress = (
        scaled | {"rope_theta": 500.0},
        scaled | {"rope_theta": 3000.0, "mscale": 0.7, "mscale_all_dim": 0.5},
    )
    stock = model_of(rope_parameters={"main": main, "compress": compress}, num_hidden_layers=3)
    ids = tokens(2, 23)
    expected, _ = logits_by_steps(stock, ids, [20, 1, 2])
    found, _ = logits_by_steps(enable(stock, page_size=4), ids, [20, 1, 2])
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_groups_of_one_size_in_both_kinds_of_layers_are_refused():
    with pytest.raises(ValueError, match=r"^compress_rates must differ between .*, got 4 for both$"):
        enable(model_of(compress_rates={CSA: 4, HCA: 4}))


def test_the_cache_of_another_model_is_refused(enabled):
    ids = tokens(2, 9)
    cache = enabled(ids).past_key_values
    enable(model_of())(ids, **{CACHE: cache})
    with pytest.raises(ValueError, match=r"^the cache was filled by a model with layers of other sizes"):
        enable(model_of(sliding_window=5))(ids, **{CACHE: cache})


def test_passes_that_do_not_fit(enabled):
    ids = tokens(2, 9)
    cache = enabled(ids).past_key_values
    with pytest.raises(ValueError, match=r"^input must have the cache's 2 requests, got 1$"):
        enabled(ids[:1], **{CACHE: cache})
    with pytest.raises(ValueError, match=r"^a DeepSeek-V4 cache cannot be cropped"):
        cache.crop(-1)


@pytest.mark.parametrize("shape", [(0, 5), (2, 0)])
def test_a_pass_over_nothing_is_refused(enabled, shape):
    with pytest.raises(ValueError, match=r"^input_ids must have at least one request and one token, got shape \["):
        enabled(torch.zeros(shape, dtype=torch.long))


def test_a_history_overwritten_by_a_failed_pass(enabled, monkeypatch):
    """Half of the layers have overwritten states that the next group needs."""
    ids = tokens(1, 30)
    cache = enabled(ids[:, :10]).past_key_values
    with pytest.raises(ValueError, match=r"^attention_mask must be"):
        enabled(ids[:, 10:], attention_mask=torch.zeros(1, 7), **{CACHE: cache})
    enabled(ids[:, 10:12], **{CACHE: cache})

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(enabled.model.layers[1].mlp, "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            enabled(ids[:, 12:], **{CACHE: cache})
    with pytest.raises(ValueError, match=r"^the cache must be a new one: the previous pass failed"):
        enabled(ids[:, 12:], **{CACHE: cache})


def test_streams_are_the_original_where_gradients_are_recorded(stock):
    """Also in training mode, and after ``disable``; wrapped modules are not changed."""
    model = copy.deepcopy(stock)
    wrapped = torch.nn.Sequential(model.model.layers[1].attn_hc)
    model.model.layers[1].attn_hc = wrapped
    originals = [type(layer.ffn_hc) for layer in model.model.layers]
    enable(model, page_size=4)
    connection = model.model.layers[0].ffn_hc
    assert type(connection) is not originals[0]
    assert model.model.layers[1].attn_hc is wrapped
    streams = torch.randn(2, 3, 2, 48, generator=torch.Generator().manual_seed(3))
    expected = originals[0].forward(connection, streams)
    for actual, value in zip(connection(streams), expected, strict=True):
        torch.testing.assert_close(actual, value, rtol=1e-4, atol=1e-5)

    collapsed = connection(streams.clone().requires_grad_())[2]
    assert collapsed.requires_grad
    connection.train()
    for actual, value in zip(connection(streams), expected, strict=True):
        assert actual.equal(value)
    disable(model)
    assert [type(layer.ffn_hc) for layer in model.model.layers] == originals
