"""The arguments of an implementation: checked, with defaults filled in."""

from __future__ import annotations

from typing import NamedTuple

import torch


class PagedAttentionParams(NamedTuple):
    """The arguments of ``api.paged_attention``, with these differences.

    Attributes:
        k_cache: [pages, page_size, h_kv, d / x, x]; x is d if the caller's cache has four axes.
        k_scale, v_scale: [pages, page_size, h_kv] or None. Strides are 0 if a scale applies to all tokens or heads.
        k_scale_value, v_scale_value: used if the tensor is None.
        out_scale, out_scale_value: likewise; the tensor has no axes.
        window_left, window_right: ``ragged.UNLIMITED`` for unbounded; causal attention has right 0.
        softcap: 0 for none.
    """

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_table: torch.Tensor
    seqused_k: torch.Tensor
    cu_seqlens_q: torch.Tensor
    k: torch.Tensor | None
    v: torch.Tensor | None
    softmax_scale: float
    window_left: int
    window_right: int
    prefix_ranges: torch.Tensor | None
    softcap: float
    alibi_slopes: torch.Tensor | None
    alibi_sqrt: bool
    qq_bias: torch.Tensor | None
    attn_sink: torch.Tensor | None
    k_scale: torch.Tensor | None
    k_scale_value: float
    v_scale: torch.Tensor | None
    v_scale_value: float
    out_scale: torch.Tensor | None
    out_scale_value: float
    empty_lse: float
    out: torch.Tensor
    lse: torch.Tensor

    @property
    def cached_keys(self) -> int:
        """The capacity of a request's pages, in keys."""
        return self.block_table.shape[1] * self.k_cache.shape[1]
