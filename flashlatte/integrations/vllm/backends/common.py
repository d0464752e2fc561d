"""Methods that FlashLatte's vLLM backends and their implementations share."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm import envs
from vllm.v1.attention.backend import MultipleOf

from flashlatte.integrations.vllm import compat, support
from flashlatte.layers.cache import LatentCache
from flashlatte.ops.cache_write import cache_write

# Whether the result of a request must be bitwise independent of the other requests.
BATCH_INVARIANT = bool(envs.VLLM_BATCH_INVARIANT)


def query_parts(
    q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """vLLM's queries [T, h, ·], and their rotated part [T, h, rope] if it is another tensor. That may have width 0."""
    if isinstance(q, torch.Tensor):
        return q, None
    nope, rope = q
    return nope, rope if rope.shape[-1] else None


def as_wide(rows: torch.Tensor, width: int) -> torch.Tensor:
    """Append zeros to the last axis up to ``width``, for a cache with room for rotated keys that the model lacks."""
    missing = width - rows.shape[-1]
    return torch.nn.functional.pad(rows, (0, missing)) if missing else rows


class CommonBackendMixin:
    """Mixin to list before vLLM's base class: any page size, 64 tokens preferred, query lengths known on the host."""

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list:
        if kv_cache_spec is None and not compat.block_size_is_given():
            # For a model with several backends vLLM takes a size that all support, not the preferred one.
            return [MultipleOf(support.PAGE_SIZE)]
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


class MLABackendMixin(CommonBackendMixin):
    """What the backends of dense and sparse MLA have in common."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float16, torch.float32]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return tuple(capability) >= support.MIN_CAPABILITY

    @classmethod
    def supports_sink(cls) -> bool:
        return True


class LatentWriterMixin:
    """Mixin to list before vLLM's base class of an implementation of MLA: writes new tokens to its cache."""

    kv_lora_rank: int

    def _cache(self, kv_cache: torch.Tensor, k_scale: torch.Tensor) -> LatentCache:
        raise NotImplementedError

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
        skip_scale: bool = False,
    ) -> None:
        """Write the latents [T, latent] and rotated keys [T, 1, rope] of new tokens."""
        if kv_cache.numel() == 0:  # vLLM's memory profiling runs without a cache
            return
        cache = self._cache(kv_cache, k_scale)
        rope = as_wide(k_pe.squeeze(1), cache.layout.head_dim - self.kv_lora_rank)
        cache_write(
            cache.pages, slot_mapping.flatten(), kv_c_normed, rope=rope, cache_format=cache.layout, scale=cache.scale
        )
