"""Methods that FlashLatte's vLLM backends share."""

from __future__ import annotations

from typing import Any

from vllm import envs
from vllm.v1.attention.backend import MultipleOf

from flashlatte.integrations.vllm import support

# Whether the result of a request must not depend on the other requests, bit for bit.
BATCH_INVARIANT = bool(envs.VLLM_BATCH_INVARIANT)


class CommonBackendMixin:
    """Mixin to list before vLLM's base class: any page size, 64 tokens preferred, query lengths known on the host."""

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list:
        return support.page_sizes(None if kv_cache_spec is None else kv_cache_spec.block_size, MultipleOf)

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        return support.PAGE_SIZE

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        # Kernels take the number of queries of a request from tensor shapes. vLLM's adaptive verification of speculated
        # tokens shortens requests on the device only.
        return False
