"""Problems of random sizes, small and large: few kernel variants, many lengths."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from flashlatte.bench.problems import Problem
from flashlatte.bench.shared.random_problems import attention, caches, indexer, layer

DRAWS: dict[str, Callable[[Random], Problem]] = {
    "dense_decode": attention.dense_decode,
    "sparse_decode": attention.sparse_decode,
    "sparse_prefill": attention.sparse_prefill,
    "sparse_attention_backward": attention.sparse_attention_backward,
    "dense_prefill": attention.dense_prefill,
    "dense_prefill_backward": attention.dense_prefill_backward,
    "paged_attention": attention.paged_attention,
    "cache_write": caches.cache_write,
    "cache_gather": caches.cache_gather,
    "cache_copy": caches.cache_copy,
    "gather_records": caches.gather_records,
    "reshape_and_cache": caches.reshape_and_cache,
    "turboquant_decode": caches.turboquant_decode,
    "turboquant_store": caches.turboquant_store,
    "turboquant_gather": caches.turboquant_gather,
    "index_logits": indexer.index_logits,
    "paged_index_logits": indexer.paged_index_logits,
    "sparse_index_logits": indexer.sparse_index_logits,
    "indexer_loss": indexer.indexer_loss,
    "index_select": indexer.index_select,
    "paged_index_select": indexer.paged_index_select,
    "topk": indexer.topk,
    "index_quantize": indexer.index_quantize,
    "index_gather": indexer.index_gather,
    "index_convert": indexer.index_convert,
    "index_query": indexer.index_query,
    "index_weights": indexer.index_weights,
    "index_workspace": indexer.index_workspace,
    "latent_rows": layer.latent_rows,
    "rotate_heads": layer.rotate_heads,
    "rope_cache_write": layer.rope_cache_write,
    "concat_mla_q": layer.concat_mla_q,
    "merge_states": layer.merge_states,
    "pack_seq": layer.pack_seq,
    "unpack_seq": layer.unpack_seq,
    "compress": layer.compress,
    "q_kv_norm": layer.q_kv_norm,
    "rotate_and_cache": layer.rotate_and_cache,
    "inverse_rope_quantize": layer.inverse_rope_quantize,
    "mhc_pre": layer.mhc_pre,
    "mhc_post": layer.mhc_post,
}
