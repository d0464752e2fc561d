"""vLLM's operations with the same arguments, implemented by FlashLatte's operations.

Names, argument order, layouts and in-place outputs are those of vLLM 0.26 (``vllm._custom_ops`` and
``vllm.v1.attention.ops``), so a program, test or plugin can call these functions instead. Arguments that vLLM added
until 0.33 follow those of 0.26. vLLM need not be installed. A wrong argument raises ValueError or TypeError. Indices,
slots and pages out of range are skipped or read as zeros; vLLM's kernels access memory there.
"""

from flashlatte.integrations.vllm.ops.decode import decode_attention_fwd
from flashlatte.integrations.vllm.ops.dtypes import KV_CACHE_DTYPES
from flashlatte.integrations.vllm.ops.indexer import (
    cooperative_topk,
    cp_gather_indexer_k_quant_cache,
    indexer_k_quant_and_cache,
    persistent_topk,
    top_k_per_row_decode,
    top_k_per_row_prefill,
)
from flashlatte.integrations.vllm.ops.latents import (
    concat_and_cache_mla,
    concat_and_cache_mla_rope_fused,
    concat_mla_q,
    cp_gather_and_upconvert_fp8_kv_cache,
    cp_gather_cache,
    gather_and_maybe_dequant_cache,
)
from flashlatte.integrations.vllm.ops.packing import pack_seq_triton, unpack_seq_triton
from flashlatte.integrations.vllm.ops.pages import (
    reshape_and_cache,
    reshape_and_cache_flash,
    swap_blocks,
    triton_reshape_and_cache_flash,
    triton_reshape_and_cache_flash_per_token_head_quant,
)
from flashlatte.integrations.vllm.ops.slots import (
    triton_convert_req_index_to_global_index,
    triton_filter_and_convert_dcp_index,
)
from flashlatte.integrations.vllm.ops.unified import unified_attention, unified_attention_diffkv
from flashlatte.integrations.vllm.ops.vision import (
    vit_flash_attn_wrapper,
    vit_torch_sdpa_wrapper,
    vit_triton_attn_wrapper,
)
from flashlatte.ops.merge_states import merge_attn_states

__all__ = [
    "KV_CACHE_DTYPES",
    "concat_and_cache_mla",
    "concat_and_cache_mla_rope_fused",
    "concat_mla_q",
    "cooperative_topk",
    "cp_gather_and_upconvert_fp8_kv_cache",
    "cp_gather_cache",
    "cp_gather_indexer_k_quant_cache",
    "decode_attention_fwd",
    "gather_and_maybe_dequant_cache",
    "indexer_k_quant_and_cache",
    "merge_attn_states",
    "pack_seq_triton",
    "persistent_topk",
    "reshape_and_cache",
    "reshape_and_cache_flash",
    "swap_blocks",
    "top_k_per_row_decode",
    "top_k_per_row_prefill",
    "triton_convert_req_index_to_global_index",
    "triton_filter_and_convert_dcp_index",
    "triton_reshape_and_cache_flash",
    "triton_reshape_and_cache_flash_per_token_head_quant",
    "unified_attention",
    "unified_attention_diffkv",
    "unpack_seq_triton",
    "vit_flash_attn_wrapper",
    "vit_torch_sdpa_wrapper",
    "vit_triton_attn_wrapper",
]
