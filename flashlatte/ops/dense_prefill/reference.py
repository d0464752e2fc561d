"""Dense prefill: the arguments, and the specification in plain PyTorch, a few query rows of a request at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from flashlatte.kernels.softmax import attend
from flashlatte.runtime.kernel_records import ElementPointer, Int32
from flashlatte.runtime.ragged import boundaries_of

SCORE_BYTES = 256 * 2**20


class DensePrefillParams(NamedTuple):
    """The checked arguments of ``api.dense_prefill``, except its outputs.

    ``window_left`` and ``window_right`` are ``ragged.UNLIMITED`` for unbounded; causal attention has right 0.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_seqlen_k: int
    softmax_scale: float
    window_left: int
    window_right: int
    empty_lse: float


class DensePrefillGradients(NamedTuple):
    """The arguments of the backward pass in addition to those of the forward pass.

    Attributes:
        out, lse: results of the forward pass.
        dout, dlse: their gradients.
        deterministic: dq is bitwise the same from run to run.
        dq, dk, dv: written to.
    """

    out: torch.Tensor
    lse: torch.Tensor
    dout: torch.Tensor
    dlse: torch.Tensor | None
    deterministic: bool
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor


class DensePrefillRequests(NamedTuple):
    """The queries and keys of each request: its first token, and the end of the last request, [count + 1].

    ``total_q`` and ``total_k``: rows of q and of k.
    """

    cu_seqlens_q: ElementPointer
    cu_seqlens_k: ElementPointer
    count: Int32
    total_q: Int32
    total_k: Int32


def requests_of(params: DensePrefillParams) -> DensePrefillRequests:
    """Make ``DensePrefillRequests`` from the arguments of a call."""
    count = params.cu_seqlens_q.shape[0] - 1
    return DensePrefillRequests(params.cu_seqlens_q, params.cu_seqlens_k, count, params.q.shape[0], params.k.shape[0])


@torch.no_grad()
def forward(params: DensePrefillParams, out: torch.Tensor, lse: torch.Tensor) -> None:
    q, k, v = params.q, params.k, params.v
    out.zero_()
    lse.fill_(params.empty_lse)
    for rows, keys, visible in _blocks(params):
        key, value = _seen(k[keys], visible), _seen(v[keys], visible)
        scores = torch.einsum("skgd,nkd->kgsn", _grouped(q[rows], k), key) * params.softmax_scale
        p, row_lse = attend(scores, visible)
        out[rows] = torch.einsum("kgsn,nkd->skgd", p, value).flatten(1, 2).to(out.dtype)
        row_lse = row_lse.flatten(0, 1).T  # [rows, h]
        lse[rows] = torch.where(row_lse.isneginf(), params.empty_lse, row_lse)


@torch.no_grad()
def backward(params: DensePrefillParams, gradients: DensePrefillGradients) -> None:
    """With P the probabilities: dV = Pᵀ dO, dP = dO Vᵀ, dS = P (dP - (Σ out · dO - dlse)), dQ = scale dS K,
    dK = scale dSᵀ Q (arXiv:2307.08691, §2.3.2; the derivative of lse by a score is its probability).
    """
    q, k, v = params.q, params.k, params.v
    out, lse, dout, dlse, _, dq, dk, dv = gradients
    dq.zero_()
    dk_sum, dv_sum = (torch.zeros_like(x, dtype=_wide(x).dtype) for x in (k, v))
    for rows, keys, visible in _blocks(params):
        key, value = _seen(k[keys], visible), _seen(v[keys], visible)
        # Queries without a visible key, and their dout, may have any value too.
        query, d_out = (_grouped(_seen(x[rows], visible.T), k) for x in (q, dout))
        row_lse = torch.where(lse[rows].isinf(), 0.0, lse[rows])
        drow = (_wide(out[rows]) * d_out.flatten(1, 2)).sum(dim=-1)
        if dlse is not None:
            drow = drow - dlse[rows]
        row_lse, drow = (x.T.unflatten(0, (k.shape[1], -1)).unsqueeze(-1) for x in (row_lse, drow))  # [h_k, g, rows, 1]
        scores = torch.einsum("skgd,nkd->kgsn", query, key) * params.softmax_scale
        p = torch.exp(scores.masked_fill(~visible, float("-inf")) - row_lse)
        dp = torch.einsum("skgd,nkd->kgsn", d_out, value)
        scaled_ds = torch.where(visible, p * (dp - drow), 0.0) * params.softmax_scale
        dq[rows] = torch.einsum("kgsn,nkd->skgd", scaled_ds, key).flatten(1, 2).to(dq.dtype)
        dk_sum[keys] += torch.einsum("kgsn,skgd->nkd", scaled_ds, query)
        dv_sum[keys] += torch.einsum("kgsn,skgd->nkd", p, d_out)
    dk.copy_(dk_sum)
    dv.copy_(dv_sum)


def _blocks(params: DensePrefillParams) -> Iterator[tuple[slice, slice, torch.Tensor]]:
    """Some query rows of a request, its keys, and the mask of visible keys [rows, keys]."""
    q = params.q
    starts_q = boundaries_of(params.cu_seqlens_q, q.shape[0])
    starts_k = boundaries_of(params.cu_seqlens_k, params.k.shape[0])
    for request in range(len(starts_q) - 1):
        first_q, end_q = starts_q[request : request + 2]
        first_k, end_k = starts_k[request : request + 2]
        if first_q >= end_q or first_k >= end_k:
            continue
        position = torch.arange(end_k - first_k, device=q.device)
        # A query's position: the last query of a request is aligned with its last key.
        shift = (end_k - first_k) - (end_q - first_q)
        step = max(1, SCORE_BYTES // (4 * q.shape[1] * (end_k - first_k)))
        for row in range(first_q, end_q, step):
            stop = min(row + step, end_q)
            own = torch.arange(row - first_q, stop - first_q, device=q.device)[:, None] + shift
            visible = (position >= own - params.window_left) & (position <= own + params.window_right)
            yield slice(row, stop), slice(first_k, end_k), visible


def _seen(x: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """``x`` with zeros for keys that are visible to no query, or for queries without a visible key (``visible``
    transposed): these may have any value."""
    return torch.where(visible.any(dim=0)[:, None, None], _wide(x), 0.0)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _grouped(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """[s, h, d] as [s, h_k, h / h_k, d]: the query heads that share a key head."""
    return _wide(x).unflatten(1, (k.shape[1], -1))
