"""``FLASHLATTE_DECODE_PRECISION`` in the vLLM plugin, without vLLM: refused configurations, and the doctor's output."""

from __future__ import annotations

import contextlib
import dataclasses
from types import SimpleNamespace

import pytest
import torch

from flashlatte.integrations import decode_precision, vllm
from flashlatte.integrations.vllm import compat, diagnostics, support
from flashlatte.layers import IndexerConfig, MLAConfig
from flashlatte.runtime import machine

V3 = MLAConfig(hidden_size=7168, num_attention_heads=128, q_lora_rank=1536)
H200, A100 = machine.GPU((9, 0), 132), machine.GPU((8, 0), 108)


@pytest.fixture(autouse=True)
def requested(monkeypatch):
    monkeypatch.setenv(decode_precision.VARIABLE, "fp8")


@pytest.fixture
def configured(monkeypatch):
    """Registers the plugin with stand-ins for vLLM's tables; the functions that vLLM calls, by mark."""
    found = {}
    monkeypatch.setattr(compat, "version", lambda: "0.33.0")
    for name in ("register_attention", "register_prefill"):
        monkeypatch.setattr(compat, name, lambda *_: None)
    monkeypatch.setattr(compat, "architectures", lambda: ("LlamaForCausalLM", "DeepseekV3ForCausalLM"))

    def configure(architectures, before=None, after=None, mark=""):
        found[mark] = (architectures, before)

    monkeypatch.setattr(compat, "configure_models", configure)
    vllm.register()
    return found


def configuration(backend="CUSTOM", ranks=1, runner="generate"):
    return SimpleNamespace(
        attention_config=SimpleNamespace(backend=backend and SimpleNamespace(name=backend)),
        model_config=SimpleNamespace(runner_type=runner),
        parallel_config=SimpleNamespace(decode_context_parallel_size=ranks),
    )


@pytest.mark.parametrize(
    ("given", "architecture", "needs"),
    [
        ({}, "DeepseekV3ForCausalLM", None),
        ({"backend": None, "runner": "draft"}, "LlamaForCausalLM", None),
        ({"backend": None}, "DeepseekV3ForCausalLM", "--attention-backend CUSTOM$"),
        ({"backend": "FLASHMLA"}, "LlamaForCausalLM", "--attention-backend CUSTOM$"),
        ({}, "DeepseekV4ForCausalLM", "a model whose layers all attend to all tokens, without an indexer$"),
        ({"ranks": 2}, "DeepseekV3ForCausalLM", "decode without context parallelism, which merges results by lse$"),
    ],
)
def test_configurations_that_would_ignore_it_are_refused(configured, given, architecture, needs):
    architectures, check = configured["precision_checked"]
    assert architectures == ("LlamaForCausalLM", "DeepseekV3ForCausalLM")
    if needs is None:
        check(configuration(**given), architecture)
        return
    with pytest.raises(ValueError, match=f"^FLASHLATTE_DECODE_PRECISION=fp8 needs {needs}"):
        check(configuration(**given), architecture)


def test_nothing_is_checked_unless_it_is_set(monkeypatch, request):
    monkeypatch.setenv(decode_precision.VARIABLE, "")
    assert "precision_checked" not in request.getfixturevalue("configured")
    assert support.dense_refusal("cpu", 576, torch.float32, "auto", 64) is None
    assert decode_precision.backend("cuda") is None


def test_an_unknown_value(monkeypatch):
    monkeypatch.setenv(decode_precision.VARIABLE, "e4m3")
    message = "^FLASHLATTE_DECODE_PRECISION must be fp8, or unset for exact products, got 'e4m3'$"
    with pytest.raises(ValueError, match=message):
        vllm.register()
    with pytest.raises(ValueError, match=message):
        support.dense_refusal("cpu", 576, torch.bfloat16, "fp8", 64)


@pytest.mark.parametrize(
    ("gpu", "given", "reason"),
    [
        (None, ("cpu", 576, torch.float32, "fp8", 16), None),
        (None, ("cpu", 576, torch.float32, "auto", 64), "an fp8 cache in e4m3"),
        (H200, ("cuda", 576, torch.bfloat16, "fp8", 64), None),
        (H200, ("cuda", 576, torch.bfloat16, "fp8_e4m3", None), None),
        (H200, ("cuda", 576, torch.bfloat16, "bfloat16", 64), "an fp8 cache in e4m3"),
        (H200, ("cuda", 576, torch.bfloat16, None, 64), "an fp8 cache in e4m3"),
        (
            H200,
            ("cuda", 576, torch.bfloat16, "fp8", 4),
            "a kernel, and that of hopper takes pages of a multiple of 8 tokens, not 4",
        ),
        (
            H200,
            ("cuda", 320, torch.bfloat16, "fp8", 64),
            "a kernel, and that of hopper takes head dims 576 with 512 or 512 with 512, not 320 with None",
        ),
        (
            A100,
            ("cuda", 576, torch.bfloat16, "fp8", 64),
            "a kernel, and that of hopper needs compute capability 9.0, and cuda has 8.0",
        ),
    ],
)
def test_caches_and_gpus_without_it_are_refused(gpu, given, reason):
    expected = None if reason is None else f"FLASHLATTE_DECODE_PRECISION=fp8 needs {reason}"
    with contextlib.nullcontext() if gpu is None else machine.assuming(gpu):
        assert support.dense_refusal(*given) == expected


def test_an_indexer_is_refused():
    reason = support.sparse_refusal("cuda", 576, torch.bfloat16, "fp8_ds_mla", 64)
    assert reason == f"FLASHLATTE_DECODE_PRECISION=fp8 needs {support.PRECISION_NEEDS}"


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {},
            "FlashLatte supports this model with FLASHLATTE_VLLM_CPU=1 and --attention-backend CUSTOM --kv-cache-dtype "
            "fp8, which FLASHLATTE_DECODE_PRECISION=fp8 needs",
        ),
        (
            {"attn_sink": True},
            "not supported by FlashLatte: FLASHLATTE_DECODE_PRECISION=fp8 needs layers without attention sinks, which "
            "are applied by lse",
        ),
        (
            {"indexer": IndexerConfig()},
            "not supported by FlashLatte: FLASHLATTE_DECODE_PRECISION=fp8 needs a model whose layers all attend to all "
            "tokens, without an indexer",
        ),
    ],
)
def test_doctor_of_a_model(monkeypatch, changes, line):
    monkeypatch.setattr(compat, "version", lambda: "0.33.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(diagnostics, "_unregistered_reason", lambda: None)
    monkeypatch.setattr(diagnostics, "_chosen", lambda dtype, model: None)
    facts = diagnostics.diagnose(torch.bfloat16, dataclasses.replace(V3, **changes))
    assert diagnostics.report(facts)[1] == f"    {line}"


def test_doctor_of_deepseek_v4(monkeypatch):
    monkeypatch.setattr(compat, "version", lambda: "0.33.0")
    monkeypatch.setattr(diagnostics, "_unregistered_reason", lambda: None)
    facts = diagnostics.diagnose(torch.bfloat16, v4=True, model_type="deepseek_v4")
    assert facts["refusal"] == f"FLASHLATTE_DECODE_PRECISION=fp8 needs {support.PRECISION_NEEDS}"
