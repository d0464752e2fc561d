"""vLLM options that reach FlashLatte's classes: used, refused, or ignored with a warning."""

import logging
from types import SimpleNamespace

import pytest
import torch


def configured(**options):
    """A configuration with these attention options, with the fields that vLLM's classes read."""
    return SimpleNamespace(
        attention_config=SimpleNamespace(**{"use_prefill_query_quantization": False, "hisparse_config": None} | options)
    )


@pytest.mark.parametrize(("named", "elsewhere"), [(None, False), ("CUSTOM", False), ("FLASH_ATTN", True)])
def test_whoever_names_another_prefill_gets_it(monkeypatch, named, elsewhere):
    import vllm.config
    from vllm.model_executor.layers.attention.mla_attention import MLACommonImpl

    from flashlatte.integrations.vllm import compat
    from flashlatte.integrations.vllm.backends import dense

    backend = None if named is None else SimpleNamespace(name=named)
    monkeypatch.setattr(vllm.config, "get_current_vllm_config_or_none", lambda: configured(mla_prefill_backend=backend))
    assert compat.selects_other_prefill() == elsewhere
    ran = []
    monkeypatch.setattr(MLACommonImpl, "forward_mha", lambda *_, **__: ran.append("vllm"))
    monkeypatch.setattr(dense, "attend_heads", lambda *_: ran.append("flashlatte"))
    impl = object.__new__(dense.FlashLatteMLAImpl)
    impl.uses_other_prefill, impl.dcp_world_size, impl.is_fp8 = compat.selects_other_prefill(), 1, False
    impl.expansion, impl.scale, impl.num_heads, impl.v_head_dim, impl.kv_lora_rank = None, 1.0, 2, 128, 512
    query = torch.zeros(1, 2, 192)
    metadata = SimpleNamespace(prefill=SimpleNamespace(chunked_context=None, query_start_loc=None, max_query_len=1))
    cache = torch.zeros(1, 16, 576)
    impl.forward_mha(
        query, torch.zeros(1, 512), torch.zeros(1, 1, 64), cache, metadata, torch.ones(1), torch.zeros(1, 256)
    )
    assert ran == ["vllm" if elsewhere else "flashlatte"]


@pytest.mark.parametrize("asked", [False, True])
def test_queries_of_a_prefill_are_not_quantised(caplog, monkeypatch, asked):
    from flashlatte.integrations.vllm import compat
    from flashlatte.integrations.vllm.backends.dense import FlashLatteMLAMetadataBuilder

    compat.warn_once.cache_clear()
    monkeypatch.setattr(compat._logger, "propagate", True)
    config = configured(use_prefill_query_quantization=asked)
    with caplog.at_level(logging.WARNING, logger=compat._logger.name):
        dtype = FlashLatteMLAMetadataBuilder.determine_prefill_query_data_type(config, torch.bfloat16)
    assert dtype == torch.bfloat16
    assert len(caplog.messages) == asked
    assert all("ignores use_prefill_query_quantization" in message for message in caplog.messages)


def test_no_backend_takes_query_lengths_that_the_device_alone_knows():
    from flashlatte.integrations.vllm.backends import dense, indexer, sparse

    for backend in (
        dense.FlashLatteMLABackend,
        sparse.FlashLatteSparseMLABackend,
        indexer.FlashLatteIndexerBackend,
    ):
        assert not backend.supports_device_cpu_query_lens_mismatch()


@pytest.mark.parametrize(("cache", "dtype"), [("auto", torch.float32), ("fp8", torch.bfloat16)])
def test_prefill_runs_before_vllm_serves(monkeypatch, cache, dtype):
    """Warm-up runs over new and cached tokens without the layer's weights; on a GPU it compiles the kernels."""
    from flashlatte.integrations.vllm.backends import dense
    from flashlatte.layers import prefill

    ran = []
    for name in ("dense_prefill", "cache_gather", "merge_states"):
        run = getattr(prefill, name)
        monkeypatch.setattr(prefill, name, lambda *a, _run=run, _name=name, **k: ran.append(_name) or _run(*a, **k))
    impl = object.__new__(dense.FlashLatteMLAImpl)
    impl.uses_other_prefill, impl.is_fp8, impl.scale = False, cache == "fp8", 192**-0.5
    impl.num_heads, impl.head_size, impl.kv_lora_rank, impl.v_head_dim = 2, 576, 512, 128
    impl.qk_nope_head_dim, impl.qk_rope_head_dim, impl.qk_head_dim = 128, 64, 192
    impl.expansion = prefill.Expansion(lambda _: pytest.fail("the weights are read"), 512, 128, 64, 128)
    impl.warm_up_prefill(dtype, 16, torch.ones(()))
    assert ran == ["dense_prefill", "cache_gather", "dense_prefill", "merge_states"]
    impl.uses_other_prefill = True
    impl.warm_up_prefill(dtype, 16, torch.ones(()))
    assert len(ran) == 4


@pytest.mark.parametrize(
    ("dtype", "cache", "sparse", "refused"),
    [
        (torch.bfloat16, "bfloat16", False, False),
        (torch.float32, "fp8", False, False),
        (torch.float32, "fp8_ds_mla", True, False),
        (torch.float32, "bfloat16", False, True),
        (torch.bfloat16, "float16", True, True),
    ],
)
def test_a_cpu_refuses_a_cache_before_weights_load(dtype, cache, sparse, refused):
    from vllm.v1.attention.selector import AttentionSelectorConfig

    from flashlatte.integrations import vllm
    from flashlatte.integrations.vllm.backends.cpu import FlashLatteCpuPlatform

    wanted = AttentionSelectorConfig(576, dtype, cache, 64, use_mla=True, use_sparse=sparse)
    if refused:
        with pytest.raises(ValueError, match=f"a {cache} cache takes queries of its own dtype, not "):
            FlashLatteCpuPlatform.get_attn_backend_cls(None, wanted)
    else:
        assert FlashLatteCpuPlatform.get_attn_backend_cls(None, wanted) == (vllm.SPARSE if sparse else vllm.DENSE)
