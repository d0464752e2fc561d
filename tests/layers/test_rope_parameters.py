"""Rotary embeddings from the various config formats, compared with transformers' modules."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch

from flashlatte.doctor import read_fields
from flashlatte.layers import MLAConfig, V4Config
from flashlatte.layers.rope import inverse_frequencies

transformers = pytest.importorskip("transformers")

SIZES = {
    "model_type": "deepseek_v3",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 64,
    "v_head_dim": 16,
    "max_position_embeddings": 4096,
}
YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 512,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
SHORT_YARN = {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
CASES = {
    "scaling alone": {"rope_theta": 20000.0, "rope_scaling": YARN},
    "parameters alone": {"rope_parameters": YARN | {"rope_theta": 20000.0}},
    "yarn beside plain parameters": {"rope_parameters": PLAIN, "rope_scaling": YARN},
    "another theta": {"rope_parameters": PLAIN, "rope_scaling": PLAIN | {"rope_theta": 5e5}},
    "another factor": {"rope_parameters": YARN | {"rope_theta": 5e5}, "rope_scaling": YARN | {"factor": 2.0}},
    "plain beside yarn parameters": {"rope_parameters": YARN, "rope_scaling": PLAIN},
    "empty scaling": {"rope_parameters": YARN, "rope_scaling": {}},
    "two original lengths": {"rope_theta": 10000.0, "rope_scaling": YARN, "original_max_position_embeddings": 64},
    "no original length": {"rope_theta": 10000.0, "rope_scaling": SHORT_YARN},
    "an upper original length": {"rope_scaling": SHORT_YARN, "original_max_position_embeddings": 512},
    "a factor of null": {"rope_scaling": YARN | {"factor": None, "original_max_position_embeddings": 1024}},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES)
def test_frequencies_and_softmax_scale_are_transformers(case, tmp_path):
    """Read from a mapping, a file and a config object, before and after transformers created a model from it."""
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as host

    fields = SIZES | CASES[case]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    stock = transformers.DeepseekV3Config.from_dict(copy.deepcopy(fields))
    read = [MLAConfig.from_transformers(source) for source in (fields, read_fields(tmp_path), stock)]
    if CASES[case].get("rope_scaling", {}).get("factor", 1) is None:
        # transformers computes the frequencies, and no softmax scale.
        scale = pytest.approx(read[0].softmax_scale)
    else:
        scale = pytest.approx(host.DeepseekV3Attention(stock, layer_idx=0).scaling, rel=1e-9)
    frequencies = host.DeepseekV3RotaryEmbedding(stock).inv_freq
    for config in (*read, MLAConfig.from_transformers(stock)):
        torch.testing.assert_close(inverse_frequencies(config.rope, 64), frequencies, rtol=1e-5, atol=0)
        assert config.softmax_scale == scale


@pytest.mark.parametrize(
    "family",
    [
        *("AXK1", "DeepseekV2", "DeepseekV3", "DeepseekV32", "Glm4MoeLite"),
        *("GlmMoeDsa", "LongcatFlash", "MiniCPM3", "SarvamMLA", "Youtu"),
    ],
)
def test_positions_of_a_config_that_gives_none_are_transformers(family):
    if not hasattr(transformers, f"{family}Config"):
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    host = getattr(transformers, f"{family}Config")
    fields = {name: value for name, value in SIZES.items() if name != "max_position_embeddings"}
    fields |= {"model_type": host.model_type, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048}
    rope = MLAConfig.from_transformers(fields | {"rope_scaling": YARN | {"factor": None}}).rope
    assert rope.yarn is not None
    assert (rope.max_position, rope.yarn.factor) == (host().max_position_embeddings, rope.max_position / 512)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"max_position_embeddings": None}, TypeError, "^max_position_embeddings must be an int, got NoneType$"),
        (
            {"original_max_position_embeddings": None, "rope_scaling": YARN},
            TypeError,
            "^original_max_position_embeddings must be an int, got NoneType$",
        ),
    ],
)
def test_lengths_that_are_null_are_named(change, error, message):
    with pytest.raises(error, match=message):
        MLAConfig.from_transformers(SIZES | change)


V4_SIZES = {
    "model_type": "deepseek_v4",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "q_lora_rank": 24,
    "num_attention_heads": 4,
    "head_dim": 64,
    "o_groups": 2,
    "o_lora_rank": 16,
    "sliding_window": 8,
    "index_n_heads": 8,
    "index_head_dim": 32,
    "index_topk": 16,
    "compress_ratios": [0, 4],
    "max_position_embeddings": 4096,
    "qk_rope_head_dim": 32,
    "compress_rope_theta": 170000.0,
}
NESTED = {"main": {"rope_theta": 1e4}, "compress": SHORT_YARN | {"rope_theta": 2e5, "partial_rotary_factor": 0.5}}
V4_CASES = {
    "scaling alone": {"rope_scaling": YARN},
    "nested parameters": {"rope_parameters": NESTED},
    "nested parameters of no theta": {"rope_parameters": {"main": {}, "compress": SHORT_YARN}, "rope_theta": 3e4},
    "yarn beside nested parameters": {"rope_parameters": NESTED, "rope_scaling": YARN},
    "plain beside flat parameters": {"rope_parameters": YARN, "rope_scaling": PLAIN},
    "no original length": {"rope_scaling": SHORT_YARN},
    "two original lengths": {"rope_scaling": YARN, "original_max_position_embeddings": 64},
    "two rotated widths": {"partial_rotary_factor": 0.25},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", V4_CASES)
def test_frequencies_of_deepseek_v4_are_transformers(case):
    if not hasattr(transformers, "DeepseekV4Config"):
        pytest.skip(f"transformers {transformers.__version__} has no DeepseekV4")
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as host

    fields = V4_SIZES | V4_CASES[case]
    if "partial_rotary_factor" not in fields:
        fields["partial_rotary_factor"] = 0.5
    stock = transformers.DeepseekV4Config.from_dict(copy.deepcopy(fields))
    read = [V4Config.layers(source) for source in (fields, stock)]
    rotary = host.DeepseekV4RotaryEmbedding(stock)
    for main, compress in (*read, V4Config.layers(stock)):
        for name, layer in (("main", main), ("compress", compress)):
            frequencies = getattr(rotary, f"{name}_inv_freq")
            torch.testing.assert_close(inverse_frequencies(layer.rope, layer.rope_dim), frequencies, rtol=1e-5, atol=0)
            scale = 1.0 if layer.rope.yarn is None else layer.rope.yarn.rotation_scale
            assert scale == pytest.approx(getattr(rotary, f"{name}_attention_scaling"))


@pytest.mark.parametrize("changes", [{}, {"mscale": 0.7, "mscale_all_dim": 1.3}, {"attention_factor": 1.25}], ids=str)
def test_frequencies_and_softmax_scale_of_dots3_note_are_transformers(changes):
    from support.engine_models import new_model

    yarn = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 8.0, "mscale_all_dim": 1.3} | changes
    stock: Any = new_model("Dots3Note", rope_parameters=yarn)
    for layer, kind in enumerate(("indexed_attention", "sliding_attention")):
        config = MLAConfig.from_transformers(stock.config, layer)
        assert config.softmax_scale == stock.model.layers[layer].self_attn.scaling
        assert config.rope.yarn is not None
        assert config.rope.yarn.rotation_scale == getattr(stock.model.rotary_emb, f"{kind}_attention_scaling")
        expected = getattr(stock.model.rotary_emb, f"{kind}_inv_freq")
        torch.testing.assert_close(inverse_frequencies(config.rope, config.qk_rope_head_dim), expected)


def test_a_yarn_of_dots3_note_whose_bounds_are_not_rounded_is_refused():
    from support.engine_models import new_model

    yarn = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 8.0, "truncate": False}
    stock = new_model("Dots3Note", rope_parameters=yarn)
    with pytest.raises(ValueError, match=r"^truncate must be true in the yarn of a dots3_note_text, got false"):
        MLAConfig.from_transformers(stock.config, 0)
