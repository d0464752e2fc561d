"""The kernel of dense decode: an online softmax over the pages of a request, for a block of its query rows.

A cache row is loaded once: the row is the key, its latent part the value. The queries of all tokens of a request that
share a kv head are rows of one matrix, so a key is multiplied by all of them.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportAttributeAccessIssue=false, reportInvalidTypeForm=false

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashlatte.kernels.triton.cache_row import CacheScale, load_scale
from flashlatte.kernels.triton.fp8 import e4m3_to_float, to_float32
from flashlatte.kernels.triton.online_softmax import LOG2_E, RowTile, attend, empty_state, load_tile, normalize
from flashlatte.kernels.triton.rows import BatchQuery
from flashlatte.runtime.kernel_records import Int32, Int64, Pointer
from flashlatte.runtime.triton_kernel import INTERPRETED, kernel
from flashlatte.split_kv import device
from flashlatte.split_kv.device import KeyLengths, SplitGrid
from flashlatte.split_kv.outputs import Outputs
from flashlatte.split_kv.work import find_rows, find_work, split_of, write_metadata, write_result


class DenseCache(NamedTuple):
    """k_cache [pages, page_size, h_kv, d], strides in units of k_align elements, and the pages of each request.

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


class PortableDenseDecodeConfig(NamedTuple):
    """Compile-time configuration of the kernel.

    Attributes:
        step: ``online_softmax``'s constants.
        page_size: tokens of a page.
        token_stride: elements between tokens if their rows are adjacent; None: ``DenseCache.stride_token``.
        q_align, k_align: units of the strides of q and k_cache, in elements.
        split: ``split_kv.work``'s constants.
        native_fp8: whether the cache is e4m3 and the GPU converts it in hardware.
    """

    step: Any
    page_size: Any
    token_stride: Any
    q_align: Any
    k_align: Any
    split: Any
    native_fp8: Any


@triton.jit
def _as_operand(x, dtype: tl.constexpr, NATIVE_FP8: tl.constexpr, step: tl.constexpr):
    """Cache elements as an MMA operand in q's dtype, or float32 in the interpreter."""
    if x.dtype == tl.uint8:
        x = e4m3_to_float(x, NATIVE_FP8)
        if not INTERPRETED:
            x = x.to(dtype)
        if step.ptx:
            # An opaque move. Without it, Triton converts the bytes twice, in the layout of each of the two MMAs, and no
            # longer prefetches tiles to shared memory.
            x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)
    return x


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
    return to_float32(rows) if INTERPRETED else rows


class RequestKeys(NamedTuple):
    """The ``length`` keys of kv head ``kv_head`` of request ``item``. Query row r attends to those below
    row_length[r], which is at most ``length``."""

    cache: Any
    item: Any
    kv_head: Any
    length: Any
    row_length: Any


@triton.jit
def _prefetch_pages(keys, start, stop, CONFIG: tl.constexpr, step: tl.constexpr):
    """PREFETCH of ``attend``: the page of the block at ``start``, or of each of its keys; -1 beyond the length."""
    if CONFIG.page_size % step.block_n != 0:
        start += tl.arange(0, step.block_n)
    entry = keys.cache.block_table + keys.item * keys.cache.table_stride + start // CONFIG.page_size
    return tl.load(entry, mask=start < keys.length, other=-1)


