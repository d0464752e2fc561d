"""DeepSeek-V4's attention in vLLM's CUDA layers: decode over two caches, prefill over rows that vLLM gathers."""

from __future__ import annotations

import functools
from typing import Any

import torch
from vllm.models.deepseek_v4.nvidia import flashmla, model
from vllm.v1.attention.backends.mla import sparse_swa
from vllm.v1.attention.ops.flashmla import is_flashmla_sparse_supported

from flashlatte.flash_mla import get_mla_metadata
from flashlatte.integrations.vllm import support
from flashlatte.integrations.vllm.backends.common import BATCH_INVARIANT
from flashlatte.ops.sparse_decode import sparse_decode
from flashlatte.ops.sparse_prefill import sparse_prefill


class FlashLatteV4Attention(flashmla.DeepseekV4FlashMLAAttention):
    """vLLM's FlashMLA layer without its padding of heads to 64 or 128, which only FlashMLA needs."""

    def forward_mqa(self, q: torch.Tensor, kv: torch.Tensor, positions: torch.Tensor, output: torch.Tensor) -> None:
        """Attention of queries [T, padded heads, 512] into ``output``; only the rank's own heads are computed."""
        heads = self.n_local_heads
        super().forward_mqa(q[:, :heads], kv, positions, output[:, :heads])


def decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    *,
    indices: torch.Tensor,
    topk_length: torch.Tensor,
    softmax_scale: float,
    head_dim_v: int,
    attn_sink: torch.Tensor,
    extra_k_cache: torch.Tensor | None,
    extra_indices_in_kvcache: torch.Tensor | None,
    extra_topk_length: torch.Tensor | None,
    out: torch.Tensor,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """FlashMLA's ``flash_mla_with_kvcache`` as vLLM's layer calls it. ``attn_sink`` covers the padded heads too."""
    return sparse_decode(
        q,
        k_cache,
        indices,
        topk_length=topk_length,
        attn_sink=attn_sink[: q.shape[2]],
        extra_k_cache=extra_k_cache,
        extra_indices=extra_indices_in_kvcache,
        extra_topk_length=extra_topk_length,
        softmax_scale=softmax_scale,
        head_dim_v=head_dim_v,
        out=out,
        batch_invariant=BATCH_INVARIANT,
    )


def prefill(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    *,
    attn_sink: torch.Tensor,
    topk_length: torch.Tensor,
    out: torch.Tensor,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """FlashMLA's ``flash_mla_sparse_fwd`` as vLLM's layer calls it. ``attn_sink`` covers the padded heads too."""
    sinks = attn_sink[: q.shape[1]]
    return sparse_prefill(q, kv, indices, sm_scale, attn_sink=sinks, topk_length=topk_length, out=out)


@functools.cache
def install() -> None:
    """Replace V4's attention in vLLM's models whose configuration selects FlashLatte."""
    stock = model._select_dsv4_attn_cls
    model._select_dsv4_attn_cls = lambda config: (
        FlashLatteV4Attention if support.selects_flashlatte(config) else stock(config)
    )
    flashmla.flash_mla_with_kvcache, flashmla.flash_mla_sparse_fwd = decode, prefill
    if not is_flashmla_sparse_supported()[0]:
        # vLLM requests schedules from FlashMLA; FlashLatte does not read them.
        sparse_swa.get_mla_metadata = get_mla_metadata
