"""vLLM's metadata for a cache of index keys: the selection of a batch's tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from vllm.distributed.parallel_state import get_dcp_group
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport, AttentionMetadataBuilder
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from flashlatte.distributed.gathered_rows import plan_rows
from flashlatte.integrations.vllm.backends import common
from flashlatte.integrations.vllm.backends.common import CommonBackendMixin
from flashlatte.kv_cache.sharding import Sharding
from flashlatte.layers.selection import SelectionChunk, plan_selection
from flashlatte.runtime.transfer import to_device


@dataclass
class IndexerMetadata:
    """A batch's tokens, those of decode requests first.

    Attributes:
        num_tokens, num_decode_tokens: tokens of the batch, and of its decode requests.
        slot_mapping: [num_tokens], the slot of each token's key.
        block_table, seq_lens: block table and lengths of the decode requests, which have the same number of tokens
            each. If their numbers differ, each token is a request; also if the batch has a prefill and must be
            invariant.
        chunks: the selection of the prefill requests, in chunks.
        sharded: how contexts are sharded over ranks, in which case ``block_table`` and ``seq_lens`` cover this rank's
            tokens only; None if they are not.
    """

    num_tokens: int
    num_decode_tokens: int
    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    chunks: tuple[SelectionChunk, ...]
    sharded: Sharded | None = None


class Sharded(NamedTuple):
    """Sharding of contexts over ranks: this rank's shard, and the process group."""

    sharding: Sharding
    group: dist.ProcessGroup


class FlashLatteIndexerMetadataBuilder(AttentionMetadataBuilder[IndexerMetadata]):
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    reorder_batch_threshold: int = 1

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=not common.BATCH_INVARIANT)
        parallel, self.sharded = vllm_config.parallel_config, None
        if parallel.decode_context_parallel_size > 1:
            ranks = get_dcp_group()
            sharding = (ranks.rank_in_group, ranks.world_size, parallel.cp_kv_cache_interleave_size)
            self.sharded = Sharded(Sharding(*sharding), ranks.device_group)
        self.supports_draft_decode_metadata_update = self.sharded is None

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        if common.BATCH_INVARIANT:
            return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        return super().get_cudagraph_support(vllm_config, kv_cache_spec)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> IndexerMetadata:
        batch, threshold = common_attn_metadata, self.reorder_batch_threshold or 1
        decodes, prefills, decode_tokens, _ = split_decodes_and_prefills(batch, decode_threshold=threshold)
        if prefills and common.BATCH_INVARIANT:  # prefill and decode tokens select by the same kernel
            decodes, prefills, decode_tokens = batch.num_reqs, 0, batch.num_actual_tokens
        block_table, seq_lens = self._decode_rows(batch, decodes, decode_tokens, threshold)
        return IndexerMetadata(
            num_tokens=batch.num_actual_tokens,
            num_decode_tokens=decode_tokens,
            slot_mapping=batch.slot_mapping,
            block_table=block_table,
            seq_lens=seq_lens,
            chunks=self._chunks(batch, batch.num_reqs - prefills) if prefills else (),
            sharded=self.sharded,
        )

    def update_draft_decode_metadata(self, metadata: IndexerMetadata) -> None:
        """Nothing to do for the next draft: the metadata has views of vLLM's buffers."""

    def _decode_rows(self, batch: Any, decodes: int, tokens: int, threshold: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Block table and lengths of the first ``decodes`` requests, which have ``tokens`` tokens.

        Each token is a request of its own if the requests have different numbers of tokens, or more than ``threshold``.
        """
        counts = batch.query_start_loc_cpu.diff()[:decodes]
        longest = int(counts.max()) if decodes else 0
        if longest <= threshold and longest * int(counts.count_nonzero()) == int(batch.query_start_loc_cpu[decodes]):
            # Without padding requests. Views of vLLM's buffers, which a CUDA graph reads. Ranks that share contexts
            # decode one token at a time.
            requests = tokens // longest if longest else decodes
            lengths = batch.seq_lens if self.sharded is None else batch.dcp_local_seq_lens
            return batch.block_table_tensor[:requests], lengths[:requests]
        requests, positions = self._positions(batch, 0, decodes)
        lengths = (positions + 1).to(torch.int32)
        if self.sharded is not None:
            lengths = self.sharded.sharding.local_lengths(lengths)
        return batch.block_table_tensor[requests], lengths

    def _positions(self, batch: Any, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The request and the position of each token of the requests ``first`` to ``last`` - 1.

        The host may count drafts that were rejected (asynchronous scheduling): lengths come from the device.
        """
        starts = batch.query_start_loc_cpu
        requests = first + torch.repeat_interleave(starts.diff()[first:last])
        tokens = torch.arange(int(starts[first]), int(starts[last]), device="cpu")
        requests, tokens = to_device(requests, self.device), to_device(tokens, self.device)
        return requests, tokens + (batch.seq_lens[:last] - batch.query_start_loc[1 : last + 1])[requests]

    def _chunks(self, batch: Any, first: int) -> tuple[SelectionChunk, ...]:
        query_lens = batch.query_start_loc_cpu.diff()[first : batch.num_reqs]
        _, positions = self._positions(batch, first, batch.num_reqs)
        chunks = plan_selection(
            query_lens.tolist(),
            batch.seq_lens_cpu_upper_bound[first : batch.num_reqs].tolist(),
            positions,
            batch.block_table_tensor[first : batch.num_reqs],
            use_gathered_rows=False,
        )
        return chunks if self.sharded is None else tuple(_gathered(chunk, *self.sharded) for chunk in chunks)


def _gathered(chunk: SelectionChunk, sharding: Sharding, group: dist.ProcessGroup) -> SelectionChunk:
    """The chunk, with a plan to gather its keys from all ranks."""
    starts = torch.zeros_like(chunk.cu_keys[1:])
    rows = plan_rows(sharding, group, chunk.block_table, starts, chunk.cu_keys, chunk.num_keys)
    return replace(chunk, sharded=rows)


class FlashLatteIndexerBackend(CommonBackendMixin, AttentionBackend):
    """vLLM's backend for a cache of index keys: page sizes and metadata, no attention."""

    @staticmethod
    def get_name() -> str:
        return "DEEPSEEK_V32_INDEXER"

    @staticmethod
    def get_impl_cls() -> type:
        raise NotImplementedError("a cache of index keys has no attention of its own")

    @staticmethod
    def get_builder_cls() -> type:
        return FlashLatteIndexerMetadataBuilder

    @classmethod
    def is_mla(cls) -> bool:
        return True
