"""``shard_metadata``: metadata of a step with keys sharded over ranks."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from flashlatte.distributed.context_parallel import ContextParallel
from flashlatte.distributed.gathered_rows import GatheredRows, plan_rows
from flashlatte.distributed.shard_plan import ShardPlan
from flashlatte.layers.cache import LatentCache
from flashlatte.layers.metadata import MLAMetadata
from flashlatte.ops.index_logits import paged_index_logits

_LOGIT_BYTES = 4


@dataclass(frozen=True)
class ContextParallelDecode:
    """``ShardedDecode`` of a step by ``ContextParallel``."""

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
        requests_per_call = max(1, logit_bytes // (_LOGIT_BYTES * queries * max(width, 1)))
        selected = []
        for begin in range(0, requests, requests_per_call):
            part = slice(begin, begin + requests_per_call)
            lengths = plan.query_lens[part]
            logits = paged_index_logits(
                query[part],
                pages,
                weights[part].flatten(0, 1),
                lengths,
                plan.block_table[part],
                clean=False,
                backend=backend,
            )
            selected.append(self.context.topk(logits, topk, lengths.flatten(), backend=backend))
        slots, _ = self.context.slots(torch.cat(selected).unflatten(0, (requests, queries)), plan)
        return slots.flatten(0, 1)


def shard_metadata(metadata: MLAMetadata, context: ContextParallel, *, cache_format: str | None = None) -> MLAMetadata:
    """Convert a step's metadata for a rank whose cache stores a shard of every request's keys and index keys.

    It runs on the device. A CUDA graph that captures it reads the buffers of ``MLAMetadataBuilder`` at replay.

    Prefill over cached tokens gathers their rows from all ranks, in chunks of the builder's ``workspace_tokens``; with
    an indexer, in chunks of ``gather_tokens`` or of one request.

    Args:
        metadata: built for pages of all ranks' tokens, a page size that is a multiple of size · interleave.
        context: the ranks over which keys are sharded: all or some of the ranks of the layer's tensor parallelism,
            with equal numbers of heads.
        cache_format: name of the cache's format, required for formats with scales.

    Returns:
        Metadata for pages of ``page_size`` / size tokens. This rank stores its own tokens only.

    Raises:
        ValueError: a page size that does not divide; metadata that is already sharded.
    """
    if metadata.sharding is not None:
        raise ValueError(f"metadata must not be sharded already, got metadata for {metadata.sharding}")
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
        decode = dataclasses.replace(decode, sharded=ContextParallelDecode(context, plan))
    if prefill is not None and prefill.chunks:
        chunks = tuple(
            dataclasses.replace(chunk, sharded=rows(chunk.block_table, chunk.starts, chunk.cu_keys, chunk.tokens))
            for chunk in prefill.chunks
        )
        prefill = dataclasses.replace(prefill, chunks=chunks)
    if selection is not None and selection.chunks is not None:
        sharded_chunks = tuple(
            dataclasses.replace(
                chunk,
                use_gathered_rows=True,
                sharded=rows(chunk.block_table, torch.zeros_like(chunk.cu_keys[1:]), chunk.cu_keys, chunk.num_keys),
            )
            for chunk in selection.chunks
        )
        selection = dataclasses.replace(selection, chunks=sharded_chunks)
    return dataclasses.replace(
        metadata,
        page_size=page_size,
        slot_mapping=slots,
        decode=decode,
        prefill=prefill,
        selection=selection,
        sharding=sharding,
    )
