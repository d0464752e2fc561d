"""A vLLM platform for CPUs that runs MLA with FlashLatte."""

from __future__ import annotations

from typing import Any

from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from flashlatte.integrations import vllm
from flashlatte.integrations.vllm import support


class FlashLatteCpuPlatform(CpuPlatform):
    """vLLM's CPU platform without the limits of its own MLA (pages of 16 tokens, no chunked prefill)."""

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        wanted = attn_selector_config
        if wanted.use_mla and _selects_flashlatte(selected_backend):
            refuses = support.sparse_refusal if wanted.use_sparse else support.dense_refusal
            if reason := refuses("cpu", wanted.head_size, wanted.dtype, wanted.kv_cache_dtype, wanted.block_size):
                raise ValueError(reason)
            return vllm.SPARSE if wanted.use_sparse else vllm.DENSE
        return super().get_attn_backend_cls(selected_backend, attn_selector_config, num_heads)

    @classmethod
    def get_mla_prefill_backend_cls(cls, mla_selector_config: Any) -> type:
        from vllm.config import get_current_vllm_config  # vllm.config imports the platform

        if _selects_flashlatte(get_current_vllm_config().attention_config.backend):
            return MLAPrefillBackendEnum.CUSTOM.get_class()
        return super().get_mla_prefill_backend_cls(mla_selector_config)

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        cache, scheduler = vllm_config.cache_config, vllm_config.scheduler_config
        wanted = (
            cache.block_size if cache.user_specified_block_size else support.PAGE_SIZE,
            cache.enable_prefix_caching,
            scheduler.enable_chunked_prefill,
            scheduler.max_num_batched_tokens,
        )
        super().check_and_update_config(vllm_config)
        model = vllm_config.model_config
        # vLLM counts DeepSeek-V4's models as MLA too.
        if model is None or model.architecture in (*support.V4_MODELS, *support.V41_MODELS):
            return
        if model.use_mla and _selects_flashlatte(vllm_config.attention_config.backend):
            (
                cache.block_size,
                cache.enable_prefix_caching,
                scheduler.enable_chunked_prefill,
                scheduler.max_num_batched_tokens,
            ) = wanted


def _selects_flashlatte(backend: Any) -> bool:
    return backend in (None, AttentionBackendEnum.CUSTOM)