@triton.jit
def _load_keys(source, pages, start, stop, dtype: tl.constexpr, CONFIG: tl.constexpr, step: tl.constexpr):
    """LOAD of ``attend``."""
    cache = source.cache
    in_block = tl.arange(0, step.block_n)
    keys = start + in_block
    in_cache = (pages >= 0) & (pages < cache.num_pages)
    if cache.latent_boxes is None:
        exists = in_cache & (keys < source.length)
        PAGE_PER_BLOCK: tl.constexpr = CONFIG.page_size % step.block_n == 0
        token = start % CONFIG.page_size + in_block if PAGE_PER_BLOCK else keys % CONFIG.page_size
        rows = tl.where(in_cache, pages, 0).to(tl.int64) * cache.stride_page + source.kv_head * cache.stride_head
        rows += token * (cache.stride_token if CONFIG.token_stride is None else CONFIG.token_stride)
        tile = load_tile(cache.k_cache, rows * CONFIG.k_align, exists, step)
    else:
        # The last box of a request is shifted to end with the last key, because later rows of the page may be NaN. TMA
        # reads rows before the page, and pages that do not exist, as zeros.
        before = tl.maximum(start + step.block_n - stop, 0)
        keys -= before
        exists = in_cache & (keys >= start)
        page = tl.where(in_cache, pages, -1).to(tl.int32)
        tile = _load_boxes(cache, page, source.kv_head, start % CONFIG.page_size - before, step)
    visible = tl.where(exists, keys, 0x7FFFFFFF)[None, :] < source.row_length[:, None]
    # The next block's pages are loaded one block ahead: the addresses of its rows depend on them.
    pages = _prefetch_pages(source, start + step.block_n, stop, CONFIG, step)
    latent = _as_operand(tile.latent, dtype, CONFIG.native_fp8, step)
    rope = latent
    if step.rope > 0:
        rope = _as_operand(tile.rope, dtype, CONFIG.native_fp8, step)
    return RowTile(latent, rope), visible, pages


@kernel
def dense_decode_kernel(
    query: BatchQuery,
    cache: DenseCache,
    key_lengths: KeyLengths,
    outputs: Outputs,
    grid: SplitGrid,
    k_scale: CacheScale,
    scratch,
    softmax_scale: tl.float32,
    causal: tl.int32,
    CONFIG: tl.constexpr,
):
    """A CTA processes a balanced range, a fixed split of a request, or a request, for one group.

    A group is BLOCK_H of the ``rows`` = tokens · ``heads`` query rows of a kv head, which has ``groups_per_head``. The
    CTAs that read the same keys have adjacent indices, so all but the first hit the L2 cache.
    """
    step: tl.constexpr = CONFIG.step
    SPLIT: tl.constexpr = CONFIG.split
    BLOCK_N: tl.constexpr = step.block_n
    rows = find_rows(grid, SPLIT)
    kv_head = rows.kv_head
    row = rows.first + rows.in_group
    token = row // outputs.heads
    q_row = token * query.stride_token + (kv_head * outputs.heads + row % outputs.heads) * query.stride_head
    in_rows = row < outputs.rows

    key_factor = load_scale(k_scale)
    scale = softmax_scale * key_factor * LOG2_E

    work = find_work(tl.program_id(0) // grid.num_groups, grid, key_lengths, scratch, SPLIT)
    cost = work.range.first_cost
    for item in range(work.first, work.stop):
        split = split_of(work, item, cost, grid, key_lengths, scratch, SPLIT)
        cost += split.blocks + SPLIT.overhead
        if split.first < split.stop:
            q_offset = (item * query.stride_request + q_row) * CONFIG.q_align
            q_tile = load_tile(query.q, q_offset, in_rows, step)
            length = device.key_count(item, key_lengths)
            row_length = length - causal * (outputs.rows // outputs.heads - 1 - token)
            keys = RequestKeys(cache, item, kv_head, length, row_length)
            begin = split.first * BLOCK_N
            stop = tl.minimum(split.stop * BLOCK_N, length)
            state = attend(
                empty_state(step), q_tile, keys, begin, stop, scale, _prefetch_pages, _load_keys, CONFIG, step
            )
            values, lse2 = normalize(state, scale, step)
            values *= key_factor
            cols = tl.arange(0, step.latent)
            write_result(outputs, scratch, work, split, rows, cols, values, lse2, grid, SPLIT)
    write_metadata(work, grid, scratch, SPLIT)
