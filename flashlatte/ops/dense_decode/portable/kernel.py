"""The kernel of dense decode: an online softmax over the pages of a request, for a block of its query rows.

A cache row is loaded once: whole it is a key, its latent part is the value. The queries of all tokens of a
request that share a kv head are rows of one matrix, so that a key is multiplied with all of them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashlatte.kernels.triton.fp8 import e4m3_to_float
from flashlatte.kernels.triton.online_softmax import LOG2_E, Tile, load_tile, no_keys, normalize, weigh
from flashlatte.runtime.triton_kernel import kernel
from flashlatte.split_kv import combine, device, output_rows


class Cache(NamedTuple):
    """k_cache [pages, page_size, h_kv, d], strides in units of K_ALIGN numbers, and the pages of each request."""

    k_cache: Any
    stride_page: Any
    stride_token: Any
    stride_head: Any
    num_pages: Any
    block_table: Any
    stride_table: Any


@triton.jit
def _as_operand(x, dtype: tl.constexpr, NATIVE_FP8: tl.constexpr, step: tl.constexpr):
    """Cache numbers as a matrix operand in q's dtype, or float32 in the interpreter."""
    if x.dtype == tl.uint8:
        x = e4m3_to_float(x, NATIVE_FP8)
        if not step.interpreted:
            x = x.to(dtype)
        if step.ptx:
            # A move that Triton cannot see through. Else it moves the bytes into the layout of each of the two
            # products and converts them there, twice, and no longer copies tiles to shared memory ahead of use.
            x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)
    return x


@triton.jit
def _load_pages(cache, item, keys, length, PAGE_SIZE: tl.constexpr):
    """Pages of ``keys`` (one key or a vector) as the block table has them; -1 for keys beyond the length."""
    entry = cache.block_table + item * cache.stride_table + keys // PAGE_SIZE
    return tl.load(entry, mask=keys < length, other=-1)


@triton.jit
def _attend(
    q,
    cache,
    item,
    kv_head,
    first_block,
    stop_block,
    length,
    row_length,
    scale,
    step: tl.constexpr,
    K_ALIGN: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
):
    """Attention of query rows over blocks of keys: (values, base-2 lse of each row).

    Row r sees the keys below row_length[r], which is at most ``length``. ``scale`` includes log2(e).
    """
    BLOCK_N: tl.constexpr = step.block_n
    PAGE_PER_BLOCK: tl.constexpr = PAGE_SIZE % BLOCK_N == 0
    in_block = tl.arange(0, BLOCK_N)
    begin = first_block * BLOCK_N
    stop = tl.minimum(stop_block * BLOCK_N, length)
    state = no_keys(step)
    pages = _load_pages(cache, item, begin if PAGE_PER_BLOCK else begin + in_block, length, PAGE_SIZE)
    for start in tl.range(begin, stop, BLOCK_N, num_stages=step.num_stages):
        keys = start + in_block
        in_cache = (pages >= 0) & (pages < cache.num_pages)
        exists = in_cache & (keys < length)
        visible = tl.where(exists, keys, 0x7FFFFFFF)[None, :] < row_length[:, None]
        token = start % PAGE_SIZE + in_block if PAGE_PER_BLOCK else keys % PAGE_SIZE
        rows = tl.where(in_cache, pages, 0).to(tl.int64) * cache.stride_page + kv_head * cache.stride_head
        rows += token * (cache.stride_token if TOKEN_STRIDE is None else TOKEN_STRIDE)
        tile = load_tile(cache.k_cache, rows * K_ALIGN, exists, step)
        # The next block's pages are fetched one block ahead: the addresses of its rows wait for them.
        following = start + BLOCK_N
        pages = _load_pages(cache, item, following if PAGE_PER_BLOCK else following + in_block, length, PAGE_SIZE)
        latent = _as_operand(tile.latent, q.latent.dtype, NATIVE_FP8, step)
        rope = latent
        if step.rope > 0:
            rope = _as_operand(tile.rope, q.latent.dtype, NATIVE_FP8, step)
        state = weigh(state, q, Tile(latent, rope), visible, scale, start, stop, step)
    return normalize(state, scale, step)


