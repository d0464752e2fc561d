"""Calls of the Hopper kernel of dense decode, as its launcher launches them, without the GPU."""

from __future__ import annotations

import math

import torch

from flashlatte.ops.dense_decode.hopper import launch


def decode(
    batch: int = 4,
    s_q: int = 1,
    heads: int = 128,
    h_kv: int = 1,
    head_dim: int = 576,
    pages: int = 8,
    page_size: int = 64,
    columns: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    cache_dtype: torch.dtype | None = None,
    index_dtype: torch.dtype = torch.int32,
    causal: bool = False,
    batch_invariant: bool = False,
    q_pad: int = 0,
    out_pad: int = 0,
) -> None:
    """A call of the implementation with tensors whose contents do not matter."""
    launch.dense_decode(
        torch.empty(batch, s_q, heads, head_dim + q_pad, dtype=dtype)[..., :head_dim],
        torch.empty(pages, page_size, h_kv, head_dim, dtype=cache_dtype or dtype),
        torch.empty(batch, columns, dtype=index_dtype),
        torch.empty(batch, dtype=index_dtype),
        None,
        1.0,
        head_dim**-0.5,
        causal,
        -math.inf,
        batch_invariant,
        torch.empty(batch, s_q, heads, 512 + out_pad, dtype=dtype)[..., :512],
        torch.empty(batch, heads, s_q),
    )
