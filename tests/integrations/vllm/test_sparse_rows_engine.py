"""FlashLatte's norms, rotations and cache writes in vLLM's layers with an indexer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import tiny_checkpoints
from support.vllm_engine import MIXED, NEW_TOKENS, Generated, engine, largest_difference, prompts

from flashlatte.integrations.vllm import compat
from flashlatte.integrations.vllm.backends import fused_rows

TOKENS, LATENT, ROPE, RANK, HEADS, INDEX_HEADS = 5, 512, 64, 96, 3, 32
BF16 = torch.bfloat16
# vLLM's model for CUDA.
FUSED = {"model_class_overrides": {"DeepseekV32ForCausalLM": "support.vllm_fused_model:DeepseekV32ForCausalLM"}}


def row_arguments(dtype: torch.dtype, cache_dtype: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of ``fused_norm_rope``; the fourth token is padding, which has no slot."""
    torch.manual_seed(0)
    projected = torch.randn(TOKENS, RANK + LATENT + ROPE).to(dtype)
    q_c, kv_c, k_pe = projected.split((RANK, LATENT, ROPE), dim=-1)
    angles = torch.rand(50, ROPE // 2) * 6
    table = torch.cat((angles.cos(), angles.sin()), dim=-1).to(dtype)
    width, cached = (656, torch.uint8) if cache_dtype == "fp8_ds_mla" else (LATENT + ROPE, dtype)
    positions = torch.tensor([3, 4, 5, 0, 40])
    norms = [torch.randn(size).to(dtype) for size in (RANK, LATENT)]
    index = torch.randn(TOKENS, 128).to(dtype), torch.randn(128), torch.randn(128), 1e-6
    before = (positions, q_c, norms[0], 1e-6, kv_c, norms[1], 1e-5, k_pe, table, *index, table)
    named: dict[str, Any] = {
        "slot_mapping": torch.tensor([7, 8, 9, -1, 30]),
        "indexer_slot_mapping": torch.tensor([7, 8, 9, -1, 30]),
        "indexer_k_cache": torch.zeros(3, 16, 132, dtype=torch.uint8),
        "indexer_cache_shuffled": False,
        "mla_kv_cache": torch.zeros(3, 16, width, dtype=cached),
        "mla_kv_cache_dtype": cache_dtype,
        "mla_k_scale": torch.ones(1),
        "has_indexer": True,
        "index_rope_interleave": False,
        "kv_c_out": torch.zeros(TOKENS, LATENT, dtype=dtype),
        "k_pe_out": torch.zeros(TOKENS, ROPE, dtype=dtype),
        "index_k_out": None,
        "skip_scale": True,
    }
    return (*before, torch.zeros(TOKENS + 2, 4, dtype=torch.int32)), named


def e4m3(cache: torch.Tensor, width: int) -> torch.Tensor:
    return cache[..., :width].contiguous().view(torch.float8_e4m3fn).float()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("cache_dtype", ["auto", "fp8_ds_mla"])
def test_rows_are_those_of_vllm(cache_dtype, interleaved):
    from support import vllm_fused_model

    results = []
    for function in (fused_rows.fused_norm_rope, vllm_fused_model.fused_norm_rope):
        before, named = row_arguments(BF16, cache_dtype)
        named["index_rope_interleave"] = interleaved
        results.append((function(*before, **named), before[-1], named))
    (q, selected, ours), (expected, selected_before, theirs) = results
    torch.testing.assert_close(q, expected)
    assert torch.equal(selected, selected_before)
    for name in ("kv_c_out", "k_pe_out"):
        torch.testing.assert_close(ours[name], theirs[name])
    mine, other = ours["mla_kv_cache"], theirs["mla_kv_cache"]
    if cache_dtype == "auto":
        torch.testing.assert_close(mine, other)
    else:
        # Latents that were rounded to bf16 first may round to the other neighbor.
        torch.testing.assert_close(e4m3(mine, LATENT), e4m3(other, LATENT), rtol=0.13, atol=2**-9)
        assert torch.equal(mine[..., LATENT : LATENT + 16], other[..., LATENT : LATENT + 16])
        tails = (cache[..., LATENT + 16 :].contiguous().view(BF16) for cache in (mine, other))
        torch.testing.assert_close(*tails)
    pages, others = (named["indexer_k_cache"].flatten(1) for named in (ours, theirs))
    torch.testing.assert_close(e4m3(pages, 16 * 128), e4m3(others, 16 * 128), rtol=0.13, atol=2**-9)
    assert torch.equal(pages[:, 16 * 128 :], others[:, 16 * 128 :])
    assert pages.any()


@pytest.mark.parametrize("has_indexer", [True, False])
def test_queries_are_those_of_vllm(has_indexer):
    from support import vllm_fused_model

    torch.manual_seed(0)
    before, _ = row_arguments(BF16, "auto")
    positions, table = before[0], before[8]
    q_pe = torch.randn(TOKENS, HEADS, 192).to(BF16)[..., 128:]
    index = torch.randn(TOKENS, INDEX_HEADS, 128).to(BF16), table
    weights = torch.randn(TOKENS, 128 + INDEX_HEADS).to(BF16)[:, 128:]
    arguments = (positions, q_pe, table, *index, torch.zeros(TOKENS, HEADS, LATENT), torch.ones(1), weights, 0.1, 0.2)
    flags = {"has_indexer": has_indexer, "index_rope_interleave": True, "quantize_mqa": False}
    values, folded, rotated = fused_rows.fused_q(*arguments, **flags)
    expected = vllm_fused_model.fused_q(*arguments, **flags)
    torch.testing.assert_close(rotated, expected[2])
    if not has_indexer:
        assert (values, folded) == (None, None)
        return
    torch.testing.assert_close(values.float(), expected[0].float(), rtol=0.13, atol=2**-9)
    torch.testing.assert_close(folded, expected[1])
    with pytest.raises(ValueError, match="quantize_mqa must be False"):
        fused_rows.fused_q(*arguments, **flags | {"quantize_mqa": True})


def test_profiling_has_no_caches():
    before, named = row_arguments(BF16, "auto")
    absent = dict.fromkeys(("slot_mapping", "indexer_slot_mapping", "indexer_k_cache", "mla_kv_cache"))
    fused_rows.fused_norm_rope(*before, **named | absent)
    assert named["kv_c_out"].any()
    assert not named["mla_kv_cache"].any()


@pytest.mark.parametrize(
    ("converts", "packs", "replaced"), [(False, False, "always"), (True, False, "never"), (True, True, "of ours")]
)
def test_vllms_kernels_run_where_they_are_supported(monkeypatch, converts, packs, replaced):
    monkeypatch.setattr(compat, "converts_e4m3", lambda: converts)
    monkeypatch.setattr(compat, "packs_index_scales", lambda: packs)
    monkeypatch.setattr(fused_rows, "fused_q", lambda *_: "FlashLatte's")
    fused_rows.fused_q.__name__ = "fused_q"
    module = SimpleNamespace(fused_norm_rope=lambda: "vLLM's", fused_q=lambda: "vLLM's")
    fused_rows.install(module, lambda metadata: metadata == "FlashLatte's metadata")
    called = {}
    for metadata in ("FlashLatte's metadata", "vLLM's metadata"):
        context = SimpleNamespace(attn_metadata={"layer": metadata})
        monkeypatch.setattr(fused_rows, "get_forward_context", lambda context=context: context)
        called[metadata] = module.fused_q()
    expected = {"always": ("FlashLatte's",) * 2, "never": ("vLLM's",) * 2, "of ours": ("FlashLatte's", "vLLM's")}
    assert tuple(called.values()) == expected[replaced]


@pytest.mark.parametrize(("cache", "bound"), [("auto", 0.15), ("fp8_ds_mla", 0.25)])
def test_a_model_generates_with_them(checkpoint, monkeypatch, cache, bound):
    from support import vllm_fused_model  # noqa: F401  (its own functions come first)
    from vllm.models.deepseek_v32 import attention

    for function in (fused_rows.fused_norm_rope, fused_rows.fused_q):
        monkeypatch.setattr(attention, function.__name__, function)
    model = checkpoint("v32", first_k_dense_replace=3, index_topk=512)
    expected = [Generated(*tiny_checkpoints.greedy(model, ids, NEW_TOKENS)) for ids in prompts(MIXED)]
    with engine(model, max_num_batched_tokens=96, dtype="bfloat16", kv_cache_dtype=cache, **FUSED) as vllm:
        assert 0 < largest_difference(vllm.generate(prompts(MIXED)), expected) < bound
        assert "index_query" in vllm.calls()[0]
