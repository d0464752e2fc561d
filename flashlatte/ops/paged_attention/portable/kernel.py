"""The kernel of paged attention: an online softmax over the keys that a tile of queries sees.

The rows of a tile are the query heads of a key head for some tokens of a request, so that a key that is loaded once
is multiplied with all of them. How the keys of all tiles are split over CTAs: ``split_kv.device``.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashlatte.kernels.triton.online_softmax import LOG2_E, load_rows, within
from flashlatte.ops.paged_attention.portable.keys import Places, Rows, load_operand
from flashlatte.ops.paged_attention.portable.scores import Terms, add_terms, is_visible
from flashlatte.ops.paged_attention.portable.tiles import load_tile, seen_by
from flashlatte.runtime.triton_kernel import kernel
from flashlatte.split_kv import combine, device
from flashlatte.split_kv.outputs import Outputs, write_lse, write_out


class Step(NamedTuple):
    """What a step over a block of keys is compiled for.

    Attributes:
        block_m, block_n: query rows and keys.
        head_dim, first, rest: numbers of a key, and widths of the two tiles that hold it; rest 0 if one does.
        head_dim_v, width_v: numbers of a value, and the width of its tile.
        page_size, num_stages: of pages, and of Triton's pipeline.
        has_terms: whether more is done to scores than scaling them.
        scaled_keys: whether each key and value has a scale of its own.
        interpreted: Triton's interpreter runs it.
    """

    block_m: int
    block_n: int
    head_dim: int
    first: int
    rest: int
    head_dim_v: int
    width_v: int
    page_size: int
    num_stages: int
    has_terms: bool
    scaled_keys: bool
    interpreted: bool


class Table(NamedTuple):
    """block_table, its row stride, and how many pages the cache has."""

    entries: Any
    stride: Any
    num_pages: Any


class Scale(NamedTuple):
    """Scales of one key head's cached rows, and their strides; ``each`` is None where one number serves all."""

    each: Any
    stride_page: Any
    stride_token: Any
    number: Any


