"""Dense decode in plain PyTorch, one request at a time: the specification."""

from __future__ import annotations

from typing import NamedTuple

import torch

from flashlatte.kernels import fp8_attention
from flashlatte.kernels.softmax import attend
from flashlatte.kv_cache.fp8 import raw_view


class DenseDecodeParams(NamedTuple):
    """The checked arguments of ``api.dense_decode``.

    k_scale is ``k_scale_value`` if ``k_scale_tensor`` is None. ``precision`` is None or "fp8".
    """

    q: torch.Tensor
    q_rope: torch.Tensor | None
    k_cache: torch.Tensor
    block_table: torch.Tensor
    cache_seqlens: torch.Tensor
    k_scale_tensor: torch.Tensor | None
    k_scale_value: float
    softmax_scale: float
    causal: bool
    empty_lse: float
    batch_invariant: bool
    precision: str | None
    out: torch.Tensor
    lse: torch.Tensor

    @property
    def whole_q(self) -> torch.Tensor:
        """The queries in one tensor [b, s_q, h_q, d]."""
        return self.q if self.q_rope is None else torch.cat((self.q, self.q_rope), -1)


@torch.no_grad()
def dense_decode(params: DenseDecodeParams) -> None:
    k_cache, out = params.k_cache, params.out
    q = params.whole_q
    if params.precision is not None:
        q = fp8_attention.quantize_queries(q, out.shape[-1])
    block_table = params.block_table
    num_pages, page_size, h_kv, head_dim = k_cache.shape
    batch, s_q, h_q, head_dim_v = out.shape
    k_scale = params.k_scale_value if params.k_scale_tensor is None else params.k_scale_tensor
    query = torch.arange(s_q, device=q.device)

    for request in range(batch):
        length = params.cache_seqlens[request].long().clamp(0, block_table.shape[1] * page_size)
        pages = block_table[request, : _pages_to_read(length, page_size)].long()
        in_cache = (pages >= 0) & (pages < num_pages)
        key = torch.arange(pages.shape[0] * page_size, device=q.device)
        written = (key < length) & in_cache.repeat_interleave(page_size)

        rows = raw_view(k_cache)[torch.where(in_cache, pages, 0)].view(k_cache.dtype)
        rows = rows.flatten(0, 1).float() * k_scale  # [keys, h_kv, d]
        rows = torch.where(written[:, None, None], rows, 0.0)

        last_visible = length - s_q + query if params.causal else length.expand(s_q)
        visible = written & (key <= last_visible[:, None])  # [s_q, keys]
        queries = q[request].float().unflatten(1, (h_kv, h_q // h_kv))  # [s_q, h_kv, group, d]
        scores = torch.einsum("skgd,nkd->skgn", queries, rows) * params.softmax_scale
        p, row_lse = attend(scores, visible[:, None, None, :])
        if params.precision is not None:
            p = fp8_attention.round_probabilities(p)
        values = torch.einsum("skgn,nkd->skgd", p, rows[..., :head_dim_v])

        out[request] = values.flatten(1, 2).to(out.dtype)
        row_lse = torch.where(row_lse.isneginf(), params.empty_lse, row_lse)
        params.lse[request] = row_lse.flatten(1, 2).transpose(0, 1)


def _pages_to_read(length: torch.Tensor, page_size: int) -> int | None:
    """The number of pages of a request on the CPU; None (all columns of the table) on a GPU, to avoid a
    synchronization."""
    return -(-int(length) // page_size) if length.device.type == "cpu" else None
