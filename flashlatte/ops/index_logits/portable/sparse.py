"""Index logits of candidate blocks: a program holds one query and loops over some tiles of its columns.

Contiguous keys are read as a cache of one page, whose size is their number.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportInvalidTypeForm=false

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashlatte.kernels.triton.cache_layout import cdiv
from flashlatte.kernels.triton.config import padded
from flashlatte.kernels.triton.online_softmax import gpu_class
from flashlatte.kernels.triton.rows import HeadRows, TokenRows, token_row, token_rows
from flashlatte.ops.index_logits.key_ranges import LogitRows
from flashlatte.ops.index_logits.portable.config import RAGGED
from flashlatte.ops.index_logits.portable.score import (
    IndexKeys,
    load_queries,
    score_arguments,
    store_logits,
    tile_of_page,
)
from flashlatte.ops.index_logits.reference import SparseIndexLogitsParams
from flashlatte.runtime.kernel_records import ElementPointer, Int32, Int64
from flashlatte.runtime.triton_kernel import kernel


class CandidateBlocks(NamedTuple):
    """The first key of each block of ``size`` keys, and how many of its keys are visible, [rows, blocks]."""

    first: ElementPointer
    first_row_stride: Int64
    first_stride: Int64
    counts: ElementPointer
    count_row_stride: Int64
    count_stride: Int64
    size: Int32


class CandidateKeys(NamedTuple):
    """The keys of a row's blocks: pointers to their first keys and to their counts. Columns end at ``width``."""

    keys: IndexKeys
    blocks: CandidateBlocks
    first: Any
    counts: Any
    width: Any
    fills: Any = True


def sparse(params: SparseIndexLogitsParams) -> None:
    q, first, counts, logits = params.q, params.first_key, params.num_keys, params.logits
    num_rows, heads, _ = q.shape
    config = RAGGED[gpu_class(q.device)]
    width = logits.shape[1]
    tiles = cdiv(width, config.block_n * config.tiles)
    blocks = 1, padded(heads), config.block_n
    records, score = score_arguments(q, params.weights, params.k, params.k_scale, blocks)
    sparse_kernel[(num_rows * tiles,)](
        *records,
        CandidateBlocks(first, *first.stride(), counts, *counts.stride(), params.block_size),
        token_rows(logits, align=1),
        heads=heads,
        width=width,
        tiles=tiles,
        TILES=config.tiles,
        CONFIG=score,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


@triton.jit
def locate_candidates_of_row(source, column, CONFIG: tl.constexpr):
    keys, blocks = source.keys, source.blocks
    in_row = column < source.width
    block, offset = column // blocks.size, column % blocks.size
    first = tl.load(source.first + block * blocks.first_stride, mask=in_row, other=0).to(tl.int64)
    count = tl.load(source.counts + block * blocks.count_stride, mask=in_row, other=0).to(tl.int64)
    key = first + offset
    exists = (offset < count) & (key >= 0) & (key < keys.num_pages * keys.page_size)
    key = tl.where(exists, key, 0)
    page = keys.start + key // keys.page_size * keys.page_stride * CONFIG.key_align
    return tile_of_page(keys, page, keys.page_size, key % keys.page_size, exists, CONFIG)


@kernel
def sparse_kernel(
    q: HeadRows,
    weights: TokenRows,
    keys: IndexKeys,
    blocks: CandidateBlocks,
    logits: TokenRows,
    heads: tl.int32,
    width: tl.int64,
    tiles: tl.int32,
    TILES: tl.constexpr,
    CONFIG: tl.constexpr,
):
    row = (tl.program_id(0) // tiles).to(tl.int64)
    begin = (tl.program_id(0) % tiles).to(tl.int64) * (CONFIG.block_n * TILES)
    head = tl.arange(0, CONFIG.block_h)
    tile = load_queries(q, weights, row, head, head < heads, CONFIG)
    first = blocks.first + row * blocks.first_row_stride
    counts = blocks.counts + row * blocks.count_row_stride
    rows = LogitRows(None, width + tl.zeros([1], tl.int64), token_row(logits, row) + tl.zeros([1], tl.int64))
    stop = tl.minimum(begin + CONFIG.block_n * TILES, width)
    source = CandidateKeys(keys, blocks, first, counts, width)
    store_logits(begin, stop, source, tile, rows, locate_candidates_of_row, CONFIG)
