"""Checkpoint weights of V4.1's layers, and errors."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest
import torch
from layers.v41.model import FIELDS, Model, hidden_states
from support import v41_reference

from flashlatte.layers.checkpoint import read_layer
from flashlatte.layers.v41 import SharedSelections, V41Attention, V41Config
from flashlatte.layers.v41.checkpoint import NAMES

KV_SOURCE, SHARING, CANDIDATES = 1, 2, 6


def layer_and_weights(layer):
    return V41Attention(V41Config.layers(FIELDS)[layer]), v41_reference.random_weights(FIELDS, 0)[layer]


def test_every_weight_of_a_checkpoint_is_loaded():
    """Each layer takes exactly the weights that vLLM's layer of the same number has."""
    used = set()
    for layer in range(FIELDS["num_hidden_layers"]):
        module, weights = layer_and_weights(layer)
        module.load_weights(weights)
        assert {NAMES[name] for name, _ in module.named_parameters()} == set(weights)
        for name, parameter in module.named_parameters():
            assert torch.equal(parameter, weights[NAMES[name]])
        used |= set(weights)
    assert used == set(NAMES.values())


@pytest.mark.parametrize("block_size", [(32, 32), (16, 128)])
def test_weights_with_block_scales(tmp_path, block_size):
    safetensors = pytest.importorskip("safetensors.torch")
    module, weights = layer_and_weights(KV_SOURCE)
    expected, stored = dict(weights), dict(weights)
    for name in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "indexer.wq_b"):
        rows, columns = weights[f"{name}.weight"].shape
        blocks = -(-rows // block_size[0]), -(-columns // block_size[1])
        scales = 2.0 ** torch.randint(-3, 3, blocks)
        values = weights[f"{name}.weight"].to(torch.float8_e4m3fn)
        per_element = scales.repeat_interleave(block_size[0], 0).repeat_interleave(block_size[1], 1)[:rows, :columns]
        expected[f"{name}.weight"] = values.float() * per_element
        stored |= {f"{name}.weight": values, f"{name}.scale": scales.to(torch.float8_e8m0fnu)}
    others = {"layers.11.attn.wq_a.weight": torch.zeros(1), "mtp.1.attn.wq_a.weight": torch.zeros(1)}
    named = {f"layers.{KV_SOURCE}.attn.{name}": tensor for name, tensor in stored.items()}
    safetensors.save_file(named | others, tmp_path / "model.safetensors")
    module.load_weights(read_layer(tmp_path, KV_SOURCE, "attn"), block_size)
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, expected[NAMES[name]]), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"wq_a.weight": None}, "^weights must have wq_a.weight, got "),
        ({"compressor.ape": torch.zeros(2)}, "^weights must not have compressor.ape, which the layer does not use$"),
        ({"wkv.weight": torch.zeros(3, 4)}, r"^wkv.weight must have shape \[32, 48\], got \[3, 4\]$"),
        (
            {"wkv.weight": torch.zeros(32, 48, dtype=torch.float8_e4m3fn)},
            r"^wkv.scale must have shape \[1, 2\] for blocks of \[32, 32\], got none$",
        ),
        (
            {"wkv.weight": torch.zeros(32, 48, dtype=torch.float8_e4m3fn), "wkv.scale": torch.ones(1, 1)},
            r"^wkv.scale must have shape \[1, 2\] for blocks of \[32, 32\], got \[1, 1\]$",
        ),
        ({"wkv.scale": torch.ones(1, 2)}, "^weights must not have wkv.scale, which the layer does not use$"),
    ],
)
def test_weights_that_are_refused(change, message):
    module, weights = layer_and_weights(KV_SOURCE)
    weights = {name: tensor for name, tensor in (weights | change).items() if tensor is not None}
    with pytest.raises(ValueError, match=message):
        module.load_weights(weights)


