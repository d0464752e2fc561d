"""SGLang's FlashMLA functions: decode over paged latents, dense and sparse, and sparse prefill.

The first argument of each is SGLang's own function, which still runs the cache layouts of DeepSeek-V4.1: in
``KVLayout.V41`` and ``V41_FP4`` the scales of a page follow all its values, which FlashLatte does not support;
``V41_NEW`` and ``V41_FP4_NEW`` (``use_legacy=False``) exist only on SM100, where FlashLatte has no native kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flashlatte import flash_mla
from flashlatte.integrations import decode_precision

# Supported formats of sparse decode: SGLang's names, and the names in ``flash_mla``. Earlier versions of SGLang call V4
# MODEL1.
_FORMATS = {"V32": "V32", "V32_NO_ROPE": "V32_NO_ROPE", "V4": "V4", "MODEL1": "V4"}
# Bytes per token.
_WIDTHS = {"V32": 656, "V32_NO_ROPE": 528, "V4": 584}
_SCHEDULE_WIDTH = 8
_SCHEDULE = flash_mla.FlashMLASchedMeta()
# SGLang's own get_mla_metadata, set by the first call for a schedule. SGLang's own kernels need its schedule.
_schedule_of_sglang: Callable[..., tuple[Any, Any]] | None = None


def get_mla_metadata(
    original: Callable[..., Any],
    cache_seqlens: torch.Tensor | None = None,
    num_q_tokens_per_head_k: int | None = None,
    num_heads_k: int | None = None,
    num_heads_q: int | None = None,
    is_fp8_kvcache: bool = False,
    topk: int | None = None,
) -> tuple[Any, torch.Tensor | None]:
    """An empty schedule: FlashLatte's kernels split the work in each call.

    Returns:
        With ``cache_seqlens`` [b]: zeros of the schedule's dtypes and axes, int32 [1, 8] and [b + 1], which SGLang
        copies between buffers. Without: SGLang's own schedule object, and None.
    """
    if cache_seqlens is None:
        return original()
    global _schedule_of_sglang
    _schedule_of_sglang = original
    zeros = torch.zeros(_SCHEDULE_WIDTH + cache_seqlens.shape[0] + 1, dtype=torch.int32, device=cache_seqlens.device)
    return zeros[:_SCHEDULE_WIDTH].view(1, _SCHEDULE_WIDTH), zeros[_SCHEDULE_WIDTH:]


def flash_mla_with_kvcache(
    original: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: Any,
    num_splits: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    descale_q: torch.Tensor | None = None,
    descale_k: torch.Tensor | None = None,
    is_fp8_kvcache: bool = False,
    indices: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    kv_format: str | None = None,
    *,
    use_legacy: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``flashlatte.flash_mla.flash_mla_with_kvcache``, which ignores schedules; lse is a natural logarithm.

    Over a dense fp8 cache its precision is that of ``FLASHLATTE_DECODE_PRECISION``.
    """
    one_byte = k_cache.dtype.itemsize == 1
    supported_format = None
    if indices is not None and one_byte:
        supported_format = _format(k_cache, kv_format, has_tensor_schedule=num_splits is not None)
    if not use_legacy or not _is_supported(q, k_cache, indices, extra_k_cache, supported_format):
        if num_splits is not None and _schedule_of_sglang is not None:
            heads, heads_k, topk = q.shape[2], k_cache.shape[2], None if indices is None else indices.shape[-1]
            tile_scheduler_metadata, num_splits = _schedule_of_sglang(
                cache_seqlens, q.shape[1] * heads // heads_k, heads_k, heads, is_fp8_kvcache, topk
            )
        # Earlier versions of SGLang lack these two arguments: pass them only if they differ from the default.
        newer = {} if kv_format is None else {"kv_format": kv_format}
        newer |= {} if use_legacy else {"use_legacy": use_legacy}
        return original(
            q,
            k_cache,
            block_table,
            cache_seqlens,
            head_dim_v,
            tile_scheduler_metadata,
            num_splits,
            softmax_scale,
            causal,
            descale_q,
            descale_k,
            is_fp8_kvcache,
            indices,
            attn_sink,
            extra_k_cache,
            extra_indices_in_kvcache,
            topk_length,
            extra_topk_length,
            **newer,
        )
    if indices is None and k_cache.dtype == torch.uint8:
        k_cache = k_cache.view(torch.float8_e4m3fn)
    dense_fp8 = one_byte and indices is None
    return flash_mla.flash_mla_with_kvcache(
        q,
        k_cache,
        block_table,
        cache_seqlens,
        head_dim_v,
        _SCHEDULE,
        softmax_scale=softmax_scale,
        causal=causal,
        # With a schedule as tensors, SGLang's is_fp8_kvcache describes q instead.
        is_fp8_kvcache=one_byte,
        indices=indices,
        attn_sink=attn_sink,
        extra_k_cache=extra_k_cache,
        extra_indices_in_kvcache=extra_indices_in_kvcache,
        topk_length=topk_length,
        extra_topk_length=extra_topk_length,
        kv_format=supported_format,
        descale_q=_single_scale(descale_q) if q.dtype == torch.float8_e4m3fn else None,
        descale_k=_single_scale(descale_k) if dense_fp8 else None,
        precision=decode_precision.requested() if dense_fp8 else None,
        backend=decode_precision.backend(q.device.type) if dense_fp8 else None,
    )


