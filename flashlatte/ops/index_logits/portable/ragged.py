"""Index logits over contiguous keys: a program keeps a tile of queries and loops over tiles of keys."""

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
from flashlatte.ops.index_logits.key_ranges import KeyRanges, LogitRows, key_ranges
from flashlatte.ops.index_logits.portable.config import RAGGED
from flashlatte.ops.index_logits.portable.score import (
    IndexKeys,
    load_queries,
    score_arguments,
    store_logits,
    tile_of_page,
)
from flashlatte.ops.index_logits.reference import IndexLogitsParams
from flashlatte.runtime.triton_kernel import kernel


class ContiguousKeys(NamedTuple):
    keys: IndexKeys
    fills: Any = False


def ragged(params: IndexLogitsParams) -> None:
    q, k, logits = params.q, params.k, params.logits
    if params.clean:
        logits.fill_(-torch.inf)
    config = RAGGED[gpu_class(q.device)]
    block_h = padded(q.shape[1])
    block_q = max(config.rows // block_h, 1)
    blocks = block_q, block_h, config.block_n
    records, score = score_arguments(q, params.weights, k, params.k_scale, blocks)
    q_blocks = cdiv(q.shape[0], block_q)
    key_blocks = cdiv(k.shape[0], config.block_n * config.tiles)
    ragged_kernel[(q_blocks * key_blocks,)](
        *records,
        key_ranges(params),
        token_rows(logits, align=1),
        num_rows=q.shape[0],
        heads=q.shape[1],
        width=logits.shape[1],
        q_blocks=q_blocks,
        COMPRESSED=params.compressed,
        TILES=config.tiles,
        CONFIG=score,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


@triton.jit
def locate_contiguous(source, key, CONFIG: tl.constexpr):
    keys = source.keys
    return tile_of_page(keys, keys.start, keys.page_size, key, key < keys.page_size, CONFIG)


@kernel
def ragged_kernel(
    q: HeadRows,
    weights: TokenRows,
    keys: IndexKeys,
    ranges: KeyRanges,
    logits: TokenRows,
    num_rows: tl.int32,
    heads: tl.int32,
    width: tl.int64,
    q_blocks: tl.int32,
    COMPRESSED: tl.constexpr,
    TILES: tl.constexpr,
    CONFIG: tl.constexpr,
):
    BLOCK_Q: tl.constexpr = CONFIG.block_q
    BLOCK_H: tl.constexpr = CONFIG.block_h
    BLOCK_N: tl.constexpr = CONFIG.block_n
    num_keys = keys.page_size
    first_query = (tl.program_id(0) % q_blocks) * BLOCK_Q
    first_key = (tl.program_id(0) // q_blocks).to(tl.int64) * (BLOCK_N * TILES)

    # [BLOCK_Q]
    query = first_query + tl.arange(0, BLOCK_Q)
    in_rows = query < num_rows
    start = tl.load(ranges.start + query.to(tl.int64) * ranges.start_stride, mask=in_rows, other=0).to(tl.int64)
    end = tl.load(ranges.end + query.to(tl.int64) * ranges.end_stride, mask=in_rows, other=0).to(tl.int64)
    start = tl.maximum(start, 0)
    end = tl.minimum(end, num_keys)
    if COMPRESSED:
        end = tl.minimum(end, start + width)
    # The range of tiles with keys of any of these queries.
    some = start < end
    lowest = tl.maximum(tl.min(tl.where(some, start, num_keys), axis=0), first_key)
    highest = tl.minimum(tl.max(tl.where(some, end, 0), axis=0), first_key + BLOCK_N * TILES)
    begin = lowest // BLOCK_N * BLOCK_N
    if begin < highest:
        # [BLOCK_Q · BLOCK_H]
        row = tl.arange(0, BLOCK_Q * BLOCK_H)
        row_query, head = first_query + row // BLOCK_H, row % BLOCK_H
        tile = load_queries(q, weights, row_query, head, (row_query < num_rows) & (head < heads), CONFIG)
        address = token_row(logits, query)
        if COMPRESSED:
            address -= start
        rows = LogitRows(start, end, address)
        store_logits(begin, highest, ContiguousKeys(keys), tile, rows, locate_contiguous, CONFIG)
