"""``shard_metadata``: a step of a layer whose keys are divided over ranks."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from flashlatte.distributed.context_parallel import ContextParallel
from flashlatte.distributed.plan import ShardPlan
from flashlatte.distributed.rows import GatheredRows, plan_rows
from flashlatte.layers.cache import LatentCache
from flashlatte.layers.metadata import MLAMetadata
from flashlatte.ops.index_logits import paged_index_logits

_LOGIT_BYTES = 4


@dataclass(frozen=True)
class PlannedDecode:
    """Attention of a step's decode part over the keys of all ranks: its ``DecodeOverRanks``."""

    context: ContextParallel
    plan: ShardPlan

    def attend(
        self, query: torch.Tensor, cache: LatentCache, softmax_scale: float, backend: str | None
    ) -> torch.Tensor:
        out, _ = self.context.decode(
            query,
            cache.pages,
            self.plan,
            cache_format=cache.layout,
            head_dim_v=cache.value_dim,
            softmax_scale=softmax_scale,
            k_scale=cache.scale,
            backend=backend,
        )
        return out

    def attend_selected(
        self, query: torch.Tensor, cache: LatentCache, slots: torch.Tensor, softmax_scale: float, backend: str | None
    ) -> torch.Tensor:
        out, _ = self.context.sparse_decode(
            query[:, None],
            cache.pages,
            slots[:, None],
            cache_format=cache.layout,
            head_dim_v=cache.value_dim,
            softmax_scale=softmax_scale,
            backend=backend,
        )
        return out.squeeze(1)

    def select(
        self,
        query: torch.Tensor,
        pages: torch.Tensor,
        weights: torch.Tensor,
        topk: int,
        logit_bytes: int,
        backend: str | None,
    ) -> torch.Tensor:
        plan, (requests, queries) = self.plan, query.shape[:2]
        weights = weights.unflatten(0, (requests, queries))
        width = plan.block_table.shape[1] * plan.page_size
        at_a_time = max(1, logit_bytes // (_LOGIT_BYTES * queries * max(width, 1)))
        chosen = []
        for begin in range(0, requests, at_a_time):
            part = slice(begin, begin + at_a_time)
            seen = plan.query_lens[part]
            logits = paged_index_logits(
                query[part],
                pages,
                weights[part].flatten(0, 1),
                seen,
                plan.block_table[part],
                clean=False,
                backend=backend,
            )
            chosen.append(self.context.topk(logits, topk, seen.flatten(), backend=backend))
        slots, _ = self.context.slots(torch.cat(chosen).unflatten(0, (requests, queries)), plan)
        return slots.flatten(0, 1)


def shard_metadata(metadata: MLAMetadata, context: ContextParallel, *, cache_format: str | None = None) -> MLAMetadata:
    """A step's metadata for a rank whose cache has a part of every request's keys, and of its index keys.

    It runs on the device: inside a CUDA graph it follows what ``MLAMetadataBuilder.build`` wrote since.

    Prefill over cached tokens gathers their rows from all ranks, a chunk of the builder's ``workspace_tokens`` at a
    time; where an indexer selects among them, a chunk of ``gather_tokens`` or of one request.

    Args:
        metadata: built for pages of as many tokens as all ranks hold of a page: a multiple of size · interleave.
        context: whose ranks divide the keys. They are the ranks of the layer's tensor parallelism, or some of them, and
            have equally many heads.
        cache_format: of the cache, by name, needed for those with scales.

    Returns:
        Metadata for pages of ``page_size`` / size tokens, of which this rank stores its own.

    Raises:
        ValueError: pages that cannot be divided so; metadata that is divided already.
    """
    if metadata.sharding is not None:
        raise ValueError(f"metadata must not be divided yet, got a part for {metadata.sharding}")
    sharding, page_tokens = context.sharding, metadata.page_size
    page_size = page_tokens // sharding.size
    slots = sharding.local_slots(metadata.slot_mapping, page_tokens)

    def rows(block_table: torch.Tensor, starts: torch.Tensor, cu_keys: torch.Tensor, tokens: int) -> GatheredRows:
        local_table = sharding.local_block_table(block_table, page_tokens, page_size)
        return plan_rows(sharding, context.group, local_table, starts, cu_keys, tokens)

    decode, prefill, selection = metadata.decode, metadata.prefill, metadata.selection
    if decode is not None:
        plan = context.plan(
            decode.block_table,
            decode.seq_lens,
            page_tokens=page_tokens,
            queries=decode.queries,
            cache_format=cache_format,
        )
        decode = dataclasses.replace(decode, over_ranks=PlannedDecode(context, plan))
    if prefill is not None and prefill.chunks:
        chunks = tuple(
            dataclasses.replace(chunk, over_ranks=rows(chunk.block_table, chunk.starts, chunk.cu_keys, chunk.tokens))
            for chunk in prefill.chunks
        )
        prefill = dataclasses.replace(prefill, chunks=chunks)
    if selection is not None and selection.chunks is not None:
        chosen_from = tuple(
            dataclasses.replace(
                chunk,
                gathers=True,
                over_ranks=rows(chunk.block_table, torch.zeros_like(chunk.cu_keys[1:]), chunk.cu_keys, chunk.keys),
            )
            for chunk in selection.chunks
        )
        selection = dataclasses.replace(selection, chunks=chosen_from)
    return dataclasses.replace(
        metadata,
        page_size=page_size,
        slot_mapping=slots,
        decode=decode,
        prefill=prefill,
        selection=selection,
        sharding=sharding,
    )
