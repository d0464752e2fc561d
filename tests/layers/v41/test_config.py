"""Layers of a V4.1 checkpoint's config."""

from __future__ import annotations

from typing import Any

import pytest

from flashlatte.layers.rope_config import Rope, Yarn
from flashlatte.layers.v4 import V4Attention, V4Config, V4IndexerConfig
from flashlatte.layers.v41 import CandidateConfig, V41Attention, V41Config, allocate_caches
from flashlatte.layers.v41.warmup import different_layers

CHECKPOINT = {
    "model_type": "deepseek_v41",
    "architectures": ["DeepseekV41ForCausalLM"],
    "text_config": {
        "model_type": "deepseek_v41_text",
        "num_hidden_layers": 7,
        # One more than the number of layers: that of the MTP layer.
        "compress_ratios": [0, 2, 2, 1, 1, 1, 0, 0],
        "kv_source_layer_ids": [1, 3],
        "index_source_layer_ids": [1, 3, 5],
        "candidate_source_layer_id": 3,
        "candidate_topk_blocks": 64,
        "candidate_block_size": 32,
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
    },
    "vision_config": {"num_hidden_layers": 2},
}


def of_text(**changes):
    return CHECKPOINT | {"text_config": CHECKPOINT["text_config"] | changes}


def test_layers_of_a_checkpoint():
    layers = V41Config.layers(CHECKPOINT)
    assert layers == V41Config.layers(CHECKPOINT["text_config"])
    assert [layer.ratio for layer in layers] == [0, 2, 2, 1, 1, 1, 0]
    assert [layer.kv_source for layer in layers] == [None, 1, 1, 3, 3, 3, None]
    assert [layer.index_source for layer in layers] == [None, 1, 1, 3, 3, 5, None]
    assert [layer.stores_groups for layer in layers] == [False, True, False, True, False, False, False]
    assert [layer.selects_groups for layer in layers] == [False, True, False, True, False, True, False]
    assert [layer.candidates is not None for layer in layers] == [False, False, False, True, False, True, False]
    assert [layer.publishes_candidates for layer in layers] == [False, False, False, True, False, False, False]
    assert [layer.state_dim for layer in layers] == [0, 1024, 0, 0, 0, 0, 0]
    assert {(layer.head_dim, layer.rope_dim, layer.window) for layer in layers} == {(512, 64, 100)}
    assert [layer.rope.theta for layer in layers] == [10000, *[170000] * 5, 10000]
    assert [layer.rope.yarn is not None for layer in layers] == [False, *[True] * 5, False]
    assert layers[5].candidates == CandidateConfig(3, 64, 32)
    assert layers[5] == V41Config.from_transformers(CHECKPOINT, 5)


def test_caches_are_shared():
    layers = V41Config.layers(CHECKPOINT)
    caches = allocate_caches(layers, 2, 16, state_pages=2, group_format="v41_fp4")
    assert {cache.window.shape for cache in caches} == {(2, 16, 1, 528)}
    assert [None if cache.groups is None else cache.groups.shape[3] for cache in caches] == [None, *[288] * 5, None]
    assert caches[1].groups is caches[2].groups
    assert caches[3].groups is caches[4].groups is caches[5].groups is not caches[1].groups
    assert [cache.index_keys is None for cache in caches] == [True, False, True, False, True, False, True]
    assert caches[3].index_keys is caches[5].index_keys
    assert [cache.states is None for cache in caches] == [True, False, *[True] * 5]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": None}, "^config must have head_dim, got a deepseek_v41 config without them$"),
        ({"compress_ratios": [0, 2]}, "^compress_ratios must have an entry for each of num_hidden_layers 7, got 2$"),
        ({"compress_ratios": [0, 2, 4, 1, 1, 1, 0]}, "^compress_ratios must be 0, 1 or 2, got 4$"),
        ({"kv_source_layer_ids": [3]}, "^kv_source_layer_ids must "),
        ({"index_source_layer_ids": []}, "^index_source_layer_ids must "),
        ({"kv_source_layer_ids": [1, 4]}, r"^layers\[3\].kv_source must be a layer with ratio 1, got 1 with 2$"),
        ({"index_source_layer_ids": [1, 4]}, r"^layers\[3\].index_source must be a layer with ratio 1, got 1 with 2$"),
        ({"kv_source_layer_ids": [1, 3, 6]}, "^kv_source_layer_ids must be layers with groups, got 6 with ratio 0$"),
        ({"kv_source_layer_ids": [1, 3, 4]}, r"^layers\[5\].kv_source must have an indexer, whose .* read, got 4$"),
        ({"candidate_source_layer_id": 4}, "^candidate_source_layer_id must be one of index_source_layer_ids, got 4$"),
        (
            {"candidate_source_layer_id": 1},
            r"^layers\[3\].candidates.source must be a layer with ratio 1, got 1 with 2$",
        ),
        ({"candidate_topk_blocks": 8192}, "^candidate_topk_blocks must be at most 4096, got 8192$"),
        ({"candidate_block_size": 0}, "^candidate_block_size must be"),
        (
            {"index_topk": 4096},
            "^candidates must have at least indexer.topk 4096 groups, got 64 blocks of 32$",
        ),
        ({"rope_scaling": {"type": "linear"}}, "^rope_type must be default or yarn, got 'linear'$"),
    ],
)
def test_configs_that_are_refused(change, message):
    with pytest.raises((TypeError, ValueError), match=message):
        V41Config.layers(of_text(**change))


