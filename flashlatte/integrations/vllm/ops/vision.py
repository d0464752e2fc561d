"""Attention functions of vLLM's vision towers: [b, s, h, d], with patches along the first two axes."""

from __future__ import annotations

import torch

from flashlatte.ops.dense_prefill import vit_attention
from flashlatte.runtime import checks


def vit_flash_attn_wrapper(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    batch_size: int,
    is_rocm_aiter: bool,
    fa_version: int | None,
    scale: float | None = None,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: torch.Tensor | None = None,
) -> torch.Tensor:
    """``flashlatte.vit_attention``; ``max_seqlen`` is not read to the host.

    Args:
        q, k, v: [b, s, h, d], bf16 or fp16.
        batch_size: b.
        is_rocm_aiter, fa_version: unused.
        scale: above 0; d^-0.5 if None.
        cu_seqlens: int32 or int64 [images + 1] boundaries over the b · s patches; None: b images of s patches.
        max_seqlen: number of patches of the largest image.

    Returns:
        [b, s, h, d].

    Raises:
        TypeError, ValueError: as ``vit_attention``.
    """
    return vit_triton_attn_wrapper(q, k, v, batch_size, scale, cu_seqlens, max_seqlen)


def vit_triton_attn_wrapper(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    batch_size: int,
    scale: float | None = None,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: torch.Tensor | None = None,
) -> torch.Tensor:
    """``vit_flash_attn_wrapper`` without its unused arguments."""
    if checks.given("q", q).shape[:1] != (checks.integer("batch_size", batch_size),):
        raise ValueError(f"batch_size must be the first axis of q's {list(q.shape)}, got {batch_size}")
    with checks.naming(softmax_scale="scale"):
        return vit_attention(q, k, v, cu_seqlens, max_seqlen, softmax_scale=scale)


def vit_torch_sdpa_wrapper(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None = None,
    cu_seqlens: torch.Tensor | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """``vit_flash_attn_wrapper`` with the arguments of PyTorch's attention; lengths are not read to the host.

    Args:
        cu_seqlens: int32 or int64 [images + 1] boundaries within the s patches of a row, the same for all b rows.
        enable_gqa: whether k and v may have fewer heads than q.
    """
    for name, given in (("q", q), ("k", k)):
        if checks.given(name, given).dim() != 4:
            raise ValueError(f"{name} must have shape [b, s, h, d], got {list(given.shape)}")
    if not checks.flag("enable_gqa", enable_gqa) and k.shape[2] != q.shape[2]:
        raise ValueError(f"k must have q's {q.shape[2]} heads without enable_gqa, got {k.shape[2]}")
    rows, patches = q.shape[:2]
    if cu_seqlens is not None and rows > 1:
        checks.indices("cu_seqlens", cu_seqlens, ("images + 1",), q.device)
        # An image without patches separates two rows.
        begins = torch.arange(rows, dtype=cu_seqlens.dtype, device=q.device) * patches
        cu_seqlens = (begins.unsqueeze(1) + cu_seqlens).flatten()
    with checks.naming(softmax_scale="scale"):
        return vit_attention(q, k, v, cu_seqlens, softmax_scale=scale)
