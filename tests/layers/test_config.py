"""``MLAConfig`` from transformers' configs and from checkpoints' JSON, and its rotary embedding."""

from __future__ import annotations

import copy
import dataclasses
import math

import pytest
import torch

from flashlatte.layers import models
from flashlatte.layers.config import IndexerConfig, MLAConfig
from flashlatte.layers.rope import inverse_frequencies, table
from flashlatte.layers.rope_config import QueryScaling, Rope, Yarn
from flashlatte.layers.v4.config import V4Config, V4IndexerConfig

# What deepseek-ai/DeepSeek-V3's config.json says of attention.
V3_JSON = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 163840,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "attention_bias": False,
}

YARN = V3_JSON["rope_scaling"]


def test_from_a_checkpoints_json():
    config = MLAConfig.from_transformers(V3_JSON)
    assert config == MLAConfig(
        7168,
        128,
        q_lora_rank=1536,
        rope=Rope(10000.0, "interleaved", 163840, Yarn(40.0, 4096, mscale=1.0, mscale_all_dim=1.0)),
    )
    assert (config.head_dim, config.qk_head_dim) == (576, 192)
    # mscale 0.1 ln 40 + 1 = 1.3689, squared, over √192.
    assert config.softmax_scale == pytest.approx(1.368888**2 / 192**0.5, rel=1e-5)


SARVAM_JSON = V3_JSON | {
    "model_type": "sarvam_mla",
    "head_dim": 576,
    "q_lora_rank": None,
    "rope_scaling": YARN | {"type": "deepseek_yarn"},
}


@pytest.mark.parametrize(("name", "json"), [("DeepseekV3", V3_JSON), ("SarvamMLA", SARVAM_JSON)])
def test_json_and_transformers_configs_agree(name, json):
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, f"{name}Config"):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    from_object = MLAConfig.from_transformers(getattr(transformers, f"{name}Config")(**copy.deepcopy(json)))
    assert from_object == MLAConfig.from_transformers(json)


FAMILIES = ("AXK1", "DeepseekV2", "DeepseekV3", "DeepseekV32", "Glm4MoeLite", "GlmMoeDsa", "LongcatFlash", "Youtu")


