"""The kernel of paged attention: the work of a CTA, and the write of its results.

The rows of a tile are the query heads of a key head for some tokens of a request, so a key that is loaded once is
multiplied by all of them. ``split_kv.device`` splits the keys of all tiles over CTAs.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton.language as tl

from flashlatte.kernels.triton.fp8 import to_float32
from flashlatte.kernels.triton.online_softmax import LOG2_E, load_rows
from flashlatte.ops.paged_attention.portable.attend import BlockTable, Scale, attend, fit_halves
from flashlatte.ops.paged_attention.portable.attend_bytes import attend_bytes, first_pages
from flashlatte.ops.paged_attention.portable.byte_operands import key_dims
from flashlatte.ops.paged_attention.portable.keys import KeyRows
from flashlatte.ops.paged_attention.portable.scores import Terms
from flashlatte.ops.paged_attention.portable.tiles import load_tile
from flashlatte.runtime.triton_kernel import kernel
from flashlatte.split_kv import combine, device
from flashlatte.split_kv.outputs import Outputs, write_lse, write_out


@kernel
def paged_attention_kernel(
    q,
    q_stride_token: tl.int64,
    q_stride_head: tl.int64,
    k_cache,
    k_stride_page: tl.int64,
    k_stride_token: tl.int64,
    k_stride_head: tl.int64,
    k_stride_piece: tl.int64,
    k_stride_number: tl.int64,
    v_cache,
    v_stride_page: tl.int64,
    v_stride_token: tl.int64,
    v_stride_head: tl.int64,
    v_stride_number: tl.int64,
    k_new,
    k_new_stride_token: tl.int64,
    k_new_stride_head: tl.int64,
    v_new,
    v_new_stride_token: tl.int64,
    v_new_stride_head: tl.int64,
    k_scale,
    k_scale_stride_page: tl.int64,
    k_scale_stride_token: tl.int64,
    k_scale_stride_head: tl.int64,
    k_scale_value: tl.float32,
    v_scale,
    v_scale_stride_page: tl.int64,
    v_scale_stride_token: tl.int64,
    v_scale_stride_head: tl.int64,
    v_scale_value: tl.float32,
    block_table,
    stride_table: tl.int64,
    num_pages: tl.int32,
    softmax_scale: tl.float32,
    window_left: tl.int32,
    window_right: tl.int32,
    prefix_ranges,
    num_prefix_ranges: tl.int32,
    prefix_stride_request: tl.int64,
    prefix_stride_range: tl.int64,
    softcap: tl.float32,
    alibi_slopes,
    alibi_stride: tl.int64,
    qq_bias,
    qq_bias_stride: tl.int64,
    qq_bias_size: tl.int32,
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
    empty_lse: tl.float32,
    tiles,
    tiles_stride: tl.int64,
    out_scale,
    out_scale_value: tl.float32,
    lengths,
    limit: tl.int32,
    scratch,
    num_items: tl.int32,
    heads: tl.int32,
    rows: tl.int32,
    num_groups: tl.int32,
    groups_per_head: tl.int32,
    num_splits: tl.int32,
    STEP: tl.constexpr,
    K_FORM: tl.constexpr,
    V_FORM: tl.constexpr,
    Q_ALIGN: tl.constexpr,
    OUT_ALIGN: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    OVERHEAD: tl.constexpr,
):
    """A CTA processes, for one group, one of ``num_splits`` balanced ranges of all tiles' keys, or a tile (IS_WHOLE).

    A group is BLOCK_M of the ``rows`` = tokens · ``heads`` query rows that a tile has for a key head. A CTA processes
    those of ``STEP.key_heads`` adjacent key heads together, concatenated in its rows.
    """
    BLOCK_M: tl.constexpr = STEP.block_m
    BLOCK_N: tl.constexpr = STEP.block_n
    HEADS: tl.constexpr = STEP.key_heads
    key_lengths = device.KeyLengths(num_items, 1, lengths, 1, 0, limit)
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
        1,
        heads,
        rows,
        empty_lse,
        tiles,
        tiles_stride,
        out_scale,
        out_scale_value,
    )
    table = BlockTable(block_table, stride_table, num_pages)
    cta = tl.program_id(0)
    ctas = num_groups // HEADS
    number = cta // ctas
    group_in_head = cta % ctas % groups_per_head
    cache_head = (cta % ctas // groups_per_head).to(tl.int64) * HEADS
    kv_head = cache_head
    row = tl.arange(0, HEADS * BLOCK_M) % BLOCK_M
    if STEP.in_words:
        kv_head += tl.arange(0, HEADS * BLOCK_M) // BLOCK_M  # of each row
        cache_head += tl.arange(0, HEADS)
    group = kv_head * groups_per_head + group_in_head
    first_row = group_in_head * BLOCK_M
    row += first_row
    row_token = row // heads
    head = kv_head * heads + row % heads
    in_rows = row < rows

    if k_scale is not None:
        k_scale += kv_head * k_scale_stride_head
        if not STEP.scaled_keys:
            k_scale_value = tl.load(k_scale)
    if v_scale is not None:
        v_scale += kv_head * v_scale_stride_head
        if not STEP.scaled_keys:
            v_scale_value = tl.load(v_scale)
    scale = softmax_scale * LOG2_E
    if not STEP.scaled_keys:
        scale *= k_scale_value
    if k_new is not None:
        k_new += kv_head * k_new_stride_head
        v_new += kv_head * v_new_stride_head
    slopes = 0.0
    if alibi_slopes is not None:
        slopes = tl.load(alibi_slopes + head * alibi_stride, mask=in_rows, other=0.0)
    keys_of = KeyRows(
        k_cache + cache_head * k_stride_head * K_FORM.align,
        k_stride_page,
        k_stride_token,
        k_stride_piece,
        k_stride_number,
        k_new,
        k_new_stride_token,
    )
    values_of = KeyRows(
        v_cache + cache_head * v_stride_head * V_FORM.align,
        v_stride_page,
        v_stride_token,
        0,
        v_stride_number,
        v_new,
        v_new_stride_token,
    )
    key_scale = Scale(k_scale, k_scale_stride_page, k_scale_stride_token, k_scale_value)
    value_scale = Scale(v_scale, v_scale_stride_page, v_scale_stride_token, v_scale_value)
    terms = Terms(
        window_left,
        window_right,
        prefix_ranges,
        num_prefix_ranges,
        prefix_stride_request,
        prefix_stride_range,
        softcap,
        slopes,
        qq_bias,
        qq_bias_stride,
        qq_bias_size,
    )

    if IS_WHOLE:
        # The last tiles of a prefill have the most keys: start them first, so that none runs alone at the end.
        first_item = num_items - 1 - number
        stop_item = num_items - number
    else:
        cta_range = device.find_range(number, num_splits, key_lengths, BLOCK_N, OVERHEAD)
        first_item = cta_range.first
        stop_item = cta_range.stop
        cost = cta_range.first_cost
    for item in range(first_item, stop_item):
        blocks = device.item_blocks(item, key_lengths, BLOCK_N)
        first_block = 0
        stop_block = blocks
        if not IS_WHOLE:
            first_block, stop_block = device.split_of(cta_range, cost, blocks, OVERHEAD)
            cost += blocks + OVERHEAD
        tile = load_tile(tiles, tiles_stride, item)
        if (first_block < stop_block) & (tile.tokens > 0):
            in_tile = in_rows & (row_token < tile.tokens)
            q_rows = (tile.first_token + row_token).to(tl.int64) * q_stride_token + head * q_stride_head
            if STEP.in_words:
                # Before q, because the loads of keys depend on them.
                pages = first_pages(table, tile, first_block, STEP)
                pointers = q + (q_rows * Q_ALIGN)[:, None] + key_dims(STEP.head_dim)[None, :]
                q_tile = tl.load(pointers, mask=in_tile[:, None], other=0.0)
                if STEP.interpreted:
                    q_tile = to_float32(q_tile, True)
            else:
                q_tile = load_rows(
                    q, q_rows * Q_ALIGN, in_tile, 0, min(STEP.head_dim, STEP.first), STEP.first, STEP.interpreted
                )
            q_rest = q_tile
            if STEP.rest > 0:
                q_rest = load_rows(
                    q, q_rows * Q_ALIGN, in_tile, STEP.first, STEP.head_dim - STEP.first, STEP.rest, STEP.interpreted
                )
            q_inverse = 1.0
            if STEP.halves:
                q_tile, q_rest, q_inverse = fit_halves(q_tile, q_rest, STEP.rest > 0)
                if not STEP.interpreted:
                    q_tile = q_tile.to(tl.float16)
                    q_rest = q_rest.to(tl.float16)
            cols = tl.arange(0, STEP.width_v)
            if STEP.in_words:
                values, lse2 = attend_bytes(
                    q_tile,
                    q_inverse,
                    keys_of,
                    values_of,
                    table,
                    terms,
                    tile,
                    row_token,
                    pages,
                    first_block,
                    stop_block,
                    scale,
                    K_FORM,
                    V_FORM,
                    STEP,
                )
            else:
                values, lse2 = attend(
                    q_tile,
                    q_rest,
                    q_inverse,
                    keys_of,
                    values_of,
                    key_scale,
                    value_scale,
                    table,
                    terms,
                    tile,
                    row_token,
                    first_block,
                    stop_block,
                    scale,
                    K_FORM,
                    V_FORM,
                    STEP,
                    tl.float16 if STEP.halves else q.dtype.element_ty,
                )
            if not STEP.scaled_keys:
                values *= v_scale_value[:, None] if STEP.in_words and v_scale is not None else v_scale_value
            if first_block == 0 and stop_block == blocks:
                write_out(
                    outputs,
                    item,
                    kv_head,
                    row,
                    cols,
                    values,
                    lse2,
                    STEP.head_dim_v,
                    OUT_ALIGN,
                    STEP.interpreted,
                    NATIVE_FP8,
                )
                write_lse(outputs, item, kv_head, row, lse2)
            elif not IS_WHOLE:
                partial = device.partial_of_range(number, group, num_groups, first_block > 0)
                combine.write_partial_rows(
                    scratch, partial, row - first_row, rows - first_row, values, lse2, cols, BLOCK_M, STEP.head_dim_v
                )
    if not IS_WHOLE:
        PARTIAL: tl.constexpr = BLOCK_M * (STEP.head_dim_v + 1)
        metadata = device.range_metadata(scratch, num_splits, num_groups, PARTIAL)
        tl.store(metadata + number, device.continued_item(cta_range, OVERHEAD).to(tl.float32))
