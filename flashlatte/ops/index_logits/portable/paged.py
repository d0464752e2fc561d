"""Index logits over a paged cache: the key tiles of all requests, concatenated, are divided evenly over programs.

Every program computes the number of tiles of each request from its length.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from flashlatte.kernels.triton.cache_address import load_words
from flashlatte.kernels.triton.cache_layout import as_bytes, cdiv, row_alignment
from flashlatte.kernels.triton.fp8 import converts_e4m3, from_float32
from flashlatte.kv_cache.index_formats import as_index_cache
from flashlatte.ops.index_logits.portable.config import PAGED, choose, padded_heads
from flashlatte.ops.index_logits.portable.score import compute_type, head_sums, load_keys, load_queries
from flashlatte.runtime import machine
from flashlatte.runtime.strides import stride_in_use
from flashlatte.runtime.triton_kernel import kernel

# Requests whose lengths are loaded together.
REQUESTS = 128


def paged(
    q: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    cache_seqlens: torch.Tensor,
    block_table: torch.Tensor,
    logits: torch.Tensor,
    clean: bool,
) -> None:
    if clean:
        logits.fill_(-torch.inf)
    batch, next_n, heads, head_dim = q.shape
    cache, layout = as_index_cache(cache, head_dim)
    cache = as_bytes(cache)
    num_pages, page_size = cache.shape[:2]
    q_unit, unit = row_alignment(q, 0, 1, 2), row_alignment(cache, 0)
    config = choose(PAGED, q.device)
    block_h = padded_heads(heads)
    block_q = min(max(config.rows // block_h, 1), 1 << (next_n - 1).bit_length())
    max_keys = min(logits.shape[1], block_table.shape[1] * page_size)
    tiles = batch * cdiv(max_keys, config.block_n)
    programs = min(tiles, config.programs * machine.num_sms(q.device))
    paged_kernel[(programs, cdiv(next_n, block_q))](
        q=q.view(torch.uint8) if q.dtype == torch.float8_e4m3fn else q,
        cache=cache,
        weights=weights,
        cache_seqlens=cache_seqlens,
        block_table=block_table,
        logits=logits,
        batch=batch,
        next_n=next_n,
        heads=heads,
        max_keys=max_keys,
        num_pages=num_pages,
        page_size=page_size,
        q_stride=stride_in_use(q, 0) // q_unit,
        q_token_stride=stride_in_use(q, 1) // q_unit,
        q_head_stride=stride_in_use(q, 2) // q_unit,
        weight_stride=stride_in_use(weights, 0),
        length_stride=cache_seqlens.stride(0),
        token_stride=0 if cache_seqlens.dim() == 1 else cache_seqlens.stride(1),
        table_stride=stride_in_use(block_table, 0),
        page_stride=stride_in_use(cache, 0) // unit,
        logits_stride=stride_in_use(logits, 0),
        D=head_dim,
        ENCODING=layout.encoding,
        COMPUTE=compute_type(q, layout.encoding),
        VALUE_WIDTH=layout.planes[0].width,
        SCALE_BYTES=layout.scale_bytes,
        PER_TOKEN=cache_seqlens.dim() == 2,
        Q_ALIGN=q_unit,
        ALIGN=unit,
        NATIVE=converts_e4m3(q.device),
        INTERPRETED=machine.interpreting(),
        BLOCK_Q=block_q,
        BLOCK_H=block_h,
        BLOCK_N=config.block_n,
        BLOCK_B=REQUESTS,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


@triton.jit
def tiles_of_requests(
    lengths,
    first,
    batch,
    next_n,
    max_keys,
    length_stride,
    token_stride,
    PER_TOKEN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """The number of key tiles of each of the requests ``first`` to ``first`` + BLOCK_B."""
    request = first + tl.arange(0, BLOCK_B)
    inside = request < batch
    entry = lengths + request.to(tl.int64) * length_stride
    longest = tl.load(entry, mask=inside, other=0).to(tl.int64)
    if PER_TOKEN:
        for token in range(1, next_n):
            longest = tl.maximum(longest, tl.load(entry + token * token_stride, mask=inside, other=0).to(tl.int64))
    longest = tl.minimum(tl.maximum(longest, 0), max_keys)
    return (longest + BLOCK_N - 1) // BLOCK_N


@kernel
def paged_kernel(
    q,
    cache,
    weights,
    cache_seqlens,
    block_table,
    logits,
    batch: tl.int32,
    next_n: tl.int32,
    heads: tl.int32,
    max_keys: tl.int64,
    num_pages: tl.int64,
    page_size: tl.int32,
    q_stride: tl.int64,
    q_token_stride: tl.int64,
    q_head_stride: tl.int64,
    weight_stride: tl.int64,
    length_stride: tl.int64,
    token_stride: tl.int64,
    table_stride: tl.int64,
    page_stride: tl.int64,
    logits_stride: tl.int64,
    D: tl.constexpr,
    ENCODING: tl.constexpr,
    COMPUTE: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    Q_ALIGN: tl.constexpr,
    ALIGN: tl.constexpr,
    NATIVE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    # [BLOCK_Q] and [BLOCK_Q · BLOCK_H]
    token = tl.program_id(1) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    row = tl.arange(0, BLOCK_Q * BLOCK_H)
    row_token, head = tl.program_id(1) * BLOCK_Q + row // BLOCK_H, row % BLOCK_H
    row_inside = (row_token < next_n) & (head < heads)

    total = tl.zeros([], tl.int64)
    for block in range(0, batch, BLOCK_B):
        count = tiles_of_requests(
            cache_seqlens, block, batch, next_n, max_keys, length_stride, token_stride, PER_TOKEN, BLOCK_N, BLOCK_B
        )
        total += tl.sum(count, axis=0)
    tile = total * tl.program_id(0) // tl.num_programs(0)
    last = total * (tl.program_id(0) + 1) // tl.num_programs(0)

    while tile < last:
        # The request of the tile, and the range of that request's tiles.
        request = tl.zeros([], tl.int32)
        request_first = tl.zeros([], tl.int64)
        request_stop = total
        before = tl.zeros([], tl.int64)
        for block in range(0, batch, BLOCK_B):
            count = tiles_of_requests(
                cache_seqlens, block, batch, next_n, max_keys, length_stride, token_stride, PER_TOKEN, BLOCK_N, BLOCK_B
            )
            stop = before + tl.cumsum(count, axis=0)
            passed = (stop <= tile) & (block + tl.arange(0, BLOCK_B) < batch)
            request += tl.sum(passed.to(tl.int32), axis=0)
            request_first = tl.maximum(request_first, tl.max(tl.where(passed, stop, 0), axis=0))
            request_stop = tl.minimum(request_stop, tl.min(tl.where(stop > tile, stop, total), axis=0))
            before += tl.sum(count, axis=0)
        stop_here = tl.minimum(request_stop, last)

        request_rows = request.to(tl.int64) * next_n
        length = cache_seqlens + request.to(tl.int64) * length_stride
        if PER_TOKEN:
            limit = tl.load(length + token * token_stride, mask=token < next_n, other=0).to(tl.int64)
        else:
            limit = tl.load(length).to(tl.int64) - next_n + 1 + token
        limit = tl.where(token < next_n, tl.minimum(limit, max_keys), 0)
        # Queries and weights are indexed by the request's tokens.
        queries, half_weights = load_queries(
            q + request.to(tl.int64) * q_stride * Q_ALIGN,
            weights + request_rows * weight_stride,
            row_token,
            head,
            row_inside,
            q_token_stride,
            q_head_stride,
            weight_stride,
            D,
            ENCODING,
            COMPUTE,
            NATIVE,
            Q_ALIGN,
        )
        table = block_table + request.to(tl.int64) * table_stride
        logits_row = logits + (request_rows + token) * logits_stride

        first_key = ((tile - request_first) * BLOCK_N).to(tl.int32)
        stop_key = ((stop_here - request_first) * BLOCK_N).to(tl.int32)
        for begin in range(first_key, stop_key, BLOCK_N):
            key = begin + tl.arange(0, BLOCK_N)
            page = tl.load(table + key // page_size, mask=key < max_keys, other=-1).to(tl.int64)
            found = (page >= 0) & (page < num_pages)
            page_start = cache + tl.where(found, page, 0) * page_stride * ALIGN
            offset = key % page_size
            scales = page_start
            if SCALE_BYTES > 0:
                scales = page_start + page_size * VALUE_WIDTH + offset * SCALE_BYTES
            if ENCODING == "e4m3":  # before the MMA, so that its latency is hidden
                scale = load_words(scales, 0, tl.uint32, found, ALIGN).to(tl.float32, bitcast=True)
            keys = load_keys(page_start + offset * VALUE_WIDTH, scales, found, D, ENCODING, COMPUTE, NATIVE)
            # [BLOCK_N, BLOCK_Q]
            scores = head_sums(keys, queries, half_weights, BLOCK_Q, ENCODING, COMPUTE)
            if ENCODING == "e4m3":
                scores *= scale[:, None]
            value = from_float32(scores, logits.dtype.element_ty, INTERPRETED)
            visible = key[:, None] < limit[None, :]
            tl.store(logits_row[None, :] + key[:, None], value, mask=visible)
        tile = stop_here
