"""FlashLatte's sparse layer with contexts in host memory, whose rows vLLM's index group copies to the GPU.

vLLM's own group needs CUDA; here a group with the same methods copies rows between CPU tensors.
"""

import inspect
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.attention.backends.mla.index_group import HiSparseMLAIndexGroup, SparseMLAIndexGroupBuilder

from flashlatte.integrations.vllm.backends import common, sparse, sparse_host

PAGE, PAGES, WIDTH, HEADS, TOPK, LAYER = 8, 16, 576, 2, 6, 1
TABLE = torch.tensor([[3, 7, 1], [5, 2, 9], [8, 11, 4]], dtype=torch.int32)
# The last token of each decode request, and five new ones of the last request.
REQUESTS, POSITIONS = (0, 1, 2, 2, 2, 2, 2), (20, 3, 12, 13, 14, 15, 16)
SIZES = {"num_heads": HEADS, "head_size": WIDTH, "scale": 0.1, "num_kv_heads": 1, "kv_lora_rank": 512}
NONE = ("alibi_slopes", "sliding_window", "logits_soft_cap", "kv_sharing_target_layer_name", "kv_b_proj")
LAYER_ARGUMENTS = (
    SIZES
    | {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "qk_head_dim": 192, "v_head_dim": 128}
    | {"kv_cache_dtype": "auto", "attn_type": "decoder"}
    | dict.fromkeys(NONE)
)


