"""One rank's part of DeepSeek-V4's checkpoints, read as slices, compared with the same part of the whole model."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.model.test_checkpoint import ranks, weights
from safetensors.torch import load_file, save_file
from support import fp8_linears
from support.engine_models import model
from transformers import AutoConfig, AutoModelForCausalLM

from flashlatte.distributed.model.checkpoint import Slices
from flashlatte.distributed.model.weight_names import in_transformers
from flashlatte.engine.v4 import V4Model

# Whole blocks of 16, and of 32 for 4-bit experts.
WHOLE_BLOCKS = {"hidden_size": 64, "q_lora_rank": 32, "moe_intermediate_size": 64}
PUBLISHED = [
    (r"^model\.", ""),
    (r"^embed_tokens\.", "embed."),
    (r"^hc_head\.hc_", "hc_head_"),
    (r"\.weight_scale_inv$", ".scale"),
]


def saved(path: Path, **options: Any) -> None:
    """A checkpoint quantized like DeepSeek's, with published names; weights that transformers computes in float32 are
    stored in float32."""
    made = copy.deepcopy(model("DeepseekV4", **WHOLE_BLOCKS))
    made.config.dtype = torch.bfloat16
    for name, weight in made.named_parameters():
        if not any(part in name for part in made._keep_in_fp32_modules_strict):
            weight.data = weight.data.bfloat16()
    fp8_linears.save(made, path, **options)
    rewrite(path, published)


def rewrite(path: Path, change: Any) -> None:
    file = path / "model.safetensors"
    changed: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(file).items():
        changed |= change(name, tensor)
    save_file(changed, file, {"format": "pt"})


def published(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """DeepSeek's name of a tensor."""
    for pattern, replacement in PUBLISHED:
        name = re.sub(pattern, replacement, name)
    return {name: tensor}


def four_bits(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Random experts with 4-bit codes, two per byte, and a scale per 32 codes."""
    if ".experts." not in name:
        return {name: tensor}
    generator = torch.Generator().manual_seed(tensor.numel())
    if name.endswith(".scale"):
        return {}
    rows, columns = tensor.shape
    codes = torch.randint(-128, 128, (rows, columns // 2), dtype=torch.int8, generator=generator)
    exponents = torch.randint(120, 130, (rows, columns // 32), dtype=torch.uint8, generator=generator)
    return {name: codes, name.replace(".weight", ".scale"): exponents.view(torch.float8_e8m0fnu)}


def check_parts(path: Path) -> dict[str, torch.Tensor]:
    """Check that each of two ranks reads its slice of the whole model; returns the weights of the last rank."""
    whole, got = AutoModelForCausalLM.from_pretrained(path, dtype="auto"), {}
    for rank in range(2):
        assert Slices.of(path, AutoConfig.from_pretrained(path), None, "cpu") is not None
        cut, read = (V4Model(source, ranks=ranks(rank, 2)) for source in (whole, path))
        assert read.layers == cut.layers
        want, got = weights(cut), weights(read)
        assert got.keys() == want.keys()
        for name, weight in want.items():
            assert (got[name].dtype, got[name].shape) == (weight.dtype, weight.shape), name
            assert got[name].float().equal(weight.float()), name
    return got


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("names", ["transformers'", "published"])
def test_each_rank_reads_its_part(dtype, names, tmp_path):
    copy.deepcopy(model("DeepseekV4")).to(dtype).save_pretrained(tmp_path)
    if names == "published":
        rewrite(tmp_path, published)
    assert check_parts(tmp_path)["model.layers.0.mlp.gate.tid2eid"].dtype == torch.int64


@pytest.mark.parametrize("kept", [True, False])
def test_float8_weights(kept, tmp_path, monkeypatch):
    saved(tmp_path, scale_fmt="ue8m0")
    if kept:
        fp8_linears.keep_quantized(monkeypatch)
    part = check_parts(tmp_path)["model.layers.1.self_attn.o_a_proj.weight"]
    assert part.dtype == (torch.float8_e4m3fn if kept else torch.bfloat16)


def test_experts_of_four_bits(tmp_path, monkeypatch):
    """As DeepSeek publishes V4: 4-bit experts, e4m3 otherwise."""
    saved(tmp_path, scale_fmt="ue8m0")
    rewrite(tmp_path, four_bits)
    config = json.loads((tmp_path / "config.json").read_text())
    config["expert_dtype"] = config["quantization_config"]["expert_dtype"] = "fp4"
    (tmp_path / "config.json").write_text(json.dumps(config))
    fp8_linears.keep_quantized(monkeypatch)
    part = check_parts(tmp_path)
    assert part["model.layers.1.mlp.experts.gate_up_proj"].dtype == torch.int8
    assert part["model.layers.1.mlp.experts.down_proj"].shape == (4, 64, 16)
    assert part["model.layers.1.mlp.experts.down_proj_scale_inv"].shape == (4, 64, 1)


def test_four_bits_that_are_dequantized_are_left_to_transformers(tmp_path):
    saved(tmp_path)
    rewrite(tmp_path, four_bits)
    assert Slices.of(tmp_path, AutoConfig.from_pretrained(tmp_path), None, "cpu") is None


@pytest.mark.parametrize(
    ("stored", "name"),
    [
        ("layers.3.attn.indexer.compressor.norm.weight", "model.layers.3.self_attn.compressor.indexer.kv_norm.weight"),
        ("layers.3.hc_ffn_scale", "model.layers.3.ffn_hc.scale"),
        ("layers.3.ffn.experts.7.w2.scale", "model.layers.3.mlp.experts.7.down_proj.weight_scale_inv"),
        ("norm.weight", "model.norm.weight"),
        ("head.weight", "lm_head.weight"),
        ("lm_head.weight", "lm_head.weight"),
    ],
)
def test_names(stored, name):
    assert in_transformers(stored, "deepseek_v4") == name
    assert in_transformers(stored, "deepseek_v3") == stored
