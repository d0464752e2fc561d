"""The kernel of TurboQuant decode: an online softmax over keys whose operands are made of codes in registers.

A score is the product of a query with centroids, times the key's norm over the centroids' length; that length comes
from another product, of ones with the squares. A value is its steps from the middle times its scale, plus the middle:
the scale goes into the weights that the steps are multiplied with, and of the middles a row keeps one weighted sum.
How the keys of all requests are split over CTAs: ``split_kv.device``.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashlatte.kernels.triton.online_softmax import within
from flashlatte.ops.turboquant_decode.portable.records import load_keys, load_norms, load_values, records_at, section
from flashlatte.ops.turboquant_decode.portable.words import key_dims, value_dims
from flashlatte.runtime.triton_kernel import kernel
from flashlatte.split_kv import combine, device
from flashlatte.split_kv.outputs import Outputs, write_lse, write_out


class Step(NamedTuple):
    """What a step over a block of keys is compiled for.

    Attributes:
        block_m, block_n: query rows and keys.
        page_size, num_stages: of pages, and of Triton's pipeline.
        first_value: the dim that values' words begin with.
        token_stride: from token to token in units of ``Form.align`` bytes, if it is one that caches have; else None.
    """

    block_m: int
    block_n: int
    page_size: int
    num_stages: int
    first_value: int
    token_stride: int | None


class Pages(NamedTuple):
    """A request's row of block_table, how many pages the cache has, and the strides of pages and tokens in it."""

    entries: Any
    num_pages: Any
    stride: Any
    token_stride: Any


