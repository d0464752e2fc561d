"""The choice of DeepSeek-V4's indexer in vLLM's layers, among groups of tokens that vLLM's compressor has written."""

from __future__ import annotations

import functools
from typing import Any

import torch
from vllm.forward_context import get_forward_context
from vllm.models.deepseek_v4 import attention

from flashlatte.integrations.vllm.backends.indexer import (
    FlashLatteSparseAttnIndexer,
    ours_where_selected,
    select_from_keys,
    select_from_pages,
)


class FlashLatteV4SparseAttnIndexer(FlashLatteSparseAttnIndexer):
    """Chooses for each token among the groups of its request that end at or before it.

    What it chose stands in ``topk_indices_buffer`` [tokens, topk]: numbers of groups within the request, then -1.
    """

    def __init__(self, *args: Any, compress_ratio: int, **others: Any) -> None:
        super().__init__(*args, **others)
        self.compress_ratio = compress_ratio

    def forward_native(
        self, hidden_states: torch.Tensor, q_quant: torch.Tensor, k: torch.Tensor | None, weights: torch.Tensor
    ) -> torch.Tensor:
        """Choose for queries [T, H, head_dim] with head weights [T, H]. Keys are in the cache: ``k`` is None."""
        metadata = get_forward_context().attn_metadata
        if isinstance(metadata, dict):  # otherwise vLLM measures memory
            # Of tokens that have no group to choose from, and those that only fill a graph.
            self.topk_indices_buffer[: hidden_states.shape[0]] = -1
            self._select(metadata[self.k_cache.prefix], q_quant, weights)
        return self.topk_indices_buffer

    forward_cpu = forward_native
    forward_cuda = forward_native

    def _select(self, batch: Any, queries: torch.Tensor, weights: torch.Tensor) -> None:
        """``batch`` is vLLM's metadata, in which a key is a group."""
        cache, chosen = self.k_cache.kv_cache, self.topk_indices_buffer[:, : self.topk_tokens]
        rows = slice(0, batch.num_decode_tokens)
        if batch.num_decode_tokens:
            table, lengths = _decode_rows(batch, self.compress_ratio)
            select_from_pages(queries[rows], cache, weights[rows], lengths, table, chosen[rows])
        for chunk in batch.prefill.chunks if batch.prefill else ():
            rows = slice(chunk.token_start, chunk.token_end)
            keys = (chunk.block_table, chunk.cu_seq_lens, chunk.total_seq_lens, chunk.cu_seqlen_ks, chunk.cu_seqlen_ke)
            select_from_keys(queries[rows], cache, weights[rows], *keys, chosen[rows])


def _decode_rows(batch: Any, compress_ratio: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The block table of requests that have as many tokens each, and how many groups each token sees."""
    decode, count = batch.decode, batch.num_decode_tokens
    requests = decode.decode_lens.shape[0]
    if not decode.requires_padding and count % requests == 0:
        return decode.block_table[:requests], decode.seq_lens[:requests]
    # Each token is a request of its own. Those behind the last request's only fill a graph, and see nothing.
    ends = decode.decode_lens.cumsum(0)
    token = torch.arange(count, device=ends.device)
    request = torch.searchsorted(ends, token, right=True).clamp_(max=requests - 1)
    keys = (batch.seq_lens[request] - ends[request] + token + 1) // compress_ratio
    keys = torch.where(token < ends[-1], keys, 0)
    return decode.block_table[request], keys.to(torch.int32)


@functools.cache
def install() -> None:
    """Have vLLM's V4 choose with all this where FlashLatte is named, but among keys of four bits, which stay vLLM's."""
    stock = attention.SparseAttnIndexer
    ours = ours_where_selected(FlashLatteV4SparseAttnIndexer, stock)

    def make(*args: Any, use_fp4_cache: bool = False, **others: Any) -> Any:
        return (stock if use_fp4_cache else ours)(*args, use_fp4_cache=use_fp4_cache, **others)

    attention.SparseAttnIndexer = make