def flash_mla_sparse_fwd(
    original: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    *,
    use_legacy: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``flashlatte.flash_mla.flash_mla_sparse_fwd`` with max_logits and lse in base 2, SGLang's convention."""
    if not use_legacy:
        return original(q, kv, indices, sm_scale, d_v, attn_sink, topk_length, use_legacy=False)
    return flash_mla.flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v, attn_sink, topk_length, return_log2_lse=True)


def forward_flashmla_sparse(
    self: Any,
    q_all: torch.Tensor,
    kv_cache: torch.Tensor,
    v_head_dim: int,
    page_table_1: torch.Tensor,
    sm_scale: float,
    topk_length: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
) -> torch.Tensor:
    """``flash_mla_sparse_fwd`` for the rank's own heads, without SGLang's padding to FlashMLA's 64 or 128 heads.

    Over a short enough latent, consecutive query tokens share a tile (recorded: 16 heads, 2.6 times as fast).

    Args:
        q_all: [T, h, 576].
        kv_cache: [slots, 1, 576].
        page_table_1: int32 [T, topk], slots; negative for none.
        topk_length: int32 [T], number of slots of each row. Ignored if its length is not T, as in SGLang.
        attn_sink: float32 [h].

    Returns:
        [T, h, v_head_dim].
    """
    if topk_length is not None and topk_length.shape[0] != q_all.shape[0]:
        topk_length = None
    indices = page_table_1.unsqueeze(1)
    return flash_mla.flash_mla_sparse_fwd(q_all, kv_cache, indices, sm_scale, v_head_dim, attn_sink, topk_length)[0]


def _format(k_cache: torch.Tensor, kv_format: str | None, *, has_tensor_schedule: bool) -> str | None:
    """The name in ``flash_mla`` of a one-byte cache's format, or None if it is not supported.

    Versions of SGLang that pass schedules as tensors are older than DeepSeek-V4.1: with them, width 528 is V3.2 without
    RoPE.
    """
    if kv_format is not None:
        return _FORMATS.get(kv_format)
    fitting = [name for name, width in _WIDTHS.items() if width == k_cache.shape[-1]]
    return fitting[0] if fitting and (fitting[0] != "V32_NO_ROPE" or has_tensor_schedule) else None


def _is_supported(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    indices: torch.Tensor | None,
    extra_k_cache: torch.Tensor | None,
    supported_format: str | None,
) -> bool:
    if indices is None:
        return True
    width = q.shape[-1] if k_cache.dtype.itemsize != 1 else _WIDTHS.get(supported_format or "")
    caches = [k_cache] if extra_k_cache is None else [k_cache, extra_k_cache]
    return all(cache.shape[-1] == width and cache.dtype.itemsize == k_cache.dtype.itemsize for cache in caches)


def _single_scale(scale: torch.Tensor | None) -> torch.Tensor | None:
    """A single scale: SGLang may repeat the tensor's scale for each head."""
    return scale if scale is None or scale.numel() == 1 else scale.flatten()[:1]
