"""Every supported family gives stock attention's tokens and logits; errors name the others."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
from typing import Any

import pytest
import torch
from support.marks import mostly_full

from flashlatte.integrations.transformers import disable, enable
from flashlatte.integrations.transformers.calls import CACHE
from flashlatte.layers import models

transformers: Any = pytest.importorskip("transformers")

VOCABULARY = 64
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
EXPERTS = {
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 4096,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
LONGCAT = {
    "num_layers": 2,
    "ffn_hidden_size": 64,
    "expert_ffn_hidden_size": 32,
    "n_routed_experts": 4,
    "moe_topk": 2,
    "head_dim": 8,
    "zero_expert_num": 2,
}
# Many index heads, so that scores with only negative products, which are 0, are rare.
INDEXED = {"index_n_heads": 32, "index_head_dim": 32, "index_topk": 16}
GLM5 = INDEXED | {"num_hidden_layers": 3, "indexer_types": ["full", "shared", "full"], "n_group": 1}
HY4 = {"num_hidden_layers": 3, "indexer_types": ["full", "shared", "full"], "n_group": 1, "hc_mult": 2}
# Layers 1 and 2 have windows of 9 tokens, and other heads and rows.
DOTS3 = INDEXED | {
    "num_hidden_layers": 4,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "use_dsa": True,
    "sliding_window": 9,
    "n_group": 1,
    "shared_experts_intermediate_size": 32,
    "head_dim": 24,
    "swa_num_attention_heads": 2,
    "swa_num_key_value_heads": 2,
    "swa_q_lora_rank": 20,
    "swa_kv_lora_rank": 40,
    "swa_head_dim": 20,
    "swa_qk_nope_head_dim": 8,
    "swa_v_head_dim": 14,
}
# 4 pools of 4 tokens are selected; layer 2 reuses the selection of layer 1. No rotation.
POOLED = {"index_n_heads": 8, "index_head_dim": 32, "index_topk": 16, "index_kpool": 4, "n_group": 1, "hc_mult": 2}
POOLED |= {"linear_head_dim": 16, "linear_num_heads": 2, "qk_rope_head_dim": 0, "num_hidden_layers": 4}
POOLED |= {
    "layer_types": ["linear_attention", "deepseek_sparse_attention", "deepseek_sparse_attention", "linear_attention"],
    "indexer_types": ["full", "full", "shared", "full"],
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
}
# Layers 1 and 3 are not rotated; 2 and 3 read the latents of 0 and 1; 2 reuses the choice of 1.
LARGE4 = INDEXED | {
    "num_hidden_layers": 4,
    "no_rope_layers": [1, 0, 1, 0],
    "kv_source_layers": [0, 1, 0, 1],
    "indexer_types": ["full", "full", "shared", "full"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "n_group": 1,
}
# A layer of linear attention before and after one of MLA.
HYBRID = {name: value for name, value in EXPERTS.items() if name not in ("n_routed_experts", "first_k_dense_replace")}
HYBRID |= {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
HYBRID |= {"num_local_experts": 4, "mlp_layer_types": ["dense", "sparse", "sparse"]}
# DeepseekV32 and GlmMoeDsa do not look at rope_interleave; for the others null is false.
SUPPORTED: dict[str, tuple[str, dict[str, Any]]] = {
    "v2": ("DeepseekV2", EXPERTS),
    "v2-lite": ("DeepseekV2", EXPERTS | {"q_lora_rank": None, "rope_parameters": YARN}),
    "v3": ("DeepseekV3", EXPERTS),
    "v32": ("DeepseekV32", EXPERTS | INDEXED | {"rope_interleave": False}),
    "v32-yarn": ("DeepseekV32", EXPERTS | INDEXED | {"rope_parameters": YARN}),
    "glm5": ("GlmMoeDsa", EXPERTS | GLM5),
    "glm4": ("Glm4MoeLite", EXPERTS | {"n_group": 1}),
    "axk2": ("AXK2", EXPERTS | INDEXED | {"n_group": None, "topk_group": None}),
    "hy4": ("HYV4", EXPERTS | INDEXED | HY4),
    "youtu": ("Youtu", {}),
    "youtu-half": ("Youtu", {"rope_interleave": None}),
    "axk1": ("AXK1", EXPERTS),
    "longcat": ("LongcatFlash", LONGCAT),
    "dots3": ("Dots3Note", EXPERTS | DOTS3),
    "dots3-dense": ("Dots3Note", EXPERTS | DOTS3 | {"use_dsa": False}),
    "glm5-next": ("Glm5Next", EXPERTS | POOLED),
    "large4": ("MistralLarge4", EXPERTS | LARGE4),
    "ling3": ("BailingHybrid", HYBRID | {"head_dim": 16, "num_local_experts": 4}),
    "kimi-linear": ("KimiLinear", HYBRID | {"q_lora_rank": None, "linear_head_dim": 16, "linear_num_heads": 2}),
    "minicpm3": ("MiniCPM3", {"scale_emb": 1, "dim_model_base": 64}),
}


VISION = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 32}
# Parameters that are zeros or ones in new models.
DRAWN = ("sinks", "softmax_scaling.scale", "softmax_scaling.bias", "rotary_emb.alpha", "k_rope_only_layernorm.weight")


@functools.cache
def _stock(name: str) -> Any:
    family, options = SUPPORTED[name]
    if not hasattr(transformers, f"{family}Config"):
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}TextConfig", getattr(transformers, f"{family}Config"))(**SIZES | options)
    if hasattr(transformers, f"{family}ForCausalLM"):
        model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    else:
        whole = getattr(transformers, f"{family}Config")(text_config=config.to_dict(), vision_config=VISION)
        model = getattr(transformers, f"{family}ForConditionalGeneration")(whole).eval()
    for parameter, weight in model.named_parameters():
        if parameter.endswith(DRAWN):
            weight.data.normal_(1.0 if "norm" in parameter else 0.0, 0.5)
    if "index_topk" in options:
        # With the padding token's zeros every index score would be zero, and the selection arbitrary.
        model.get_input_embeddings().weight.data[0].normal_(0.0, 0.3)
    return model


LONG = ("v32-yarn", "dots3-dense")


@pytest.fixture(params=[pytest.param(name, marks=[pytest.mark.full] * (name in LONG)) for name in SUPPORTED])
def stock(request) -> Any:
    return copy.deepcopy(_stock(request.param))


def generate(model: Any, inputs: dict[str, torch.Tensor], **options: Any) -> Any:
    torch.manual_seed(0)
    return model.generate(**inputs, **{"max_new_tokens": 16, "do_sample": False} | options)


@torch.no_grad()
def logits(model: Any, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Logits of a prefill, a step of one token and one of three."""
    ids, mask, cache, found = inputs["input_ids"], inputs["attention_mask"], None, []
    for queries in (1, 3, 0):
        out = model(ids, attention_mask=mask, **{CACHE: cache}, use_cache=True)
        found.append(out.logits[mask[:, -ids.shape[1] :].bool()])
        cache = out.past_key_values
        ids = torch.arange(1, 1 + queries).expand(len(mask), -1)
        mask = torch.cat((mask, torch.ones_like(ids)), dim=1)
    return found


