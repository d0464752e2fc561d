"""``turboquant_decode`` in plain PyTorch, one request at a time: the specification."""

from __future__ import annotations

from typing import NamedTuple

import torch

from flashlatte.kernels.softmax import attend
from flashlatte.kv_cache.turboquant import TurboQuantFormat, turboquant_format


class TurboQuantDecodeParams(NamedTuple):
    """The checked arguments of ``api.turboquant_decode``."""

    q: torch.Tensor
    cache: torch.Tensor
    block_table: torch.Tensor
    cache_seqlens: torch.Tensor
    cache_format: str
    softmax_scale: float
    causal: bool
    empty_lse: float
    out: torch.Tensor
    lse: torch.Tensor

    @property
    def layout(self) -> TurboQuantFormat:
        return turboquant_format(self.cache_format, self.q.shape[3])


@torch.no_grad()
def turboquant_decode(params: TurboQuantDecodeParams) -> None:
    q, cache, block_table, layout = params.q, params.cache, params.block_table, params.layout
    num_pages, page_size, h_kv = cache.shape[:3]
    batch, s_q, h_q, _ = q.shape
    query = torch.arange(s_q, device=q.device)
    for request in range(batch):
        length = params.cache_seqlens[request].long().clamp(0, block_table.shape[1] * page_size)
        pages = block_table[request].long()
        in_cache = (pages >= 0) & (pages < num_pages)
        key = torch.arange(pages.shape[0] * page_size, device=q.device)
        found = ((key < length) & in_cache.repeat_interleave(page_size)).nonzero().squeeze(1)
        keys, values = layout.decode(cache[pages[found // page_size], found % page_size])  # [keys, h_kv, d]

        last_visible = length - s_q + query if params.causal else length.expand(s_q)
        visible = found <= last_visible[:, None]  # [s_q, keys]
        values = torch.where(visible.any(dim=0)[:, None, None], values, 0.0)
        queries = q[request].float().unflatten(1, (h_kv, h_q // h_kv))  # [s_q, h_kv, group, d]
        scores = torch.einsum("skgd,nkd->skgn", queries, keys) * params.softmax_scale
        p, row_lse = attend(scores, visible[:, None, None, :])
        params.out[request] = torch.einsum("skgn,nkd->skgd", p, values).flatten(1, 2).to(params.out.dtype)
        row_lse = torch.where(row_lse.isneginf(), params.empty_lse, row_lse)
        params.lse[request] = row_lse.flatten(1, 2).transpose(0, 1)
