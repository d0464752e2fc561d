"""Contexts in host memory (vLLM's HiSparse): vLLM copies the selected rows to the GPU and returns their slots."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backends.mla.index_group import HiSparseMLAIndexGroup, SparseMLAIndexGroupBuilder

from flashlatte.ops.index_convert import index_convert


class HostRows(NamedTuple):
    """A layer's place in a group of layers that share a selection.

    Attributes:
        group: vLLM's record of the layers and of their rows on the GPU.
        index: the layer's index in the group.
    """

    group: HiSparseMLAIndexGroup
    index: int


class PhaseRows(NamedTuple):
    """Rows on the GPU that some of a batch's tokens attend to.

    Attributes:
        tokens: the range of tokens in the batch.
        pages: [pages, page_size, width].
        slots: int32 [n, topk], page · page_size + offset; below 0 for none.
        in_prompt: whether the tokens belong to prompts, whose tokens select from the same rows.
    """

    tokens: slice
    pages: torch.Tensor
    slots: torch.Tensor
    in_prompt: bool


def register(
    topk_indices_buffer: torch.Tensor | None,
    index_group_builder: SparseMLAIndexGroupBuilder | None,
    has_indexer: bool,
    head_size: int,
    kv_cache_dtype: str,
) -> HostRows | None:
    """Register a layer with vLLM; None if contexts are on the GPU."""
    config = get_current_vllm_config()
    if getattr(config.attention_config, "hisparse_config", None) is None:
        return None
    builder = index_group_builder or SparseMLAIndexGroupBuilder(topk_indices_buffer)
    group, index = builder.register_layer(has_indexer, config, head_size=head_size, kv_cache_dtype=kv_cache_dtype)
    return HostRows(group, index)


def selected_rows(
    host: HostRows, topk: torch.Tensor, kv_cache: torch.Tensor, attn_metadata: Any
) -> Iterator[PhaseRows]:
    """Copy the rows that tokens selected (positions ``topk`` [T, k], valid ones first) from ``kv_cache`` on the host.

    Decode tokens read rows that stay on the GPU between steps. Tokens of prompts also do if all of their pages are
    there; otherwise their whole contexts are copied for this step.
    """
    group, index = host
    tokens, decoding = topk.shape[0], min(attn_metadata.num_decode_tokens, topk.shape[0])
    resident = tokens if not decoding and group.cache(index).all_context_pages_resident else decoding
    if resident:
        slots, counts = group.convert_logical_to_physical_topk(
            index, topk[:resident], attn_metadata, block_stride_rows=None, return_valid_counts=True
        )
        pages = group.physical_kv_cache(index).view(kv_cache.dtype)
        absent = torch.arange(slots.shape[1], device=slots.device) >= counts[:, None]
        yield PhaseRows(slice(resident), pages, slots.masked_fill(absent, -1), not decoding)
    if resident < tokens:
        pages, block_table, requests = group.stage_prefill_rows(index, kv_cache, attn_metadata)
        slots = index_convert(topk[resident:], block_table, pages.shape[1], request_ids=requests[: tokens - resident])
        yield PhaseRows(slice(resident, tokens), pages, slots, True)