@pytest.mark.parametrize("said", [{}, {"rope_interleave": False}, {"rope_interleave": None}], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_rotation_defaults_of_a_checkpoint_are_those_of_transformers(family, said):
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, f"{family}Config"):
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    if family == "Glm4MoeLite" and said == {"rope_interleave": None}:
        pytest.skip("its config refuses null")
    host = getattr(transformers, f"{family}Config")
    json = {name: value for name, value in V3_JSON.items() if not name.startswith("rope")} | said
    json |= {"index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048, "model_type": host.model_type}
    rope = MLAConfig.from_transformers(json).rope
    assert rope == MLAConfig.from_transformers(host.from_dict(dict(json))).rope
    honours = family in ("AXK1", "DeepseekV3", "Glm4MoeLite", "Youtu")
    assert rope.layout == ("half" if honours and said else "interleaved")


@pytest.mark.parametrize("family", ["glm5_next", "mistral_large4"])
def test_a_family_that_is_refused_has_its_reason(family):
    transformers = pytest.importorskip("transformers")
    if family not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    with pytest.raises(ValueError, match=f"is not supported: {models.SUPPORTED[family].layer_refusal}$"):
        MLAConfig.from_transformers(transformers.CONFIG_MAPPING[family]())


def test_a_nested_text_config():
    config = MLAConfig.from_transformers({"model_type": "kimi_k25", "text_config": V3_JSON | {"model_type": "kimi_k2"}})
    assert config.num_attention_heads == 128


# Objects that could be passed instead of a config.
@pytest.mark.parametrize("config", ["deepseek-ai/DeepSeek-V3", torch.nn.Linear(1, 1), None], ids=str)
@pytest.mark.parametrize("read", [MLAConfig.from_transformers, V4Config.layers])
def test_objects_that_are_not_configs_are_rejected(read, config):
    got = repr(config) if isinstance(config, str) else type(config).__name__
    with pytest.raises(
        TypeError, match=rf"^config must be a transformers config \(a model's \.config\), .*, got {got}$"
    ):
        read(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_lora_rank": None}, "config must be an MLA model's, with kv_lora_rank, got model_type deepseek_v3"),
        ({"v_head_dim": None, "hidden_size": None}, "config must have hidden_size, v_head_dim"),
        ({"model_type": "deepseek_v9"}, "model_type must be one of .*deepseek_v2.*, got 'deepseek_v9'"),
        (
            {"model_type": "glm5_next", "text_config": V3_JSON},
            "'glm5_next' is not supported: its indexer selects pools",
        ),
        ({"model_type": "mistral_large4", "kv_lora_rank": None}, "'mistral_large4' is not supported: the frequencies"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_type must be default or yarn, got 'linear'"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim must be even, got 63"),
        ({"num_attention_heads": 0}, "num_attention_heads must be at least 1, got 0"),
        ({"rope_theta": 1.0}, "theta must be a finite number above 1, got 1.0"),
        ({"rope_theta": "10000"}, "rope_theta must be a number, got str"),
        ({"rope_scaling": 5}, "rope_scaling of a config must be an object, got 5"),
        ({"rope_scaling": YARN | {"factor": 0}}, "factor must be a finite number above 0, got 0"),
        ({"rope_scaling": YARN | {"factor": "4"}}, "factor must be a number, got str"),
        ({"rope_scaling": YARN | {"beta_fast": -1}}, "beta_fast must be a finite number above 0, got -1"),
        (
            {"rope_scaling": YARN | {"original_max_position_embeddings": 0}},
            "original_max_position_embeddings must be at least 1, got 0",
        ),
        ({"sliding_window": 512}, "no fields about attention that are unknown here, got sliding_window: "),
        ({"use_qk_norm": True, "attn_sinks": [0.0]}, "unknown here, got attn_sinks, use_qk_norm: "),
        ({"rope_scaling": YARN | {"ntk_alpha": 8}}, "unknown here, got rope_parameters.ntk_alpha: "),
        ({"rope_scaling": YARN | {"llama_4_scaling_beta": 0.1}}, "must have no llama_4_scaling_beta, got 0.1"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types must be .*, got 'sliding_attention'"),
        ({"model_type": "kimi_linear", "mla_use_nope": False}, "mla_use_nope of a kimi_linear must be True, got False"),
        ({"model_type": "longcat_flash", "mla_scale_q_lora": False}, "mla_scale_q_lora of a longcat_flash must be"),
        ({"indexer_rope_interleave": True}, "indexer_rope_interleave of a deepseek_v3 must be False, got True"),
        ({"attention_bias": "no"}, "attention_bias must be True or False, got 'no'"),
        ({"text_config": 5}, "text_config of a config must be an object, got 5"),
        ({"model_type": ["deepseek_v3"]}, "model_type must be a str"),
    ],
)
def test_a_config_without_mla_is_named(changes, message):
    with pytest.raises((TypeError, ValueError), match=message):
        MLAConfig.from_transformers(V3_JSON | changes)


@pytest.mark.parametrize("number", [math.nan, math.inf, 0.0, -1.0])
@pytest.mark.parametrize("name", ["factor", "beta_fast", "beta_slow", "attention_factor"])
def test_yarn_fields_must_be_numbers(name, number):
    with pytest.raises(ValueError, match=f"{name} must be a finite number above 0, got {number}"):
        Yarn(**{"factor": 4.0, "original_max_position": 64} | {name: number})


@pytest.mark.parametrize(
    "options", [{"norm_eps": math.nan}, {"norm_eps": -1e-6}, {"query_factor": math.inf}, {"latent_factor": math.nan}]
)
def test_numbers_that_would_make_every_output_nan_are_refused(options):
    (name,) = options
    with pytest.raises(ValueError, match=f"{name} must be a finite number"):
        MLAConfig(64, 4, **options)


def test_query_scaling():
    """Llama 4's formula, computed by hand: the factor grows with the logarithm of complete spans of positions."""
    scaling = QueryScaling(beta=0.5, original_max_position=10)
    got = scaling.factors(torch.tensor([0, 9, 10, 19, 20, 100]))
    assert got.tolist() == pytest.approx([1 + 0.5 * math.log(1 + spans) for spans in (0, 0, 1, 1, 2, 10)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_results_do_not_depend_on_the_default_dtype(dtype):
    scaling, positions = QueryScaling(beta=0.1, original_max_position=8192), torch.arange(70_000)
    expected, before = scaling.factors(positions), torch.get_default_dtype()
    assert expected.dtype == torch.float32
    try:
        torch.set_default_dtype(dtype)
        got = scaling.factors(positions)
    finally:
        torch.set_default_dtype(before)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("numbers", "error", "message"),
    [
        ((-0.1, 8), ValueError, "beta must be a finite number from 0, got -0.1"),
        ((math.nan, 8), ValueError, "beta must be a finite number from 0, got nan"),
        (("0.1", 8), TypeError, "beta must be a number"),
        ((0.1, 0), ValueError, "original_max_position must be"),
    ],
)
def test_query_scaling_fields_must_be_numbers(numbers, error, message):
    with pytest.raises(error, match=message):
        QueryScaling(*numbers)


def test_mistral_without_its_scaling_is_refused():
    with pytest.raises(ValueError, match="rope_parameters must have llama_4_scaling_beta, got"):
        MLAConfig.from_transformers(V3_JSON | {"model_type": "mistral4"})


def test_mistral_may_have_query_scaling_and_yarn():
    json = V3_JSON | {"model_type": "mistral4", "rope_scaling": YARN | {"llama_4_scaling_beta": 0.3}}
    assert MLAConfig.from_transformers(json).query_scaling == QueryScaling(0.3, 4096)


@pytest.mark.parametrize(("layer", "error"), [(0, ValueError), (-1, ValueError), (1.5, TypeError)])
def test_layers_that_cannot_share_a_selection(layer, error):
    with pytest.raises(error, match="shared_layers must be"):
        IndexerConfig(shared_layers=(2, layer))


def test_a_layout_that_does_not_exist():
    with pytest.raises(ValueError, match="layout must be one of interleaved, half, none, got 'neox'"):
        Rope(layout="neox")


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "default", "rope_theta": 5000.0},
        {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0},
        {"rope_type": "yarn", "factor": 4.0, "mscale": 0.707, "mscale_all_dim": 1.3, "beta_fast": 16, "beta_slow": 2},
        {"rope_type": "yarn", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.25},
        {"rope_type": "yarn", "factor": 4.0, "truncate": False},
    ],
    ids=str,
)
def test_the_table_is_transformers(scaling):
    transformers = pytest.importorskip("transformers")
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding

    if scaling["rope_type"] == "yarn":
        scaling = {"rope_theta": 10000.0, "original_max_position_embeddings": 4096} | scaling
    host_config = transformers.DeepseekV3Config(max_position_embeddings=8192, rope_parameters=scaling)
    cosine, sine = DeepseekV3RotaryEmbedding(host_config)(torch.zeros(1), torch.arange(8192)[None])
    rope = MLAConfig.from_transformers(host_config).rope
    expected = torch.cat((cosine[0, :, :32], sine[0, :, :32]), dim=-1)
    torch.testing.assert_close(table(rope, 64, torch.device("cpu")), expected, rtol=0, atol=1e-6)


