"""Multi-head Latent Attention in Python: attention operations, cache formats, layers, and FlashMLA's interface.

Names are imported at first access. Operations: ``dense_decode``, ``dense_prefill``, ``sparse_decode``,
``sparse_prefill``, ``merge_states``; for training ``sparse_attention`` and ``indexer_loss``; for paged keys and values
``paged_attention``, ``turboquant_decode``; for the sparse-attention indexer ``index_select`` and its parts; for
DeepSeek-V4 ``compress`` and related operations. Caches: ``kv_cache``. Layers: ``layers``. Drop-in replacements with the
same arguments: ``flash_mla``, ``flashinfer``, and ``deep_gemm`` for the indexer. Several GPUs: ``distributed``. Models
and servers: ``integrations``.
"""

from typing import TYPE_CHECKING

from flashlatte.runtime import lazy

if TYPE_CHECKING:
    from flashlatte import deep_gemm, distributed, flash_mla, flashinfer, integrations, kv_cache, layers
    from flashlatte.ops.compress import compress
    from flashlatte.ops.concat_mla_q import concat_mla_q
    from flashlatte.ops.dense_decode import dense_decode
    from flashlatte.ops.dense_prefill import dense_prefill, vit_attention
    from flashlatte.ops.index_convert import index_convert
    from flashlatte.ops.index_logits import index_logits, paged_index_logits, sparse_index_logits
    from flashlatte.ops.index_quantize import index_gather, index_quantize
    from flashlatte.ops.index_query import index_query, index_query_mxfp4
    from flashlatte.ops.index_select import index_select, paged_index_select
    from flashlatte.ops.index_workspace import index_workspace
    from flashlatte.ops.indexer_loss import indexer_loss
    from flashlatte.ops.inverse_rope_quantize import inverse_rope_quantize
    from flashlatte.ops.merge_states import merge_attn_states, merge_states
    from flashlatte.ops.pack_seq import pack_seq, unpack_seq
    from flashlatte.ops.paged_attention import paged_attention
    from flashlatte.ops.q_kv_norm import q_kv_norm
    from flashlatte.ops.reshape_and_cache import reshape_and_cache
    from flashlatte.ops.rotate_and_cache import rotate_and_cache
    from flashlatte.ops.sparse_attention import sparse_attention
    from flashlatte.ops.sparse_decode import sparse_decode
    from flashlatte.ops.sparse_prefill import sparse_prefill
    from flashlatte.ops.topk import topk
    from flashlatte.ops.turboquant_decode import turboquant_decode
    from flashlatte.ops.turboquant_gather import turboquant_gather
    from flashlatte.ops.turboquant_store import turboquant_store

__version__ = "0.2.0"

__all__ = [
    "compress",
    "concat_mla_q",
    "deep_gemm",
    "dense_decode",
    "dense_prefill",
    "distributed",
    "flash_mla",
    "flashinfer",
    "index_convert",
    "index_gather",
    "index_logits",
    "index_quantize",
    "index_query",
    "index_query_mxfp4",
    "index_select",
    "index_workspace",
    "indexer_loss",
    "integrations",
    "inverse_rope_quantize",
    "kv_cache",
    "layers",
    "merge_attn_states",
    "merge_states",
    "pack_seq",
    "paged_attention",
    "paged_index_logits",
    "paged_index_select",
    "q_kv_norm",
    "reshape_and_cache",
    "rotate_and_cache",
    "sparse_attention",
    "sparse_decode",
    "sparse_index_logits",
    "sparse_prefill",
    "topk",
    "turboquant_decode",
    "turboquant_gather",
    "turboquant_store",
    "unpack_seq",
    "vit_attention",
]

_OPERATIONS = (
    *("concat_mla_q", "dense_decode", "dense_prefill", "merge_states", "paged_attention", "reshape_and_cache"),
    *("sparse_attention", "sparse_decode", "sparse_prefill", "topk"),
    *("turboquant_decode", "turboquant_gather", "turboquant_store"),
    *("index_convert", "index_logits", "index_quantize", "index_query", "index_select", "indexer_loss"),
    *("compress", "index_workspace", "inverse_rope_quantize", "pack_seq", "q_kv_norm", "rotate_and_cache"),
)
_OTHER_OPERATIONS = {
    "index_gather": "index_quantize",
    "index_query_mxfp4": "index_query",
    "merge_attn_states": "merge_states",
    "paged_index_logits": "index_logits",
    "paged_index_select": "index_select",
    "sparse_index_logits": "index_logits",
    "unpack_seq": "pack_seq",
    "vit_attention": "dense_prefill",
}
_PACKAGES = ("deep_gemm", "distributed", "flash_mla", "flashinfer", "integrations", "kv_cache", "layers")

lazy.declare(__name__, {name: f"flashlatte.ops.{name}:{name}" for name in _OPERATIONS})
lazy.declare(__name__, {name: f"flashlatte.ops.{operation}:{name}" for name, operation in _OTHER_OPERATIONS.items()})
lazy.declare(__name__, {name: f"flashlatte.{name}" for name in _PACKAGES})
# Operations on caches are defined above ``kv_cache``, and are also available as its attributes.
lazy.declare(
    "flashlatte.kv_cache",
    {
        "copy_blocks": "flashlatte.ops.cache_copy:copy_blocks",
        "gather": "flashlatte.ops.cache_gather:cache_gather",
        "gather_last": "flashlatte.ops.cache_gather:gather_last",
        "gather_records": "flashlatte.ops.gather_records:gather_records",
        "rope_write": "flashlatte.ops.rope_cache_write:rope_cache_write",
        "swap_blocks": "flashlatte.ops.cache_copy:swap_blocks",
        "to_cache_indices": "flashlatte.ops.index_convert:to_cache_indices",
        "write": "flashlatte.ops.cache_write:cache_write",
    },
)
if not TYPE_CHECKING:  # A type checker would take any name from __getattr__.
    __getattr__, __dir__ = lazy.attach(__name__)
