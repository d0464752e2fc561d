"""Random pages and index logits of ``flashlatte bench vllm-steps``; tests with engines need vLLM."""

from __future__ import annotations

import importlib.util
import json
import sys
from typing import Any

import pytest
import torch

from flashlatte import deep_gemm, kv_cache
from flashlatte.bench.serving import vllm_index_logits
from flashlatte.bench.serving.random_model import CONFIGS, fill_weights, has_indexer, is_v4, vocabulary, write_config
from flashlatte.bench.serving.random_pages import fill_pages
from flashlatte.bench.serving.vllm_engine import index_logits_of
from flashlatte.ops.index_quantize import index_gather

PAGES, PAGE_SIZE = 6, 16


def index_keys(cache: torch.Tensor) -> torch.Tensor:
    table, starts = torch.arange(PAGES, dtype=torch.int32)[None], torch.tensor([0, PAGES * PAGE_SIZE]).int()
    values, scales = index_gather(cache, table, starts, PAGES * PAGE_SIZE)
    assert scales is not None
    return (values.float() * scales[:, None]).unflatten(0, (PAGES, PAGE_SIZE))


FORMATS: dict[str, tuple[torch.dtype, int, Any]] = {
    "bf16": (torch.bfloat16, 576, lambda cache: cache),
    "float32": (torch.float32, 40, lambda cache: cache),
    "fp8": (torch.uint8, 576, lambda cache: cache.view(torch.float8_e4m3fn)),
    "fp8_ds_mla": (torch.uint8, 656, lambda cache: kv_cache.unpack(cache.unsqueeze(2), "v32").squeeze(2)),
    "fp8_ds_mla of V4": (torch.uint8, 584, lambda cache: kv_cache.unpack(cache.unsqueeze(2), "model1").squeeze(2)),
    "index keys": (torch.uint8, 132, index_keys),
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("gap", [0, 576])
def test_pages_have_normally_distributed_values(name, gap):
    dtype, width, values_of = FORMATS[name]
    pages = torch.zeros(2, PAGES, PAGE_SIZE * width + gap, dtype=dtype)
    cache, other = pages[..., : PAGE_SIZE * width].unflatten(-1, (PAGE_SIZE, width))
    fill_pages(cache, [4, 1], torch.Generator().manual_seed(3))
    fill_pages(other, [0, 5], torch.Generator().manual_seed(3))
    values, others = values_of(cache).float(), values_of(other).float()
    assert torch.equal(values[[4, 1]], others[[0, 5]])
    assert not values[[0, 2, 3, 5]].any()
    assert abs(values[[4, 1]].mean()) < 0.05
    assert abs(values[[4, 1]].std() - 1) < 0.05
    assert not torch.equal(values[4], values[1])
    assert not pages[..., PAGE_SIZE * width :].any()


def test_models_with_an_indexer(tmp_path):
    for model in CONFIGS:
        write_config(tmp_path, model, layers=1)
        assert has_indexer(str(tmp_path)) == (model != "v3")
        assert is_v4(str(tmp_path)) == (model == "v4")
        assert vocabulary(str(tmp_path)) == json.loads((tmp_path / "config.json").read_text())["vocab_size"]


def test_layers_of_v4(tmp_path):
    """All kinds in three layers, and weights of each kind of parameter."""
    write_config(tmp_path, "v4", layers=4)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["compress_ratios"], config["num_hash_layers"]) == ([0, 4, 128, 4], 4)
    layer = torch.nn.Module()
    layer.hc_attn_scale, layer.hc_attn_base, layer.attn_sink = (torch.nn.Parameter(torch.empty(3)) for _ in range(3))
    layer.tid2eid = torch.nn.Parameter(torch.empty(20, 6, dtype=torch.int32), requires_grad=False)
    fill_weights(layer.named_parameters())
    assert layer.hc_attn_scale.tolist() == [1, 1, 1]
    assert layer.hc_attn_base.tolist() == layer.attn_sink.tolist() == [0, 0, 0]
    assert layer.tid2eid[5].tolist() == [5, 6, 7, 0, 1, 2]


def test_index_logits_replace_a_missing_deep_gemm(monkeypatch, capsys):
    monkeypatch.setattr(vllm_index_logits, "DEEP_GEMM", ("deep_gemm", "no_such_package.deep_gemm"))
    monkeypatch.delitem(sys.modules, "deep_gemm", raising=False)
    assert index_logits_of("CUSTOM") == "flashlatte"
    assert "deep_gemm" not in sys.modules
    assert capsys.readouterr().out == ""
    assert index_logits_of("FLASHMLA_SPARSE") == "flashlatte"
    assert "FLASHMLA_SPARSE: DeepGEMM is not installed. Index logits are FlashLatte's" in capsys.readouterr().out
    # As vLLM looks for it and imports it.
    assert importlib.util.find_spec("deep_gemm") is not None
    assert importlib.import_module("deep_gemm") is deep_gemm
    del sys.modules["deep_gemm"]


def test_an_installed_deep_gemm_is_kept(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "deep_gemm", importlib.import_module("json"))
    assert index_logits_of("FLASHMLA_SPARSE") == "deep_gemm"
    assert sys.modules["deep_gemm"] is json
    assert capsys.readouterr().out == ""