def test_frequencies_without_yarn():
    frequencies = inverse_frequencies(Rope(theta=100.0), 4)
    torch.testing.assert_close(frequencies, torch.tensor([1.0, 0.1]))


def test_one_table_for_all_layers():
    rope, device = Rope(max_position=32), torch.device("cpu")
    assert table(rope, 8, device) is table(dataclasses.replace(rope), 8, device)


@pytest.mark.parametrize(
    ("part", "fields", "message"),
    [
        (MLAConfig, {"rope": {"theta": 1e4}}, "^rope must be of type Rope, got dict$"),
        (MLAConfig, {"q_lora_rank": 8, "indexer": True}, "^indexer must be of type IndexerConfig or None, got bool$"),
        (Rope, {"yarn": 4.0}, "^yarn must be of type Yarn or None, got float$"),
        (IndexerConfig, {"shared_layers": 2}, "^shared_layers must be of type Sequence, got int$"),
        (IndexerConfig, {"head_dim": "128"}, "^head_dim must be an int, got str$"),
    ],
)
def test_parts_of_a_wrong_type_are_named(part, fields, message):
    sizes = {"hidden_size": 64, "num_attention_heads": 4} if part is MLAConfig else {}
    with pytest.raises(TypeError, match=message):
        part(**sizes, **fields)


@pytest.mark.parametrize("kind", [IndexerConfig, V4IndexerConfig])
@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"topk": 4097}, "topk of an indexer must be at most 4096, got 4097"),
        ({"topk": 0}, "topk must be at least 1, got 0"),
        ({"head_dim": 48}, "head_dim of an indexer must be 32, 64 or 128, got 48"),
    ],
)
def test_indexer_sizes_that_operations_do_not_support(kind, sizes, message):
    kind(topk=4096)
    with pytest.raises(ValueError, match=message):
        kind(**sizes)


def test_disabled_fields_and_fields_of_other_parts_are_accepted():
    harmless = {"sliding_window": None, "use_sliding_window": False, "attn_softcap": 0.0, "moe_gate": "sigmoid"}
    harmless |= {"num_nextn_predict_layers": 1, "router_sink": 4, "attn_implementation": "eager"}
    assert MLAConfig.from_transformers(V3_JSON | harmless) == MLAConfig.from_transformers(V3_JSON)


ONE_CONFIG = [name for name, traits in models.SUPPORTED.items() if not (traits.layer_refusal or traits.has_layers)]


