"""The indexer of DeepSeek-V3.2, GLM-5 and Hy4 in vLLM's models: its key cache and its token selection."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.custom_op import CustomOp
from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer
from vllm.model_executor.models import deepseek_v2
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionBackend

from flashlatte.distributed.topk import global_topk
from flashlatte.integrations.vllm import support
from flashlatte.integrations.vllm.backends.indexer_metadata import FlashLatteIndexerBackend, IndexerMetadata
from flashlatte.kv_cache.index_formats import quantize_rows
from flashlatte.kv_cache.sharding import Sharding
from flashlatte.layers.selection import LOGIT_BYTES
from flashlatte.layers.sharded_keys import ShardedRows
from flashlatte.ops.index_logits import paged_index_logits
from flashlatte.ops.index_quantize import index_gather, index_quantize
from flashlatte.ops.index_select import index_select, paged_index_select


class FlashLatteIndexerCache(deepseek_v2.DeepseekV32IndexerCache):
    """vLLM's cache of index keys [pages, page_size, head_dim + 4], with FlashLatte's metadata."""

    def get_attn_backend(self) -> type[AttentionBackend]:
        return FlashLatteIndexerBackend


class FlashLatteSparseAttnIndexer(SparseAttnIndexer):
    """Stores the index keys of new tokens, and selects the top k of each token among the keys of its request up to it.

    It writes the result to ``topk_indices_buffer`` [tokens, topk]: positions within the request, padded with -1.
    """

    def __init__(
        self,
        k_cache: Any,
        quant_block_size: int,
        scale_fmt: str | None,
        topk_tokens: int,
        head_dim: int,
        max_model_len: int,
        max_total_seq_len: int,
        topk_indices_buffer: torch.Tensor,
        skip_k_cache_insert: bool = False,
        use_fp4_cache: bool = False,
        **others: Any,
    ) -> None:
        # Skip vLLM's own constructor, which requires DeepGEMM.
        CustomOp.__init__(self)
        config = get_current_vllm_config()
        shared = config.parallel_config.prefill_context_parallel_size
        support.check_indexer(
            use_fp4_cache=use_fp4_cache, prefill_context_parallel_size=shared if shared > 1 else None, **others
        )
        self.k_cache = k_cache
        self.topk_tokens = topk_tokens
        self.head_dim = head_dim
        self.topk_indices_buffer = topk_indices_buffer
        self.skip_k_cache_insert = skip_k_cache_insert
        self.scale_rounding = "power_of_two" if scale_fmt == "ue8m0" else "exact"
        # vLLM's layers for CUDA read it.
        self.topk_backend = config.kernel_config.sparse_indexer_topk_backend

    def forward_native(
        self, hidden_states: torch.Tensor, q_quant: torch.Tensor, k: torch.Tensor | None, weights: torch.Tensor
    ) -> torch.Tensor:
        """Store keys ``k`` [T, head_dim], then select for queries [T, H, head_dim] with head weights [T, H]."""
        metadata = get_forward_context().attn_metadata
        if not isinstance(metadata, dict):  # memory profiling
            return self.topk_indices_buffer
        batch: IndexerMetadata = metadata[self.k_cache.prefix]
        cache = self.k_cache.kv_cache
        if not self.skip_k_cache_insert:
            slots = batch.slot_mapping[: batch.num_tokens]
            index_quantize(cache, slots, k, scale_rounding=self.scale_rounding)
        select_tokens(batch, cache, q_quant, weights, self.topk_indices_buffer[:, : self.topk_tokens])
        return self.topk_indices_buffer

    forward_cpu = forward_native
    forward_cuda = forward_native


def select_tokens(
    batch: IndexerMetadata, cache: torch.Tensor, queries: torch.Tensor, weights: torch.Tensor, selected: torch.Tensor
) -> None:
    """Select for queries [T, H, head_dim] with head weights [T, H], into ``selected`` [≥ T, topk]."""
    decoding = batch.num_decode_tokens
    if decoding:
        rows = slice(0, decoding)
        decode = (queries[rows], cache, weights[rows], batch.seq_lens, batch.block_table, selected[rows])
        if batch.sharded is None:
            select_from_pages(*decode)
        else:
            select_from_ranks(*decode, *batch.sharded)
    for chunk in batch.chunks:
        rows = slice(decoding + chunk.first, decoding + chunk.last)
        keys = (chunk.block_table, chunk.cu_keys, chunk.num_keys, chunk.key_start, chunk.key_end)
        select_from_keys(queries[rows], cache, weights[rows], *keys, selected[rows], chunk.sharded)


def select_from_pages(
    queries: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    lengths: torch.Tensor,
    block_table: torch.Tensor,
    selected: torch.Tensor,
) -> None:
    """Select for decode requests, which have the same number of tokens; ``lengths`` as in ``paged_index_logits``."""
    requests = block_table.shape[0]
    paged_index_select(
        queries.unflatten(0, (requests, len(queries) // requests)),
        cache,
        weights.float(),
        lengths,
        block_table,
        selected.shape[1],
        indices=selected,
    )


def select_from_ranks(
    queries: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    lengths: torch.Tensor,
    block_table: torch.Tensor,
    selected: torch.Tensor,
    sharding: Sharding,
    group: dist.ProcessGroup,
) -> None:
    """Select for decode requests of one token each among the keys of all ranks; ``lengths`` are of this rank's keys."""
    width = block_table.shape[1] * cache.shape[1]
    at_a_time = max(1, LOGIT_BYTES // (4 * max(width, 1)))
    for first in range(0, len(queries), at_a_time):
        part = slice(first, first + at_a_time)
        local = (queries[part, None], cache, weights[part].float(), lengths[part], block_table[part])
        logits = paged_index_logits(*local, clean=False)
        selected[part] = global_topk(logits, selected.shape[1], lengths[part], sharding, group, None)


def select_from_keys(
    queries: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    block_table: torch.Tensor,
    cu_keys: torch.Tensor,
    num_keys: int,
    key_start: torch.Tensor,
    key_end: torch.Tensor,
    selected: torch.Tensor,
    sharded: ShardedRows | None = None,
) -> None:
    """Select for prefill requests after gathering their ``num_keys`` keys; other arguments as in ``SelectionChunk``."""
    head_dim = queries.shape[-1]
    if sharded is None:
        keys, scales = index_gather(cache, block_table, cu_keys, num_keys, head_dim=head_dim)
    else:
        keys, scales = sharded.index_keys(cache, head_dim, None)
    index_select(
        queries,
        keys,
        weights.float(),
        key_start,
        key_end,
        selected.shape[1],
        k_scale=scales,
        workspace_bytes=LOGIT_BYTES,
        indices=selected,
    )


def select_tokens_or(stock: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Replacement for vLLM's ``sparse_attn_indexer``, which runs after vLLM's CUDA layers have stored the keys.

    It selects with FlashLatte if the cache is FlashLatte's, else it calls ``stock``.
    """

    def sparse_attn_indexer(
        hidden_states: torch.Tensor,
        k_cache_prefix: str,
        kv_cache: torch.Tensor,
        q_quant: torch.Tensor,
        q_scale: torch.Tensor | None,
        k: torch.Tensor | None,
        weights: torch.Tensor,
        quant_block_size: int,
        scale_fmt: str | None,
        topk_tokens: int,
        head_dim: int,
        max_model_len: int,
        total_seq_lens: int,
        topk_indices_buffer: torch.Tensor,
        **others: Any,
    ) -> torch.Tensor:
        context = get_forward_context()
        if not isinstance(context.no_compile_layers[k_cache_prefix], FlashLatteIndexerCache):
            before = (
                hidden_states,
                k_cache_prefix,
                kv_cache,
                q_quant,
                q_scale,
                k,
                weights,
                quant_block_size,
                scale_fmt,
            )
            sizes = (topk_tokens, head_dim, max_model_len, total_seq_lens)
            return stock(*before, *sizes, topk_indices_buffer, **others)
        if isinstance(context.attn_metadata, dict):
            batch = context.attn_metadata[k_cache_prefix]
            select_tokens(batch, kv_cache, q_quant, weights, topk_indices_buffer[:, :topk_tokens])
        return topk_indices_buffer

    return sparse_attn_indexer


def quantize_queries(
    x: torch.Tensor, group_size: int, eps: float = 1e-10, use_ue8m0: bool | None = None, **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """vLLM's ``per_token_group_quant_fp8`` in PyTorch: e4m3 values [n, d] and scales [n, d / group_size]."""
    rounding = "power_of_two" if use_ue8m0 else "exact"
    values, scales = quantize_rows(x.unflatten(-1, (-1, group_size)), rounding, smallest_amax=eps)
    return values.flatten(-2), scales


@functools.cache
def install() -> None:
    """Replace the indexer in vLLM's CUDA models whose configuration selects FlashLatte."""
    from vllm.models.deepseek_v32 import attention

    layer = attention.DeepseekV32Indexer
    layer.indexer_cache_cls = staticmethod(ours_where_selected(FlashLatteIndexerCache, layer.indexer_cache_cls))
    attention.SparseAttnIndexer = ours_where_selected(FlashLatteSparseAttnIndexer, attention.SparseAttnIndexer)
    attention.sparse_attn_indexer = select_tokens_or(attention.sparse_attn_indexer)


@functools.cache
def install_in(module: str) -> None:
    """Replace the indexer in a module of layers that look these classes up when they are built."""
    layers = importlib.import_module(module)
    layers.SparseAttnIndexer = ours_where_selected(FlashLatteSparseAttnIndexer, layers.SparseAttnIndexer)
    layers.DeepseekV32IndexerCache = ours_where_selected(FlashLatteIndexerCache, layers.DeepseekV32IndexerCache)
    if current_platform.is_cpu():
        layers.per_token_group_quant_fp8 = quantize_queries


def ours_where_selected(ours: Callable[..., Any], stock: Callable[..., Any]) -> Callable[..., Any]:
    """A constructor that calls ``ours`` if vLLM's configuration selects FlashLatte (on a CPU also by default)."""

    def make(*args: Any, **kwargs: Any) -> Any:
        config = get_current_vllm_config()
        by_default = support.selected_backend(config) is None and current_platform.is_cpu()
        return (ours if by_default or support.selects_flashlatte(config) else stock)(*args, **kwargs)

    return make
