"""A call of each function of the drop-ins, as in ``public_calls``."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from support.public_calls import BF16, E4M3, I8, I64, U8, Call, ints, of, zeros

from flashlatte import deep_gemm, flash_mla, flashinfer
from flashlatte.integrations.vllm import ops


def of_flash_mla() -> list[Call]:
    """Those of ``flashlatte.flash_mla`` that take arguments which they check."""
    # fmt: off
    return [
        of(flash_mla.flash_attn_varlen_func, q=zeros(9, 4, 24), k=zeros(9, 2, 24), v=zeros(9, 2, 16),
           cu_seqlens_qo=ints(4), cu_seqlens_kv=ints(4), max_seqlen_qo=5, max_seqlen_kv=7, dropout_p=0.0,
           softmax_scale=0.2, causal=True, deterministic=True, is_varlen=True),
        of(flash_mla.flash_attn_varlen_kvpacked_func, q=zeros(9, 4, 24), kv=zeros(9, 4, 40), cu_seqlens_qo=ints(4),
           cu_seqlens_kv=ints(4), max_seqlen_qo=5, max_seqlen_kv=5, head_dim_qk=24, causal=True),
        of(flash_mla.flash_attn_varlen_qkvpacked_func, qkv=zeros(9, 4, 64), cu_seqlens=ints(4), max_seqlen=5,
           head_dim_qk=24, causal=True),
        of(flash_mla.flash_mla_sparse_fwd, q=zeros(5, 4, 576, dtype=BF16), kv=zeros(90, 1, 576, dtype=BF16),
           indices=ints(5, 1, 64), sm_scale=0.5, d_v=512, attn_sink=zeros(4), topk_length=ints(5)),
        of(flash_mla.flash_mla_with_kvcache, q=zeros(2, 2, 4, 512, dtype=BF16), k_cache=zeros(6, 64, 1, 528, dtype=U8),
           block_table=None, cache_seqlens=None, head_dim_v=512,
           tile_scheduler_metadata=flash_mla.get_mla_metadata()[0], causal=False, is_fp8_kvcache=False,
           indices=ints(2, 2, 64), attn_sink=zeros(4), extra_k_cache=zeros(4, 64, 1, 288, dtype=U8),
           extra_indices_in_kvcache=ints(2, 2, 20), topk_length=ints(2), extra_topk_length=ints(2), kv_format="V41"),
        of(flash_mla.get_mla_decoding_metadata, seqlens_k=ints(3), num_q_tokens_per_head_k=8, h_k=1, use_legacy=True),
    ]
    # fmt: on


def of_deep_gemm() -> list[Call]:
    """Those of ``flashlatte.deep_gemm``."""
    # fmt: off
    return [
        of(deep_gemm.fp8_fp4_mqa_logits, q=(zeros(5, 32, 128, dtype=E4M3), None),
           kv=(zeros(40, 128, dtype=E4M3), zeros(40)), weights=zeros(5, 32), cu_seq_len_k_start=ints(5),
           cu_seq_len_k_end=ints(5), clean_logits=False, max_seqlen_k=32),
        of(deep_gemm.fp8_fp4_paged_mqa_logits, q=(zeros(2, 1, 8, 128, dtype=E4M3), None),
           kv_cache=zeros(3, 64, 1, 132, dtype=U8), weights=zeros(2, 8, dtype=BF16), context_lens=ints(2),
           block_table=ints(2, 2), schedule_meta=None, max_context_len=128, clean_logits=True),
        of(deep_gemm.fp8_fp4_paged_sparse_mqa_logits, q=(zeros(4, 1, 32, 128, dtype=E4M3), None),
           kv_cache=zeros(7, 16, 1, 132, dtype=U8), weights=zeros(4, 32, dtype=BF16),
           metadata=zeros(4, 8, 2, dtype=I64), num_max_sparse_blocks=8, sparse_block_kv=8),
        of(deep_gemm.fp8_fp4_sparse_mqa_logits, q=(zeros(5, 20, 128, dtype=E4M3), None),
           kv=(zeros(40, 128, dtype=E4M3), zeros(40)), weights=zeros(5, 20), metadata=zeros(5, 12, 2, dtype=I64),
           num_max_sparse_blocks=12, sparse_block_kv=8, use_unaligned_ks=False),
        of(deep_gemm.fp8_mqa_logits, q=zeros(5, 32, 128, dtype=E4M3), kv=(zeros(40, 128, dtype=E4M3), zeros(40)),
           weights=zeros(5, 32), cu_seq_len_k_start=ints(5), cu_seq_len_k_end=ints(5)),
        of(deep_gemm.fp8_paged_mqa_logits, q=zeros(3, 1, 32, 128, dtype=E4M3), kv_cache=zeros(15, 64, 1, 132, dtype=U8),
           weights=zeros(3, 32), context_lens=ints(3), block_table=ints(3, 5), schedule_meta=None, max_context_len=400,
           clean_logits=True),
        of(deep_gemm.get_mqa_logits_metadata, cu_seq_len_k_start=ints(5), cu_seq_len_k_end=ints(5), num_kv_tokens=40,
           num_heads=32),
        of(deep_gemm.get_paged_mqa_logits_metadata, context_lens=ints(2, 1), block_kv=64, num_sms=4, indices=ints(2)),
        of(deep_gemm.get_paged_sparse_mqa_logits_metadata, context_lens=ints(1), block_table=ints(1, 3), indices=None,
           page_kv=16, sparse_kv_block_indices=ints(1, 3), qk_dtype=I8, sparse_block_kv=8),
        of(deep_gemm.get_sparse_mqa_logits_metadata, cu_seq_len_k_start=ints(1), cu_seq_len_k_end=ints(1),
           num_kv_tokens=40, sparse_kv_block_indices=ints(1, 3), qk_dtype=I8, sparse_block_kv=8),
        of(deep_gemm.set_num_sms, num_sms=3),
    ]
    # fmt: on


def of_flashinfer() -> list[Call]:
    """Those of ``flashlatte.flashinfer``."""
    # fmt: off
    return [
        of(flashinfer.append_paged_mla_kv_cache, append_ckv=zeros(1, 16), append_kpe=zeros(1, 8), batch_indices=ints(1),
           positions=ints(1), ckv_cache=zeros(2, 1, 16), kpe_cache=zeros(2, 1, 8), kv_indices=ints(2),
           kv_indptr=ints(2), kv_last_page_len=ints(1)),
        of(flashinfer.concat_mla_k, k=zeros(2, 3, 24, dtype=BF16), k_nope=zeros(2, 3, 16, dtype=BF16),
           k_rope=zeros(2, 1, 8, dtype=BF16)),
        of(flashinfer.get_batch_indices_positions, append_indptr=ints(4), seq_lens=ints(3), nnz=9,
           batch_indices=ints(9), positions=ints(9)),
        of(flashinfer.get_seq_lens, kv_indptr=ints(2), kv_last_page_len=ints(1), page_size=1),
        of(flashinfer.merge_state, v_a=zeros(5, 3, 8), s_a=zeros(5, 3), v_b=zeros(5, 3, 8), s_b=zeros(5, 3)),
        of(flashinfer.merge_state_in_place, v=zeros(5, 3, 8), s=zeros(5, 3), v_other=zeros(5, 3, 8),
           s_other=zeros(5, 3), mask=zeros(5, dtype=torch.bool)),
        of(flashinfer.merge_states, v=zeros(5, 1, 3, 8), s=zeros(5, 1, 3)),
        of(flashinfer.top_k, input=zeros(2, 9), k=4, sorted=True),
        of(flashinfer.top_k_page_table_transform, input=zeros(6, 40), src_page_table=ints(6, 20), lengths=ints(6), k=5,
           row_starts=ints(6), page_table_row_starts=ints(6), page_size=1, out=ints(6, 5), out_raw_indices=ints(6, 5)),
        of(flashinfer.top_k_ragged_transform, input=zeros(6, 40, dtype=BF16), offsets=ints(6), lengths=ints(6), k=18,
           row_starts=ints(6)),
        of(flashinfer.trtllm_batch_decode_with_kv_cache_mla, query=zeros(3, 2, 3, 48), kv_cache=zeros(7, 8, 48),
           workspace_buffer=zeros(16, dtype=U8), qk_nope_head_dim=128, kv_lora_rank=32, qk_rope_head_dim=16,
           block_tables=ints(3, 3), seq_lens=ints(3), max_seq_len=20, out=zeros(3, 2, 3, 32), bmm1_scale=0.2,
           lse=zeros(6, 3), return_lse=True),
        of(flashinfer.xqa_batch_decode_with_kv_cache_mla, query=zeros(2, 1, 3, 48), kv_cache=zeros(6, 8, 48),
           workspace_buffer=zeros(16, dtype=U8), qk_nope_head_dim=128, kv_lora_rank=32, qk_rope_head_dim=16,
           block_tables=ints(2, 3), seq_lens=ints(2), max_seq_len=20, out=zeros(2, 3, 32), bmm1_scale=0.2),
    ]
    # fmt: on


def of_vllm() -> list[Call]:
    """Those of ``flashlatte.integrations.vllm.ops``."""
    # fmt: off
    return [
        of(ops.concat_and_cache_mla, kv_c=zeros(1, 512, dtype=BF16), k_pe=zeros(1, 64, dtype=BF16),
           kv_cache=zeros(1, 2, 656, dtype=U8), slot_mapping=ints(1), kv_cache_dtype="fp8_ds_mla", scale=zeros(),
           scale_rounding="exact"),
        of(ops.concat_and_cache_mla_rope_fused, positions=ints(2), q_pe=zeros(2, 3, 4), k_pe=zeros(2, 4),
           kv_c=zeros(2, 16), cos_sin_cache=zeros(2, 4), is_neox=True, slot_mapping=ints(2), kv_cache=zeros(1, 2, 20),
           kv_cache_dtype="auto", kv_cache_scale=zeros()),
        of(ops.concat_mla_q, ql_nope=zeros(3, 8, 512, dtype=BF16), q_pe=zeros(3, 8, 64, dtype=BF16),
           q_out=zeros(3, 64, 576, dtype=BF16)),
        of(ops.cooperative_topk, logits=zeros(6, 40), lengths=ints(2, 3), output=ints(6, 8), workspace=None, k=8,
           max_seq_len=40),
        of(ops.cp_gather_and_upconvert_fp8_kv_cache, src_cache=zeros(1, 2, 656, dtype=U8),
           dst=zeros(3, 576, dtype=BF16), block_table=ints(2, 1), workspace_starts=ints(2), batch_size=2,
           seq_starts=ints(2)),
        of(ops.cp_gather_cache, src_cache=zeros(6, 4, 320), dst=zeros(10, 320), block_table=ints(3, 2),
           cu_seq_lens=ints(4), batch_size=3, seq_starts=ints(3)),
        of(ops.cp_gather_indexer_k_quant_cache, kv_cache=zeros(2, 4, 132, dtype=U8), dst_k=zeros(4, 128, dtype=U8),
           dst_scale=zeros(4, 1), block_table=ints(1, 1), cu_seq_lens=ints(2)),
        of(ops.decode_attention_fwd, q=zeros(3, 4, 16, dtype=BF16), k_buffer=zeros(6, 4, 1, 16, dtype=E4M3),
           v_buffer=zeros(6, 4, 1, 8, dtype=E4M3), o=zeros(3, 4, 8, dtype=BF16), lse=zeros(3, 4, dtype=BF16),
           req_to_token=ints(4, 3), b_seq_len=ints(3), attn_logits=None, num_kv_splits=None, sm_scale=0.25, page_size=4,
           k_scale=zeros(), v_scale=zeros(), is_mla=True),
        of(ops.gather_and_maybe_dequant_cache, src_cache=zeros(6, 4, 320), dst=zeros(10, 320), block_table=ints(3, 2),
           cu_seq_lens=ints(4), token_to_seq=ints(8), num_tokens=ints(), kv_cache_dtype="auto", scale=zeros(),
           seq_starts=ints(3)),
        of(ops.indexer_k_quant_and_cache, k=zeros(3, 128, dtype=BF16), kv_cache=zeros(2, 4, 132, dtype=U8),
           slot_mapping=ints(3), quant_block_size=128, kv_cache_dtype="ue8m0"),
        of(ops.merge_attn_states, output=zeros(7, 3, 8), prefix_output=zeros(7, 3, 8), prefix_lse=zeros(3, 7),
           suffix_output=zeros(7, 3, 8), suffix_lse=zeros(3, 7)),
        of(ops.pack_seq_triton, x=zeros(6, 2, 3), lengths=ints(4)),
        of(ops.persistent_topk, logits=zeros(6, 40), lengths=ints(6), output=ints(6, 8), workspace=None, k=8,
           max_seq_len=40),
        of(ops.reshape_and_cache, key=zeros(4, 2, 16), value=zeros(4, 2, 16), key_cache=zeros(3, 2, 4, 4, 4),
           value_cache=zeros(3, 2, 16, 4), slot_mapping=ints(3), kv_cache_dtype="auto", k_scale=zeros(),
           v_scale=zeros()),
        of(ops.reshape_and_cache_flash, key=zeros(4, 2, 16), value=zeros(4, 2, 16), key_cache=zeros(3, 4, 2, 16),
           value_cache=zeros(3, 4, 2, 16), slot_mapping=ints(3), kv_cache_dtype="auto", k_scale=zeros(),
           v_scale=zeros()),
        of(ops.swap_blocks, src=zeros(4, 2), dst=zeros(4, 2), block_size_in_bytes=8,
           block_mapping=torch.tensor([[0, 1], [1, 2]])),
        of(ops.top_k_per_row_decode, logits=zeros(6, 40), next_n=3, seq_lens=ints(2), raw_topk_indices=ints(6, 8),
           num_rows=6, stride0=40, stride1=1, topk_tokens=8),
        of(ops.top_k_per_row_prefill, logits=zeros(6, 40), cu_seqlen_ks=ints(4), cu_seqlen_ke=ints(4),
           raw_topk_indices=ints(6, 9), num_rows=4, stride0=40, stride1=1, topk_tokens=8),
        of(ops.triton_convert_req_index_to_global_index, req_id=ints(1), block_table=ints(1, 1),
           token_indices=ints(1, 4), NUM_TOPK_TOKENS=4, HAS_PREFILL_WORKSPACE=True,
           prefill_workspace_request_ids=ints(1), prefill_workspace_starts=ints(1), BLOCK_STRIDE_ROWS=80,
           prefill_workspace_rank_stride=3, dcp_size=2, idx_mapping=ints(1)),
        of(ops.triton_filter_and_convert_dcp_index, req_id=ints(1), block_table=ints(1, 1), token_indices=ints(1, 4),
           dcp_size=1, dcp_rank=0, NUM_TOPK_TOKENS=4, BLOCK_N=4),
        of(ops.triton_reshape_and_cache_flash, key=zeros(4, 2, 16), value=zeros(4, 2, 16),
           key_cache=zeros(3, 2, 4, 4, 4), value_cache=zeros(3, 2, 16, 4), slot_mapping=ints(3), kv_cache_dtype="auto",
           k_scale=zeros(), v_scale=zeros()),
        of(ops.triton_reshape_and_cache_flash_per_token_head_quant, key=zeros(2, 2, 16), value=zeros(2, 2, 24),
           key_cache=zeros(1, 4, 2, 16, dtype=I8), value_cache=zeros(1, 4, 2, 24, dtype=I8),
           k_scale_cache=zeros(1, 4, 2), v_scale_cache=zeros(1, 4, 2), slot_mapping=ints(2),
           kv_quant_mode=SimpleNamespace(name="INT8_PER_TOKEN_HEAD")),
        of(ops.unified_attention, q=zeros(5, 4, 16, dtype=BF16), k=zeros(6, 4, 2, 16, dtype=U8),
           v=zeros(6, 4, 2, 16, dtype=U8), out=zeros(5, 4, 16, dtype=E4M3), cu_seqlens_q=ints(3), max_seqlen_q=4,
           seqused_k=ints(2), max_seqlen_k=9, softmax_scale=0.25, causal=True, window_size=(-1, -1),
           block_table=ints(2, 3), softcap=0, q_descale=None, k_descale=zeros(2, 2), v_descale=zeros(2, 2),
           output_scale=zeros(), kv_quant_mode=SimpleNamespace(name="FP8_PER_TOKEN_HEAD"), k_scale_cache=zeros(6, 4, 2),
           v_scale_cache=zeros(6, 4, 2)),
        of(ops.unified_attention_diffkv, q=zeros(5, 4, 24, dtype=BF16), k=zeros(6, 4, 2, 24, dtype=E4M3),
           v=zeros(6, 4, 2, 16, dtype=E4M3), out=zeros(5, 4, 16, dtype=BF16), cu_seqlens_q=ints(3), seqused_k=ints(2),
           softmax_scale=0.25, causal=True, window_size=(-1, -1), block_table=ints(2, 3), softcap=0, sinks=zeros(4),
           k_descale=zeros(), v_descale=zeros()),
        of(ops.unpack_seq_triton, packed_tensor=zeros(4, 3, 2, 3), lengths=ints(4)),
        of(ops.vit_flash_attn_wrapper, q=zeros(1, 7, 2, 8), k=zeros(1, 7, 2, 8), v=zeros(1, 7, 2, 8), batch_size=1,
           is_rocm_aiter=False, fa_version=None, scale=0.3, cu_seqlens=ints(3), max_seqlen=ints()),
        of(ops.vit_torch_sdpa_wrapper, q=zeros(1, 7, 2, 8), k=zeros(1, 7, 2, 8), v=zeros(1, 7, 2, 8), scale=0.3,
           cu_seqlens=ints(3)),
        of(ops.vit_triton_attn_wrapper, q=zeros(1, 7, 2, 8), k=zeros(1, 7, 2, 8), v=zeros(1, 7, 2, 8), batch_size=1,
           scale=0.3, cu_seqlens=ints(3), max_seqlen=ints()),
    ]
    # fmt: on