@kernel
def dense_decode_kernel(
    q,
    q_stride_request: tl.int64,
    q_stride_token: tl.int64,
    q_stride_head: tl.int64,
    k_cache,
    k_stride_page: tl.int64,
    k_stride_token: tl.int64,
    k_stride_head: tl.int64,
    num_pages: tl.int32,
    block_table,
    stride_table: tl.int64,
    cache_seqlens,
    stride_seqlens: tl.int64,
    limit: tl.int32,
    k_scale,
    k_scale_value: tl.float32,
    softmax_scale: tl.float32,
    causal: tl.int32,
    out,
    out_stride_request: tl.int64,
    out_stride_token: tl.int64,
    out_stride_head: tl.int64,
    lse,
    lse_stride_request: tl.int64,
    lse_stride_token: tl.int64,
    lse_stride_head: tl.int64,
    empty_lse: tl.float32,
    scratch,
    requests: tl.int32,
    heads: tl.int32,
    rows: tl.int32,
    num_groups: tl.int32,
    row_blocks: tl.int32,
    parts: tl.int32,
    first_request: tl.int32,
    STEP: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    Q_ALIGN: tl.constexpr,
    K_ALIGN: tl.constexpr,
    OUT_ALIGN: tl.constexpr,
    OVERHEAD: tl.constexpr,
    SPLIT_BLOCKS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
):
    """A program takes one part (SPLIT_BLOCKS None) or one of ``parts`` splits of a request, for one group of rows.

    A group is BLOCK_H of the ``rows`` = tokens · ``heads`` query rows of a kv head, which has ``row_blocks`` of them.
    The programs that read the same keys have adjacent numbers, so that the L2 cache serves all but the first.
    """
    BLOCK_H: tl.constexpr = STEP.block_h
    BLOCK_N: tl.constexpr = STEP.block_n
    cache = Cache(k_cache, k_stride_page, k_stride_token, k_stride_head, num_pages, block_table, stride_table)
    lists = device.KeyLists(requests, 1, cache_seqlens, stride_seqlens, 0, limit, None, 0, 0, None)
    outputs = output_rows.Outputs(
        out,
        out_stride_request,
        out_stride_token,
        out_stride_head,
        lse,
        lse_stride_request,
        lse_stride_token,
        lse_stride_head,
        None,
        0,
        1,
        heads,
        rows,
        empty_lse,
    )
    program = tl.program_id(0)
    group = program % num_groups
    unit = program // num_groups
    kv_head = group // row_blocks
    first_row = (group % row_blocks) * BLOCK_H
    row = first_row + tl.arange(0, BLOCK_H)
    token = row // heads
    q_row = token * q_stride_token + (kv_head * heads + row % heads) * q_stride_head
    in_rows = row < rows

    if k_scale is not None:
        k_scale_value = tl.load(k_scale)
    scale = softmax_scale * k_scale_value * LOG2_E

    if SPLIT_BLOCKS is None:
        part = device.find_part(unit, parts, lists, BLOCK_N, OVERHEAD)
        first_item = part.first
        stop_item = part.stop
        cost = part.first_cost
    else:
        first_item = first_request + unit // parts
        stop_item = first_item + 1
    for item in range(first_item, stop_item):
        blocks = device.item_blocks(item, lists, BLOCK_N)
        if SPLIT_BLOCKS is None:
            first_block, stop_block = device.share(part, cost, blocks, OVERHEAD)
            cost += blocks + OVERHEAD
        else:
            split_size, _ = device.fixed_splits(blocks, SPLIT_BLOCKS, MAX_SPLITS)
            first_block = (unit % parts) * split_size
            stop_block = tl.minimum(first_block + split_size, blocks)
        if first_block < stop_block:
            q_offset = (item * q_stride_request + q_row) * Q_ALIGN
            q_tile = load_tile(q, q_offset, in_rows, STEP)
            length = device.key_count(item, lists)
            values, lse2 = _attend(
                q_tile,
                cache,
                item,
                kv_head,
                first_block,
                stop_block,
                length,
                length - causal * (rows // heads - 1 - token),
                scale,
                STEP,
                K_ALIGN,
                PAGE_SIZE,
                TOKEN_STRIDE,
                NATIVE_FP8,
            )
            values *= k_scale_value
            cols = tl.arange(0, STEP.latent)
            if first_block == 0 and stop_block == blocks:
                output_rows.write_out(
                    outputs, item, kv_head, row, cols, values, lse2, STEP.latent_dim, OUT_ALIGN, STEP.interpreted
                )
                output_rows.write_lse(outputs, item, kv_head, row, lse2)
            elif scratch is not None:
                if SPLIT_BLOCKS is None:
                    record = device.part_record(unit, group, num_groups, first_block > 0)
                else:
                    record = device.fixed_record(unit // parts, unit % parts, group, num_groups, parts)
                combine.write_record(scratch, record, rows - first_row, values, lse2, cols, BLOCK_H, STEP.latent_dim)
