"""FlashInfer's functions for MLA with the same arguments: ``import flashlatte.flashinfer as flashinfer``.

The conventions are FlashInfer's: lse is the base-2 logarithm, and -inf without keys. The modules have FlashInfer's
names (``flashlatte.flashinfer.mla``, ``cascade``, ``concat_ops``, ``decode``, ``page``, ``prefill``, ``topk``) and the
signatures of version 0.6.15, with the arguments that 0.7.4 added, other than those of
``BatchMLAPagedAttentionWrapper``. Backends of FlashInfer are accepted and mean FlashLatte's choice; "hopper",
"portable" and "reference" select one of FlashLatte's. Whatever FlashLatte cannot compute raises ``ValueError`` or
``TypeError``.
"""

from flashlatte.flashinfer import cascade, concat_ops, decode, mla, page, prefill, topk
from flashlatte.flashinfer.cascade import merge_state, merge_state_in_place, merge_states
from flashlatte.flashinfer.concat_ops import concat_mla_k
from flashlatte.flashinfer.decode import trtllm_batch_decode_with_kv_cache_mla, xqa_batch_decode_with_kv_cache_mla
from flashlatte.flashinfer.mla import BatchMLAPagedAttentionWrapper
from flashlatte.flashinfer.page import append_paged_mla_kv_cache, get_batch_indices_positions, get_seq_lens
from flashlatte.flashinfer.prefill import BatchPrefillWithRaggedKVCacheWrapper
from flashlatte.flashinfer.topk import TopKTieBreak, top_k, top_k_page_table_transform, top_k_ragged_transform

# The version of FlashInfer whose interface this is, for programs that check it.
__version__ = "0.6.15"

__all__ = [
    "BatchMLAPagedAttentionWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "TopKTieBreak",
    "append_paged_mla_kv_cache",
    "cascade",
    "concat_mla_k",
    "concat_ops",
    "decode",
    "get_batch_indices_positions",
    "get_seq_lens",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
    "mla",
    "page",
    "prefill",
    "top_k",
    "top_k_page_table_transform",
    "top_k_ragged_transform",
    "topk",
    "trtllm_batch_decode_with_kv_cache_mla",
    "xqa_batch_decode_with_kv_cache_mla",
]
