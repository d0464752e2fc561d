"""The kernel of dense decode: an online softmax over the pages of a request, for a block of its query rows.

A cache row is loaded once: the row is the key, its latent part the value. The queries of all tokens of a request that
share a kv head are rows of one matrix, so a key is multiplied by all of them.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from flashlatte.kernels.triton.fp8 import e4m3_to_float, to_float32
from flashlatte.kernels.triton.online_softmax import (
    LOG2_E,
    RowTile,
    empty_state,
    load_tile,
    normalize,
    online_softmax_step,
)
from flashlatte.runtime.kernel_records import Int32, Int64, Pointer
from flashlatte.runtime.triton_kernel import kernel
from flashlatte.split_kv import combine, device
from flashlatte.split_kv.device import KeyLengths, SplitGrid
from flashlatte.split_kv.outputs import Outputs, write_lse, write_out


class DenseCache(NamedTuple):
    """k_cache [pages, page_size, h_kv, d], strides in units of K_ALIGN elements, and the pages of each request.

    Attributes:
        latent_boxes, rope_boxes: TMA descriptors of the two parts of tiles, [1, 1, BLOCK_N, columns]; None if tiles are
            loaded by row addresses.
    """

    k_cache: Pointer
    latent_boxes: Pointer
    rope_boxes: Pointer
    stride_page: Int64
    stride_token: Int64
    stride_head: Int64
    num_pages: Int32
    block_table: Pointer
    table_stride: Int64


class DenseQuery(NamedTuple):
    """q [b, s_q, h_q, d], strides in units of Q_ALIGN elements."""

    q: Pointer
    stride_request: Int64
    stride_token: Int64
    stride_head: Int64


@triton.jit
def _as_operand(x, dtype: tl.constexpr, NATIVE_FP8: tl.constexpr, step: tl.constexpr):
    """Cache elements as an MMA operand in q's dtype, or float32 in the interpreter."""
    if x.dtype == tl.uint8:
        x = e4m3_to_float(x, NATIVE_FP8)
        if not step.interpreted:
            x = x.to(dtype)
        if step.ptx:
            # An opaque move. Without it, Triton converts the bytes twice, in the layout of each of the two MMAs, and no
            # longer prefetches tiles to shared memory.
            x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)
    return x


@triton.jit
def _load_pages(cache, item, keys, length, PAGE_SIZE: tl.constexpr):
    """The pages of ``keys`` (a scalar or a vector) from the block table; -1 for keys beyond the length."""
    entry = cache.block_table + item * cache.table_stride + keys // PAGE_SIZE
    return tl.load(entry, mask=keys < length, other=-1)


@triton.jit
def _load_boxes(cache, page, kv_head, token, step: tl.constexpr):
    """The rows of a page from ``token`` on; 0 for rows outside the page, and for page -1."""
    latent = _load_box(cache.latent_boxes, page, kv_head, token, 0, step.latent, step)
    rope = latent
    if step.rope > 0:
        rope = _load_box(cache.rope_boxes, page, kv_head, token, step.latent, step.rope, step)
    return RowTile(latent, rope)


@triton.jit
def _load_box(boxes, page, kv_head, token, FIRST: tl.constexpr, WIDTH: tl.constexpr, step: tl.constexpr):
    rows = tl.reshape(boxes.load([page, kv_head, token, FIRST]), [step.block_n, WIDTH])
    return to_float32(rows, True) if step.interpreted else rows


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
    """Attention of query rows over blocks of keys; returns (values, base-2 lse of each row).

    Row r attends to the keys below row_length[r], which is at most ``length``. ``scale`` includes log2(e).
    """
    BLOCK_N: tl.constexpr = step.block_n
    PAGE_PER_BLOCK: tl.constexpr = PAGE_SIZE % BLOCK_N == 0
    in_block = tl.arange(0, BLOCK_N)
    begin = first_block * BLOCK_N
    stop = tl.minimum(stop_block * BLOCK_N, length)
    state = empty_state(step)
    pages = _load_pages(cache, item, begin if PAGE_PER_BLOCK else begin + in_block, length, PAGE_SIZE)
    for start in tl.range(begin, stop, BLOCK_N, num_stages=step.num_stages):
        keys = start + in_block
        in_cache = (pages >= 0) & (pages < cache.num_pages)
        if cache.latent_boxes is None:
            exists = in_cache & (keys < length)
            token = start % PAGE_SIZE + in_block if PAGE_PER_BLOCK else keys % PAGE_SIZE
            rows = tl.where(in_cache, pages, 0).to(tl.int64) * cache.stride_page + kv_head * cache.stride_head
            rows += token * (cache.stride_token if TOKEN_STRIDE is None else TOKEN_STRIDE)
            tile = load_tile(cache.k_cache, rows * K_ALIGN, exists, step)
        else:
            # The last box of a request is shifted to end with the last key, because later rows of the page may be NaN.
            # TMA reads rows before the page, and pages that do not exist, as zeros.
            before = tl.maximum(start + BLOCK_N - stop, 0)
            keys -= before
            exists = in_cache & (keys >= start)
            page = tl.where(in_cache, pages, -1).to(tl.int32)
            tile = _load_boxes(cache, page, kv_head, start % PAGE_SIZE - before, step)
        visible = tl.where(exists, keys, 0x7FFFFFFF)[None, :] < row_length[:, None]
        # The next block's pages are loaded one block ahead: the addresses of its rows depend on them.
        following = start + BLOCK_N
        pages = _load_pages(cache, item, following if PAGE_PER_BLOCK else following + in_block, length, PAGE_SIZE)
        latent = _as_operand(tile.latent, q.latent.dtype, NATIVE_FP8, step)
        rope = latent
        if step.rope > 0:
            rope = _as_operand(tile.rope, q.latent.dtype, NATIVE_FP8, step)
        state = online_softmax_step(state, q, RowTile(latent, rope), visible, scale, start, stop, step)
    return normalize(state, scale, step)


