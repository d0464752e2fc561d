"""The kernel of paged attention: the work of a CTA, and the write of its results.

The rows of a tile are the query heads of a key head for some tokens of a request, so a key that is loaded once is
multiplied by all of them. ``split_kv.work`` splits the keys of all tiles over CTAs.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportAttributeAccessIssue=false, reportInvalidTypeForm=false

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashlatte.kernels.triton.fp8 import to_float32
from flashlatte.kernels.triton.online_softmax import LOG2_E, load_rows
from flashlatte.kernels.triton.rows import HeadRows
from flashlatte.ops.paged_attention.portable.attend import PagedInputs, PagedQueries, attend, fit_halves
from flashlatte.ops.paged_attention.portable.attend_bytes import attend_bytes, first_pages
from flashlatte.ops.paged_attention.portable.byte_operands import key_dims
from flashlatte.ops.paged_attention.portable.keys import PagedRows, RowScales, cache_of_heads
from flashlatte.ops.paged_attention.portable.tiles import TileLengths, load_tile
from flashlatte.runtime.triton_kernel import INTERPRETED, kernel
from flashlatte.split_kv import device
from flashlatte.split_kv.device import SplitGrid
from flashlatte.split_kv.outputs import Outputs
from flashlatte.split_kv.work import GroupRows, find_work, split_of, write_metadata, write_result


class PagedGroup(NamedTuple):
    """The query rows that a CTA processes of each tile: BLOCK_M rows for each of its key heads.

    Attributes:
        number: number of its range of keys, or of its tile.
        cache_head: the key head; [key_heads] if caches are read as words.
        rows: the rows; key head and group are scalars unless caches are read as words.
        token, head: [rows], the tile's query and the query head of each row.
        in_use: [rows], whether the row exists.
    """

    number: Any
    cache_head: Any
    rows: Any
    token: Any
    head: Any
    in_use: Any


@triton.jit
def _find_group(grid, outputs, step: tl.constexpr):
    BLOCK_M: tl.constexpr = step.block_m
    HEADS: tl.constexpr = step.key_heads
    cta = tl.program_id(0)
    ctas = grid.num_groups // HEADS
    group_in_head = cta % ctas % grid.groups_per_head
    cache_head = (cta % ctas // grid.groups_per_head).to(tl.int64) * HEADS
    kv_head = cache_head
    in_group = tl.arange(0, HEADS * BLOCK_M) % BLOCK_M
    if step.in_words:
        kv_head += tl.arange(0, HEADS * BLOCK_M) // BLOCK_M
        cache_head += tl.arange(0, HEADS)
    first_row = group_in_head * BLOCK_M
    row = in_group + first_row
    return PagedGroup(
        cta // ctas,
        cache_head,
        GroupRows(kv_head * grid.groups_per_head + group_in_head, kv_head, first_row, in_group),
        row // outputs.heads,
        kv_head * outputs.heads + row % outputs.heads,
        row < outputs.rows,
    )


@triton.jit
def _load_queries(query, group, tile, slopes, step: tl.constexpr):
    """The queries of a tile; for ``attend_bytes``, with their dims in the order of ``key_dims``."""
    in_use = group.in_use & (group.token < tile.tokens)
    offsets = (tile.first_token + group.token).to(tl.int64) * query.token_stride + group.head * query.head_stride
    offsets *= query.align
    if step.in_words:
        pointers = query.start + offsets[:, None] + key_dims(step.head_dim)[None, :]
        q = tl.load(pointers, mask=in_use[:, None], other=0.0)
        if INTERPRETED:
            q = to_float32(q)
    else:
        q = load_rows(query.start, offsets, in_use, 0, min(step.head_dim, step.first), step.first)
    rest = q
    if step.rest > 0:
        rest = load_rows(query.start, offsets, in_use, step.first, step.head_dim - step.first, step.rest)
    inverse = 1.0
    if step.halves:
        q, rest, inverse = fit_halves(q, rest, step.rest > 0)
        if not INTERPRETED:
            q = q.to(tl.float16)
            rest = rest.to(tl.float16)
    return PagedQueries(q, rest, inverse, group.token, slopes)


@triton.jit
def _attend_tile(
    inputs,
    group,
    tile,
    slopes,
    first_block,
    stop_block,
    scale,
    K_FORM: tl.constexpr,
    V_FORM: tl.constexpr,
    step: tl.constexpr,
):
    """(values [rows, width_v], base-2 lse [rows]) of a tile over blocks first_block to stop_block of its keys."""
    if step.in_words:
        # Before q, because the loads of keys depend on them.
        pages = first_pages(inputs.table, tile, first_block, step)
        queries = _load_queries(inputs.query, group, tile, slopes, step)
        values, lse2 = attend_bytes(queries, inputs, tile, pages, first_block, stop_block, scale, K_FORM, V_FORM, step)
    else:
        queries = _load_queries(inputs.query, group, tile, slopes, step)
        dtype: tl.constexpr = tl.float16 if step.halves else inputs.query.start.dtype.element_ty
        values, lse2 = attend(queries, inputs, tile, first_block, stop_block, scale, K_FORM, V_FORM, step, dtype)
    if not step.scaled_keys:
        v_scale = inputs.v.scales.value
        values *= v_scale[:, None] if step.in_words and inputs.v.scales.scales is not None else v_scale
    return values, lse2


@kernel
def paged_attention_kernel(
    inputs: PagedInputs,
    tile_lengths: TileLengths,
    outputs: Outputs,
    grid: SplitGrid,
    scratch,
    softmax_scale: tl.float32,
    K_FORM: tl.constexpr,
    V_FORM: tl.constexpr,
    STEP: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """A CTA processes, for one group, a balanced range of all tiles' keys, or a tile.

    A group is BLOCK_M of the ``rows`` = tokens · ``heads`` query rows that a tile has for a key head. A CTA processes
    those of ``STEP.key_heads`` adjacent key heads together, concatenated in its rows.
    """
    key_lengths = device.KeyLengths(tile_lengths.num_tiles, None, tile_lengths.lengths, 1, 0, tile_lengths.limit)
    group = _find_group(grid, outputs, STEP)
    kv_head = group.rows.kv_head
    # Not in a function: Triton 3.6 returns no None.
    k_new = inputs.k.new.start
    v_new = inputs.v.new.start
    if k_new is not None:
        k_new += kv_head * inputs.k.new.head_stride
        v_new += kv_head * inputs.v.new.head_stride
    k_scales = inputs.k.scales.scales
    k_scale = inputs.k.scales.value
    if k_scales is not None:
        k_scales += kv_head * inputs.k.scales.stride_head
        if not STEP.scaled_keys:
            k_scale = tl.load(k_scales)
    v_scales = inputs.v.scales.scales
    v_scale = inputs.v.scales.value
    if v_scales is not None:
        v_scales += kv_head * inputs.v.scales.stride_head
        if not STEP.scaled_keys:
            v_scale = tl.load(v_scales)
    k = PagedRows(
        cache_of_heads(inputs.k.cache, group.cache_head, K_FORM),
        HeadRows(k_new, inputs.k.new.token_stride, inputs.k.new.head_stride, 1),
        RowScales(k_scales, inputs.k.scales.stride_page, inputs.k.scales.stride_token, 0, k_scale),
    )
    v = PagedRows(
        cache_of_heads(inputs.v.cache, group.cache_head, V_FORM),
        HeadRows(v_new, inputs.v.new.token_stride, inputs.v.new.head_stride, 1),
        RowScales(v_scales, inputs.v.scales.stride_page, inputs.v.scales.stride_token, 0, v_scale),
    )
    terms = inputs.terms
    inputs = PagedInputs(inputs.query, k, v, inputs.table, inputs.visible, terms)
    scale = softmax_scale * LOG2_E
    if not STEP.scaled_keys:
        scale *= k_scale
    slopes = 0.0
    if terms.alibi_slopes is not None:
        slopes = tl.load(terms.alibi_slopes + group.head * terms.alibi_stride, mask=group.in_use, other=0.0)

    number = group.number
    if scratch is None:
        # The last tiles of a prefill have the most keys: start them first, so that none runs alone at the end.
        number = tile_lengths.num_tiles - 1 - number
    work = find_work(number, grid, key_lengths, scratch, SPLIT)
    cost = work.range.first_cost
    for item in range(work.first, work.stop):
        split = split_of(work, item, cost, grid, key_lengths, scratch, SPLIT)
        cost += split.blocks + SPLIT.overhead
        tile = load_tile(outputs.tiles, outputs.tiles_stride, item)
        if (split.first < split.stop) & (tile.tokens > 0):
            values, lse2 = _attend_tile(
                inputs, group, tile, slopes, split.first, split.stop, scale, K_FORM, V_FORM, STEP
            )
            cols = tl.arange(0, STEP.width_v)
            write_result(outputs, scratch, work, split, group.rows, cols, values, lse2, grid, SPLIT)
    write_metadata(work, grid, scratch, SPLIT)