def test_sources_that_have_not_run():
    model = Model(FIELDS, v41_reference.random_weights(FIELDS, 0), 1, 8)
    hidden, step = hidden_states(FIELDS, [5], 0), model.step([(0, 5)])
    for layer, message in (
        (SHARING, "^selections must hold the groups of layer 1 for the step's 5 tokens, got nothing$"),
        (CANDIDATES, "^selections must hold the candidate blocks of layer 4 for the step's 5 tokens, got nothing$"),
    ):
        with pytest.raises(ValueError, match=message):
            model.layers[layer](hidden[layer][0], step, model.caches[layer])
    selections = SharedSelections()
    model.layers[KV_SOURCE](hidden[KV_SOURCE][0], step, model.caches[KV_SOURCE], selections)
    with pytest.raises(ValueError, match=r"^selections must hold the groups of layer 1 .* 4 tokens, got 5 tokens$"):
        model.layers[SHARING](hidden[SHARING][0][:4], model.step([(0, 4)]), model.caches[SHARING], selections)
    with pytest.raises(TypeError, match=r"^selections must be of type SharedSelections or None, got dict$"):
        model.layers[KV_SOURCE](hidden[KV_SOURCE][0], step, model.caches[KV_SOURCE], {})


def test_caches_that_do_not_fit():
    model = Model(FIELDS, v41_reference.random_weights(FIELDS, 0), 1, 8)
    hidden, step = hidden_states(FIELDS, [5], 0)[KV_SOURCE][0], model.step([(0, 5)])
    for name in ("groups", "states", "index_keys"):
        cache = dataclasses.replace(model.caches[KV_SOURCE], **{name: None})
        with pytest.raises(ValueError, match=f"^cache.{name} must be a tensor in this layer$"):
            model.layers[KV_SOURCE](hidden, step, cache)


def test_groups_that_are_not_those_of_the_source():
    model = Model(FIELDS, v41_reference.random_weights(FIELDS, 0), 1, 8)
    hidden, step = hidden_states(FIELDS, [5], 0), model.step([(0, 5)])
    for layer, name in ((SHARING, "groups"), (3, "index_keys")):
        selections, cache = SharedSelections(), model.caches[layer]
        stored = getattr(cache, name)
        assert stored is not None
        if layer == 3:
            with pytest.raises(ValueError, match=r"^cache.groups must be the tensor that layer 1 .*, got none stored"):
                model.layers[layer](hidden[layer][0], step, cache, selections)
        model.layers[KV_SOURCE](hidden[KV_SOURCE][0], step, model.caches[KV_SOURCE], selections)
        with pytest.raises(ValueError, match=rf"^cache.{name} must be the tensor that layer 1 .*, got another tensor$"):
            model.layers[layer](
                hidden[layer][0], step, dataclasses.replace(cache, **{name: stored.clone()}), selections
            )
        model.layers[layer](hidden[layer][0], step, cache, selections)


def test_copies_compute_the_same():
    model = Model(FIELDS, v41_reference.random_weights(FIELDS, 0), 1, 8)
    hidden, step = hidden_states(FIELDS, [8], 0)[KV_SOURCE][0], model.step([(0, 8)])
    layer, cache = model.layers[KV_SOURCE], model.caches[KV_SOURCE]
    expected = layer(hidden, step, cache)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(hidden, step, cache), expected)


def test_rows_of_unfinished_groups_are_not_written():
    """A second write of the same slot in one step would be a race."""
    model = Model(FIELDS, v41_reference.random_weights(FIELDS, 0), 1, 8)
    model.run(hidden_states(FIELDS, [5], 0), [(0, 5)])
    groups = model.caches[KV_SOURCE].groups
    assert groups is not None
    rows = groups[model.table[0]].flatten(0, 2)
    assert rows.isfinite().all(dim=1).tolist() == [True, True, *[False] * 6]


def test_training_is_refused():
    layer, _ = layer_and_weights(KV_SOURCE)
    with pytest.raises(TypeError, match=r"^V41Attention is for inference: groups and selections"):
        layer.forward_training(torch.zeros(4, 48), torch.tensor([0, 4]), 4)
