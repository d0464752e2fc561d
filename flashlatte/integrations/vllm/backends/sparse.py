"""Sparse MLA: attention over the tokens that an indexer selected (DeepSeek-V3.2, GLM-5, Hy4)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from vllm.distributed.parallel_state import get_dcp_group
from vllm.model_executor.layers.attention.mla_attention import MLACommonBaseImpl
from vllm.model_executor.layers.attention.sparse_mla_attention import (
    SharedTopkIndicesBuffer,
    SparseMLACommonMetadata,
    SparseMLACommonMetadataBuilder,
)
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport, AttentionType

from flashlatte.integrations.vllm import support
from flashlatte.integrations.vllm.backends import common, sparse_host
from flashlatte.integrations.vllm.backends.common import LatentWriterMixin, MLABackendMixin
from flashlatte.integrations.vllm.backends.sparse_host import PhaseRows
from flashlatte.integrations.vllm.ops import dtypes
from flashlatte.kv_cache.registry import as_format, plain_format
from flashlatte.layers.absorbed import attend_selected, attend_selected_rows
from flashlatte.layers.cache import LatentCache
from flashlatte.ops.index_convert import index_convert
from flashlatte.ops.sparse_decode import sparse_decode


class FlashLatteSparseMLABackend(MLABackendMixin, AttentionBackend):
    """FlashLatte as vLLM's attention backend for MLA with an indexer."""

    supported_kv_cache_dtypes: ClassVar[list[str]] = list(support.SPARSE_CACHES)

    @staticmethod
    def get_impl_cls() -> type:
        return FlashLatteSparseMLAImpl

    @staticmethod
    def get_builder_cls() -> type:
        return FlashLatteSparseMLAMetadataBuilder

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def is_sparse(cls) -> bool:
        return True

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, block_size: int | None, *_: Any, **__: Any
    ) -> str | None:
        return support.sparse_refusal(current_platform.device_type, head_size, dtype, kv_cache_dtype, block_size)


class FlashLatteSparseMLAMetadataBuilder(SparseMLACommonMetadataBuilder[SparseMLACommonMetadata]):
    """Builds vLLM's own metadata: the request of each token and the pages of each request."""

    metadata_cls = SparseMLACommonMetadata
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    reorder_batch_threshold: int = 1

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        # Speculated tokens are decode queries of their request. With batch invariance each is a request of its own.
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=not common.BATCH_INVARIANT)
        on_host = getattr(vllm_config.attention_config, "hisparse_config", None) is not None
        self.supports_draft_decode_metadata_update = self.dcp_world_size == 1 and not on_host

    def update_draft_decode_metadata(self, metadata: SparseMLACommonMetadata) -> None:
        """Write the request of each token for the next draft. A CUDA graph may record this.

        The other tensors are views of vLLM's buffers.
        """
        tokens = torch.arange(metadata.num_decode_tokens, dtype=torch.int32, device=self.device)
        ends = metadata.query_start_loc[1:]
        requests = torch.searchsorted(ends, tokens, right=True, out_int32=True)
        # Tokens after the last request pad a CUDA graph and have selected nothing.
        metadata.req_id_per_token[: len(tokens)] = requests.clamp_(max=len(ends) - 1)

    def _build_req_id_per_token(self, common_attn_metadata: Any) -> torch.Tensor:
        if self.device.type != "cpu":
            return super()._build_req_id_per_token(common_attn_metadata)
        # vLLM's implementation is a Triton kernel.
        starts = common_attn_metadata.query_start_loc_cpu
        requests = torch.arange(len(starts) - 1, dtype=torch.int32)
        return torch.repeat_interleave(requests, starts.diff())


