"""Sparse decode in plain PyTorch, one request at a time: the specification."""

from __future__ import annotations

import torch

from flashlatte.kernels.softmax import attend, sink_weight
from flashlatte.kv_cache.formats import CacheFormat
from flashlatte.kv_cache.slots import in_cache, read_slots


@torch.no_grad()
def sparse_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    indices: torch.Tensor,
    layout: CacheFormat,
    topk_length: torch.Tensor | None,
    attn_sink: torch.Tensor | None,
    extra_k_cache: torch.Tensor | None,
    extra_indices: torch.Tensor | None,
    extra_topk_length: torch.Tensor | None,
    softmax_scale: float,
    empty_lse: float,
    batch_invariant: bool,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    scopes = [(k_cache, layout, indices, topk_length)]
    if extra_k_cache is not None and extra_indices is not None:
        scopes.append((extra_k_cache, layout.second_format(extra_k_cache.shape[-1]), extra_indices, extra_topk_length))

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

        scores = torch.einsum("shd,snd->shn", q[request].float(), keys) * softmax_scale
        p, row_lse = attend(scores, seen[:, None, :])
        values = torch.einsum("shn,snd->shd", p, keys[..., : out.shape[-1]])
        if attn_sink is not None:
            values = values * sink_weight(row_lse, attn_sink).unsqueeze(-1)

        out[request] = values.to(out.dtype)
        lse[request] = torch.where(row_lse.isneginf(), empty_lse, row_lse).transpose(0, 1)