@pytest.mark.parametrize("pads", [pytest.param((0,), marks=pytest.mark.full), (5, 0, 33)])
def test_every_token_and_logit_is_that_of_stock_attention(stock, prompts, pads):
    inputs = prompts(pads, length=40)
    enabled = enable(copy.deepcopy(stock))
    expected = generate(stock, inputs)
    assert expected[0, 40:].unique().numel() > 4, "the reference must not be degenerate"
    out = generate(enabled, inputs, return_dict_in_generate=True)
    assert type(out.past_key_values).__name__ == "PagedLatentCache"
    assert torch.equal(out.sequences, expected)
    for got, wanted in zip(logits(enabled, inputs), logits(stock, inputs), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=2e-4)


@torch.no_grad()
@pytest.mark.parametrize("hides", mostly_full(("nothing", "left", "right", "any"), "nothing", "right"))
def test_positions_with_offsets_and_gaps(stock, hides):
    """Logits of hidden columns too, from the first visible one on: ``generate`` reads the last column."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, VOCABULARY, (2, 30), generator=generator)
    positions = 3 + torch.randint(1, 4, ids.shape, generator=generator).cumsum(1)
    column, padding = torch.arange(30), torch.tensor([[7], [0]])
    mask = {
        "nothing": torch.ones_like(ids),
        "left": (padding <= column).long(),
        "right": (30 - padding > column).long(),
        "any": (torch.rand(ids.shape, generator=generator) > 0.4).long(),
    }[hides]
    if hides == "any":
        # transformers does not apply a mask to a step's only token in some models with linear attention.
        mask[:, 17] = 1
    found = []
    for model in (stock, enable(copy.deepcopy(stock), page_size=4)):
        cache, logits = None, []
        for begin, end in ((0, 17), (17, 18), (18, 28), (28, 30)):
            options = {CACHE: cache, "attention_mask": None if hides == "nothing" else mask[:, :end]}
            out = model(ids[:, begin:end], position_ids=positions[:, begin:end], use_cache=True, **options)
            cache = out.past_key_values
            logits.append(out.logits)
        found.append(torch.cat(logits, dim=1)[mask.cumsum(1) > 0])
    assert type(cache).__name__ == "PagedLatentCache"
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=2e-4)


@pytest.mark.full
def test_a_mask_that_only_the_model_s_own_attention_applies(stock, prompts):
    inputs = prompts((4, 0), length=30, side="right")
    enabled = enable(copy.deepcopy(stock))
    assert torch.equal(generate(enabled, inputs), generate(stock, inputs))


def test_continuous_batching_is_refused_with_the_reason(stock):
    """transformers' own error for an indexer's layers is "Invalid layer type: indexed_attention"."""
    enabled = enable(copy.deepcopy(stock))
    with pytest.raises(ValueError, match=f"^generate_batch does not support an enabled {type(stock).__name__}: "):
        enabled.generate_batch([[1, 2, 3]], max_new_tokens=2)


def caches_each_head(stock):
    """A cache with keys of each head, as DeepseekV32 and GlmMoeDsa had in transformers 5.17."""
    with torch.no_grad():
        layers = stock(torch.ones(1, 2, dtype=torch.int64), use_cache=True).past_key_values.layers
    return any(layer.keys.shape[1] > 1 for layer in layers if getattr(layer, "keys", None) is not None)


def test_stock_attention_continues_with_a_paged_cache(stock, prompts):
    inputs = prompts((3, 0), length=30)
    enabled = enable(copy.deepcopy(stock))
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    with torch.no_grad():
        cache = enabled(ids[:, :20], attention_mask=mask[:, :20]).past_key_values
        disable(enabled)
        if caches_each_head(stock):
            with pytest.raises(
                ValueError, match="stock attention of this transformers version caches keys of each head"
            ):
                enabled(ids[:, 20:], attention_mask=mask, **{CACHE: cache})
            return
        got = enabled(ids[:, 20:], attention_mask=mask, **{CACHE: cache}).logits
        torch.testing.assert_close(got, stock(ids, attention_mask=mask).logits[:, 20:], rtol=1e-4, atol=2e-4)


@pytest.mark.full
def test_disable_and_pickle(stock, prompts):
    inputs = prompts((0, 2), length=20)
    enabled = pickle.loads(pickle.dumps(enable(copy.deepcopy(stock))))
    expected = generate(stock, inputs)
    assert torch.equal(generate(enabled, inputs), expected)
    restored = disable(enabled)
    assert [type(module) for module in restored.modules()] == [type(module) for module in stock.modules()]
    assert torch.equal(generate(restored, inputs), expected)


def test_the_language_model_inside_kimi_k25(prompts):
    if not hasattr(transformers, "Kimi_K25Config"):
        pytest.skip(f"transformers {transformers.__version__} has no Kimi_K25")
    text = SIZES | EXPERTS | {"model_type": "kimi_k2"}
    vision = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 32}
    torch.manual_seed(0)
    config = transformers.Kimi_K25Config(text_config=text, vision_config=vision, image_token_id=VOCABULARY - 1)
    stock = transformers.Kimi_K25ForConditionalGeneration(config).eval()
    enabled = enable(copy.deepcopy(stock))
    inputs = prompts((5, 0), length=30)
    inputs["input_ids"] = inputs["input_ids"].clamp(max=VOCABULARY - 2)
    out = generate(enabled, inputs, return_dict_in_generate=True)
    assert type(out.past_key_values).__name__ == "PagedLatentCache"
    assert torch.equal(out.sequences, generate(stock, inputs))


def hy4_vl() -> Any:
    if not hasattr(transformers, "HYV4VLConfig"):
        pytest.skip(f"transformers {transformers.__version__} has no HYV4VL")
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
    text = SIZES | EXPERTS | INDEXED | HY4 | {"rope_parameters": rope, "rms_norm_eps": 1e-3}
    vision = VISION | {"out_hidden_size": 64}
    torch.manual_seed(0)
    config = transformers.HYV4VLConfig(text_config=text, vision_config=vision, image_token_id=62, video_token_id=63)
    stock = transformers.HYV4VLForConditionalGeneration(config).eval()
    stock.get_input_embeddings().weight.data[0].normal_(0.0, 0.3)
    return stock


@torch.no_grad()
def test_the_language_model_inside_hy4_vl(prompts):
    """Its positions have three axes, which differ within an image."""
    stock = hy4_vl()
    enabled = enable(copy.deepcopy(stock))
    inputs = prompts((5, 0), length=30)
    inputs["input_ids"] = inputs["input_ids"].clamp(max=61)
    out = generate(enabled, inputs, return_dict_in_generate=True)
    assert type(out.past_key_values).__name__ == "PagedLatentCache"
    assert torch.equal(out.sequences, generate(stock, inputs))
    positions = torch.randint(0, 40, (3, 2, 30), generator=torch.Generator().manual_seed(0)).sort(dim=-1).values
    got, expected = (model(**inputs, position_ids=positions, use_cache=True).logits for model in (enabled, stock))
    torch.testing.assert_close(got[1], expected[1], rtol=1e-4, atol=2e-4)

    ids = inputs["input_ids"][1:]
    enabled.model.rope_deltas = stock.model.rope_deltas = None
    cache = enabled(ids[:, :25], use_cache=True).past_key_values
    got = disable(enabled)(ids[:, 25:], **{CACHE: cache}).logits
    torch.testing.assert_close(got, stock(ids).logits[:, 25:], rtol=1e-4, atol=2e-4)


def test_latents_of_another_layer_than_transformers_reads_are_refused():
    """transformers keeps only the last layer's latents of each kind, regardless of ``kv_source_layers``."""
    rope = {"no_rope_layers": [1, 1, 1, 1, 1], "num_hidden_layers": 5, "indexer_types": ["full"] * 5}
    options = SIZES | EXPERTS | LARGE4 | rope | {"kv_source_layers": [0, 1, 0, 1, 0]}
    if not hasattr(transformers, "MistralLarge4TextConfig"):
        pytest.skip(f"transformers {transformers.__version__} has no MistralLarge4")
    model = transformers.MistralLarge4TextModel(transformers.MistralLarge4TextConfig(**options))
    with pytest.raises(ValueError, match=r"^kv_source_layers must name the last layer before 2 .*, got 0$"):
        enable(model)


def test_attention_with_parts_of_its_own_is_refused():
    model = copy.deepcopy(_stock("v3"))
    model.model.layers[1].self_attn.v_norm = torch.nn.RMSNorm(12)
    with pytest.raises(TypeError, match=r"^DeepseekV3Attention must have no other parts than MLA's, got v_norm$"):
        enable(model)


@pytest.mark.full
def test_every_mla_model_of_this_transformers_is_supported():
    """A new MLA model in a transformers release fails this test until support is decided."""
    unknown = []
    for model_type in transformers.CONFIG_MAPPING:
        config = transformers.CONFIG_MAPPING[model_type]
        if "kv_lora_rank" in inspect.signature(config.__init__).parameters or hasattr(config, "kv_lora_rank"):
            unknown.append(model_type)
    assert {"deepseek_v2", "deepseek_v3", "minicpm3", "deepseek_v32", "kimi_linear"} <= set(unknown)
    assert not {name.removesuffix("_text") for name in unknown} - set(models.SUPPORTED)


def test_a_model_of_two_decoders_is_refused():
    both = torch.nn.ModuleList([_stock("v2"), _stock("v3")])
    with pytest.raises(TypeError, match="model must have one decoder, got ModuleList with 2: enable each of them"):
        enable(both)