@kernel
def dense_decode_kernel(
    query: DenseQuery,
    cache: DenseCache,
    key_lengths: KeyLengths,
    outputs: Outputs,
    grid: SplitGrid,
    scratch,
    k_scale,
    k_scale_value: tl.float32,
    softmax_scale: tl.float32,
    causal: tl.int32,
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
    """A CTA processes, for one group, one of ``num_splits`` balanced ranges (if SPLIT_BLOCKS is None) or a split of a
    request.

    A group is BLOCK_H of the ``rows`` = tokens · ``heads`` query rows of a kv head, which has ``groups_per_head``. The
    CTAs that read the same keys have adjacent indices, so all but the first hit the L2 cache.
    """
    BLOCK_H: tl.constexpr = STEP.block_h
    BLOCK_N: tl.constexpr = STEP.block_n
    cta = tl.program_id(0)
    group = cta % grid.num_groups
    number = cta // grid.num_groups
    kv_head = group // grid.groups_per_head
    first_row = (group % grid.groups_per_head) * BLOCK_H
    row = first_row + tl.arange(0, BLOCK_H)
    token = row // outputs.heads
    q_row = token * query.stride_token + (kv_head * outputs.heads + row % outputs.heads) * query.stride_head
    in_rows = row < outputs.rows

    if k_scale is not None:
        k_scale_value = tl.load(k_scale)
    scale = softmax_scale * k_scale_value * LOG2_E

    PARTIAL: tl.constexpr = BLOCK_H * (STEP.latent_dim + 1)
    if SPLIT_BLOCKS is None:
        cta_range = device.find_range(number, grid.num_splits, key_lengths, BLOCK_N, OVERHEAD)
        first_item = cta_range.first
        stop_item = cta_range.stop
        cost = cta_range.first_cost
        continued = device.continued_item(cta_range, OVERHEAD)
    else:
        local_item = number // grid.num_splits
        split = number % grid.num_splits
        first_item = grid.first_item + local_item
        stop_item = first_item + 1
    for item in range(first_item, stop_item):
        blocks = device.item_blocks(item, key_lengths, BLOCK_N)
        if SPLIT_BLOCKS is None:
            first_block, stop_block = device.split_of(cta_range, cost, blocks, OVERHEAD)
            cost += blocks + OVERHEAD
        else:
            split_size, splits = device.fixed_splits(blocks, SPLIT_BLOCKS, MAX_SPLITS)
            first_block = split * split_size
            stop_block = tl.minimum(first_block + split_size, blocks)
            if scratch is not None:
                items = tl.num_programs(0) // grid.num_groups // grid.num_splits
                metadata = device.item_metadata(scratch, items, grid.num_groups, grid.num_splits, PARTIAL)
                tl.store(metadata + local_item, splits.to(tl.float32), mask=(grid.num_splits > 1) & (split == 0))
        if first_block < stop_block:
            q_offset = (item * query.stride_request + q_row) * Q_ALIGN
            q_tile = load_tile(query.q, q_offset, in_rows, STEP)
            length = device.key_count(item, key_lengths)
            values, lse2 = _attend(
                q_tile,
                cache,
                item,
                kv_head,
                first_block,
                stop_block,
                length,
                length - causal * (outputs.rows // outputs.heads - 1 - token),
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
                write_out(outputs, item, kv_head, row, cols, values, lse2, STEP.latent_dim, OUT_ALIGN, STEP.interpreted)
                write_lse(outputs, item, kv_head, row, lse2)
            elif scratch is not None:
                if SPLIT_BLOCKS is None:
                    partial = device.partial_of_range(number, group, grid.num_groups, first_block > 0)
                else:
                    partial = device.partial_of_split(local_item, split, group, grid.num_groups, grid.num_splits)
                combine.write_partial(
                    scratch, partial, outputs.rows - first_row, values, lse2, cols, BLOCK_H, STEP.latent_dim
                )
    if SPLIT_BLOCKS is None:
        metadata = device.range_metadata(scratch, grid.num_splits, grid.num_groups, PARTIAL)
        tl.store(metadata + number, continued.to(tl.float32))
