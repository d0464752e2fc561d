"""A call of each public operation, with most of its tensors and options, as keyword arguments.

Tensors hold zeros, and are new in each list.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import flashlatte
from flashlatte import kv_cache

Call = tuple[Callable[..., Any], dict[str, Any]]
BF16, FP16, F32, E4M3, U8, I8, I64 = (
    *(torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn),
    *(torch.uint8, torch.int8, torch.int64),
)


def zeros(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def of(function: Callable[..., Any], **arguments: Any) -> Call:
    return function, arguments


def operations() -> list[Call]:
    """Those of ``flashlatte`` and ``flashlatte.kv_cache``."""
    # fmt: off
    return [
        of(flashlatte.compress, kv=zeros(2, 32), score=zeros(2, 32), ape=zeros(4, 32), weight=zeros(16),
           cos_sin=zeros(9, 8), request_ids=ints(2), positions=ints(2), cache=zeros(1, 4, 1, 16), slot_mapping=ints(2),
           state_cache=zeros(5, 3, 64), state_table=ints(1, 3), scale_rounding="power_of_two"),
        of(flashlatte.concat_mla_q, ql_nope=zeros(3, 2, 130, dtype=FP16), q_pe=zeros(3, 2, 1, dtype=FP16),
           out=zeros(3, 2, 131, dtype=FP16)),
        of(flashlatte.dense_decode, q=zeros(3, 2, 4, 24, dtype=BF16), k_cache=zeros(8, 64, 1, 24, dtype=E4M3),
           block_table=ints(3, 2), cache_seqlens=ints(3), head_dim_v=16, causal=True, k_scale=zeros(1)),
        of(flashlatte.dense_prefill, q=zeros(9, 4, 8), k=zeros(9, 2, 8), v=zeros(9, 2, 8), cu_seqlens_q=ints(4),
           cu_seqlens_k=ints(4), max_seqlen_q=14, max_seqlen_k=6, softmax_scale=3.0, causal=False, window=(-1, 3),
           deterministic=True),
        of(flashlatte.index_convert, indices=ints(4, 5), block_table=ints(2, 1), page_size=64, request_ids=ints(4),
           next_n=2, query_positions=ints(4), sinks=3, window=0, workspace_ids=ints(4), workspace_starts=ints(3),
           sharding=(3, 4, 16), compact=False, return_counts=True, dtype=I64),
        of(flashlatte.index_gather, cache=zeros(2, 1, 1, 68, dtype=U8), block_table=ints(1, 2), cu_seqlens=ints(2),
           total_tokens=2, head_dim=64, seq_starts=ints(1)),
        of(flashlatte.index_logits, q=zeros(1, 1, 32, dtype=BF16), k=zeros(1, 32, dtype=E4M3), weights=zeros(1, 1),
           key_start=ints(1), key_end=ints(1), k_scale=zeros(1), clean=False, out=zeros(1, 1)),
        of(flashlatte.index_quantize, cache=zeros(2, 5, 1, 68, dtype=U8), slot_mapping=ints(5),
           k=zeros(5, 64, dtype=BF16), scale_rounding="exact"),
        of(flashlatte.index_query, q=zeros(4, 1, 128, dtype=FP16), weights=zeros(4, 1, dtype=FP16),
           cos_sin=zeros(9, 16), positions=ints(4), rope_first=False, interleaved=False, hadamard=False,
           smallest_amax=0.0001, scale_rounding="power_of_two"),
        of(flashlatte.index_query_mxfp4, q=zeros(3, 1, 32, dtype=BF16), weights=zeros(3, 1), cos_sin=zeros(9, 16),
           positions=ints(3), hadamard=False),
        of(flashlatte.index_select, q=zeros(5, 4, 32, dtype=BF16), k=zeros(40, 32, dtype=BF16), weights=zeros(5, 4),
           key_start=ints(5), key_end=ints(5), num_selected=8, block_table=ints(3, 5), page_size=6,
           request_ids=ints(5)),
        of(flashlatte.index_workspace, indices=ints(1, 2), cu_seqlens_q=ints(3), seq_lens=ints(2), total_tokens=1,
           window=20, ratio=1, workspace_rows=16, window_row=4, gather_lens=ints(2)),
        of(flashlatte.indexer_loss, index_q=zeros(3, 3, 6), index_k=zeros(14, 6), index_weights=zeros(3, 3),
           q=zeros(3, 1, 8), kv=zeros(14, 1, 8), lse=zeros(3, 1), key_start=ints(3), key_end=ints(3), softmax_scale=0.5,
           use_relu=False),
        of(flashlatte.inverse_rope_quantize, o=zeros(1, 1, 128), cos_sin=zeros(1, 2), positions=ints(1), groups=1),
        of(flashlatte.merge_attn_states, output=zeros(7, 3, 8), prefix_output=zeros(7, 3, 8), prefix_lse=zeros(3, 7),
           suffix_output=zeros(7, 3, 8), suffix_lse=zeros(3, 7), output_lse=zeros(3, 7)),
        of(flashlatte.merge_states, outs=[zeros(5, 2, 8), zeros(5, 2, 8)], lses=[zeros(5, 2), zeros(5, 2)],
           context_tokens=ints(1)),
        of(flashlatte.pack_seq, x=zeros(2, 3, dtype=BF16), cu_seqlens=ints(3), max_seqlen=3),
        of(flashlatte.paged_attention, q=zeros(9, 4, 16, dtype=BF16), k_cache=zeros(7, 16, 2, 16, dtype=BF16),
           v_cache=zeros(7, 16, 2, 16, dtype=BF16), block_table=ints(5, 1), seqused_k=ints(5), cu_seqlens_q=ints(6),
           causal=True, prefix_ranges=ints(5, 1, 2), softcap=1.0, alibi_slopes=zeros(4), alibi_sqrt=False,
           qq_bias=zeros(3, 3)),
        of(flashlatte.paged_index_logits, q=zeros(1, 1, 1, 32, dtype=BF16), cache=zeros(2, 1, 1, 36, dtype=U8),
           weights=zeros(1, 1), cache_seqlens=ints(1), block_table=ints(1, 1), clean=False, out=zeros(1, 1)),
        of(flashlatte.paged_index_select, q=zeros(1, 1, 8, 32, dtype=BF16), cache=zeros(1, 1, 1, 32, dtype=BF16),
           weights=zeros(1, 8), cache_seqlens=ints(1), block_table=ints(1, 1), num_selected=20, slots=False),
        of(flashlatte.q_kv_norm, q=zeros(3, 8), kv=zeros(3, 4), q_weight=zeros(8), kv_weight=zeros(4)),
        of(flashlatte.reshape_and_cache, key=zeros(4, 1, 16), value=zeros(4, 1, 16),
           k_cache=zeros(2, 3, 1, 16, dtype=E4M3), v_cache=zeros(2, 3, 1, 16, dtype=E4M3), slot_mapping=ints(4)),
        of(flashlatte.rotate_and_cache, q=zeros(4, 1, 16, dtype=BF16), kv=zeros(4, 16, dtype=BF16), cos_sin=zeros(9, 4),
           positions=ints(4), cache=zeros(5, 2, 1, 16), slot_mapping=ints(4), out=zeros(4, 1, 16, dtype=BF16)),
        of(flashlatte.sparse_attention, q=zeros(3, 4, 24, dtype=BF16), kv=zeros(30, 1, 24, dtype=BF16),
           indices=ints(3, 1, 9), topk_length=ints(3), attn_sink=zeros(4), softmax_scale=0.5, d_v=16),
        of(flashlatte.sparse_decode, q=zeros(2, 2, 4, 512, dtype=BF16), k_cache=zeros(6, 4, 1, 512, dtype=BF16),
           indices=ints(2, 2, 64), topk_length=ints(2), attn_sink=zeros(4),
           extra_k_cache=zeros(4, 4, 1, 512, dtype=BF16), extra_indices=ints(2, 2, 20), extra_topk_length=ints(2),
           head_dim_v=512),
        of(flashlatte.sparse_index_logits, q=zeros(1, 1, 64, dtype=BF16), k=zeros(60, 64, dtype=E4M3),
           weights=zeros(1, 1), first_key=ints(1, 1), num_keys=ints(1, 1), block_size=1, k_scale=zeros(60), dtype=F32),
        of(flashlatte.sparse_prefill, q=zeros(5, 4, 24, dtype=BF16), kv=zeros(30, 1, 24, dtype=BF16),
           indices=ints(5, 1, 9), softmax_scale=0.5, d_v=16, attn_sink=zeros(4), topk_length=ints(5)),
        of(flashlatte.topk, logits=zeros(2, 1), k=2, start=ints(2), end=ints(2), next_n=1, block_table=ints(3, 1),
           page_size=64, request_ids=ints(2), return_values=True),
        of(flashlatte.turboquant_decode, q=zeros(1, 1, 2, 16, dtype=FP16), cache=zeros(1, 3, 1, 22, dtype=U8),
           block_table=ints(1, 1), cache_seqlens=ints(1)),
        of(flashlatte.turboquant_gather, cache=zeros(4, 3, 1, 30, dtype=U8), block_table=ints(3, 2), cu_seqlens=ints(4),
           total_tokens=11, head_dim=32, seq_starts=ints(3), dtype=BF16, key=zeros(11, 1, 32, dtype=BF16),
           value=zeros(11, 1, 32, dtype=BF16)),
        of(flashlatte.turboquant_store, key=zeros(4, 1, 16), value=zeros(4, 1, 16), cache=zeros(1, 4, 1, 28, dtype=U8),
           slot_mapping=ints(4)),
        of(flashlatte.unpack_seq, packed=zeros(1, 5, 2, 5), cu_seqlens=ints(2), total_tokens=7, out=zeros(7, 2, 5)),
        of(flashlatte.vit_attention, q=zeros(1, 9, 2, 64, dtype=BF16), k=zeros(1, 9, 2, 64, dtype=BF16),
           v=zeros(1, 9, 2, 64, dtype=BF16), cu_seqlens=ints(3), max_seqlen=ints(), out=zeros(1, 9, 2, 64, dtype=BF16)),
        of(kv_cache.allocate, cache_format="v32", num_pages=6, page_size=64),
        of(kv_cache.copy_blocks, caches=[zeros(4, 3, 1, 656, dtype=U8), zeros(6, 3, 1, 576, dtype=BF16)],
           src_pages=ints(1), dst_pages=ints(1)),
        of(kv_cache.dequantize, records=zeros(3, 40, dtype=E4M3), cache_format="fp8", scale=zeros(1), dtype=F32),
        of(kv_cache.gather, cache=zeros(6, 2, 1, 584, dtype=U8), block_table=ints(4, 3), cu_seqlens=ints(5),
           cache_format="model1", dtype=FP16, out=zeros(17, 512, dtype=FP16)),
        of(kv_cache.gather_last, cache=zeros(20, 3, 1, 584, dtype=U8), block_table=ints(1, 4), seq_lens=ints(1),
           out=zeros(1, 6, 512), gather_lens=ints(1), offset=0),
        of(kv_cache.gather_records, cache=zeros(4, 1, 1, 40, dtype=FP16), block_table=ints(2, 3), cu_seqlens=ints(2),
           total_tokens=1, cache_format="fp16", seq_starts=ints(2), out=zeros(1, 40, dtype=FP16)),
        of(kv_cache.get_format, cache_format="v32"),
        of(kv_cache.infer_format, cache=zeros(2, 4, 1, 528, dtype=E4M3), rows=(512, 0)),
        of(kv_cache.pack, rows=zeros(3, 4, 1, 40, dtype=BF16), cache_format="bf16"),
        of(kv_cache.quantize, x=zeros(3, 40), cache_format="fp8", scale=zeros(1)),
        of(kv_cache.read, cache=zeros(2, 3, 1, 8), slots=ints(2, 2)),
        of(kv_cache.rope_write, cache=zeros(2, 4, 1, 48), slot_mapping=ints(3), latent=zeros(3, 40), k_rope=zeros(3, 8),
           positions=ints(3), cos_sin=zeros(3, 8), interleaved=True, q_rope=zeros(3, 2, 8)),
        of(kv_cache.swap_blocks, src_cache=zeros(3, 3, 1, 576, dtype=BF16), dst_cache=zeros(5, 3, 1, 576, dtype=BF16),
           src_pages=ints(1), dst_pages=ints(1)),
        of(kv_cache.to_cache_indices, positions=ints(3, 4), block_table=ints(3, 4), page_size=1, request_ids=ints(3)),
        of(kv_cache.unpack, cache=zeros(3, 4, 1, 40, dtype=BF16), dtype=BF16),
        of(kv_cache.write, cache=zeros(2, 4, 1, 132, dtype=U8), slot_mapping=ints(3), x=zeros(3, 128),
           cache_format="index_fp8"),
    ]
    # fmt: on
