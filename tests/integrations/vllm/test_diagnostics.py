"""``flashlatte doctor`` for vLLM: plugin registration and model support."""

import dataclasses
import importlib.metadata
import json
from types import SimpleNamespace

import pytest
import torch

from flashlatte import doctor
from flashlatte.integrations.vllm import compat, diagnostics, support
from flashlatte.layers import MLAConfig
from flashlatte.layers.config import IndexerConfig

V3 = MLAConfig(hidden_size=7168, num_attention_heads=128, q_lora_rank=1536)


def test_doctor_without_vllm(monkeypatch):
    monkeypatch.setattr(compat, "version", lambda: None)
    facts = diagnostics.diagnose(torch.bfloat16, V3)
    assert (facts["registered"], facts["reason"]) == (False, "vLLM is not installed")
    assert diagnostics.report(facts) == []


def test_doctor_with_the_plugin_disabled(monkeypatch):
    monkeypatch.setattr(compat, "version", lambda: "0.26.0")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: SimpleNamespace(names={"flashlatte"}))
    monkeypatch.setenv("VLLM_PLUGINS", "another")
    facts = diagnostics.diagnose(torch.bfloat16)
    assert diagnostics.report(facts) == [
        "vLLM 0.26.0: FlashLatte's plugin is not registered: VLLM_PLUGINS is 'another', without flashlatte"
    ]


@pytest.mark.parametrize(
    ("gpu", "version", "line"),
    [
        (True, "0.26.0", "FlashLatte supports this model with --attention-backend CUSTOM, or FLASHLATTE_VLLM=auto"),
        (False, "0.32.0", "FlashLatte supports this model with FLASHLATTE_VLLM_CPU=1"),
        (
            False,
            "0.26.0",
            "not supported by FlashLatte: its CPU platform supports vLLM 0.32 and later, and 0.26.0 is installed",
        ),
    ],
)
def test_doctor_of_a_model(monkeypatch, gpu, version, line):
    monkeypatch.setattr(compat, "version", lambda: version)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(diagnostics, "_unregistered_reason", lambda: None)
    monkeypatch.setattr(diagnostics, "_chosen", lambda dtype, model: "vllm.TritonMLABackend")
    monkeypatch.delenv("FLASHLATTE_VLLM", raising=False)
    assert diagnostics.report(diagnostics.diagnose(torch.bfloat16, V3)) == [
        f"vLLM {version}: FlashLatte's plugin is registered",
        f"    {line}",
        "    without an option vLLM chooses vllm.TritonMLABackend",
    ]


@pytest.mark.parametrize(
    ("version", "line"),
    [
        (
            "0.26.0",
            "not supported by FlashLatte: models with an indexer are supported in vLLM 0.32 and later, not in 0.26.0",
        ),
        ("0.33.0", "FlashLatte supports this model with --attention-backend CUSTOM"),
    ],
)
def test_doctor_of_a_model_with_an_indexer(monkeypatch, version, line):
    monkeypatch.setattr(compat, "version", lambda: version)
    monkeypatch.setattr(diagnostics, "_unregistered_reason", lambda: None)
    monkeypatch.setattr(diagnostics, "_chosen", lambda dtype, model: "vllm.FlashMLASparseBackend")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    indexer = IndexerConfig(num_heads=64, head_dim=128, topk=2048)
    lines = diagnostics.report(diagnostics.diagnose(torch.bfloat16, dataclasses.replace(V3, indexer=indexer)))
    assert lines[1:] == [f"    {line}", "    without an option vLLM chooses vllm.FlashMLASparseBackend"]


def test_doctor_of_a_model_with_windows(monkeypatch):
    monkeypatch.setattr(compat, "version", lambda: "0.33.0")
    monkeypatch.setattr(diagnostics, "_unregistered_reason", lambda: None)
    monkeypatch.setattr(diagnostics, "_chosen", lambda dtype, model: "vllm.FlashMLASparseBackend")
    facts = diagnostics.diagnose(torch.bfloat16, V3, dataclasses.replace(V3, window=512))
    assert diagnostics.report(facts)[1] == f"    not supported by FlashLatte: {support.WINDOW_UNSUPPORTED}"


@pytest.mark.parametrize("model_type", support.WITHOUT_MLA)
def test_doctor_of_a_model_that_is_not_mla_in_vllm(monkeypatch, tmp_path, model_type):
    monkeypatch.setattr(compat, "version", lambda: "0.33.0")
    monkeypatch.setattr(diagnostics, "_unregistered_reason", lambda: None)
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "kv_lora_rank": 256, "qk_nope_head_dim": 64}
    fields = {"model_type": model_type, "qk_rope_head_dim": 32, "v_head_dim": 64} | sizes
    if model_type.startswith("mistral"):
        fields["rope_parameters"] = {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 8192}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": fields}))
    assert diagnostics.report(doctor.diagnose(model=tmp_path)["vllm"]) == [
        "vLLM 0.33.0: FlashLatte's plugin is registered",
        f"    not supported by FlashLatte: {support.WITHOUT_MLA[model_type]}",
    ]


def test_doctor_of_deepseek_v4(monkeypatch):
    monkeypatch.setattr(compat, "version", lambda: "0.33.0")
    monkeypatch.setattr(diagnostics, "_unregistered_reason", lambda: None)
    facts = diagnostics.diagnose(torch.bfloat16, v4=True, model_type="deepseek_v41")
    assert facts["refusal"] == support.V41_UNSUPPORTED

    def lines():
        return diagnostics.report(diagnostics.diagnose(torch.bfloat16, v4=True, model_type="deepseek_v4"))[1:]

    assert lines() == [f"    not supported by FlashLatte: {support.V4_NEEDS_CUDA}"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 6))
    assert lines() == [f"    not supported by FlashLatte: {support.V4_NEEDS_E4M3}"]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert lines() == [f"    FlashLatte supports this model with --attention-backend CUSTOM: {support.V4_PARTS}"]
    monkeypatch.setattr(compat, "version", lambda: "0.26.0")
    assert lines() == [
        "    not supported by FlashLatte: DeepSeek-V4 is supported in vLLM 0.32 and later, not in 0.26.0"
    ]
