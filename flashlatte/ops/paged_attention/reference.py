"""Paged attention: the arguments, and the specification in plain PyTorch, a few query rows of a request at a time."""

from __future__ import annotations

from typing import NamedTuple

import torch

from flashlatte.kernels.softmax import attend, sink_weight
from flashlatte.kv_cache.fp8 import raw_view, to_e4m3
from flashlatte.runtime.kernel_records import ElementPointer, Int32, Int64
from flashlatte.runtime.ragged import boundaries_of

_SCORE_BYTES = 256 * 2**20


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


class PagedAttentionRequests(NamedTuple):
    """The queries of each request, and its keys in pages.

    Attributes:
        cu_seqlens_q: first query of each request and the end of the last one, [count + 1].
        count: number of requests.
        total_q: rows of q.
        seqused_k, seqused_stride: keys of each request in its pages, clamped to 0 … ``capacity``.
    """

    cu_seqlens_q: ElementPointer
    count: Int32
    total_q: Int32
    seqused_k: ElementPointer
    seqused_stride: Int64
    capacity: Int32


def paged_requests(params: PagedAttentionParams) -> PagedAttentionRequests:
    """Make ``PagedAttentionRequests`` from the arguments of a call."""
    return PagedAttentionRequests(
        cu_seqlens_q=params.cu_seqlens_q,
        count=params.cu_seqlens_q.shape[0] - 1,
        total_q=params.q.shape[0],
        seqused_k=params.seqused_k,
        seqused_stride=params.seqused_k.stride(0),
        capacity=params.cached_keys,
    )


@torch.no_grad()
def paged_attention(params: PagedAttentionParams) -> None:
    params.out.zero_()
    params.lse.fill_(params.empty_lse)
    tokens, h_q, _ = params.q.shape
    boundaries = boundaries_of(params.cu_seqlens_q, tokens)
    for request in range(len(boundaries) - 1):
        first, end = boundaries[request : request + 2]
        if first >= end:
            continue
        key_rows, values, exists = _keys_of(params, request, slice(first, end))
        if exists.shape[0] == 0:
            continue
        context = exists.shape[0] - (end - first)
        step = max(1, _SCORE_BYTES // (4 * h_q * exists.shape[0]))
        for row in range(first, end, step):
            rows = slice(row, min(row + step, end))
            own = torch.arange(rows.start - first, rows.stop - first, device=exists.device)
            _attend_rows(params, request, rows, own, context, key_rows, values, exists)


def _attend_rows(
    params: PagedAttentionParams,
    request: int,
    rows: slice,
    own: torch.Tensor,
    context: int,
    key_rows: torch.Tensor,
    values: torch.Tensor,
    exists: torch.Tensor,
) -> None:
    """Attention of queries ``own`` [rows] of a request, at positions context + own, over keys [n, h_kv, d]."""
    queries = params.q[rows].float().unflatten(1, (key_rows.shape[1], -1))  # [rows, h_kv, group, d]
    scores = torch.einsum("skgd,nkd->skgn", queries, key_rows).flatten(1, 2) * params.softmax_scale
    if params.softcap:
        scores = params.softcap * torch.tanh(scores / params.softcap)
    key = torch.arange(exists.shape[0], device=exists.device)
    position = (own + context)[:, None]
    if params.alibi_slopes is not None:
        distance = (position - key).abs().float()
        distance = distance.sqrt() if params.alibi_sqrt else distance
        scores = scores - params.alibi_slopes[:, None] * distance[:, None]
    if params.qq_bias is not None:
        scores = scores + _bias_between(params.qq_bias, own, key - context)[:, None]
    visible = (key >= position - params.window_left) & (key <= position + params.window_right)
    if params.prefix_ranges is not None:
        for first, last in params.prefix_ranges[request].unbind():
            in_range = (position >= first) & (position <= last)
            visible = visible | (in_range & (key >= first) & (key <= last))
    visible = visible & exists
    p, lse = attend(scores, visible[:, None])  # [rows, h_q, n]
    values = torch.where(visible.any(dim=0)[:, None, None], values, 0.0)  # a window leaves pages that others reuse
    out = torch.einsum("skgn,nkd->skgd", p.unflatten(1, (key_rows.shape[1], -1)), values).flatten(1, 2)
    if params.attn_sink is not None:
        out = out * sink_weight(lse, params.attn_sink).unsqueeze(-1)
    if params.out.dtype == torch.float8_e4m3fn:
        scale = out.new_tensor(params.out_scale_value) if params.out_scale is None else params.out_scale
        raw_view(params.out)[rows] = raw_view(to_e4m3(out * (1.0 / scale)))
    else:
        params.out[rows] = out.to(params.out.dtype)
    params.lse[rows] = torch.where(lse.isneginf(), params.empty_lse, lse)


def _keys_of(params: PagedAttentionParams, request: int, new: slice) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """float32 keys [n, h_kv, d] and values [n, h_kv, d_v] of a request, and the mask of existing ones [n]."""
    num_pages, page_size = params.k_cache.shape[:2]
    length = int(params.seqused_k[request].clamp(0, params.cached_keys))
    pages = params.block_table[request, : -(-length // page_size)].long()
    in_cache = (pages >= 0) & (pages < num_pages)
    pages = torch.where(in_cache, pages, 0)
    exists = in_cache.repeat_interleave(page_size)[:length]
    keys = _dequantized(params.k_cache, params.k_scale, params.k_scale_value, pages)[:length].flatten(2)
    values = _dequantized(params.v_cache, params.v_scale, params.v_scale_value, pages)[:length]
    keys, values = (torch.where(exists[:, None, None], rows, 0.0) for rows in (keys, values))
    if params.k is not None and params.v is not None:
        keys = torch.cat((keys, params.k[new].float()))
        values = torch.cat((values, params.v[new].float()))
        exists = torch.cat((exists, exists.new_ones(new.stop - new.start)))
    return keys, values, exists


def _dequantized(cache: torch.Tensor, scale: torch.Tensor | None, value: float, pages: torch.Tensor) -> torch.Tensor:
    """Rows of some pages as float32 [pages · page_size, h_kv, ...]."""
    rows = raw_view(cache)[pages].view(cache.dtype).float()
    factor = value if scale is None else scale[pages].reshape(*scale[pages].shape, *[1] * (cache.dim() - 3))
    return (rows * factor).flatten(0, 1)


def _bias_between(qq_bias: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """qq_bias at [query, key], 0 outside of it."""
    size = qq_bias.shape[0]
    inside = (query < size)[:, None] & (key >= 0) & (key < size)
    return torch.where(inside, qq_bias[query.clamp(max=size - 1)[:, None], key.clamp(0, size - 1)], 0.0)
