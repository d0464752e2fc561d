"""Dense MLA: vLLM's backend class, metadata builder and layer implementation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonDecodeMetadata,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType

from flashlatte.integrations import decode_precision
from flashlatte.integrations.vllm import compat, support
from flashlatte.integrations.vllm.backends import common
from flashlatte.integrations.vllm.backends.common import LatentWriterMixin, MLABackendMixin
from flashlatte.kv_cache.registry import plain_format
from flashlatte.layers.absorbed import apply_sink
from flashlatte.layers.cache import LatentCache
from flashlatte.layers.metadata import ContextChunk, PrefillPart
from flashlatte.layers.prefill import Expansion, attend_heads
from flashlatte.ops.dense_decode import dense_decode
from flashlatte.runtime.transfer import to_device

# Up to this number of new tokens, the same for all requests of a batch, attention runs in absorbed form: it reads the
# cached latents without expanding them to keys and values of every head.
MAX_ABSORBED_QUERIES = 128


class PaddedRows(NamedTuple):
    """Rows of a batch in which every request has as many tokens as the longest one.

    Attributes:
        tokens: int64 [requests · queries], the token of each row. A request's tokens are its last rows, and the rows
            before them repeat its first token.
        rows: int64 [tokens], the row of each token.
    """

    tokens: torch.Tensor
    rows: torch.Tensor


@dataclass
class DecodeMetadata(MLACommonDecodeMetadata):
    """vLLM's metadata of decode requests, with their rows if they have different numbers of tokens."""

    padded: PaddedRows | None = None


class FlashLatteMLABackend(MLABackendMixin, MLACommonBackend):
    """FlashLatte as vLLM's attention backend for MLA without an indexer."""

    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", *support.CACHE_DTYPES]

    @staticmethod
    def get_impl_cls() -> type:
        return FlashLatteMLAImpl

    @staticmethod
    def get_builder_cls() -> type:
        return FlashLatteMLAMetadataBuilder

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return []  # any

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        use_mla: bool = True,
        has_sink: bool = False,
        use_sparse: bool = False,
        *_: Any,
        **__: Any,
    ) -> str | None:
        if use_sparse:
            return f"FlashLatte: {compat.indexer_refusal() or support.NEEDS_CUSTOM}"
        return support.dense_refusal(current_platform.device_type, head_size, dtype, kv_cache_dtype, block_size)


class FlashLatteMLAMetadataBuilder(MLACommonMetadataBuilder[MLACommonMetadata]):
    """Builds vLLM's own metadata: kernels split the work on the device in each call, and need no schedule.

    If all requests of a batch have the same number of tokens, up to ``MAX_ABSORBED_QUERIES``, all are decode requests.
    Otherwise a decode request has at most one token and the speculated ones. Kernels read the lengths of decode
    requests on the device: with asynchronous scheduling the host does not know how many drafts were accepted.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.VARLEN
    # Batch invariance: whether a request uses the absorbed form must not depend on the other requests.
    reorder_batch_threshold: int = 1 if common.BATCH_INVARIANT else MAX_ABSORBED_QUERIES

    @staticmethod
    def determine_prefill_query_data_type(vllm_config: Any, model_dtype: torch.dtype) -> torch.dtype:
        if vllm_config.attention_config.use_prefill_query_quantization:
            compat.warn_once("FlashLatte ignores use_prefill_query_quantization: queries of a prefill keep their dtype")
        return model_dtype

    def __init__(
        self,
        kv_cache_spec: Any,
        layer_names: list[str],
        vllm_config: Any,
        device: torch.device,
        *more: Any,
        **others: Any,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, *more, **others)
        speculates = getattr(vllm_config, "speculative_config", None) is not None
        if self.dcp_world_size > 1 and speculates and vllm_config.scheduler_config.async_scheduling:
            raise ValueError(support.SHARED_SPECULATION_UNSUPPORTED)
        # Not between ranks: vLLM would not advance their lengths.
        self.supports_draft_decode_metadata_update = self.dcp_world_size == 1
        if device.type != "cpu" and self.dcp_world_size == 1:
            layer = vllm_config.compilation_config.static_forward_context[layer_names[0]]
            if isinstance(getattr(layer, "impl", None), FlashLatteMLAImpl):  # vLLM's tests use other implementations
                layer.impl.warm_up_prefill(vllm_config.model_config.dtype, kv_cache_spec.block_size, layer._k_scale)

    def _init_reorder_batch_threshold(self, reorder_batch_threshold: int | None = 1, *more: Any, **others: Any) -> None:
        super()._init_reorder_batch_threshold(1, *more, **others)
        self.speculated_step = self.reorder_batch_threshold
        super()._init_reorder_batch_threshold(reorder_batch_threshold, *more, **others)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> MLACommonMetadata:
        largest, starts = self.reorder_batch_threshold, common_attn_metadata.query_start_loc_cpu
        longest, requests = _shape(starts)
        if longest * requests != int(starts[-1]):
            self.reorder_batch_threshold = self.speculated_step
        try:
            return super().build(common_prefix_len, common_attn_metadata, fast_build)
        finally:
            self.reorder_batch_threshold = largest

    def update_draft_decode_metadata(self, metadata: MLACommonMetadata) -> None:
        """Nothing to do for the next draft: the metadata has views of vLLM's buffers."""

    def _build_decode(self, **batch: Any) -> DecodeMetadata:
        """Metadata of the decode requests. Drops padding requests, which have no tokens."""
        starts, padded = batch["query_start_loc_cpu"], None
        longest, requests = _shape(starts)
        if longest and longest * requests == int(starts[-1]):
            # Requests without tokens may stand for tokens that pad a CUDA graph.
            requests = batch["num_decode_tokens"] // longest
        elif longest:
            padded = _padded_rows(starts.diff()[:requests], longest, batch["seq_lens_device"].device)
        for name in ("block_table_tensor", "seq_lens_device"):
            batch[name] = batch[name][:requests]
        return DecodeMetadata(**vars(super()._build_decode(**batch)), padded=padded)


