"""The kernel of TurboQuant decode: online softmax over keys whose operands are unpacked from codes in registers.

A score is the dot product of a query with centroids, times the key's norm divided by the length of the centroids. The
squared length is computed by another MMA, of ones with the squares. A value is its code relative to the middle code,
times its scale, plus the middle value. The scale is multiplied into P, and each row accumulates the weighted sum of the
middle values. ``split_kv.work`` splits the keys of all requests over CTAs.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashlatte.kernels.triton.online_softmax import within
from flashlatte.kernels.triton.rows import BlockTable
from flashlatte.kernels.triton.turboquant import RecordCache
from flashlatte.ops.turboquant_decode.portable.records import load_keys, load_norms, load_values, records_at, section
from flashlatte.ops.turboquant_decode.portable.words import keep_tables, key_dims, value_dims, value_unit
from flashlatte.runtime.kernel_records import Int32, Pointer
from flashlatte.runtime.triton_kernel import INTERPRETED, kernel
from flashlatte.split_kv import device
from flashlatte.split_kv.device import KeyLengths, SplitGrid
from flashlatte.split_kv.outputs import Outputs
from flashlatte.split_kv.work import GroupRows, find_rows, find_work, split_of, write_metadata, write_result


class TurboQuantStep(NamedTuple):
    """The constants of a step over a block of keys.

    Attributes:
        block_m, block_n: query rows and keys.
        page_size: tokens of a page.
        num_stages: pipeline stages of the loop over keys.
        first_value: the first dim of values' words.
        packed_keys, packed_values: whether codes are unpacked by PTX.
        token_stride: token stride in units of ``RecordForm.align`` bytes, if it is one of the usual strides; else None.
    """

    block_m: int
    block_n: int
    page_size: int
    num_stages: int
    first_value: int
    packed_keys: bool
    packed_values: bool
    token_stride: int | None


class RotatedQueries(NamedTuple):
    """The results of ``queries``: ``rotated`` [b, tokens, heads, D] and ``row_scale`` [b, tokens, heads]."""

    rotated: Pointer
    row_scale: Pointer
    tokens: Int32
    heads: Int32


class TileOfRows(NamedTuple):
    """The query rows of a tile.

    Attributes:
        q: [D, BLOCK_M], in the order of ``key_dims``.
        scale: [BLOCK_M], scales dot products to base-2 scores.
        last_visible: [BLOCK_M], the last visible key of each row, if CAUSAL.
    """

    q: Any
    scale: Any
    last_visible: Any


@triton.jit
def _attend(
    rows,
    cache,
    head_offset,
    table,
    item,
    length,
    v_dims,
    begin,
    end,
    CAUSAL: tl.constexpr,
    step: tl.constexpr,
    form: tl.constexpr,
):
    """Attention over a request's keys begin to end: (values [BLOCK_M, D] in the order of ``value_dims``, base-2 lse
    [BLOCK_M]).

    Keys of a page beyond ``length`` may be loaded, and are masked.
    """
    row_scale = rows.scale
    entries = table.pages + item * table.stride
    M: tl.constexpr = step.block_m
    N: tl.constexpr = step.block_n
    D: tl.constexpr = form.head_dim
    PAGE_PER_BLOCK: tl.constexpr = step.page_size % N == 0
    in_block = tl.arange(0, N)
    row_max = tl.full([M], float("-inf"), tl.float32)
    # Each thread sums over its own keys; the sums of threads are added at the end.
    row_sum = tl.zeros([8, M], tl.float32)
    minima = tl.zeros([8, M], tl.float32)
    unit = tl.full([], 2.0**-24, tl.float32)
    values = tl.zeros([D, M], tl.float32)
    never = table.num_pages < 0
    key_part = section(cache.start, never, 0, form.key_bits, form)
    value_part = section(cache.start, never, form.value_offset, form.value_bits, form)
    token_stride = cache.stride_token if step.token_stride is None else step.token_stride
    first = begin if PAGE_PER_BLOCK else begin + in_block
    page = tl.load(entries + first // step.page_size, mask=first < length, other=-1)
    for start in tl.range(begin, end, N, num_stages=step.num_stages):
        keys = start + in_block
        valid = within(page, table.num_pages)
        safe = tl.where(valid, page, 0).to(tl.int64)
        exists = valid & (keys < length)
        if PAGE_PER_BLOCK:
            offset = head_offset + safe * cache.stride_page + (start % step.page_size) * token_stride
            records = records_at(cache.start, offset, in_block.to(tl.int64) * token_stride, form)
        else:
            offsets = safe * cache.stride_page + (keys % step.page_size) * token_stride
            records = records_at(cache.start, head_offset, offsets, form)
        operand, squared = load_keys(records, key_part, form, step.packed_keys)  # [BLOCK_N, D], [BLOCK_N, D or D / 2]
        scores = tl.dot(operand, rows.q)  # [BLOCK_N, BLOCK_M]
        if form.key_bits < 8:
            # [BLOCK_N, 8], with the squared lengths in each column
            squares = tl.dot(squared, tl.full([squared.shape[1], 8], 1.0, rows.q.dtype))
            scores = _times_each(scores, load_norms(records, form), squares)
        visible = exists[:, None]
        if CAUSAL:
            visible = visible & (keys[:, None] <= rows.last_visible[None, :])
        scores = tl.where(visible, scores, float("-inf"))

        new_max = tl.maximum(row_max, tl.max(scores, axis=0))
        shift = tl.where(new_max == float("-inf"), 0.0, new_max * row_scale)
        p = tl.exp2(scores * row_scale[None, :] - shift[None, :])
        alpha = tl.exp2(row_max * row_scale - shift)
        row_sum = row_sum * alpha[None, :] + _sum_of_eighths(p)
        row_max = new_max
        steps, scale, minimum = load_values(records, value_part, form, step.packed_values)  # [D, BLOCK_N]
        minima = minima * alpha[None, :] + _sum_of_eighths(p * tl.where(exists, minimum, 0.0)[:, None])
        # P times the scale is fp16, relative to the power of two of the largest scale so far.
        scale = tl.where(exists, scale, 0.0)
        new_unit = tl.maximum(unit, _power_of_two(tl.max(scale, axis=0)))
        p *= (scale * _reciprocal_power(new_unit))[:, None]
        alpha *= unit * _reciprocal_power(new_unit)
        unit = new_unit
        # The next block's page is loaded one block ahead: the addresses of its records depend on it.
        following = start + N if PAGE_PER_BLOCK else start + N + in_block
        page = tl.load(entries + following // step.page_size, mask=following < length, other=-1)
        values = tl.dot(steps, p.to(steps.dtype), values * alpha[None, :])
    row_sum = tl.sum(row_sum, axis=0)
    is_empty = row_sum == 0
    row_sum = tl.where(is_empty, 1.0, row_sum)
    lse2 = tl.where(is_empty, float("-inf"), row_max * row_scale + tl.log2(row_sum))
    if step.packed_values:
        values *= value_unit(v_dims)[:, None]
    values = values * unit + tl.sum(minima, axis=0)[None, :]
    return tl.trans(values * (1.0 / row_sum)[None, :]), lse2


@triton.jit
def _sum_of_eighths(x):
    """Sum x [keys, rows] to [8, rows] over every eighth key, which are in one thread."""
    return tl.sum(tl.reshape(x, [x.shape[0] // 8, 8, x.shape[1]]), axis=0)


@triton.jit
def _power_of_two(x):
    """The power of two at or below a positive normal float32; 0 for 0."""
    return (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def _reciprocal_power(x):
    """1 / x of a power of two from 2^-126 to 2^126."""
    return (0x7F000000 - x.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def _times_each(scores, norm, squares):
    """scores [keys, rows] · norm [keys] / the square root of any column of squares [keys, 8]."""
    N: tl.constexpr = scores.shape[0]
    M: tl.constexpr = scores.shape[1]
    # A thread has two adjacent columns, and needs the root of one.
    one, _ = tl.split(tl.reshape(squares, [N, 4, 2]))
    factor = norm[:, None] * tl.rsqrt(one)  # [keys, 4]
    groups = tl.reshape(scores, [N, M // 8, 4, 2]) * factor[:, None, :, None]
    return tl.reshape(groups, [N, M])


@kernel
def turboquant_decode_kernel(
    query: RotatedQueries,
    cache: RecordCache,
    table: BlockTable,
    key_lengths: KeyLengths,
    outputs: Outputs,
    grid: SplitGrid,
    scratch,
    STEP: tl.constexpr,
    FORM: tl.constexpr,
    CAUSAL: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """A CTA processes, for one group, a balanced range of all requests' keys, or a request.

    A group is BLOCK_M of the ``rows`` = query tokens · ``heads`` query rows of a request for a key head.
    """
    N: tl.constexpr = STEP.block_n
    D: tl.constexpr = FORM.head_dim
    if STEP.packed_keys and FORM.key_bits < 8:
        keep_tables(table.num_pages, FORM.key_bits)
    rows = find_rows(grid, SPLIT)
    kv_head = rows.kv_head.to(tl.int64)
    rows = GroupRows(rows.group, kv_head, rows.first, rows.in_group)
    row = rows.first + rows.in_group
    row_token = row // outputs.heads
    in_rows = row < outputs.rows
    query_row = row_token.to(tl.int64) * query.heads + kv_head * outputs.heads + row % outputs.heads
    # Without PTX, the dims of operands are in order.
    q_dims = tl.arange(0, D)
    v_dims = tl.arange(0, D)
    if STEP.packed_keys:
        q_dims = key_dims(D, FORM.key_bits)
    if STEP.packed_values:
        v_dims = value_dims(D, STEP.first_value)

    work = find_work(tl.program_id(0) // grid.num_groups, grid, key_lengths, scratch, SPLIT)
    cost = work.range.first_cost
    for item in range(work.first, work.stop):
        split = split_of(work, item, cost, grid, key_lengths, scratch, SPLIT)
        cost += split.blocks + SPLIT.overhead
        if split.first < split.stop:
            item64 = tl.zeros([], tl.int64) + item
            length = device.key_count(item, key_lengths)
            request_rows = item64 * query.tokens * query.heads + query_row
            pointers = query.rotated + (request_rows * D)[None, :] + q_dims[:, None]
            q_tile = tl.load(pointers, mask=in_rows[None, :], other=0.0)  # [D, BLOCK_M]
            if INTERPRETED:
                q_tile = q_tile.to(tl.float32)
            scale = tl.load(query.row_scale + request_rows, mask=in_rows, other=1.0)
            values, lse2 = _attend(
                TileOfRows(q_tile, scale, length - query.tokens + row_token),
                cache,
                kv_head * cache.stride_head,
                table,
                item64,
                length,
                v_dims,
                split.first * N,
                tl.minimum(split.stop * N, length),
                CAUSAL,
                STEP,
                FORM,
            )
            write_result(outputs, scratch, work, split, rows, v_dims, values, lse2, grid, SPLIT)
    write_metadata(work, grid, scratch, SPLIT)
