"""DeepSeek-V4's indexer selection in vLLM's layers, over the token groups that vLLM's compressor wrote."""

from __future__ import annotations

import functools
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.models.utils import extract_layer_index
from vllm.models.deepseek_v4 import attention

from flashlatte.integrations.vllm import compat, support
from flashlatte.integrations.vllm.backends.indexer import (
    FlashLatteSparseAttnIndexer,
    ours_where_selected,
    select_from_keys,
    select_from_pages,
)


class FlashLatteV4SparseAttnIndexer(FlashLatteSparseAttnIndexer):
    """Selects for each token among the groups of its request that end at or before it.

    It writes the result to ``topk_indices_buffer`` [tokens, topk]: group indices within the request, padded with -1.
    """

    def __init__(self, *args: Any, compress_ratio: int, **others: Any) -> None:
        super().__init__(*args, **others)
        self.compress_ratio = compress_ratio

    def forward_native(
        self, hidden_states: torch.Tensor, q_quant: torch.Tensor, k: torch.Tensor | None, weights: torch.Tensor
    ) -> torch.Tensor:
        """Select for queries [T, H, head_dim] with head weights [T, H]. The cache has the keys: ``k`` is None."""
        metadata = get_forward_context().attn_metadata
        if isinstance(metadata, dict):  # else memory profiling
            # For tokens without a group, and for the padding of a CUDA graph.
            self.topk_indices_buffer[: hidden_states.shape[0]] = -1
            self._select(metadata[self.k_cache.prefix], q_quant, weights)
        return self.topk_indices_buffer

    forward_cpu = forward_native
    forward_cuda = forward_native

    def _select(self, batch: Any, queries: torch.Tensor, weights: torch.Tensor) -> None:
        """``batch`` is vLLM's metadata, in which one key is one group."""
        cache, selected = self.k_cache.kv_cache, self.topk_indices_buffer[:, : self.topk_tokens]
        rows = slice(0, batch.num_decode_tokens)
        if batch.num_decode_tokens:
            table, lengths = _decode_rows(batch, self.compress_ratio)
            select_from_pages(queries[rows], cache, weights[rows], lengths, table, selected[rows])
        for chunk in batch.prefill.chunks if batch.prefill else ():
            rows = slice(chunk.token_start, chunk.token_end)
            keys = (chunk.block_table, chunk.cu_seq_lens, chunk.total_seq_lens, chunk.cu_seqlen_ks, chunk.cu_seqlen_ke)
            select_from_keys(queries[rows], cache, weights[rows], *keys, selected[rows])


def _decode_rows(batch: Any, compress_ratio: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A block table for requests of equal token counts, and the number of groups visible to each token."""
    decode, count = batch.decode, batch.num_decode_tokens
    requests = decode.decode_lens.shape[0]
    if not decode.requires_padding and count % requests == 0:
        return decode.block_table[:requests], decode.seq_lens[:requests]
    # Treat each token as a request. Tokens after the last request are padding of a CUDA graph and have no groups.
    ends = decode.decode_lens.cumsum(0)
    token = torch.arange(count, device=ends.device)
    request = torch.searchsorted(ends, token, right=True).clamp_(max=requests - 1)
    keys = (batch.seq_lens[request] - ends[request] + token + 1) // compress_ratio
    keys = torch.where(token < ends[-1], keys, 0)
    return decode.block_table[request], keys.to(torch.int32)


class SharedSelection(torch.nn.Module):
    """Replaces the selection of a layer that reuses the selection of an earlier layer (IndexCache)."""

    def __init__(self, topk_indices_buffer: torch.Tensor) -> None:
        super().__init__()
        self.topk_indices_buffer = topk_indices_buffer

    def forward(self, *_: Any) -> torch.Tensor:
        return self.topk_indices_buffer


class FlashLatteV4Indexer(attention.DeepseekV4Indexer):
    """vLLM's indexer, which computes no queries and stores no keys in a layer that reuses a selection."""

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
        if isinstance(self.indexer_op, SharedSelection):
            return None, None, None
        return super().forward(*args, **kwargs)


def reuses_selection(k_cache_prefix: str) -> bool:
    """Whether the layer of this key cache reuses a selection. The first such layer of a pipeline stage never does."""
    config = get_current_vllm_config()
    layer, name = extract_layer_index(k_cache_prefix), k_cache_prefix.rsplit(".layers.", 1)[-1].split(".", 1)[-1]
    before = [
        prefix
        for prefix in config.compilation_config.static_forward_context
        if prefix != k_cache_prefix and prefix.endswith(f".{name}")
    ]
    return bool(before) and layer in support.v4_shared_layers(config.model_config.hf_text_config)


@functools.cache
def install() -> None:
    """Replace V4's indexer in models whose configuration selects FlashLatte.

    Except indexers with fp4 keys, and those whose keys have scales in DeepGEMM's format.
    """
    stock = attention.SparseAttnIndexer
    select = ours_where_selected(FlashLatteV4SparseAttnIndexer, stock)

    def ours(k_cache: Any, *sizes: Any, use_fp4_cache: bool = False, **others: Any) -> Any:
        if reuses_selection(k_cache.prefix):
            return SharedSelection(sizes[-1])  # topk_indices_buffer
        chosen = stock if use_fp4_cache or compat.packs_index_scales() else select
        return chosen(k_cache, *sizes, use_fp4_cache=use_fp4_cache, **others)

    attention.SparseAttnIndexer = ours_where_selected(ours, stock)
    attention.DeepseekV4Indexer = FlashLatteV4Indexer
