"""FlashLatte: Multi-head Latent Attention in Python.

Operations: ``dense_decode``, ``dense_prefill``, ``sparse_decode``, ``sparse_prefill``, ``merge_states``. Cache formats
and what reads or writes their bytes: ``flashlatte.kv_cache``. FlashMLA's interface, argument for argument:
``flashlatte.flash_mla``.
"""

from flashlatte import kv_cache
from flashlatte.ops.dense_decode import dense_decode
from flashlatte.ops.dense_prefill import dense_prefill
from flashlatte.ops.merge_states import merge_states
from flashlatte.ops.sparse_decode import sparse_decode
from flashlatte.ops.sparse_prefill import sparse_prefill

__version__ = "0.1.0"

__all__ = ["dense_decode", "dense_prefill", "kv_cache", "merge_states", "sparse_decode", "sparse_prefill"]
