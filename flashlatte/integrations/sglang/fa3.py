"""SGLang's sparse decode with FlashAttention-3, the default of its ``dsa`` backend on Hopper."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flashlatte.ops.sparse_decode import sparse_decode

# SGLang allocates its pools in whole pages of this many tokens.
_PAGE = 64


def forward_fa3(
    original: Callable[..., torch.Tensor],
    self: Any,
    q_rope: torch.Tensor,
    kv_cache: torch.Tensor,
    v_head_dim: int,
    q_nope: torch.Tensor,
    page_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    sm_scale: float,
    logit_cap: float,
    page_size: int,
) -> torch.Tensor:
    """``sparse_decode`` for query tokens with one row of slots each.

    SGLang's own function runs the other cases: pages of several tokens, keys without a rope part or in another dtype
    than the queries, a soft cap, and GLM's pooled keys.

    Args:
        q_nope, q_rope: [T, h, v_head_dim] and [T, h, rope].
        kv_cache: [slots, 1, v_head_dim + rope].
        page_table: int32 [T, topk], slots; negative for none.
        cache_seqlens: int32 [≥ T], number of slots of each row.

    Returns:
        [T, h, v_head_dim].
    """
    tokens = q_nope.shape[0]
    width = v_head_dim + q_rope.shape[-1]
    supported = (
        (page_size, max_seqlen_q, logit_cap) == (1, 1, 0)
        # SGLang before 0.5.20 has no pooled keys.
        and getattr(self, "dsa_index_kpool", 1) <= 1
        and q_nope.dim() == 3
        and page_table.shape[0] == tokens <= cache_seqlens.shape[0]
        and kv_cache.dtype == q_nope.dtype
        and width == kv_cache.shape[-1] > v_head_dim
    )
    if not supported:
        rest = (cache_seqlens, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, sm_scale, logit_cap, page_size)
        return original(self, q_rope, kv_cache, v_head_dim, q_nope, page_table, *rest)
    page = _PAGE if kv_cache.shape[0] % _PAGE == 0 else 1
    out, _ = sparse_decode(
        q_nope.unsqueeze(1),
        kv_cache.view(-1, page, 1, width),
        page_table.unsqueeze(1),
        q_rope=q_rope.unsqueeze(1),
        topk_length=cache_seqlens[:tokens],
        softmax_scale=sm_scale,
        head_dim_v=v_head_dim,
        # SGLang requests one split from FlashAttention for deterministic inference.
        batch_invariant=self.num_splits == 1,
    )
    return out.squeeze(1)
