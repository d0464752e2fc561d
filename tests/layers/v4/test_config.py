"""A checkpoint's config and transformers' version of it give the same layers."""

from __future__ import annotations

import pytest

from flashlatte.layers.v4 import V4Config

CHECKPOINT = {
    "model_type": "deepseek_v4",
    "num_hidden_layers": 5,
    "hidden_size": 256,
    "q_lora_rank": 64,
    "num_attention_heads": 8,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "o_groups": 2,
    "o_lora_rank": 32,
    "sliding_window": 100,
    "index_n_heads": 8,
    "index_head_dim": 128,
    "index_topk": 16,
    # One more than the number of layers: that of the MTP layer.
    "compress_ratios": [0, 0, 4, 128, 4, 0],
    "rope_theta": 10000,
    "compress_rope_theta": 170000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "max_position_embeddings": 1048576,
}


@pytest.mark.parametrize("rates", [{}, {"compress_rate_csa": 8, "compress_rate_hca": 64}])
def test_a_checkpoints_config_is_transformers(rates):
    transformers = pytest.importorskip("transformers", minversion="5.23")
    theirs = transformers.DeepseekV4Config(**CHECKPOINT | rates)
    layers = V4Config.layers(CHECKPOINT | rates)
    assert layers == V4Config.layers(theirs) == V4Config.layers(theirs.to_dict())
    assert layers[3] == V4Config.from_transformers(theirs, 3)


def test_layers_of_a_checkpoint():
    layers = V4Config.layers(CHECKPOINT)
    assert [layer.ratio for layer in layers] == [0, 0, 4, 128, 4]
    assert [layer.indexer is not None for layer in layers] == [False, False, True, False, True]
    assert {(layer.head_dim, layer.rope_dim, layer.window) for layer in layers} == {(512, 64, 100)}
    assert [layer.rope.theta for layer in layers] == [10000, 10000, 170000, 170000, 170000]
    assert [layer.rope.yarn is not None for layer in layers] == [False, False, True, True, True]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "deepseek_v41"}, "^model_type must be 'deepseek_v4', got 'deepseek_v41'$"),
        (
            {"head_dim": None, "index_topk": None},
            "^config must have head_dim, index_topk, got a deepseek_v4 config without",
        ),
        ({"compress_ratios": [0, 0, 4, 8, 4]}, "^compress_ratios must be 0, 4 or 128, got 8$"),
        ({"compress_ratios": [0, 0, 4]}, "^compress_ratios must have an entry for each of num_hidden_layers 5, got 3$"),
        ({"layer_types": ["full_attention"] * 5}, r"^layer_types\[0\] must be one of sliding_attention, .*full_atten"),
        (
            {"rope_scaling": CHECKPOINT["rope_scaling"] | {"truncate": False}},
            "^truncate must be true in the yarn of DeepSeek-V4, got false$",
        ),
        ({"rope_scaling": {"type": "linear"}}, "^rope_type must be default or yarn, got 'linear'$"),
    ],
)
def test_configs_that_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        V4Config.layers(CHECKPOINT | change)