def _shape(starts: torch.Tensor) -> tuple[int, int]:
    """The largest number of tokens of a request, and the number of requests that have tokens."""
    counts = starts.diff()
    return int(counts.max()), int(counts.count_nonzero())


def _padded_rows(counts: torch.Tensor, queries: int, device: torch.device) -> PaddedRows:
    """Rows for requests with ``counts`` tokens (on the host), at most ``queries``."""
    ends = counts.cumsum(0)
    columns = torch.arange(-queries, 0, device="cpu")
    tokens = torch.maximum(ends[:, None] + columns, (ends - counts)[:, None])
    skipped = torch.arange(1, len(counts) + 1, device="cpu") * queries - ends
    rows = torch.arange(int(ends[-1]), device="cpu") + torch.repeat_interleave(skipped, counts)
    return PaddedRows(to_device(tokens.flatten(), device), to_device(rows, device))


def _by_request(queries: torch.Tensor, decode: Any) -> torch.Tensor:
    """Queries [T, h, d] as [requests, queries, h, d]."""
    if decode.padded is not None:
        queries = queries[decode.padded.tokens]
    requests = decode.seq_lens.shape[0]
    return queries.unflatten(0, (requests, queries.shape[0] // requests))


class FlashLatteMLAImpl(LatentWriterMixin, MLACommonImpl[MLACommonMetadata]):
    """One layer's attention over its paged latent cache."""

    can_return_lse_for_decode: bool = True
    supports_dcp: bool = True
    supports_pcp: bool = False  # vLLM's default for MLA is True; untested here
    sinks: torch.Tensor | None = None  # float32 [h], a logit in the denominator of each head's softmax
    precision: str | None = None  # of dense_decode
    decode_backend: str | None = None

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
        sinks: torch.Tensor | None = None,
        **mla_args: Any,
    ) -> None:
        support.check_layer(
            kv_cache_dtype,
            alibi_slopes=alibi_slopes,
            sliding_window=sliding_window,
            logits_soft_cap=logits_soft_cap,
            attn_type=None if attn_type == AttentionType.DECODER else attn_type,
        )
        super().__init__(
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            alibi_slopes,
            sliding_window,
            kv_cache_dtype,
            logits_soft_cap,
            attn_type,
            kv_sharing_target_layer_name,
            **mla_args,
        )
        # Queries stay 16-bit with an fp8 cache.
        self.supports_quant_query_input = False
        self.is_fp8 = kv_cache_dtype.startswith("fp8")
        self.uses_other_prefill = compat.selects_other_prefill()
        if sinks is not None and (self.dcp_world_size > 1 or self.uses_other_prefill):
            # vLLM's own prefill runs there, and it has no sinks.
            raise NotImplementedError(
                "FlashLatte supports attention sinks without an indexer only with its own prefill and without decode "
                "context parallelism"
            )
        self.sinks = sinks
        self.precision = decode_precision.requested()
        self.decode_backend = decode_precision.backend(current_platform.device_type)
        if sinks is not None and self.precision is not None:
            raise NotImplementedError(decode_precision.needs_message(support.PRECISION_NEEDS_NO_SINKS))
        self.expansion = Expansion(
            kv_b=lambda latent: self.kv_b_proj(latent)[0],
            latent_dim=self.kv_lora_rank,
            nope_dim=self.qk_nope_head_dim,
            rope_dim=self.qk_rope_head_dim,
            v_dim=self.v_head_dim,
        )

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: MLACommonMetadata,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention in absorbed form: [T, h, latent], and lse [T, h] if vLLM merges results over ranks, else None."""
        decode: Any = attn_metadata.decode
        query, rope = common.query_parts(q)
        cache = self._cache(kv_c_and_k_pe_cache, layer._k_scale)
        out, lse = dense_decode(
            _by_request(query, decode),
            cache.pages,
            decode.block_table,
            decode.seq_lens,
            q_rope=None if rope is None else _by_request(rope, decode),
            head_dim_v=self.kv_lora_rank,
            softmax_scale=self.scale,
            causal=True,
            k_scale=cache.scale,
            batch_invariant=common.BATCH_INVARIANT,
            precision=self.precision,
            backend=self.decode_backend,
        )
        apply_sink(out, lse.transpose(1, 2), self.sinks)
        out = out.flatten(0, 1)
        lse = lse.transpose(1, 2).flatten(0, 1) if self.need_to_return_lse_for_decode else None
        if decode.padded is None:
            return out, lse
        rows = decode.padded.rows
        return out[rows], lse if lse is None else lse[rows]

    def forward_mha(
        self,
        q: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: MLACommonMetadata,
        k_scale: torch.Tensor,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
    ) -> None:
        """Attention of prefill requests, in multi-head form, into ``output`` [T, h · v]."""
        if output_scale is not None or self.dcp_world_size > 1 or self.uses_other_prefill:
            # vLLM's own path: it quantizes outputs, gathers context over ranks, and runs other prefill backends.
            scale = {} if output_scale is None else {"output_scale": output_scale}
            super().forward_mha(q, kv_c_normed, k_pe, kv_c_and_k_pe_cache, attn_metadata, k_scale, output, **scale)
            return
        attend_heads(
            q,
            torch.cat((kv_c_normed, k_pe.squeeze(1)), dim=-1),
            self._cache(kv_c_and_k_pe_cache, k_scale),
            compat.prefill_part(attn_metadata.prefill, q.shape[0]),
            self.expansion,
            self.scale,
            output.view(-1, self.num_heads, self.v_head_dim),
            self.sinks,
        )

    def warm_up_prefill(self, dtype: torch.dtype, page_size: int, k_scale: torch.Tensor) -> None:
        """Run prefill once over zeros, new and cached, to compile its kernels before the first request.

        vLLM's own warm-up has no cached context.
        """
        if self.uses_other_prefill:
            return
        device, tokens = k_scale.device, 2
        bounds, start = (torch.tensor(values, dtype=torch.int32, device=device) for values in ((0, tokens), (0,)))
        chunk = ContextChunk(
            first=0,
            last=tokens,
            tokens=tokens,
            max_queries=tokens,
            max_keys=tokens,
            cu_queries=bounds,
            cu_keys=bounds,
            starts=start,
            block_table=start.view(1, 1),
        )
        per_head = self.num_heads * (self.qk_nope_head_dim + self.v_head_dim)
        pages = torch.zeros(
            1, page_size, self.head_size, dtype=torch.float8_e4m3fn if self.is_fp8 else dtype, device=device
        )
        zeros = pages.new_zeros(tokens, self.num_heads * self.qk_head_dim, dtype=dtype)
        attend_heads(
            zeros.view(tokens, self.num_heads, self.qk_head_dim),
            zeros.new_zeros(tokens, self.head_size),
            self._cache(pages, k_scale),
            PrefillPart(bounds, tokens, (chunk,)),
            # Not the layer's own projection: a LoRA may have wrapped it.
            replace(self.expansion, kv_b=lambda latent: latent.new_zeros(latent.shape[0], per_head)),
            self.scale,
            zeros.new_zeros(tokens, self.num_heads, self.v_head_dim),
        )

    def _cache(self, kv_cache: torch.Tensor, k_scale: torch.Tensor) -> LatentCache:
        """vLLM's cache [pages, page_size, latent + rope]; vLLM may pass e4m3 as uint8."""
        if self.is_fp8:
            kv_cache = kv_cache.view(torch.float8_e4m3fn)
        layout = plain_format(kv_cache.dtype, kv_cache.shape[-1])
        return LatentCache(kv_cache.unsqueeze(2), layout, self.kv_lora_rank, k_scale if self.is_fp8 else None)