def draw(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Group:
    """``HiSparseMLAIndexGroup``: rows on the GPU are in a different order, in pages of the same size."""

    def __init__(self, host, resident=False):
        self.host, self.resident, self.calls = host, resident, []
        self.hot = torch.full((PAGES, PAGE, WIDTH), float("nan"))

    def cache(self, layer_index):
        return SimpleNamespace(all_context_pages_resident=self.resident)

    def physical_kv_cache(self, layer_index):
        assert layer_index == LAYER
        return self.hot.view(torch.uint8)

    def convert_logical_to_physical_topk(
        self, layer_index, logical_topk_indices, attn_metadata, *, block_stride_rows, return_valid_counts
    ):
        self.calls.append(("convert", len(logical_topk_indices)))
        requests = attn_metadata.req_id_per_token[: len(logical_topk_indices)]
        # Entries of a row after the valid ones are undefined.
        slots = torch.full_like(logical_topk_indices, 10**6)
        free = iter(torch.randperm(PAGES * PAGE, generator=torch.Generator().manual_seed(3)).tolist())
        for token, (request, row) in enumerate(zip(requests.tolist(), logical_topk_indices.tolist(), strict=True)):
            for column, place in enumerate(place for place in row if place >= 0):
                slot = next(free)
                self.hot[slot // PAGE, slot % PAGE] = self.host[TABLE[request, place // PAGE], place % PAGE]
                slots[token, column] = slot
        return slots, (logical_topk_indices >= 0).sum(1, dtype=torch.int32)

    def stage_prefill_rows(self, layer_index, kv_cache, attn_metadata):
        self.calls.append(("stage", layer_index))
        assert kv_cache is self.host
        requests = attn_metadata.req_id_per_token[attn_metadata.num_decode_tokens :] - attn_metadata.num_decodes
        return self.host[TABLE[2].long()], torch.arange(3, dtype=torch.int32)[None], requests


def batch(tokens):
    """Selections and metadata of these tokens."""
    topk = torch.full((len(REQUESTS), TOPK), -1, dtype=torch.int32)
    for token, place in enumerate(POSITIONS):
        chosen = torch.randperm(place + 1, generator=torch.Generator().manual_seed(token))[:TOPK].sort().values
        topk[token, : len(chosen)] = chosen
    decoding = [request for request in REQUESTS[tokens] if request < 2]
    requests = torch.tensor(REQUESTS[tokens], dtype=torch.int32)
    metadata = SimpleNamespace(
        num_decode_tokens=len(decoding), num_decodes=len(decoding), req_id_per_token=requests, block_table=TABLE
    )
    return topk[tokens], metadata


@pytest.fixture
def make(monkeypatch):
    """A layer; with ``group`` if its contexts are in host memory."""

    def layer(topk, group=None):
        config = SimpleNamespace(attention_config=SimpleNamespace(hisparse_config=group and "given"))
        monkeypatch.setattr(sparse_host, "get_current_vllm_config", lambda: config)
        builder = SimpleNamespace(
            register_layer=lambda has_indexer, config, *, head_size, kv_cache_dtype: (group, LAYER)
        )
        return sparse.FlashLatteSparseMLAImpl(**LAYER_ARGUMENTS, topk_indices_buffer=topk, index_group_builder=builder)

    return layer


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize(
    ("tokens", "resident", "calls"),
    [
        (slice(0, 2), False, [("convert", 2)]),
        (slice(0, 7), False, [("convert", 2), ("stage", LAYER)]),
        (slice(2, 7), False, [("stage", LAYER)]),
        (slice(2, 7), True, [("convert", 5)]),
    ],
)
def test_attends_to_the_rows_that_vllm_copied(make, monkeypatch, tokens, resident, calls, invariant):
    monkeypatch.setattr(common, "BATCH_INVARIANT", invariant)
    host, query = draw(PAGES, PAGE, WIDTH, seed=0), draw(7, HEADS, WIDTH, seed=1)[tokens]
    topk, metadata = batch(tokens)
    if tokens == slice(2, 7):
        metadata.req_id_per_token = torch.full((5,), 2, dtype=torch.int32)
    expected, _ = make(topk).forward_mqa(query, host, metadata, None)
    if tokens == slice(2, 7):
        metadata.num_decodes = 2
    group = Group(host, resident)
    out, lse = make(topk, group).forward_mqa(query, host, metadata, None)
    assert lse is None
    assert group.calls == calls
    torch.testing.assert_close(out, expected)


def test_a_prefill_backend_is_used_only_with_contexts_on_the_host(make):
    """vLLM plans the copies of a prompt's context only with one."""
    topk, _ = batch(slice(0, 2))
    assert make(topk, Group(None)).supports_dense_mha_prefill
    assert not make(topk).supports_dense_mha_prefill


@pytest.mark.parametrize("on_host", [True, False])
def test_vllms_layer_finds_the_rows_on_the_gpu(on_host):
    """It writes new rows to them and not to the cache on the host."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.config.attention import HiSparseConfig
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention

    config, group = VllmConfig(), object.__new__(HiSparseMLAIndexGroup)
    group.caches = ["of another layer", "of this layer"]
    config.attention_config.hisparse_config = HiSparseConfig() if on_host else None
    builder = SimpleNamespace(register_layer=lambda *_, **__: (group, 1))
    dims = {name: LAYER_ARGUMENTS[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")}
    with set_current_vllm_config(config):
        layer = MLAAttention(
            num_heads=HEADS,
            scale=0.1,
            q_lora_rank=None,
            kv_lora_rank=512,
            kv_b_proj=torch.nn.Linear(512, HEADS * 256, bias=False),
            prefix="layer.0",
            attn_backend=sparse.FlashLatteSparseMLABackend,
            use_sparse=True,
            topk_indices_buffer=torch.zeros(4, TOPK, dtype=torch.int32),
            index_group_builder=builder,
            prefill_backend_cls=lambda **_: None,
            **dims,
        )
    assert layer.hisparse_cache == ("of this layer" if on_host else None)


def test_vllms_group_has_these_methods():
    signature = inspect.signature
    signature(SparseMLAIndexGroupBuilder.register_layer).bind(None, True, None, head_size=576, kv_cache_dtype="auto")
    convert = HiSparseMLAIndexGroup.convert_logical_to_physical_topk
    signature(convert).bind(None, 0, None, None, block_stride_rows=None, return_valid_counts=True)
    signature(HiSparseMLAIndexGroup.stage_prefill_rows).bind(None, 0, None, None)
    signature(HiSparseMLAIndexGroup.physical_kv_cache).bind(None, 0)
    signature(HiSparseMLAIndexGroup.set_logical_topk_ready).bind(None, 0)
    signature(HiSparseMLAIndexGroup.prepare_for_batch).bind(None, 0, None)