class FlashLatteSparseMLAImpl(LatentWriterMixin, MLACommonBaseImpl[SparseMLACommonMetadata], SharedTopkIndicesBuffer):
    """One layer's attention. All tokens, also in prefill, attend in absorbed form to their selected tokens."""

    is_sparse = True
    supports_dense_mha_prefill = False
    masked_mha_available = False
    supports_pcp = False
    supports_dcp = True
    can_return_lse_for_decode = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        *,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        qk_head_dim: int,
        v_head_dim: int,
        kv_b_proj: Any,
        indexer: object | None = None,
        topk_indices_buffer: torch.Tensor | None = None,
        index_group_builder: Any = None,
        sinks: torch.Tensor | None = None,
        **_: Any,
    ) -> None:
        support.check_layer(
            kv_cache_dtype,
            support.SPARSE_CACHES,
            alibi_slopes=alibi_slopes,
            sliding_window=sliding_window,
            logits_soft_cap=logits_soft_cap,
            attn_type=None if attn_type == AttentionType.DECODER else attn_type,
            kv_sharing_target_layer_name=kv_sharing_target_layer_name,
        )
        super().__init__(
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            kv_cache_dtype,
            kv_lora_rank,
            qk_nope_head_dim,
            qk_rope_head_dim,
            qk_head_dim,
            v_head_dim,
            kv_b_proj,
        )
        self.supports_quant_query_input = False
        self.sinks = sinks
        self.group_sinks = None
        self.init_topk_indices_buffer(indexer, topk_indices_buffer)
        self.host = sparse_host.register(
            self.topk_indices_buffer, index_group_builder, indexer is not None, head_size, kv_cache_dtype
        )
        # vLLM's layer reads these attributes to write new rows to the group's slots and to prepare each batch.
        self.index_group, self.index_group_index = self.host or (None, 0)
        # Only with a prefill backend does vLLM plan the copies of a prompt's context. Attention does not run there.
        self.supports_dense_mha_prefill = self.host is not None

    def record_logical_topk_ready(self) -> None:
        """Record that the indexer has selected tokens; needed only for contexts in host memory."""
        if self.host is not None:
            self.host.group.set_logical_topk_ready(self.host.index)

    def prepare_for_batch(self, attn_metadata: Any) -> None:
        """Prepare copies of a batch's rows; needed only for contexts in host memory."""
        if self.host is not None:
            self.host.group.prepare_for_batch(self.host.index, attn_metadata)

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: SparseMLACommonMetadata,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention of every token over its selected tokens: [T, h, latent], and lse [T, h] if ranks share contexts."""
        cache = self._cache(kv_c_and_k_pe_cache)
        query, rope = common.query_parts(q)
        width = cache.layout.head_dim
        if rope is None:
            query = common.as_wide(query, width)
        else:
            rope = common.as_wide(rope, width - query.shape[-1])
        if self.need_to_return_lse_for_decode:
            return self._attend_shard(query, rope, cache, attn_metadata)
        tokens = query.shape[0]
        topk = self.topk_indices_buffer[:tokens]
        if self.host is not None:
            parts = sparse_host.selected_rows(self.host, topk, kv_c_and_k_pe_cache, attn_metadata)
        else:
            request_ids = attn_metadata.req_id_per_token[:tokens]
            slots = index_convert(topk, attn_metadata.block_table, cache.page_size, request_ids=request_ids)
            parts = _by_phase(kv_c_and_k_pe_cache, slots, attn_metadata.num_decode_tokens)
        out = None
        for part in parts:
            part_rope = None if rope is None else rope[part.tokens]
            attended = self._attend_rows(
                query[part.tokens], part_rope, self._cache(part.pages), part.slots, part.in_prompt
            )
            if attended.shape[0] == tokens:
                return attended, None
            out = query.new_empty(tokens, *attended.shape[1:]) if out is None else out
            out[part.tokens] = attended
        assert out is not None
        return out, None

    def _attend_rows(
        self,
        query: torch.Tensor,
        rope: torch.Tensor | None,
        cache: LatentCache,
        slots: torch.Tensor,
        in_prompt: bool,
    ) -> torch.Tensor:
        # Batch invariance: sparse prefill sums in another order than sparse decode, and the last token of a prompt may
        # be alone in its chunk, and so a decode token, or not.
        if not in_prompt or common.BATCH_INVARIANT:
            return attend_selected(query, cache, slots, self.scale, None, common.BATCH_INVARIANT, self.sinks, rope)
        # Tokens of a prompt select from the same rows: sparse prefill reads a plain contiguous cache in place.
        rows = cache.pages.flatten(0, 1) if cache.layout.plain and cache.pages.is_contiguous() else None
        return attend_selected_rows(query, cache, rows, slots, self.scale, None, self.sinks, rope)

    def _attend_shard(
        self,
        query: torch.Tensor,
        rope: torch.Tensor | None,
        cache: LatentCache,
        attn_metadata: SparseMLACommonMetadata,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention over the selected tokens that are on this rank, for the heads of all ranks; vLLM merges by lse."""
        tokens = query.shape[0]
        slots, counts = index_convert(
            self.topk_indices_buffer[:tokens],
            attn_metadata.block_table,
            cache.page_size,
            request_ids=attn_metadata.req_id_per_token[:tokens],
            sharding=(self.dcp_rank, self.dcp_world_size, attn_metadata.cp_kv_cache_interleave_size),
            compact=True,
            return_counts=True,
        )
        out, lse = sparse_decode(
            query[:, None],
            cache.pages,
            slots[:, None],
            q_rope=None if rope is None else rope[:, None],
            cache_format=cache.layout,
            topk_length=counts[:, None],
            attn_sink=self.group_sinks,
            softmax_scale=self.scale,
            head_dim_v=self.kv_lora_rank,
            batch_invariant=common.BATCH_INVARIANT,
        )
        lse = lse.squeeze(-1)
        return out.squeeze(1), lse if self.group_sinks is None else torch.logaddexp(lse, self.group_sinks)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Collect the sinks of all ranks' heads on the first rank: a sink counts once in the merged denominator."""
        if self.sinks is not None and self.need_to_return_lse_for_decode:
            sinks = get_dcp_group().all_gather(self.sinks.detach(), dim=0)
            if self.group_sinks is not None:
                self.group_sinks.copy_(sinks)  # CUDA graphs keep the address when weights are loaded again
            elif self.dcp_rank == 0:
                self.group_sinks = sinks

    def _cache(self, kv_cache: torch.Tensor, k_scale: torch.Tensor | None = None) -> LatentCache:
        """vLLM's cache: plain values [pages, page_size, latent + rope], or DeepSeek's 656 bytes a token."""
        ds_mla = self.kv_cache_dtype == dtypes.DS_MLA
        layout = as_format(dtypes.DS_MLA_FORMAT) if ds_mla else plain_format(kv_cache.dtype, kv_cache.shape[-1])
        return LatentCache(kv_cache.unsqueeze(2), layout, self.kv_lora_rank)


def _by_phase(pages: torch.Tensor, slots: torch.Tensor, num_decode_tokens: int) -> Iterator[PhaseRows]:
    """The tokens of decode requests, then those of prompts; with batch invariance all together."""
    tokens = slots.shape[0]
    decoding = tokens if common.BATCH_INVARIANT else min(num_decode_tokens, tokens)
    for phase, in_prompt in ((slice(decoding), False), (slice(decoding, tokens), True)):
        if slots[phase].shape[0] or not tokens:
            yield PhaseRows(phase, pages, slots[phase], in_prompt)
