"""vLLM's engine over FlashLatte's sparse MLA and indexer, on a CPU: DeepSeek-V3.2 and GLM-5."""

import sys
import types

import pytest
import torch
from support import tiny_checkpoints
from support.vllm_engine import MIXED, NEW_TOKENS, Generated, engine, largest_difference, prompts

from flashlatte.integrations import vllm as plugin
from flashlatte.integrations.vllm import support

CLOSE = 5e-5
SHARED = prompts((230, 200, 170), shared=160)
# vLLM's model for CUDA, with PyTorch functions in place of its fused kernels.
FUSED = {
    "model_class_overrides": {
        name: f"support.vllm_fused_model:{name}" for name in ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM")
    }
}
FUSED_AWAY = {"index_quantize"}
OPERATIONS = {"index_quantize", "index_gather", "index_select", "paged_index_select", "attend_selected_rows"}


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("v32", {}),
        ("v32", {"max_num_batched_tokens": 96, "block_size": 16}),
        ("glm", {"max_num_batched_tokens": 96}),
        ("v32", FUSED),
        ("glm", FUSED | {"max_num_batched_tokens": 96, "block_size": 16}),
    ],
)
def test_generates_the_tokens_of_transformers(checkpoint, exact_indexer, family, options):
    model, given = checkpoint(family), prompts(MIXED)
    with engine(model, **options) as vllm:
        ours = vllm.generate(given)
        assert vllm.calls()[0].keys() >= OPERATIONS - (FUSED_AWAY if FUSED.items() <= options.items() else set())
    stock = [Generated(*tiny_checkpoints.greedy(model, ids, NEW_TOKENS)) for ids in given]
    assert [one.tokens for one in ours] == [other.tokens for other in stock]
    assert largest_difference(ours, stock) < CLOSE


@pytest.fixture(scope="module")
def whole(checkpoint):
    """Outputs of V3.2 with vLLM's e4m3 indexer and whole prefills, by cache dtype.

    All tokens are chosen: of two index logits of e4m3 keys that are as good as equal, another sum takes the other.
    """
    generated = {}
    for cache in ("auto", "fp8_ds_mla"):
        with engine(checkpoint("v32", index_topk=512), kv_cache_dtype=cache, enable_prefix_caching=False) as vllm:
            generated[cache] = vllm.generate(SHARED)
    return generated


@pytest.mark.parametrize("cache", ["auto", "fp8_ds_mla"])
def test_chunks_prefixes_and_page_sizes_do_not_change_tokens(checkpoint, whole, cache):
    """Prompts in chunks, prefixes from the cache, other pages: the cache holds the same bytes."""
    model = checkpoint("v32", index_topk=512)
    with engine(model, kv_cache_dtype=cache, max_num_batched_tokens=96, block_size=16) as vllm:
        ours = vllm.generate(SHARED[:1]) + vllm.generate(SHARED[1:])
    assert [one.cached for one in ours] == [0, 160, 160]
    assert [one.tokens for one in ours] == [other.tokens for other in whole[cache]]
    assert largest_difference(ours, whole[cache]) < CLOSE


def test_speculation(checkpoint, whole, own_process):
    speculation = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    with engine(checkpoint("v32", index_topk=512), speculative_config=speculation) as vllm:
        ours = vllm.generate(SHARED)
        assert vllm.metric("spec_decode_num_draft_tokens") > 0
    assert [one.tokens for one in ours] == [other.tokens for other in whole["auto"]]


# Largest difference of a logprob from float32 if all tokens are selected. Dense layers only, as for dense MLA.
@pytest.mark.parametrize(
    ("options", "bound"),
    [
        ({"dtype": "bfloat16"}, 0.15),
        ({"dtype": "bfloat16", "kv_cache_dtype": "fp8_ds_mla"}, 0.25),
        ({"dtype": "bfloat16"} | FUSED, 0.15),
        ({"dtype": "bfloat16", "kv_cache_dtype": "fp8_ds_mla"} | FUSED, 0.25),
    ],
)
def test_fewer_bits(checkpoint, options, bound):
    model = checkpoint("v32", first_k_dense_replace=3, index_topk=512)
    expected = [Generated(*tiny_checkpoints.greedy(model, ids, NEW_TOKENS)) for ids in prompts(MIXED)]
    with engine(model, max_num_batched_tokens=96, **options) as vllm:
        assert 0 < largest_difference(vllm.generate(prompts(MIXED)), expected) < bound


V32, BF16 = "DeepseekV32ForCausalLM", torch.bfloat16


@pytest.fixture
def cuda(monkeypatch):
    """The class that CUSTOM selects on a Hopper GPU, by architecture."""
    import vllm.config

    monkeypatch.setitem(sys.modules, "vllm._C_stable_libtorch", types.ModuleType("stand_in"))
    from vllm.platforms import current_platform
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability
    from vllm.plugins import load_general_plugins
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig

    load_general_plugins()
    monkeypatch.setattr(CudaPlatformBase, "get_device_capability", lambda *_: DeviceCapability(9, 0))
    monkeypatch.setattr(type(current_platform), "device_type", "cuda")

    def choose(architecture, dtype=BF16, cache="auto", use_sparse=True, head_size=576, **more):
        config = types.SimpleNamespace(model_config=types.SimpleNamespace(architecture=architecture))
        monkeypatch.setattr(vllm.config, "get_current_vllm_config_or_none", lambda: config)
        expected = AttentionSelectorConfig(head_size, dtype, cache, None, use_mla=True, use_sparse=use_sparse, **more)
        return CudaPlatformBase.get_attn_backend_cls(AttentionBackendEnum.CUSTOM, expected, num_heads=128)

    return choose


def test_custom_selects_the_backend_of_the_model(cuda):
    assert cuda("DeepseekV3ForCausalLM", use_sparse=False) == plugin.DENSE
    # Layers of one model differ (Hy4). FlashLatte also attends to what vLLM's own indexer has selected (GLM-5.3-Flash).
    assert cuda("HYV4ForCausalLM", use_sparse=False, has_sink=True) == plugin.DENSE
    assert cuda("HYV4ForCausalLM", has_sink=True) == plugin.SPARSE
    assert cuda("Glm5NextForCausalLM", head_size=512) == plugin.SPARSE
    assert cuda("Glm5NextForCausalLM", head_size=512, cache="fp8_ds_mla") == plugin.SPARSE
    for architecture in support.INDEXER_MODELS:
        for cache in ("auto", "bfloat16", "fp8_ds_mla"):
            assert cuda(architecture, cache=cache) == plugin.SPARSE
        assert cuda(architecture, use_batch_invariant=True) == plugin.SPARSE
        assert cuda(architecture, use_dcp=True) == plugin.SPARSE


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"architecture": V32, "dtype": torch.float32}, "it takes bfloat16, float16, not float32"),
        ({"architecture": V32, "cache": "fp8_e5m2"}, "kv_cache_dtype not supported"),
        ({"architecture": V32, "use_pcp": True}, "PCP not supported"),
        ({"architecture": V32, "use_adaptive_verification": True}, "device-cpu query lens mismatch not supported"),
    ],
)
def test_unsupported_calls_on_a_gpu(cuda, arguments, reason):
    with pytest.raises(ValueError, match=reason):
        cuda(**arguments)