def test_yarn_never_scales():
    """As in vLLM, also for nested parameters, for which transformers' default differs."""
    yarn = CHECKPOINT["text_config"]["rope_scaling"] | {"rope_type": "yarn"}
    parameters = {"main": {"rope_type": "default", "rope_theta": 10000}, "compress": yarn | {"rope_theta": 170000}}
    layers = V41Config.layers(of_text(rope_scaling=None, rope_parameters=parameters))
    assert layers == V41Config.layers(CHECKPOINT)
    scaled = V41Config.layers(of_text(rope_scaling=yarn | {"mscale": 1.0, "mscale_all_dim": 2.0}))
    assert scaled == layers


def test_another_model():
    with pytest.raises(ValueError, match=r"^model_type must be 'deepseek_v41', got 'deepseek_v4'$"):
        V41Config.layers(CHECKPOINT["text_config"] | {"model_type": "deepseek_v4"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ratio": 4}, "^ratio must be 0, 1 or 2, got 4$"),
        ({"ratio": 0, "indexer": None}, "^kv_source must be None in a layer with ratio 0, got 0$"),
        ({"kv_source": 1}, "^kv_source must be at most layer 0, got 1$"),
        (
            {"rope": Rope(theta=160000.0, yarn=Yarn(4.0, 64))},
            r"^rope.yarn must not scale the rotation \(attention_factor 1.0\), got 1.13",
        ),
        ({"indexer": None}, "^indexer must be given in a layer with groups, got None$"),
        (
            {"candidates": CandidateConfig(1, 64, 32)},
            "^candidates must be None in layer 0, which has no indexer or precedes their source 1$",
        ),
    ],
)
def test_layers_that_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        V41Config(**change)


def test_a_layer_and_its_config():
    small: dict[str, Any] = {
        "hidden_size": 64,
        "q_lora_rank": 16,
        "num_attention_heads": 2,
        "o_groups": 1,
        "o_lora_rank": 16,
    }
    config = V41Config(**small, indexer=V4IndexerConfig(2, 128, 8))
    with pytest.raises(TypeError, match=r"^config must be of type V4Config, got V41Config$"):
        V4Attention(config)
    with pytest.raises(TypeError, match=r"^config must be of type V41Config, got V4Config$"):
        V41Attention(V4Config(**small))


def test_warmup_runs_a_layer_of_each_kind():
    """With the layers that it reads, renumbered."""
    found = different_layers(V41Config.layers(CHECKPOINT))
    assert [(one.layer, one.ratio, one.kv_source, one.index_source) for one in found] == [
        (0, 0, None, None),
        (1, 2, 1, 1),
        (2, 2, 1, 1),
        (3, 1, 3, 3),
        (4, 1, 3, 3),
        (5, 1, 3, 5),
    ]
    many = [0, *[2] * 4, *[1] * 6]
    sources = {"kv_source_layer_ids": [1, 5], "index_source_layer_ids": [1, 5, 7, 9], "candidate_source_layer_id": 5}
    found = different_layers(V41Config.layers(of_text(num_hidden_layers=11, compress_ratios=many, **sources)))
    assert [(one.layer, one.ratio, one.kv_source, one.index_source) for one in found[3:]] == [
        (3, 1, 3, 3),
        (4, 1, 3, 3),
        (5, 1, 3, 5),
    ]
    assert [one.candidates for one in found[3:]] == [CandidateConfig(3, 64, 32), None, CandidateConfig(3, 64, 32)]
