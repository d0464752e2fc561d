"""A ``config.json`` with one wrong field: an error that names a field, or a result, within seconds."""

from __future__ import annotations

import copy
import json
import re
import time
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashlatte import cli
from flashlatte.doctor.calls import typical_calls, v4_calls, v41_calls
from flashlatte.doctor.models import read_model
from flashlatte.layers import MLAConfig
from flashlatte.layers.models import MAX_LAYERS, SUPPORTED

# Processor time. As many layers as accepted take one; an unbounded number of them takes minutes.
SECONDS = 10
YARN = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
MLA = {
    "num_hidden_layers": 6,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 163840,
    "rope_theta": 10000.0,
    "rope_interleave": True,
    "attention_bias": False,
    "rope_scaling": YARN,
}
INDEXER = {
    "index_n_heads": 16,
    "index_head_dim": 128,
    "index_topk": 2048,
    "index_topk_freq": 1,
    "index_skip_topk_offset": 2,
    "indexer_types": None,
    "index_topk_pattern": None,
    "quantization_config": {"scale_fmt": "ue8m0"},
}
DOTS3 = {
    "model_type": "dots3_note",
    "layer_types": ["indexed_attention", "sliding_attention", "indexed_attention"] * 2,
    "sliding_window": 512,
    "rope_scaling": None,
    "rope_parameters": {"sliding_attention": {"rope_theta": 5e4}, "indexed_attention": {"rope_theta": 8e7}},
    "per_layer_config": {"1": {"kv_lora_rank": 1024, "num_attention_heads": 64}},
}
V4 = {
    "model_type": "deepseek_v4",
    "num_hidden_layers": 4,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "q_lora_rank": 512,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "o_groups": 2,
    "o_lora_rank": 256,
    "sliding_window": 128,
    "compress_ratios": [0, 4, 128, 4],
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "max_position_embeddings": 4096,
    "rope_scaling": {name: YARN[name] for name in ("type", "factor", "original_max_position_embeddings")},
}
V4_IN_TRANSFORMERS = {name: value for name, value in V4.items() if name not in ("compress_ratios", "qk_rope_head_dim")}
V4_IN_TRANSFORMERS |= {
    "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"] * 2,
    "partial_rotary_factor": 0.125,
    "compress_rates": {"compressed_sparse_attention": 4},
    "compress_rate_hca": 128,
}
V41 = V4 | {
    "model_type": "deepseek_v41_text",
    "compress_ratios": [0, 2, 2, 2],
    "kv_source_layer_ids": [1, 3],
    "index_source_layer_ids": [1, 3],
    "candidate_source_layer_id": 1,
    "candidate_topk_blocks": 512,
    "candidate_block_size": 16,
}


def _of_family(name: str) -> dict[str, Any]:
    traits = SUPPORTED[name]
    fields = {"model_type": name, **MLA, **(INDEXER if traits.has_indexer else {})}
    if traits.scales_queries:
        fields["rope_scaling"] = YARN | {"llama_4_scaling_beta": 0.1}
    return fields


CONFIGS: dict[str, dict[str, Any]] = {
    **{name: _of_family(name) for name, one in SUPPORTED.items() if not one.layer_refusal and not one.has_layers},
    "vision": {"model_type": "some_vl", "text_config": MLA | {"model_type": "deepseek_v3"}},
    "dots3_note": MLA | INDEXER | DOTS3,
    "deepseek_v4": V4,
    "deepseek_v4 of transformers": V4_IN_TRANSFORMERS,
    "deepseek_v41": {"model_type": "deepseek_v41", "text_config": V41},
}
NUMBERS = [0, 1, -1, 7, 2**31, 2**62, 10**30, -(10**30), 0.0, 2.5, -1.5, float("nan"), float("inf")]
VALUES = [None, True, False, *NUMBERS, "", "x", "512", [], [None], ["x"], [[1]], [{}], [10**30], {}, {"a": 1}, {"1": 3}]
# Names in errors about fields that do not fit each other.
RELATIONS = {"rope_type", "rope_parameters", "kv_source", "index_source", "candidates"}