@pytest.mark.parametrize("name", [*ONE_CONFIG, "hy_v4_vl_text"])
def test_every_field_of_transformers_configs_is_known(name):
    transformers = pytest.importorskip("transformers")
    if name not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    MLAConfig.from_transformers(transformers.CONFIG_MAPPING[name]())


def test_former_names_of_layer_types():
    """transformers before 5.18, and checkpoints saved with it, have other names."""
    fields = V3_JSON | {"model_type": "deepseek_v32", "index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048}
    former = fields | {"layer_types": ["deepseek_sparse_attention"]}
    assert MLAConfig.from_transformers(former) == MLAConfig.from_transformers(fields)
    nested = {"model_type": "some_vl", "text_config": former}
    assert MLAConfig.from_transformers(nested) == MLAConfig.from_transformers(fields)


DOTS3_JSON = V3_JSON | {
    "model_type": "dots3_note_text",
    "index_n_heads": 16,
    "index_head_dim": 128,
    "index_topk": 2048,
    "rms_norm_eps": 1e-5,
    "num_hidden_layers": 3,
    "layer_types": ["indexed_attention", "sliding_attention", "indexed_attention"],
    "sliding_window": 512,
    "rope_scaling": None,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 5e4},
        "indexed_attention": {"rope_type": "default", "rope_theta": 8e7},
    },
    "per_layer_config": {"1": {"kv_lora_rank": 1024, "num_attention_heads": 64}},
}


def test_layers_that_differ():
    first, second, third = MLAConfig.layers(DOTS3_JSON)
    assert first == third
    assert (first.kv_lora_rank, first.window, first.rope.theta, first.latent_factor) == (512, None, 8e7, 14**0.5)
    assert first.indexer == IndexerConfig(16, rope_layout="interleaved")
    assert (second.kv_lora_rank, second.window, second.rope.theta, second.latent_factor) == (1024, 512, 5e4, 7**0.5)
    assert (second.num_attention_heads, second.indexer, second.output_gate) == (64, None, "head")
    assert MLAConfig.layers(V3_JSON | {"num_hidden_layers": 2}) == (MLAConfig.from_transformers(V3_JSON),) * 2


@pytest.mark.parametrize(
    ("changes", "layer", "message"),
    [
        ({}, None, "layer must be given for a dots3_note_text, whose layers differ, got None"),
        ({}, 3, "layer must be from 0 to 2, got 3"),
        ({"sliding_window": None}, 1, "config must have sliding_window for layers of sliding_attention, got None"),
        ({"layer_types": ["full_attention", "indexed_attention"]}, 0, "must not have both indexed_attention and full"),
        ({"swa_kv_lora_rank": 1024}, 0, "unknown here, got swa_kv_lora_rank"),
    ],
)
def test_layers_that_cannot_be_read(changes, layer, message):
    with pytest.raises(ValueError, match=message):
        MLAConfig.from_transformers(DOTS3_JSON | changes, layer)


def test_properties_of_the_new_families():
    common = V3_JSON | {"index_n_heads": 16, "index_head_dim": 128, "index_topk": 2048, "rms_norm_eps": 1e-5}
    common |= {"num_hidden_layers": 6}
    hy4 = MLAConfig.from_transformers(common | {"model_type": "hy_v4_vl_text"})
    assert (hy4.output_gate, hy4.attn_sink, hy4.norm_eps, hy4.rope.layout) == ("channel", True, 1e-5, "interleaved")
    assert hy4.indexer == IndexerConfig(
        16, rope_layout="interleaved", rope_last=True, norm_eps=1e-5, shared_layers=(2, 3, 4)
    )
    assert MLAConfig.from_transformers(common | {"model_type": "hy_v4"}).norm_eps == 1e-6
    kimi = MLAConfig.from_transformers(common | {"model_type": "kimi_linear", "mla_use_nope": True})
    assert (kimi.rope.layout, kimi.rope.yarn, kimi.softmax_scale) == ("none", None, 192**-0.5)
    assert MLAConfig.from_transformers(common | {"model_type": "bailing_hybrid"}).output_gate == "head"
    assert MLAConfig.from_transformers(common | {"model_type": "axk2"}).output_gate == "query"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"output_gate": "token"}, "output_gate must be one of head, channel, query, got 'token'"),
        ({"output_gate": "query"}, "q_lora_rank must be set in a config with output_gate 'query', got None"),
        ({"key_rope_norm": True, "qk_rope_head_dim": 0}, "key_rope_norm needs rope dims, got qk_rope_head_dim 0"),
        ({"qk_rope_head_dim": -2}, "qk_rope_head_dim must be at least 0, got -2"),
        ({"attn_sink": 1}, "attn_sink must be True or False, got 1"),
    ],
)
def test_inconsistent_parts(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        MLAConfig(64, 4, **options)
