"""Index logits over a paged cache: the key tiles of all requests, concatenated, are divided evenly over programs.

Every program computes the number of tiles of each request from its length.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportAttributeAccessIssue=false, reportInvalidTypeForm=false

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from flashlatte.kernels.triton.cache_layout import cdiv
from flashlatte.kernels.triton.config import padded
from flashlatte.kernels.triton.online_softmax import gpu_class
from flashlatte.kernels.triton.rows import HeadRows, TokenRows, token_row, token_rows
from flashlatte.ops.index_logits.key_ranges import LogitRows, QueryLengths, query_lengths
from flashlatte.ops.index_logits.portable.config import PAGED
from flashlatte.ops.index_logits.portable.score import (
    IndexKeys,
    load_queries,
    score_arguments,
    store_logits,
    tile_of_page,
)
from flashlatte.ops.index_logits.reference import PagedIndexLogitsParams
from flashlatte.runtime import machine
from flashlatte.runtime.triton_kernel import kernel

# Requests whose lengths are loaded together.
REQUESTS = 128


class PagedKeys(NamedTuple):
    """A request's keys below ``max_keys``: ``table`` is its row of the block table."""

    keys: IndexKeys
    table: Any
    max_keys: Any
    fills: Any = False


def paged(params: PagedIndexLogitsParams) -> None:
    q, logits, block_table = params.q, params.logits, params.block_table
    if params.clean:
        logits.fill_(-torch.inf)
    next_n, heads = q.shape[1:3]
    config = PAGED[gpu_class(q.device)]
    block_h = padded(heads)
    block_q = min(max(config.rows // block_h, 1), 1 << (next_n - 1).bit_length())
    blocks = block_q, block_h, config.block_n
    records, score = score_arguments(q.flatten(0, 1), params.weights, params.cache, None, blocks)
    lengths = query_lengths(params, block_q)
    tiles = lengths.requests * cdiv(lengths.max_keys, config.block_n)
    programs = min(tiles, config.programs * machine.num_sms(q.device))
    paged_kernel[(programs, cdiv(next_n, block_q))](
        *records,
        token_rows(block_table, align=1),
        lengths,
        token_rows(logits, align=1),
        heads=heads,
        BLOCK_B=REQUESTS,
        CONFIG=score,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


@triton.jit
def locate_paged(source, key, CONFIG: tl.constexpr):
    keys = source.keys
    page_size = keys.page_size.to(tl.int32)
    page = tl.load(source.table + key // page_size, mask=key < source.max_keys, other=-1).to(tl.int64)
    found = (page >= 0) & (page < keys.num_pages)
    start = keys.start + tl.where(found, page, 0) * keys.page_stride * CONFIG.key_align
    return tile_of_page(keys, start, page_size, key % page_size, found, CONFIG)


@triton.jit
def tiles_of_requests(lengths, first, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr):
    """The number of key tiles of each of the requests ``first`` to ``first`` + BLOCK_B."""
    request = first + tl.arange(0, BLOCK_B)
    inside = request < lengths.requests
    entry = lengths.lengths + request.to(tl.int64) * lengths.request_stride
    longest = tl.load(entry, mask=inside, other=0).to(tl.int64)
    if lengths.per_query:
        for token in range(1, lengths.next_n):
            length = tl.load(entry + token * lengths.token_stride, mask=inside, other=0)
            longest = tl.maximum(longest, length.to(tl.int64))
    longest = tl.minimum(tl.maximum(longest, 0), lengths.max_keys)
    return (longest + BLOCK_N - 1) // BLOCK_N


@kernel
def paged_kernel(
    q: HeadRows,
    weights: TokenRows,
    keys: IndexKeys,
    table: TokenRows,
    lengths: QueryLengths,
    logits: TokenRows,
    heads: tl.int32,
    BLOCK_B: tl.constexpr,
    CONFIG: tl.constexpr,
):
    BLOCK_Q: tl.constexpr = CONFIG.block_q
    BLOCK_H: tl.constexpr = CONFIG.block_h
    BLOCK_N: tl.constexpr = CONFIG.block_n
    next_n = lengths.next_n
    # [BLOCK_Q] and [BLOCK_Q · BLOCK_H]
    token = tl.program_id(1) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    row = tl.arange(0, BLOCK_Q * BLOCK_H)
    row_token, head = tl.program_id(1) * BLOCK_Q + row // BLOCK_H, row % BLOCK_H
    row_inside = (row_token < next_n) & (head < heads)

    total = tl.zeros([], tl.int64)
    for block in range(0, lengths.requests, BLOCK_B):
        total += tl.sum(tiles_of_requests(lengths, block, BLOCK_N, BLOCK_B), axis=0)
    tile = total * tl.program_id(0) // tl.num_programs(0)
    last = total * (tl.program_id(0) + 1) // tl.num_programs(0)

    while tile < last:
        # The request of the tile, and the range of that request's tiles.
        request = tl.zeros([], tl.int32)
        request_first = tl.zeros([], tl.int64)
        request_stop = total
        before = tl.zeros([], tl.int64)
        for block in range(0, lengths.requests, BLOCK_B):
            count = tiles_of_requests(lengths, block, BLOCK_N, BLOCK_B)
            stop = before + tl.cumsum(count, axis=0)
            passed = (stop <= tile) & (block + tl.arange(0, BLOCK_B) < lengths.requests)
            request += tl.sum(passed.to(tl.int32), axis=0)
            request_first = tl.maximum(request_first, tl.max(tl.where(passed, stop, 0), axis=0))
            request_stop = tl.minimum(request_stop, tl.min(tl.where(stop > tile, stop, total), axis=0))
            before += tl.sum(count, axis=0)
        stop_here = tl.minimum(request_stop, last)

        length = lengths.lengths + request.to(tl.int64) * lengths.request_stride
        if lengths.per_query:
            limit = tl.load(length + token * lengths.token_stride, mask=token < next_n, other=0).to(tl.int64)
        else:
            limit = tl.load(length).to(tl.int64) - next_n + 1 + token
        limit = tl.where(token < next_n, tl.minimum(limit, lengths.max_keys), 0)
        first_row = request.to(tl.int64) * next_n
        rows = LogitRows(None, limit, token_row(logits, first_row + token))
        query_tile = load_queries(q, weights, first_row + row_token, head, row_inside, CONFIG)
        source = PagedKeys(keys, token_row(table, request), lengths.max_keys)

        begin = ((tile - request_first) * BLOCK_N).to(tl.int32)
        end = ((stop_here - request_first) * BLOCK_N).to(tl.int32)
        store_logits(begin, end, source, query_tile, rows, locate_paged, CONFIG)
        tile = stop_here
