"""Gradients of sparse attention in plain PyTorch, a few query tokens at a time: the specification."""

from __future__ import annotations

from typing import NamedTuple

import torch

from flashlatte.kernels.softmax import sink_weight

GATHERED_BYTES = 64 * 2**20


class SparseAttentionParams(NamedTuple):
    """The checked arguments of ``api.sparse_attention``."""

    q: torch.Tensor
    kv: torch.Tensor
    indices: torch.Tensor
    topk_length: torch.Tensor | None
    attn_sink: torch.Tensor | None
    softmax_scale: float
    d_v: int
    deterministic: bool


class SparseAttentionBackwardParams(NamedTuple):
    """Gradients of the forward results, and the arguments and results of the forward pass. ``dout``, ``dlse``, ``out``
    and ``lse`` are contiguous."""

    dout: torch.Tensor
    dlse: torch.Tensor | None
    q: torch.Tensor
    kv: torch.Tensor
    indices: torch.Tensor
    topk_length: torch.Tensor | None
    attn_sink: torch.Tensor | None
    out: torch.Tensor
    lse: torch.Tensor
    softmax_scale: float
    deterministic: bool


class SparseAttentionGradients(NamedTuple):
    """The gradients that an implementation writes, contiguous; ``d_sink`` is 0 without sinks."""

    dq: torch.Tensor
    dkv: torch.Tensor
    d_sink: torch.Tensor


@torch.no_grad()
def backward(params: SparseAttentionBackwardParams, gradients: SparseAttentionGradients) -> None:
    """Write ``gradients``. Deterministic, also without ``deterministic``.

    With P the probabilities over the selected keys and w = e^lse / (e^lse + e^sink), 1 without a sink, out = w P V:
    dP = dO Vᵀ, dS = P (w dP - (w Σ out · dO - dlse)), dQ = scale dS K, dK = scale dSᵀ Q, dV = w Pᵀ dO, and
    d_sink = -(1 - w) Σ out · dO, summed over queries (arXiv:2307.08691, §2.3.2, with w for the sink).
    """
    dout, dlse, q, kv, indices, topk_length, attn_sink, out, lse, softmax_scale, _ = params
    dq, dkv, d_sink = gradients
    wide = torch.promote_types(q.dtype, torch.float32)
    s_q, _, topk = indices.shape
    d_v = out.shape[-1]
    position = torch.arange(topk, device=q.device)
    dkv_sum = torch.zeros_like(kv[:, 0], dtype=wide)
    d_sink.zero_()
    chunk = max(1, GATHERED_BYTES // (topk * q.shape[-1] * 4))

    for begin in range(0, s_q, chunk):
        tokens = slice(begin, min(begin + chunk, s_q))
        selected = indices[tokens, 0].long()  # [tokens, topk]
        visible = (selected >= 0) & (selected < kv.shape[0])
        if topk_length is not None:
            visible &= position < topk_length[tokens, None]
        selected = torch.where(visible, selected, 0)
        keys = torch.where(visible.unsqueeze(-1), kv[selected, 0].to(wide), 0.0)  # [tokens, topk, d]

        # The output of a query without keys is constant, so its gradients are 0, also if dout or dlse is NaN.
        has_keys = visible.any(dim=-1)[:, None]
        query = q[tokens].to(wide)
        d_rows = torch.where(has_keys.unsqueeze(-1), dout[tokens].to(wide), 0.0)
        row_lse = torch.where(has_keys, lse[tokens], 0.0)
        delta = (out[tokens].to(wide) * d_rows).sum(dim=-1)  # [tokens, h]
        w = torch.ones_like(row_lse)
        if attn_sink is not None:
            w = sink_weight(row_lse, attn_sink)
            d_sink -= (torch.sigmoid(attn_sink - row_lse) * delta).sum(dim=0)
        delta = w * delta
        if dlse is not None:
            delta = delta - torch.where(has_keys, dlse[tokens], 0.0)

        scores = torch.einsum("shd,snd->shn", query, keys) * softmax_scale
        p = torch.exp(scores.masked_fill(~visible[:, None, :], float("-inf")) - row_lse.unsqueeze(-1))
        dp = torch.einsum("shd,snd->shn", d_rows, keys[..., :d_v])
        scaled_ds = p * (w.unsqueeze(-1) * dp - delta.unsqueeze(-1)) * softmax_scale
        dq[tokens] = torch.einsum("shn,snd->shd", scaled_ds, keys).to(dq.dtype)
        d_keys = torch.einsum("shn,shd->snd", scaled_ds, query)
        d_keys[..., :d_v] += torch.einsum("shn,shd->snd", p * w.unsqueeze(-1), d_rows)
        d_keys = torch.where(visible.unsqueeze(-1), d_keys, 0.0)
        # index_add_ uses atomics on a GPU, and index_put_ does on the CPU; the other one has a fixed order there.
        if dkv_sum.is_cuda:
            dkv_sum.index_put_((selected.flatten(),), d_keys.flatten(0, 1), accumulate=True)
        else:
            dkv_sum.index_add_(0, selected.flatten(), d_keys.flatten(0, 1))
    dkv[:, 0] = dkv_sum
