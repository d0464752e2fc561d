"""Models with block-scaled e4m3 weights (DeepSeek's checkpoints), some of which are read without calling their
module.
"""

from __future__ import annotations

import copy

import pytest
import torch
from integrations import test_transformers_indexed as indexed
from integrations.test_transformers_v4 import model_of as v4_model_of
from layers.test_quantized import Dequantizable
from support import fp8_linears
from support.engine_models import greedy
from support.transformers_pairs import assert_same_tokens, generate, pair

from flashlatte.distributed.model.partition import check_divisible
from flashlatte.engine import Engine
from flashlatte.engine.model import Model
from flashlatte.integrations.transformers import enable
from flashlatte.layers import MLAAttention
from flashlatte.layers.weights import linear_weight

finegrained = pytest.importorskip("transformers.integrations.finegrained_fp8")


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch):
    fp8_linears.install(monkeypatch)


def engine_tokens(model, prompt, count=24):
    (output,) = Engine(model, num_pages=32).generate([prompt], greedy(count, ignore_eos=True))
    return output.outputs[0].token_ids


@pytest.mark.parametrize("in_blocks", [True, False])
@pytest.mark.parametrize("cache_format", [None, "v32"])
def test_tokens_are_stocks(make_model, prompts, cache_format, in_blocks):
    model = fp8_linears.quantized(make_model(), in_blocks=in_blocks)
    assert isinstance(model.model.layers[0].self_attn.kv_b_proj, finegrained.FP8Linear)
    stock, enabled = pair(model)
    if cache_format is None:
        assert_same_tokens(stock, enabled, prompts((3, 0)), do_sample=False)
        return
    dense = make_model()
    for layer, quantized in zip(dense.model.layers, model.model.layers, strict=True):
        for name, module in quantized.self_attn.named_children():
            if isinstance(module, finegrained.FP8Linear):
                getattr(layer.self_attn, name).weight.data = fp8_linears.dense(module)
    expected = generate(enable(dense, cache_format), prompts((3, 0)), do_sample=False)
    assert torch.equal(generate(enable(enabled, cache_format), prompts((3, 0)), do_sample=False), expected)


def test_the_engines_tokens_are_stocks(make_model, prompts):
    model = fp8_linears.quantized(make_model())
    inputs = prompts((0,))
    expected = generate(model, inputs, do_sample=False)[0, inputs["input_ids"].shape[1] :].tolist()
    assert engine_tokens(model, inputs["input_ids"][0].tolist()) == expected


def test_an_attentions_expansions_are_of_the_dequantized_weight(make_model):
    made = Model(fp8_linears.quantized(make_model())).attention[0]
    assert isinstance(made, MLAAttention)
    expansions = torch.cat((made.w_uk, made.w_uv), dim=1).flatten(0, 1)
    torch.testing.assert_close(expansions, fp8_linears.dense(made.kv_b_proj), rtol=0, atol=0)


@pytest.mark.parametrize("family", ["v32", pytest.param("glm5", marks=pytest.mark.full)])
def test_an_indexer_of_quantized_weights(prompts, family):
    model = fp8_linears.quantized(indexed.make(*indexed.FAMILIES[family]))
    inputs = prompts((0,), length=40)
    expected = generate(model, inputs, do_sample=False)
    assert engine_tokens(model, inputs["input_ids"][0].tolist()) == expected[0, 40:].tolist()
    assert torch.equal(generate(enable(model), inputs, do_sample=False), expected)


@pytest.mark.full
def test_deepseek_v4():
    torch.manual_seed(1)
    model = fp8_linears.quantized(v4_model_of())
    assert isinstance(model.model.layers[0].self_attn.o_a_proj, finegrained.FP8GroupedLinear)
    inputs = {"input_ids": torch.randint(1, 97, (1, 30))}
    expected = generate(model, inputs, do_sample=False, eos_token_id=None)[0, 30:].tolist()
    assert len(set(expected)) > 5
    assert engine_tokens(copy.deepcopy(model), inputs["input_ids"][0].tolist()) == expected
    enabled = enable(model)
    assert generate(enabled, inputs, do_sample=False, eos_token_id=None)[0, 30:].tolist() == expected


def test_a_changed_weight_is_read_again(make_model):
    attention = fp8_linears.quantized(make_model()).model.layers[0].self_attn
    module = attention.kv_b_proj
    before = linear_weight(attention, "kv_b_proj", torch.float32)
    torch.testing.assert_close(before, fp8_linears.dense(module), rtol=0, atol=0)
    assert linear_weight(attention, "kv_b_proj", torch.float32) is before
    assert linear_weight(attention, "kv_b_proj", torch.bfloat16).dtype == torch.bfloat16
    with torch.no_grad():
        module.weight_scale_inv.mul_(2)
    torch.testing.assert_close(linear_weight(attention, "kv_b_proj", torch.float32), 2 * before, rtol=0, atol=0)
    module.weight = torch.nn.Parameter(torch.zeros_like(module.weight), requires_grad=False)
    assert not linear_weight(attention, "kv_b_proj", torch.float32).any()


def test_ranks_do_not_divide_weights_quantized_otherwise(make_model):
    check_divisible(make_model())
    check_divisible(fp8_linears.quantized(make_model()))
    module = make_model().model.layers[0].self_attn
    weight = module.o_proj.weight
    for other, name in (
        (Dequantizable(torch.ones(weight.shape, dtype=torch.int8), torch.ones(())), "Dequantizable"),
        (torch.ones(weight.shape, dtype=torch.uint8), "torch.uint8"),
        (weight.detach().to(torch.float8_e4m3fn), "torch.float8_e4m3fn"),
    ):
        module.o_proj.weight = torch.nn.Parameter(other, requires_grad=False)
        with pytest.raises(ValueError, match=rf"^tensor_parallel above 1 needs .* got o_proj\.weight of {name}$"):
            check_divisible(module)


def test_other_quantized_weights_are_refused(make_model):
    model = make_model()
    module = model.model.layers[1].self_attn.kv_b_proj
    module.weight = torch.nn.Parameter(module.weight.to(torch.int8), requires_grad=False)
    for use in (enable, Engine):
        with pytest.raises(TypeError, match=r"^kv_b_proj( of layer 1)? must be a plain module.* of torch\.int8"):
            use(model)


def test_a_compiled_layer_dequantizes_in_its_graph(make_model):
    attention = fp8_linears.quantized(make_model()).model.layers[0].self_attn

    def expand(latents):
        return torch.nn.functional.linear(latents, linear_weight(attention, "kv_b_proj", latents.dtype))

    latents = torch.randn(3, 512)
    compiled = torch.compile(expand, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(latents), attention.kv_b_proj(latents), rtol=0, atol=0)