@triton.jit
def _attend(
    q,
    row_scale,
    cache,
    head_offset,
    pages,
    length,
    last_seen,
    begin,
    end,
    CAUSAL: tl.constexpr,
    step: tl.constexpr,
    form: tl.constexpr,
):
    """(values [BLOCK_M, D] in the order of ``value_dims``, base-2 lse [BLOCK_M]) of a request's keys begin to end.

    ``q`` [BLOCK_M, D] is in the order of ``key_dims``, and ``row_scale`` [BLOCK_M] makes base-2 scores of products.
    What lies beyond ``length`` in a page may be loaded, and is not used.
    """
    M: tl.constexpr = step.block_m
    N: tl.constexpr = step.block_n
    D: tl.constexpr = form.head_dim
    PAGE_PER_BLOCK: tl.constexpr = step.page_size % N == 0
    in_block = tl.arange(0, N)
    row_max = tl.full([M], float("-inf"), tl.float32)
    row_sum = tl.zeros([M], tl.float32)
    middles = tl.zeros([M], tl.float32)
    values = tl.zeros([M, D], tl.float32)
    ones = tl.full([M, D], 1.0, q.dtype)
    never = pages.num_pages < 0
    key_part = section(cache, never, 0, form.key_bits, 0, form)
    value_part = section(cache, never, form.value_offset, form.value_bits, 1, form)
    token_stride = pages.token_stride if step.token_stride is None else step.token_stride
    first = begin if PAGE_PER_BLOCK else begin + in_block
    page = tl.load(pages.entries + first // step.page_size, mask=first < length, other=-1)
    for start in tl.range(begin, end, N, num_stages=step.num_stages):
        keys = start + in_block
        valid = within(page, pages.num_pages)
        safe = tl.where(valid, page, 0).to(tl.int64)
        exists = valid & (keys < length)
        if PAGE_PER_BLOCK:
            offset = head_offset + safe * pages.stride + (start % step.page_size) * token_stride
            records = records_at(cache, offset, in_block * token_stride, form)
        else:
            offsets = safe * pages.stride + (keys % step.page_size) * token_stride
            records = records_at(cache, head_offset, offsets, form)
        operand = load_keys(records, key_part, form)  # [D, BLOCK_N]
        scores = tl.dot(q, operand)  # [BLOCK_M, BLOCK_N]
        if form.key_bits < 8:
            squares = tl.dot(ones, operand * operand)  # every row has the squared lengths of all keys
            norm = load_norms(records, form)
            scores *= tl.where(exists, norm, 0.0)[None, :] * tl.rsqrt(squares)
        visible = exists[None, :]
        if CAUSAL:
            visible = visible & (keys[None, :] <= last_seen[:, None])
        scores = tl.where(visible, scores, float("-inf"))

        new_max = tl.maximum(row_max, tl.max(scores, axis=1))
        shift = tl.where(new_max == float("-inf"), 0.0, new_max * row_scale)
        p = tl.exp2(scores * row_scale[:, None] - shift[:, None])
        alpha = tl.exp2(row_max * row_scale - shift)
        row_sum = row_sum * alpha + tl.sum(p, axis=1)
        row_max = new_max
        steps, scale, middle = load_values(records, value_part, form)
        middles = middles * alpha + tl.sum(p * tl.where(exists, middle, 0.0)[None, :], axis=1)
        p *= tl.where(exists, scale, 0.0)[None, :]
        # The next block's page is fetched one block ahead: the addresses of its records wait for it.
        following = start + N if PAGE_PER_BLOCK else start + N + in_block
        page = tl.load(pages.entries + following // step.page_size, mask=following < length, other=-1)
        values = tl.dot(p.to(steps.dtype), steps, values * alpha[:, None])
    is_empty = row_sum == 0
    row_sum = tl.where(is_empty, 1.0, row_sum)
    lse2 = tl.where(is_empty, float("-inf"), row_max * row_scale + tl.log2(row_sum))
    return (values + middles[:, None]) * (1.0 / row_sum)[:, None], lse2


@kernel(by_element=("lengths",))
def turboquant_decode_kernel(
    q,
    row_scale,
    cache,
    page_stride: tl.int64,
    token_stride: tl.int64,
    head_stride: tl.int64,
    block_table,
    table_stride: tl.int64,
    num_pages: tl.int32,
    out,
    out_stride_request: tl.int64,
    out_stride_token: tl.int64,
    out_stride_head: tl.int64,
    lse,
    lse_stride_request: tl.int64,
    lse_stride_token: tl.int64,
    lse_stride_head: tl.int64,
    sink,
    sink_stride: tl.int64,
    tokens: tl.int32,
    heads: tl.int32,
    rows: tl.int32,
    empty_lse: tl.float32,
    lengths,
    lengths_stride_request: tl.int64,
    limit: tl.int32,
    scratch,
    num_items: tl.int32,
    num_groups: tl.int32,
    groups_per_head: tl.int32,
    num_splits: tl.int32,
    query_heads: tl.int32,
    query_tokens: tl.int32,
    STEP: tl.constexpr,
    FORM: tl.constexpr,
    CAUSAL: tl.constexpr,
    OUT_ALIGN: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    OVERHEAD: tl.constexpr,
):
    """A CTA takes, for one group, one of ``num_splits`` balanced ranges of all requests' keys, or a request (IS_WHOLE).

    A group is BLOCK_M of the ``rows`` = query_tokens · ``heads`` query rows that a request has for a key head.
    ``q`` [b, query_tokens, query_heads, D] and ``row_scale`` [b, query_tokens, query_heads] are those of ``queries``.
    """
    M: tl.constexpr = STEP.block_m
    N: tl.constexpr = STEP.block_n
    D: tl.constexpr = FORM.head_dim
    key_lengths = device.KeyLengths(num_items, 1, lengths, lengths_stride_request, 0, limit)
    outputs = Outputs(
        out,
        out_stride_request,
        out_stride_token,
        out_stride_head,
        lse,
        lse_stride_request,
        lse_stride_token,
        lse_stride_head,
        sink,
        sink_stride,
        tokens,
        heads,
        rows,
        empty_lse,
    )
    cta = tl.program_id(0)
    group = cta % num_groups
    number = cta // num_groups
    kv_head = (group // groups_per_head).to(tl.int64)
    first_row = (group % groups_per_head) * M
    row = first_row + tl.arange(0, M)
    row_token = row // heads
    in_rows = row < rows
    query_row = row_token.to(tl.int64) * query_heads + kv_head * heads + row % heads
    # Without PTX operands have their dims in order.
    q_dims = tl.arange(0, D)
    v_dims = tl.arange(0, D)
    if FORM.packed_keys:
        q_dims = key_dims(D, FORM.key_bits)
    if FORM.packed_values:
        v_dims = value_dims(D, STEP.first_value)

    if IS_WHOLE:
        first_item = number
        stop_item = number + 1
    else:
        cta_range = device.find_range(number, num_splits, key_lengths, N, OVERHEAD)
        first_item = cta_range.first
        stop_item = cta_range.stop
        cost = cta_range.first_cost
    for item in range(first_item, stop_item):
        blocks = device.item_blocks(item, key_lengths, N)
        first_block = 0
        stop_block = blocks
        if not IS_WHOLE:
            first_block, stop_block = device.split_of(cta_range, cost, blocks, OVERHEAD)
            cost += blocks + OVERHEAD
        if first_block < stop_block:
            item64 = tl.zeros([], tl.int64) + item
            length = device.key_count(item, key_lengths)
            request_rows = item64 * query_tokens * query_heads + query_row
            q_tile = tl.load(q + (request_rows * D)[:, None] + q_dims[None, :], mask=in_rows[:, None], other=0.0)
            if FORM.interpreted:
                q_tile = q_tile.to(tl.float32)
            scale = tl.load(row_scale + request_rows, mask=in_rows, other=1.0)
            values, lse2 = _attend(
                q_tile,
                scale,
                cache,
                kv_head * head_stride,
                Pages(block_table + item64 * table_stride, num_pages, page_stride, token_stride),
                length,
                length - query_tokens + row_token,
                first_block * N,
                tl.minimum(stop_block * N, length),
                CAUSAL,
                STEP,
                FORM,
            )
            if first_block == 0 and stop_block == blocks:
                write_out(outputs, item, kv_head, row, v_dims, values, lse2, D, OUT_ALIGN, FORM.interpreted)
                write_lse(outputs, item, kv_head, row, lse2)
            elif not IS_WHOLE:
                partial = device.partial_of_range(number, group, num_groups, first_block > 0)
                combine.write_partial(scratch, partial, rows - first_row, values, lse2, v_dims, M, D)
    if not IS_WHOLE:
        metadata = device.range_metadata(scratch, num_splits, num_groups, M * (D + 1))
        tl.store(metadata + number, device.continued_item(cta_range, OVERHEAD).to(tl.float32))
