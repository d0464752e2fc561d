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
def test_another_prefill_backend_can_be_selected(monkeypatch, named, elsewhere):
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
def test_queries_of_a_prefill_are_not_quantized(caplog, monkeypatch, asked):
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


def test_no_backend_supports_query_lengths_on_the_device_only():
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
    from flashlatte.layers import cache as caches
    from flashlatte.layers import prefill

    ran = []
    for module, name in ((prefill, "dense_prefill"), (caches, "cache_gather"), (prefill, "merge_states")):
        run = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, _run=run, _name=name, **k: ran.append(_name) or _run(*a, **k))
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

    expected = AttentionSelectorConfig(576, dtype, cache, 64, use_mla=True, use_sparse=sparse)
    if refused:
        with pytest.raises(ValueError, match=f"a {cache} cache takes queries of its own dtype, not "):
            FlashLatteCpuPlatform.get_attn_backend_cls(None, expected)
    else:
        assert FlashLatteCpuPlatform.get_attn_backend_cls(None, expected) == (vllm.SPARSE if sparse else vllm.DENSE)


@pytest.mark.parametrize("shared", [False, True])
def test_lengths_of_index_keys_are_vllms_buffers(shared):
    """A CUDA graph reads the addresses that it was captured with."""
    from flashlatte.integrations.vllm.backends.indexer_metadata import FlashLatteIndexerMetadataBuilder, Sharded
    from flashlatte.kv_cache.sharding import Sharding

    builder = object.__new__(FlashLatteIndexerMetadataBuilder)
    builder.reorder_batch_threshold = 1
    builder.sharded = Sharded(Sharding(1, 2, 1), None) if shared else None
    batch = SimpleNamespace(
        max_query_len=1,
        num_reqs=3,
        num_actual_tokens=3,
        query_start_loc_cpu=torch.arange(4),
        slot_mapping=torch.arange(3),
        block_table_tensor=torch.zeros(3, 2, dtype=torch.int32),
        seq_lens=torch.tensor([5, 8, 1]),
        dcp_local_seq_lens=torch.tensor([2, 4, 0]),
        max_logits_per_req=None,
    )
    lengths = builder.build(0, batch).seq_lens
    buffer = batch.dcp_local_seq_lens if shared else batch.seq_lens
    assert lengths.tolist() == buffer.tolist()
    assert lengths.data_ptr() == buffer.data_ptr()


def with_sink(scores, values, sink):
    """Causal attention of queries over keys: scores [h, q, k], values [h, k, v], and a logit [h] without a value."""
    queries, keys = scores.shape[1:]
    hidden = torch.ones(queries, keys, dtype=torch.bool).triu(keys - queries + 1)
    logits = torch.cat((scores.masked_fill(hidden, -torch.inf), sink[:, None, None].expand(-1, queries, 1)), -1)
    return (logits.softmax(-1)[..., :-1] @ values).transpose(0, 1)


def test_sinks_without_an_indexer():
    """Layers of Hy4 that attend to all tokens: decode in absorbed form, and prefill."""
    from flashlatte.integrations.vllm.backends import dense
    from flashlatte.layers.prefill import Expansion

    heads, tokens, scale, draw = 2, 9, 0.1, torch.Generator().manual_seed(0)
    rows, sink = torch.randn(tokens, 576, generator=draw), torch.tensor([1.0, -2.0])
    kv_b = 0.1 * torch.randn(512, heads * 256, generator=draw)
    impl = object.__new__(dense.FlashLatteMLAImpl)
    impl.uses_other_prefill, impl.is_fp8, impl.scale, impl.sinks, impl.dcp_world_size = False, False, scale, sink, 1
    impl.num_heads, impl.kv_lora_rank, impl.v_head_dim, impl.need_to_return_lse_for_decode = heads, 512, 128, False
    impl.expansion = Expansion(lambda latent: latent @ kv_b, 512, 128, 64, 128)
    cache = torch.zeros(2, 16, 576)
    cache[1, :tokens] = rows

    query = torch.randn(1, heads, 576, generator=draw)
    decode = SimpleNamespace(seq_lens=torch.tensor([tokens]), block_table=torch.tensor([[1]]), padded=None)
    out, _ = impl.forward_mqa(query, cache, SimpleNamespace(decode=decode), SimpleNamespace(_k_scale=torch.ones(())))
    latents = rows[:, :512].expand(heads, -1, -1)
    torch.testing.assert_close(out, with_sink(scale * query.transpose(0, 1) @ rows.T, latents, sink))

    query = torch.randn(tokens, heads, 192, generator=draw)
    keys, values = impl.expansion.keys_and_values(rows)
    starts = torch.tensor([0, tokens], dtype=torch.int32)
    prefill = SimpleNamespace(chunked_context=None, query_start_loc=starts, max_query_len=tokens)
    out = torch.empty(tokens, heads * 128)
    batch = SimpleNamespace(prefill=prefill)
    impl.forward_mha(query, rows[:, :512], rows[:, None, 512:], cache, batch, torch.ones(()), out)
    scores = scale * query.transpose(0, 1) @ keys.permute(1, 2, 0)
    torch.testing.assert_close(out.view(tokens, heads, 128), with_sink(scores, values.transpose(0, 1), sink))


@pytest.mark.parametrize("rank", [0, 1])
def test_sinks_of_all_ranks_stay_in_place(monkeypatch, rank):
    """A CUDA graph reads them after weights were loaded again."""
    from flashlatte.integrations.vllm.backends import sparse

    group = SimpleNamespace(all_gather=lambda own, dim: torch.cat((own, own + 10), dim))
    monkeypatch.setattr(sparse, "get_dcp_group", lambda: group)
    impl = object.__new__(sparse.FlashLatteSparseMLAImpl)
    impl.sinks, impl.group_sinks, impl.need_to_return_lse_for_decode, impl.dcp_rank = torch.ones(2), None, True, rank
    impl.process_weights_after_loading(torch.bfloat16)
    first = impl.group_sinks
    impl.sinks.mul_(3)
    impl.process_weights_after_loading(torch.bfloat16)
    assert impl.group_sinks is first
    assert (first is None) if rank else first.tolist() == [3, 3, 13, 13]


@pytest.mark.parametrize("others", [(), (16,), (16, 128)])
def test_pages_of_a_model_with_several_backends(others):
    """vLLM takes the smallest page size that all support. Index keys and latents are two, and a draft may add one."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.platforms.interface import Platform
    from vllm.v1.attention.backend import MultipleOf

    from flashlatte.integrations.vllm.backends import dense, indexer, sparse

    config = VllmConfig()
    ours = [sparse.FlashLatteSparseMLABackend, indexer.FlashLatteIndexerBackend, dense.FlashLatteMLABackend]
    others = [
        type("Other", (dense.FlashLatteMLABackend,), {"get_supported_kernel_block_sizes": lambda n=n: [MultipleOf(n)]})
        for n in others
    ]
    pages = 128 if len(others) > 1 else 64
    assert Platform._preferred_block_size_for_backends(ours + others, 16, config) == pages
    config.cache_config.user_specified_block_size = True
    with set_current_vllm_config(config):
        assert all(backend.supports_block_size(size) for backend in ours for size in (16, 48, 64))
