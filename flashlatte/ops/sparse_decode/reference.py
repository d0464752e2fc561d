"""Sparse decode in plain PyTorch, one request at a time: the specification."""

from __future__ import annotations

import torch

from flashlatte.kernels.softmax import attend, sink_weight
from flashlatte.kv_cache.slots import in_cache, read_slots
from flashlatte.ops.sparse_decode.params import SparseDecodeParams


@torch.no_grad()
def sparse_decode(params: SparseDecodeParams) -> None:
    q, out = params.q, params.out
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
