"""``FLASHLATTE_DECODE_PRECISION`` in the SGLang plugin: decode, the check at start, and what the doctor prints."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.sglang_calls import draw, untouched

from flashlatte import flash_mla
from flashlatte.integrations import decode_precision
from flashlatte.integrations.sglang import attention, diagnostics, hooks, start
from flashlatte.layers import IndexerConfig, MLAConfig
from flashlatte.runtime import machine

E4M3 = torch.float8_e4m3fn
V3 = MLAConfig(hidden_size=7168, num_attention_heads=128, q_lora_rank=1536)
H200, A100 = machine.GPU((9, 0), 132), machine.GPU((8, 0), 108)


@pytest.fixture(autouse=True)
def requested(monkeypatch):
    monkeypatch.setenv(decode_precision.VARIABLE, "fp8")


def dense(cache: torch.Tensor, q: torch.Tensor) -> dict[str, Any]:
    """The arguments of SGLang's flashmla backend."""
    table, lengths = torch.tensor([[3, 1], [2, 0]], dtype=torch.int32), torch.tensor([70, 64], dtype=torch.int32)
    call: dict[str, Any] = {"q": q, "k_cache": cache, "block_table": table, "cache_seqlens": lengths, "head_dim_v": 512}
    return call | {"softmax_scale": 0.1, "causal": True, "tile_scheduler_metadata": flash_mla.FlashMLASchedMeta()}


@pytest.mark.parametrize("stored", [E4M3, torch.uint8])
def test_decode_over_an_fp8_cache(monkeypatch, stored):
    q, cache = draw(2, 1, 4, 576).to(E4M3), draw(4, 64, 1, 576, seed=1).to(E4M3)
    scale = torch.full((1,), 0.37)
    scales: dict[str, Any] = {"descale_q": scale, "descale_k": scale}
    call = dense(cache.view(stored), q) | scales
    rounded = attention.flash_mla_with_kvcache(untouched, **call)
    expected = flash_mla.flash_mla_with_kvcache(**dense(cache, q), **scales, precision="fp8")
    assert all(x.equal(y) for x, y in zip(rounded, expected, strict=True))
    monkeypatch.delenv(decode_precision.VARIABLE)
    exact = attention.flash_mla_with_kvcache(untouched, **call)
    assert 1e-3 < ((rounded[0] - exact[0]).norm() / exact[0].norm()).item() < 0.1


def test_a_draft_model_with_another_cache_is_exact(monkeypatch):
    call = dense(draw(4, 64, 1, 576, seed=1).bfloat16(), draw(2, 1, 4, 576).bfloat16())
    results = attention.flash_mla_with_kvcache(untouched, **call)
    monkeypatch.delenv(decode_precision.VARIABLE)
    assert results[0].equal(attention.flash_mla_with_kvcache(untouched, **call)[0])


def runner(**changes: Any) -> Any:
    """Fake of SGLang's model runner with the attributes that the check reads."""
    facts = {"is_draft_worker": False, "decode_attention_backend_str": "flashmla", "device": "cuda"}
    facts |= {"dtype": torch.bfloat16, "kv_cache_dtype": E4M3}
    return SimpleNamespace(model_config=SimpleNamespace(kv_lora_rank=512, qk_rope_head_dim=64), **facts | changes)


@pytest.mark.parametrize(
    ("gpu", "changes", "needs"),
    [
        (H200, {}, None),
        (H200, {"is_draft_worker": True, "decode_attention_backend_str": "triton"}, None),
        (H200, {"decode_attention_backend_str": "fa3"}, "--attention-backend flashmla, got fa3 for decode"),
        (H200, {"decode_attention_backend_str": "dsa"}, "--attention-backend flashmla, got dsa for decode"),
        (H200, {"kv_cache_dtype": torch.bfloat16}, "an fp8 cache in e4m3"),
        (H200, {"kv_cache_dtype": torch.float8_e5m2}, "an fp8 cache in e4m3"),
        (A100, {}, "a kernel, and that of hopper needs compute capability 9.0, and cuda has 8.0"),
    ],
)
def test_a_server_that_would_ignore_it_does_not_start(gpu, changes, needs):
    began = []
    message = f"^FLASHLATTE_DECODE_PRECISION=fp8 needs {needs}$"
    refused = contextlib.nullcontext() if needs is None else pytest.raises(ValueError, match=message)
    with machine.assuming(gpu), refused:
        start.init_attention_backends(began.append, runner(**changes))
    assert len(began) == 1


def test_an_unknown_value_does_not_start(monkeypatch):
    """SGLang only logs exceptions of a registration."""
    monkeypatch.setenv(decode_precision.VARIABLE, "e4m3")
    with pytest.raises(ValueError, match="FLASHLATTE_DECODE_PRECISION must be fp8, or unset for exact products"):
        start.init_attention_backends(lambda _: None, runner())
    assert hooks.START in hooks.active_hooks()


def test_nothing_is_checked_unless_it_is_set(monkeypatch):
    monkeypatch.delenv(decode_precision.VARIABLE)
    assert hooks.active_hooks() == hooks.HOOKS
    assert start.init_attention_backends(lambda _: "theirs", runner(decode_attention_backend_str="fa3")) == "theirs"


@pytest.mark.parametrize(
    ("config", "line"),
    [
        (
            V3,
            "with --attention-backend flashmla --kv-cache-dtype fp8_e4m3, which FLASHLATTE_DECODE_PRECISION=fp8 needs, "
            "FlashLatte runs decode and SGLang runs prefill",
        ),
        (
            dataclasses.replace(V3, indexer=IndexerConfig()),
            "FLASHLATTE_DECODE_PRECISION=fp8 needs a model without an indexer, which SGLang runs with "
            "--attention-backend flashmla",
        ),
    ],
)
def test_doctor_of_a_model(monkeypatch, config, line):
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.5.23")
    monkeypatch.setattr(diagnostics, "_unregistered_reason", lambda: None)
    monkeypatch.setattr(diagnostics, "missing_targets", lambda _: [])
    assert diagnostics.report(diagnostics.diagnose(config))[1:] == [f"    {line}"]
