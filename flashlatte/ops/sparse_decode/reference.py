"""Sparse decode in plain PyTorch, one request at a time: the specification."""

from __future__ import annotations

from typing import NamedTuple

import torch

from flashlatte.kernels.softmax import attend, sink_weight
from flashlatte.kv_cache.formats import CacheFormat
from flashlatte.kv_cache.registry import as_format
from flashlatte.kv_cache.slots import in_cache, read_slots
from flashlatte.runtime import query_parts


class SparseDecodeParams(NamedTuple):
    """The checked arguments of ``api.sparse_decode``. ``cache_format``: the name of k_cache's format."""

    q: torch.Tensor
    k_cache: torch.Tensor
    indices: torch.Tensor
    cache_format: str
    topk_length: torch.Tensor | None
    attn_sink: torch.Tensor | None
    extra_k_cache: torch.Tensor | None
    extra_indices: torch.Tensor | None
    extra_topk_length: torch.Tensor | None
    softmax_scale: float
    empty_lse: float
    batch_invariant: bool
    out: torch.Tensor
    lse: torch.Tensor
    q_rope: torch.Tensor | None = None

    @property
    def head_dim(self) -> int:
        """The width of the queries, of both parts if there are two."""
        return query_parts.width(self.q, self.q_rope)

    @property
    def layout(self) -> CacheFormat:
        """The format of k_cache."""
        return as_format(self.cache_format, self.head_dim)

    @property
    def extra_layout(self) -> CacheFormat:
        """The format of extra_k_cache, or that of k_cache without one."""
        cache = self.extra_k_cache
        return self.layout if cache is None else self.layout.second_format(cache.shape[-1])

    @property
    def is_uniform(self) -> bool:
        """Whether all query tokens have the same number of keys."""
        return self.topk_length is None and self.extra_topk_length is None


@torch.no_grad()
def sparse_decode(params: SparseDecodeParams) -> None:
    q, out = query_parts.join(params.q, params.q_rope), params.out
    extra_k_cache, extra_indices = params.extra_k_cache, params.extra_indices
    scopes = [(params.k_cache, params.layout, params.indices, params.topk_length)]
    if extra_k_cache is not None and extra_indices is not None:
        scopes.append((extra_k_cache, params.extra_layout, extra_indices, params.extra_topk_length))

    for request in range(q.shape[0]):
        rows, visible = [], []
        for cache, cache_layout, selected, length in scopes:
            slots = selected[request].long()  # [s_q, topk]
            counted = torch.ones_like(slots, dtype=torch.bool)
            if length is not None:
                counted &= torch.arange(slots.shape[-1], device=q.device) < length[request].view(-1, 1)
            visible.append(in_cache(slots, cache) & counted)
            rows.append(read_slots(cache, torch.where(visible[-1], slots, -1), cache_layout))
        keys = torch.cat(rows, dim=1)  # [s_q, topk + extra_topk, d]
        seen = torch.cat(visible, dim=1)

        scores = torch.einsum("shd,snd->shn", q[request].float(), keys) * params.softmax_scale
        p, row_lse = attend(scores, seen[:, None, :])
        values = torch.einsum("shn,snd->shd", p, keys[..., : out.shape[-1]])
        if params.attn_sink is not None:
            values = values * sink_weight(row_lse, params.attn_sink).unsqueeze(-1)

        out[request] = values.to(out.dtype)
        params.lse[request] = torch.where(row_lse.isneginf(), params.empty_lse, row_lse).transpose(0, 1)