def _paths(fields: Any, prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The keys of every field, also of nested objects and lists."""
    items = fields.items() if isinstance(fields, dict) else enumerate(fields) if isinstance(fields, list) else ()
    return [path for key, value in items for path in ((*prefix, key), *_paths(value, (*prefix, key)))]


def _changed(fields: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    fields = copy.deepcopy(fields)
    parent: Any = fields
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = value
    return fields


def _use(fields: dict[str, Any]) -> None:
    """What ``flashlatte doctor`` does with a config."""
    model, sizes = read_model(fields), (torch.device("cpu"), torch.bfloat16)
    assert model.description
    if model.v41_layers:
        v41_calls(*sizes, model.v41_layers)
    elif model.v4_layers:
        v4_calls(*sizes, model.v4_layers)
    for kind in model.kinds:
        typical_calls(*sizes, kind.config)


@pytest.mark.parametrize("name", CONFIGS)
@given(data=st.data())
def test_a_wrong_field(name, data):
    config = CONFIGS[name]
    _use(config)
    path = data.draw(st.sampled_from(_paths(config)))
    fields = _changed(config, path, data.draw(st.sampled_from(VALUES)))
    names = {key for keys in _paths(config) for key in keys if isinstance(key, str)} | RELATIONS
    message = " ".join(names)
    begin = time.process_time()
    try:
        _use(fields)
    except (TypeError, ValueError) as error:
        message = str(error)
    assert names & set(re.findall(r"\w+", message)), message
    assert "\n" not in message
    assert time.process_time() - begin < SECONDS


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("dots3_note", {"num_hidden_layers": 10**30}, "num_hidden_layers must fit 64 bits, got 1"),
        ("dots3_note", {"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 1024, got 1000000000"),
        ("dots3_note", {"layer_types": {"0": "indexed_attention"}}, "layer_types must be a list, got dict"),
        ("dots3_note", {"layer_types": [["x"]] * 6}, r"layer_types must be .*, got \['x'\]"),
        ("dots3_note", {"num_hidden_layers": 7}, "layer_types must have an entry for each of num_hidden_layers 7"),
        ("dots3_note", {"per_layer_config": 3}, "per_layer_config of a config must be an object, got 3"),
        ("dots3_note", {"per_layer_config": {"1": 3}}, r"per_layer_config\[1\] must be an object, got 3"),
        ("deepseek_v32", {"num_hidden_layers": 10**12}, "num_hidden_layers must be at most 1024, got 1000000000000"),
        ("deepseek_v32", {"indexer_types": 1}, "indexer_types must be a list, got int"),
        ("deepseek_v32", {"index_topk_pattern": 1}, "index_topk_pattern must be a str or a list, got int"),
        ("deepseek_v32", {"index_topk_pattern": "SF"}, "layer 0 must have an indexer, by indexer_types, index_topk_"),
        ("deepseek_v32", {"index_n_heads": 256}, "index_n_heads must be at most 128, got 256"),
        ("deepseek_v3", {"num_attention_heads": 10**9}, "num_attention_heads must be at most 8192, got 1000000000"),
        ("deepseek_v3", {"max_position_embeddings": 2**25}, "max_position_embeddings must be at most 16777216, got"),
        ("deepseek_v3", {"rope_theta": 1}, "rope_theta must be a finite number above 1, got 1.0"),
        ("longcat_flash", {"hidden_size": "x"}, "hidden_size must be an int, got str"),
        ("deepseek_v4", {"compress_ratios": 4}, "compress_ratios must be a list, got int"),
        ("deepseek_v4", {"compress_rope_theta": 0}, "compress_rope_theta must be a finite number above 1, got 0.0"),
        ("deepseek_v4", {"qk_rope_head_dim": 63}, "qk_rope_head_dim must be even and at most head_dim 512, got 63"),
        ("deepseek_v4 of transformers", {"partial_rotary_factor": float("inf")}, "partial_rotary_factor must be a fin"),
        ("deepseek_v4 of transformers", {"compress_rate_hca": -1}, "compress_rate_hca must be at least 1, got -1"),
    ],
)
def test_the_error_of_a_field(tmp_path, capsys, name, changes, message):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name] | changes))
    assert cli.main(["doctor", "--model", str(tmp_path)]) == cli.USER_ERROR
    assert re.fullmatch(f"flashlatte doctor: {message}.*\n", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_source_layer_ids": [3]}, r"kv_source_layer_ids must have a layer up to 1, which has groups, got \[3\]"),
        ({"index_source_layer_ids": [-1]}, "index_source_layer_ids must be at least 0, got -1"),
        ({"candidate_topk_blocks": 10**9}, "candidate_topk_blocks must be at most 4096, got 1000000000"),
        ({"compress_ratios": [0, 2, 2, True]}, "compress_ratios must be 0, 1 or 2, got True"),
    ],
)
def test_the_error_of_a_field_of_v41(changes, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        read_model({"model_type": "deepseek_v41", "text_config": V41 | changes})


def test_a_config_of_as_many_layers_as_accepted():
    types = ["indexed_attention", "sliding_attention"] * (MAX_LAYERS // 2)
    changes = {str(layer): {"kv_lora_rank": 512} for layer in range(MAX_LAYERS)}
    begin = time.process_time()
    layers = MLAConfig.layers(
        CONFIGS["dots3_note"] | {"num_hidden_layers": MAX_LAYERS, "layer_types": types, "per_layer_config": changes}
    )
    assert time.process_time() - begin < SECONDS
    assert len(layers) == MAX_LAYERS
    assert len(set(layers)) == 2


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("deepseek_v3", {"num_attention_heads": 8192, "q_lora_rank": 8192}, "--model, --page-size and --max-batch"),
        ("deepseek_v4", {"hc_mult": 10**6}, "hc_mult must be at most 32, got 1000000"),
    ],
)
def test_compile_for_a_model_that_is_too_large(tmp_path, capsys, monkeypatch, name, changes, message):
    def no_memory(*_, **__):
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    monkeypatch.setattr("flashlatte.layers.warmup.MLAAttention", no_memory)
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name] | changes))
    arguments = ["compile", "--list", "--model", str(tmp_path), "--target", "sm_90"]
    assert cli.main(arguments) == cli.USER_ERROR
    assert re.match(f"flashlatte compile: {message}", capsys.readouterr().err)
