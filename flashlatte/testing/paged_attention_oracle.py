"""float64 oracle of ``flashlatte.paged_attention``: one query head at a time, over an explicit list of its keys."""

from __future__ import annotations

import math
from typing import Any

import torch

from flashlatte.testing.byte_oracles import E4M3_VALUES


def _e5m2_decode(byte: int) -> float:
    """One sign bit, five exponent bits (bias 15), two mantissa bits."""
    sign, exponent, mantissa = -1 if byte & 0x80 else 1, byte >> 2 & 31, byte & 3
    if exponent == 31:
        return math.nan if mantissa else sign * math.inf
    return sign * (mantissa / 4 + (exponent > 0)) * 2.0 ** (max(exponent, 1) - 15)


_DECODED = {torch.float8_e4m3fn: E4M3_VALUES, torch.float8_e5m2: [_e5m2_decode(byte) for byte in range(256)]}


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seqused_k: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    *,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window: int | tuple[int, int] | None = None,
    prefix_ranges: torch.Tensor | None = None,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    alibi_sqrt: bool = False,
    qq_bias: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
    out_scale: float | torch.Tensor | None = None,
    empty_lse: float = -math.inf,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out [T, h_q, d_v] in ``dtype``, divided by ``out_scale`` without rounding, and lse [T, h_q] in float64."""
    tokens, h_q, head_dim = q.shape
    num_pages, page_size, h_kv = k_cache.shape[:3]
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    left, right = (window - 1, 0) if isinstance(window, int) else (-1, -1) if window is None else window
    boundaries, tables = cu_seqlens_q.tolist(), block_table.tolist()
    out = torch.zeros(tokens, h_q, v_cache.shape[3], dtype=dtype, device=q.device)
    lse = torch.full((tokens, h_q), empty_lse, dtype=torch.float64, device=q.device)

    def bias(query: int, key: int, head: int) -> float:
        """The bias of a score; ``key`` is relative to the request's first query."""
        added = 0.0
        if alibi_slopes is not None:
            distance = abs(query - key)
            added -= float(alibi_slopes[head]) * (math.sqrt(distance) if alibi_sqrt else distance)
        if qq_bias is not None and query < qq_bias.shape[0] and 0 <= key < qq_bias.shape[0]:
            added += float(qq_bias[query, key])
        return added

    def sees(request: int, position: int, key: int) -> bool:
        ranges = [] if prefix_ranges is None else prefix_ranges[request].tolist()
        if any(first <= min(position, key) and max(position, key) <= last for first, last in ranges):
            return True
        behind = position - key
        return not (causal and behind < 0) and (left < 0 or behind <= left) and (right < 0 or -behind <= right)

    for request, table in enumerate(tables):
        first, end = boundaries[request : request + 2]
        cached = min(max(int(seqused_k[request]), 0), len(table) * page_size)
        length = cached + (end - first if k is not None else 0)
        context = length - (end - first)
        for token in range(first, end):
            position = context + token - first
            keys = [key for key in range(length) if sees(request, position, key)]
            keys = [key for key in keys if key >= cached or 0 <= table[key // page_size] < num_pages]
            slots = [(table[key // page_size], key % page_size) for key in keys if key < cached]
            new = [first + key - cached for key in keys if key >= cached]
            for head in range(h_q if keys else 0):
                kv_head = head * h_kv // h_q
                rows = _rows(k_cache, k_scale, slots, kv_head, k, new).to(dtype)
                values = _rows(v_cache, v_scale, slots, kv_head, v, new).to(dtype)
                logits = rows @ q[token, head].to(dtype) * scale
                if softcap:
                    logits = softcap * torch.tanh(logits / softcap)
                terms = [bias(token - first, key - context, head) for key in keys]
                logits = logits + torch.tensor(terms, dtype=dtype, device=q.device)
                exact = logits.double()
                lse[token, head] = row_lse = exact.logsumexp(dim=0)
                if row_lse.isneginf():
                    lse[token, head] = empty_lse
                    continue
                factor = 1.0 if attn_sink is None else 1 / (1 + math.exp(float(attn_sink[head]) - float(row_lse)))
                out[token, head] = torch.softmax(logits, dim=0) @ values * factor
    return out if out_scale is None else out / out_scale, lse


def _rows(
    cache: torch.Tensor,
    scale: Any,
    slots: list[tuple[int, int]],
    kv_head: int,
    new: torch.Tensor | None,
    tokens: list[int],
) -> torch.Tensor:
    """float64 [keys, d]: rows at the (page, offset) slots of a cache, then the rows of new tokens."""
    rows = [_row(cache, scale, page, offset, kv_head) for page, offset in slots]
    if new is not None:
        rows += [new[token, kv_head].double() for token in tokens]
    return torch.stack(rows)


def _row(cache: torch.Tensor, scale: Any, page: int, offset: int, kv_head: int) -> torch.Tensor:
    if cache.dtype in _DECODED:
        numbers = cache.view(torch.uint8)[page, offset, kv_head].flatten().tolist()
        row = torch.tensor([_DECODED[cache.dtype][byte] for byte in numbers], dtype=torch.float64, device=cache.device)
    else:
        row = cache[page, offset, kv_head].flatten().double()
    if isinstance(scale, torch.Tensor) and scale.numel() > 1:
        scale = scale[kv_head] if scale.dim() == 1 else scale[page, offset, kv_head]
    return row if scale is None else row * float(scale)
