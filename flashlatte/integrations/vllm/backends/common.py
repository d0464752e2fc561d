"""What all of FlashLatte's backends and caches in vLLM answer alike."""

from __future__ import annotations

from typing import Any

from vllm.v1.attention.backend import MultipleOf

from flashlatte.integrations.vllm import support


class CommonBackendMixin:
    """A mixin, before vLLM's backend: pages of any size, best of 64 tokens, and query lengths that the host knows."""

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list:
        return support.page_sizes(None if kv_cache_spec is None else kv_cache_spec.block_size, MultipleOf)

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        return support.PAGE_SIZE

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        # How many queries a request has is told by the shape of the batch, and vLLM's adaptive verification of
        # speculated tokens shortens requests on the device alone.
        return False
