"""Checkpoints with missing or unexpected weights raise errors that name them, on one process and on each of several
ranks.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from distributed.model.test_checkpoint import ranks
from safetensors.torch import load_file, save_file
from support import fp8_linears
from support.engine_models import SIZES, model
from transformers import AutoModelForCausalLM

from flashlatte.distributed.model.checkpoint import Slices
from flashlatte.engine import Engine
from flashlatte.engine.model import Model
from flashlatte.engine.v4 import V4Model
from flashlatte.integrations.transformers import enable

Weights = dict[str, torch.Tensor]


@pytest.fixture(params=["one process", "a rank"])
def read(request):
    """Read a checkpoint directory."""
    beside = {} if request.param == "one process" else {"ranks": ranks(0, 2)}

    def read(path: Path, kind: type = Model) -> Model | V4Model:
        return kind(path, **beside)

    return read


def rewrite(path: Path, change: Callable[[Weights], object]) -> None:
    """Change the weights of a checkpoint in place."""
    file = path / "model.safetensors"
    weights = load_file(file)
    change(weights)
    save_file(weights, file, {"format": "pt"})


def without(pattern: str) -> Callable[[Weights], object]:
    return lambda weights: [weights.pop(name) for name in [*weights] if re.search(pattern, name)]


def split_kv_b(weights: Weights) -> None:
    """Split kv_b_proj, as converters do for absorbed attention."""
    for name in [name for name in weights if name.endswith("kv_b_proj.weight")]:
        both = weights.pop(name).unflatten(0, (SIZES["num_attention_heads"], -1))
        for half, part in zip(("k_b", "v_b"), both.split((16, 12), dim=1), strict=True):
            weights[name.replace("kv_b", half)] = part.flatten(0, 1).contiguous()


def prefixed(weights: Weights) -> None:
    for name in [*weights]:
        weights["language_model." + name] = weights.pop(name)


def with_bias(weights: Weights) -> None:
    weights["model.layers.0.self_attn.o_proj.bias"] = torch.ones(64)


def narrow(weights: Weights) -> None:
    name = "model.layers.0.self_attn.kv_a_layernorm.weight"
    weights[name] = weights[name][:-1].clone()


BROKEN = {
    "a projection": (without(r"layers\.1\.self_attn\.o_proj"), "lacks model.layers.1.self_attn.o_proj.weight$"),
    "norms": (without("layernorm"), r"lacks model.layers.0.input_layernorm.weight, .*_layernorm.weight$"),
    "the head": (without("lm_head"), "lacks lm_head.weight$"),
    "the embedding": (without("embed_tokens"), "lacks model.embed_tokens.weight$"),
    "a layer": (without(r"layers\.1\."), r"lacks model.layers.1.input_layernorm.weight, .* and \d more$"),
    "an expert": (
        without(r"experts\.2\."),
        r"lacks model.layers.1.mlp.experts.2.down_proj.weight, .*2.up_proj.weight$",
    ),
    "an expert's gate": (without(r"experts\.3\.gate"), "lacks model.layers.1.mlp.experts.3.gate_proj.weight$"),
    "kv_b_proj in two": (
        split_kv_b,
        "lacks model.layers.0.self_attn.kv_b_proj.weight, model.layers.1.self_attn.kv_b_proj.weight; "
        "it has model.layers.0.self_attn.k_b_proj.weight, .*1.self_attn.v_b_proj.weight, which the model does not use$",
    ),
    "other names": (prefixed, "lacks lm_head.weight, .* more; it has language_model.lm_head.weight, .* does not use$"),
    "a bias too many": (with_bias, "it has model.layers.0.self_attn.o_proj.bias, which the model does not use$"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_weights_that_are_missing_are_named(case, read, tmp_path):
    change, message = BROKEN[case]
    model().save_pretrained(tmp_path)
    rewrite(tmp_path, change)
    with pytest.raises(ValueError, match=rf"and {tmp_path} is not: (it )?.*{message}"):
        read(tmp_path)


def test_an_engine_of_a_checkpoint_that_lacks_an_indexer(tmp_path):
    model("DeepseekV32").save_pretrained(tmp_path)
    rewrite(tmp_path, without(r"layers\.1\.self_attn\.indexer\.wk\."))
    with pytest.raises(ValueError, match=r"lacks model\.layers\.1\.self_attn\.indexer\.wk\.weight$"):
        Engine(tmp_path)


def test_a_config_with_more_layers_than_the_checkpoint(read, tmp_path):
    model().save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_hidden_layers": 3}))
    with pytest.raises(ValueError, match=r"lacks model\.layers\.2\.input_layernorm\.weight, "):
        read(tmp_path)


def test_a_weight_of_another_shape(tmp_path):
    model().save_pretrained(tmp_path)
    rewrite(tmp_path, narrow)
    with pytest.raises(ValueError, match=r"kv_a_layernorm\.weight of shape \[31\], and the config gives \[32\]$"):
        Model(tmp_path)


def test_an_index_that_leaves_a_weight_out(read, tmp_path):
    model().save_pretrained(tmp_path, max_shard_size="100KB")
    file = tmp_path / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    name = "model.layers.0.self_attn.q_b_proj.weight"
    shard = tmp_path / index["weight_map"].pop(name)
    file.write_text(json.dumps(index))
    weights = load_file(shard)
    weights.pop(name)
    save_file(weights, shard, {"format": "pt"})
    with pytest.raises(ValueError, match=f"lacks {name}$"):
        read(tmp_path)


def test_unneeded_weights_are_skipped(read, tmp_path):
    """The MTP layer, rotary buffers, and a head tied to the embedding."""
    whole = model("DeepseekV3", tie_word_embeddings=True)
    whole.save_pretrained(tmp_path)

    def change(weights: Weights) -> None:
        assert "lm_head.weight" not in weights
        for name in [name for name in weights if "layers.1." in name]:
            weights[name.replace("layers.1.", "layers.2.")] = weights[name].clone()
        weights["model.layers.2.eh_proj.weight"] = torch.ones(64, 128)
        weights["model.layers.2.self_attn.o_proj.bias"] = torch.ones(64)
        weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)

    rewrite(tmp_path, change)
    made = read(tmp_path)
    assert made._head.weight.equal(whole.lm_head.weight)


def test_missing_weights_are_detected_without_reading_the_checkpoint(tmp_path, monkeypatch):
    model().save_pretrained(tmp_path)
    rewrite(tmp_path, without("lm_head"))
    monkeypatch.setattr("flashlatte.engine.loading.load", None)
    with pytest.raises(ValueError, match=r"lacks lm_head\.weight$"):
        Model(tmp_path, ranks=ranks(0, 2))


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("missing", ["layers.1.self_attn.o_proj", "layers.1.mlp.experts.2.up_proj"])
def test_scales_that_are_missing_are_named(missing, kept, read, tmp_path, monkeypatch):
    """Whether weights stay in float8 or are dequantized."""
    if kept:
        fp8_linears.keep_quantized(monkeypatch)
    fp8_linears.save(copy.deepcopy(model(**fp8_linears.SIZES)).bfloat16(), tmp_path)
    rewrite(tmp_path, without(f"{missing}.weight_scale_inv"))
    with pytest.raises(ValueError, match=f"lacks model.{missing}.weight_scale_inv$"):
        read(tmp_path)


def test_scales_not_declared_in_the_config_are_rejected(read, tmp_path):
    fp8_linears.save(copy.deepcopy(model(**fp8_linears.SIZES)).bfloat16(), tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": None}))
    with pytest.raises(ValueError, match=r"it has model\.layers\.0\..*weight_scale_inv.* the model does not use$"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        (r"layers\.1\.attn\.wo_a", "model.layers.1.self_attn.o_a_proj.weight"),
        (r"layers\.1\.attn\.attn_sink", "model.layers.1.self_attn.sinks"),
        (r"layers\.1\.attn\.indexer\.wq_b", "model.layers.1.self_attn.compressor.indexer.q_b_proj.weight"),
        (r"layers\.2\.ffn\.experts\.2\.w1", "model.layers.2.mlp.experts.2.gate_proj.weight"),
        ("tid2eid", "model.layers.0.mlp.gate.tid2eid"),
    ],
)
def test_weights_of_deepseek_v4(pattern, name, read, tmp_path):
    model("DeepseekV4").save_pretrained(tmp_path)
    rewrite(tmp_path, without(pattern))
    with pytest.raises(ValueError, match=f"lacks {re.escape(name)}$"):
        read(tmp_path, V4Model)


@pytest.mark.parametrize("shards", [False, True])
def test_a_truncated_file_is_named(shards, read, tmp_path):
    model().save_pretrained(tmp_path, max_shard_size="100KB" if shards else "1GB")
    file = sorted(tmp_path.glob("*.safetensors"))[-1]
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=f"^{file} must be a complete safetensors file: "):
        read(tmp_path)
    file.unlink()
    if shards:
        with pytest.raises(FileNotFoundError, match=f"file {file} is missing$"):
            read(tmp_path)


@pytest.mark.parametrize("size", [0, 100])
def test_a_truncated_pickle_file_is_named(size, read, tmp_path):
    model().config.save_pretrained(tmp_path)
    file = tmp_path / "pytorch_model.bin"
    torch.save(model().state_dict(), file)
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(ValueError, match=f"that transformers can load, and {tmp_path} is not: .*Error: "):
        read(tmp_path)


def test_an_index_that_is_not_json_is_named(read, tmp_path):
    model().save_pretrained(tmp_path, max_shard_size="100KB")
    (tmp_path / "model.safetensors.index.json").write_text("{")
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json must be JSON"):
        read(tmp_path)


def test_a_score_correction_may_be_missing_as_in_transformers(tmp_path):
    if not model("AXK1")._keys_to_ignore_on_load_missing:
        pytest.skip("this transformers does not")
    model("AXK1").save_pretrained(tmp_path)
    rewrite(tmp_path, without("e_score_correction_bias"))
    assert Slices.of(tmp_path, model("AXK1").config, None, "cpu") is None
    assert Model(tmp_path)._body.layers[1].mlp.gate.e_score_correction_bias.count_nonzero() == 0


@pytest.mark.parametrize("cache_format", ["nope", "index_fp8", "v32"])
def test_a_cache_format_is_refused_before_weights_are_read(cache_format, tmp_path):
    model().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    accepted = r"^cache_format must be bf16, fp16, fp32 or fp8 for rows of 32 \+ 8, got"
    with pytest.raises(ValueError, match=f"{accepted} '{cache_format}'$"):
        Engine(tmp_path, cache_format=cache_format)


@pytest.mark.parametrize("start", [Engine, enable])
@pytest.mark.parametrize("family", ["DeepseekV3", "DeepseekV4"])
def test_a_loaded_model_whose_checkpoint_lacked_weights_is_warned_of(family, start, tmp_path):
    """The user may have set them since, so this is not an error."""
    model(family).save_pretrained(tmp_path)
    rewrite(tmp_path, without(r"layers\.1\.(self_)?attn\.(o_proj|wo_b)|^(lm_)?head"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.warns(
        UserWarning, match=r"at random; .*: lm_head\.weight, model\.layers\.1\.self_attn\.o_(b_)?proj\.weight$"
    ):
        start(loaded)


@pytest.mark.parametrize("start", [Engine, enable])
def test_a_quantized_model_gives_no_warning(start, tmp_path, recwarn, monkeypatch):
    """transformers does not mark all of its scales as loaded."""
    fp8_linears.keep_quantized(monkeypatch)
    fp8_linears.save(copy.deepcopy(model(**fp8_linears.SIZES)).bfloat16(), tmp_path, scale_fmt="ue8m0")
    start(AutoModelForCausalLM.from_pretrained(tmp_path))
    assert not [warning for warning in recwarn if "at random" in str(warning.message)]


@pytest.mark.parametrize("start", [Engine, enable])
@pytest.mark.parametrize("family", ["DeepseekV3", "DeepseekV4", "Youtu"])
def test_a_loaded_model_with_all_weights_gives_no_warning(family, start, tmp_path, recwarn):
    made = model(family, tie_word_embeddings=True) if family == "Youtu" else model(family)
    made.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).double().float()
    # As an adapter adds.
    loaded.model.layers[0].mlp.register_module("added", torch.nn.Linear(2, 2))
    for each in (loaded, loaded, copy.deepcopy(made)):
        start(each)
    assert not [warning for warning in recwarn if "at random" in str(warning.message)]


def test_a_model_that_transformers_lacks_is_refused_with_the_reason(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "deepseek_v41", "text_config": {}}))
    with pytest.raises(
        ValueError, match=r"^model must be of a type .*, got 'deepseek_v41': transformers has no such model"
    ):
        Engine(tmp_path)


@pytest.mark.parametrize("family", ["DeepseekV3", "DeepseekV4"])
def test_sizes_are_checked_before_weights_are_loaded(family, tmp_path):
    model(family).config.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_attention_heads": 10**6}))
    with pytest.raises(ValueError, match=r"^num_attention_heads must be at most 8192, got 1000000$"):
        Engine(tmp_path)
