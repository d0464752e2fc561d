"""Weights from safetensors checkpoints: plain, float8 with block scales, missing, and of a wrong shape."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from flashlatte.layers import IndexerConfig, MLAAttention, MLAConfig
from flashlatte.layers.quantized import apply_block_scales

CONFIG = MLAConfig(160, 2, 136, 8, 4, 8, q_lora_rank=24, attention_bias=True)
LITE = MLAConfig(160, 2, 136, 8, 4, 8)
INDEXED = dataclasses.replace(CONFIG, indexer=IndexerConfig(num_heads=6, head_dim=32, topk=8))


def random_weights(config=CONFIG, seed=0):
    generator = torch.Generator().manual_seed(seed)
    layer = MLAAttention(config)
    return {name: torch.randn(weight.shape, generator=generator) for name, weight in layer.named_parameters()}


@pytest.fixture
def save(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")

    def write(weights, file="model.safetensors", prefix="model.layers.3.self_attn."):
        named = {prefix + name: weight.contiguous() for name, weight in weights.items()}
        safetensors.save_file(named | {"model.layers.13.self_attn.o_proj.weight": torch.zeros(2)}, tmp_path / file)
        return tmp_path

    return write


def assert_loaded(layer, weights):
    for name, weight in layer.named_parameters():
        assert torch.equal(weight, weights[name]), name


@pytest.mark.parametrize("config", [CONFIG, LITE], ids=["q_lora", "no_q_lora"])
def test_a_layer_of_a_file_and_of_a_directory(save, config):
    weights = random_weights(config)
    directory = save(weights)
    for path in (directory, directory / "model.safetensors", str(directory)):
        layer = MLAAttention(config)
        layer.load_checkpoint(path, 3)
        assert_loaded(layer, weights)


def test_a_layer_over_several_files_with_an_index(save):
    weights = random_weights()
    names = list(weights)
    for file, part in (("a.safetensors", names[:4]), ("b.safetensors", names[4:])):
        directory = save({name: weights[name] for name in part}, file)
    where = {
        f"model.layers.3.self_attn.{name}": "a.safetensors" if name in names[:4] else "b.safetensors" for name in names
    }
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    layer = MLAAttention(CONFIG)
    layer.load_checkpoint(directory, 3)
    assert_loaded(layer, weights)


def test_an_index_without_files_is_named(save):
    directory = save(random_weights(), "a.safetensors")
    (directory / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match=r"^model\.safetensors\.index\.json must have a weight_map .*, got None in "):
        MLAAttention(CONFIG).load_checkpoint(directory, 3)


FLOAT8 = ("q_a_proj.weight", "kv_b_proj.weight", "o_proj.weight", "indexer.wq_b.weight", "indexer.wk.weight")


@pytest.mark.parametrize("config", [CONFIG, INDEXED], ids=["v3", "v3.2"])
def test_float8_weights_are_scaled_by_the_block(save, config):
    weights = random_weights(config)
    stored = {}
    for name, weight in weights.items():
        if not name.startswith(FLOAT8):
            stored[name] = weight
            continue
        blocks = [-(-size // 128) for size in weight.shape]
        stored[name] = weight.to(torch.float8_e4m3fn)
        stored[name + "_scale_inv"] = torch.rand(blocks) + 0.5
    layer = MLAAttention(config, dtype=torch.bfloat16)
    layer.load_checkpoint(save(stored), 3)
    for name, weight in layer.named_parameters():
        scale = stored.get(name + "_scale_inv")
        expected = stored[name] if scale is None else apply_block_scales(stored[name], scale, (128, 128))
        # The head weights of an indexer stay in float32.
        dtype = torch.float32 if name == "indexer.weights_proj.weight" else torch.bfloat16
        assert torch.equal(weight, expected.to(dtype)), name


def test_dequantized_blocks():
    weight = torch.ones(130, 257).to(torch.float8_e4m3fn)
    scale = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    result = apply_block_scales(weight, scale, (128, 128))
    assert result[[0, 127, 128, 129], [0, 128, 127, 256]].tolist() == [1.0, 2.0, 4.0, 6.0]


def test_a_shard_takes_its_heads(save):
    weights = random_weights()
    layer = MLAAttention(CONFIG, heads=(1, 2))
    layer.load_checkpoint(save(weights), 3)
    assert torch.equal(layer.q_b_proj.weight, weights["q_b_proj.weight"][12:])
    assert torch.equal(layer.kv_b_proj.weight, weights["kv_b_proj.weight"][16:])
    assert torch.equal(layer.o_proj.weight, weights["o_proj.weight"][:, 8:])
    assert torch.equal(layer.q_a_proj.weight, weights["q_a_proj.weight"])
    assert layer.o_proj.bias is None


def test_missing_weights_are_named():
    weights = random_weights()
    del weights["kv_a_layernorm.weight"], weights["o_proj.bias"]
    with pytest.raises(ValueError, match=r"weights must have (kv_a_layernorm.weight|o_proj.bias), (o_proj|kv_a)"):
        MLAAttention(CONFIG).load_weights(weights)


INDEXER = {"indexer.wk.weight": torch.zeros(3), "indexer.wq_b.weight": torch.zeros(2)}


def test_unused_weights_are_named(save):
    weights = random_weights()
    layer = MLAAttention(CONFIG)
    message = "weights must not have indexer.wk.weight, indexer.wq_b.weight, which the layer does not use: .*ignore="
    with pytest.raises(ValueError, match=message):
        layer.load_weights(weights | INDEXER)
    with pytest.raises(ValueError, match=message):
        layer.load_checkpoint(save(weights | INDEXER), 3)
    with pytest.raises(ValueError, match=r"weights must not have indexer.wq_b.weight, which"):
        layer.load_weights(weights | INDEXER, ignore=("indexer.wk.*",))


def test_unused_weights_can_be_ignored(save):
    weights = random_weights()
    layer = MLAAttention(CONFIG)
    layer.load_checkpoint(save(weights | INDEXER), 3, ignore=("indexer.*",))
    assert_loaded(layer, weights)


def test_a_scale_of_weights_that_are_not_float8_is_unused():
    weights = random_weights()
    with pytest.raises(ValueError, match=r"weights must not have o_proj.weight_scale_inv, which the layer"):
        MLAAttention(CONFIG).load_weights(weights | {"o_proj.weight_scale_inv": torch.ones(2, 1)})


def test_misshapen_weights_are_all_named_and_none_is_loaded():
    layer = MLAAttention(CONFIG)
    layer.load_weights(random_weights(seed=1))
    weights = random_weights()
    weights["q_b_proj.weight"] = torch.zeros(24, 25)
    weights["kv_b_proj.weight"] = torch.zeros(32, 136).to(torch.float8_e4m3fn)
    message = (
        r"q_b_proj.weight must have shape \[24, 24\], got \[24, 25\]; kv_b_proj.weight is torch.float8_e4m3fn and "
        r"must have kv_b_proj.weight_scale_inv of shape \[1, 2\], got none"
    )
    with pytest.raises(ValueError, match=message):
        layer.load_weights(weights)
    assert_loaded(layer, random_weights(seed=1))


def test_a_missing_layer(save):
    with pytest.raises(ValueError, match=r"path must hold weights of layer 1 \(layers.1.self_attn.…\)"):
        MLAAttention(CONFIG).load_checkpoint(save(random_weights()), 1)


def test_no_file(tmp_path):
    pytest.importorskip("safetensors")
    with pytest.raises(FileNotFoundError, match="path must be a safetensors file or a directory with some"):
        MLAAttention(CONFIG).load_checkpoint(tmp_path, 0)


def test_without_safetensors(monkeypatch, tmp_path):
    import sys

    monkeypatch.setitem(sys.modules, "safetensors", None)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'flashlatte\[transformers\]'"):
        MLAAttention(CONFIG).load_checkpoint(tmp_path, 0)