@triton.jit
def _load_pages(table, request, keys, tile, PAGE_SIZE: tl.constexpr):
    """Pages of ``keys`` (one key or a vector) as the block table has them; -1 for those that are not read there."""
    stop = tl.minimum(tile.stop_key, tile.cached)
    return tl.load(table.entries + request * table.stride + keys // PAGE_SIZE, mask=keys < stop, other=-1)


@triton.jit
def _scales_of(scale, places):
    """The scale of each key [keys]; 1 for the new ones."""
    if scale.each is None:
        return tl.where(places.is_new, 1.0, scale.number)
    else:
        pointers = scale.each + places.page.to(tl.int64) * scale.stride_page + places.offset * scale.stride_token
        return tl.load(pointers, mask=places.in_cache, other=1.0)


@triton.jit
def _attend(
    q,
    q_rest,
    keys_of,
    values_of,
    k_scale,
    v_scale,
    table,
    terms,
    tile,
    row_token,
    first_block,
    stop_block,
    scale,
    K_FORM: tl.constexpr,
    V_FORM: tl.constexpr,
    step: tl.constexpr,
    dtype: tl.constexpr,
):
    """(values [BLOCK_M, width_v], base-2 lse [BLOCK_M]) of a tile over some of its blocks of keys.

    ``row_token`` [BLOCK_M]: which query of the tile a row belongs to. ``scale`` includes log2(e).
    """
    BLOCK_M: tl.constexpr = step.block_m
    BLOCK_N: tl.constexpr = step.block_n
    WIDTH_V: tl.constexpr = step.width_v
    PAGE_SIZE: tl.constexpr = step.page_size
    PAGE_PER_BLOCK: tl.constexpr = PAGE_SIZE % BLOCK_N == 0
    in_block = tl.arange(0, BLOCK_N)
    origin = tile.first_key // BLOCK_N * BLOCK_N
    begin = origin + first_block * BLOCK_N
    stop = tl.minimum(origin + stop_block * BLOCK_N, tile.stop_key)
    position = tile.context + tile.own + row_token
    lower, upper = seen_by(position, tile.stop_key, terms.window_left, terms.window_right)
    first_new = tile.first_token - tile.own - tile.cached
    request = tile.request.to(tl.int64)

    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    values = tl.zeros([BLOCK_M, WIDTH_V], tl.float32)
    pages = _load_pages(table, request, begin if PAGE_PER_BLOCK else begin + in_block, tile, PAGE_SIZE)
    for start in tl.range(begin, stop, BLOCK_N, num_stages=step.num_stages):
        keys = start + in_block
        needed = (keys >= tile.first_key) & (keys < tile.stop_key)
        offset = start % PAGE_SIZE + in_block if PAGE_PER_BLOCK else keys % PAGE_SIZE
        valid = within(pages, table.num_pages)
        in_cache = needed & (keys < tile.cached) & valid
        is_new = needed & (keys >= tile.cached)
        places = Places(tl.where(valid, pages, 0), offset, in_cache, (first_new + keys).to(tl.int64), is_new)
        k = load_operand(keys_of, places, dtype, 0, min(step.head_dim, step.first), step.first, K_FORM)
        scores = tl.dot(q, tl.trans(k))  # [BLOCK_M, BLOCK_N]
        if step.rest > 0:
            k = load_operand(keys_of, places, dtype, step.first, step.head_dim - step.first, step.rest, K_FORM)
            scores = tl.dot(q_rest, tl.trans(k), scores)
        if step.scaled_keys:
            scores *= _scales_of(k_scale, places)[None, :]
        factor = scale
        if step.has_terms:
            scores = add_terms(scores * scale, terms, position, keys, tile.context, tile.own + row_token)
            factor = 1.0
        exists = in_cache | is_new if keys_of.new is not None else in_cache
        visible = is_visible(terms, request, position, lower, upper, keys) & exists[None, :]
        scores = tl.where(visible, scores, float("-inf"))

        new_max = tl.maximum(row_max, tl.max(scores, axis=1))
        shift = tl.where(new_max == float("-inf"), 0.0, new_max * factor)
        p = tl.exp2(scores * factor - shift[:, None])
        alpha = tl.exp2(row_max * factor - shift)
        row_sum = row_sum * alpha + tl.sum(p, axis=1)
        row_max = new_max
        if step.scaled_keys:
            p *= _scales_of(v_scale, places)[None, :]
        v = load_operand(values_of, places, dtype, 0, step.head_dim_v, step.width_v, V_FORM)
        # The next block's pages are fetched one block ahead: the addresses of its rows wait for them.
        following = start + BLOCK_N
        pages = _load_pages(table, request, following if PAGE_PER_BLOCK else following + in_block, tile, PAGE_SIZE)
        values = tl.dot(p.to(v.dtype), v, values * alpha[:, None])
    is_empty = row_sum == 0
    row_sum = tl.where(is_empty, 1.0, row_sum)
    lse2 = tl.where(is_empty, float("-inf"), row_max * (1.0 if step.has_terms else scale) + tl.log2(row_sum))
    return values * (1.0 / row_sum)[:, None], lse2


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
    HAS_SOFTCAP: tl.constexpr,
    ALIBI_SQRT: tl.constexpr,
    Q_ALIGN: tl.constexpr,
    OUT_ALIGN: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    OVERHEAD: tl.constexpr,
):
    """A CTA takes, for one group, one of ``num_splits`` balanced ranges of all tiles' keys, or a tile (IS_WHOLE).

    A group is BLOCK_M of the ``rows`` = tokens · ``heads`` query rows that a tile has for a key head.
    """
    BLOCK_M: tl.constexpr = STEP.block_m
    BLOCK_N: tl.constexpr = STEP.block_n
    lists = device.KeyLengths(num_items, 1, lengths, 1, 0, limit)
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
    table = Table(block_table, stride_table, num_pages)
    cta = tl.program_id(0)
    group = cta % num_groups
    number = cta // num_groups
    kv_head = (group // groups_per_head).to(tl.int64)
    first_row = (group % groups_per_head) * BLOCK_M
    row = first_row + tl.arange(0, BLOCK_M)
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
    keys_of = Rows(
        k_cache + kv_head * k_stride_head * K_FORM.align,
        k_stride_page,
        k_stride_token,
        k_stride_piece,
        k_stride_number,
        k_new,
        k_new_stride_token,
    )
    values_of = Rows(
        v_cache + kv_head * v_stride_head * V_FORM.align,
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
        HAS_SOFTCAP,
        alibi_slopes is not None,
        slopes,
        ALIBI_SQRT,
        qq_bias,
        qq_bias_stride,
        qq_bias_size,
    )

    if IS_WHOLE:
        first_item = number
        stop_item = number + 1
    else:
        cta_range = device.find_range(number, num_splits, lists, BLOCK_N, OVERHEAD)
        first_item = cta_range.first
        stop_item = cta_range.stop
        cost = cta_range.first_cost
    for item in range(first_item, stop_item):
        blocks = device.item_blocks(item, lists, BLOCK_N)
        first_block = 0
        stop_block = blocks
        if not IS_WHOLE:
            first_block, stop_block = device.split_of(cta_range, cost, blocks, OVERHEAD)
            cost += blocks + OVERHEAD
        tile = load_tile(tiles, tiles_stride, item)
        if first_block < stop_block:
            in_tile = in_rows & (row_token < tile.tokens)
            q_rows = (tile.first_token + row_token).to(tl.int64) * q_stride_token + head * q_stride_head
            q_tile = load_rows(
                q, q_rows * Q_ALIGN, in_tile, 0, min(STEP.head_dim, STEP.first), STEP.first, STEP.interpreted
            )
            q_rest = q_tile
            if STEP.rest > 0:
                q_rest = load_rows(
                    q, q_rows * Q_ALIGN, in_tile, STEP.first, STEP.head_dim - STEP.first, STEP.rest, STEP.interpreted
                )
            values, lse2 = _attend(
                q_tile,
                q_rest,
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
                q.dtype.element_ty,
            )
            if not STEP.scaled_keys:
                values *= v_scale_value
            cols = tl.arange(0, STEP.width_v)
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
                combine.write_partial(scratch, partial, rows - first_row, values, lse2, cols, BLOCK_M, STEP.head_dim_v)
    if not IS_WHOLE:
        PARTIAL: tl.constexpr = BLOCK_M * (STEP.head_dim_v + 1)
        metadata = device.range_metadata(scratch, num_splits, num_groups, PARTIAL)
        tl.store(metadata + number, device.continued_item(cta_range, OVERHEAD).to(tl.float32))
