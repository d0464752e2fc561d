"""The main loop of paged attention: online softmax of a tile of queries over paged and new keys.

The pages of a block are looked up one block ahead.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashlatte.kernels.triton.online_softmax import finish, softmax, within
from flashlatte.kernels.triton.rows import BlockTable, HeadRows
from flashlatte.ops.paged_attention.portable.keys import KeyAddresses, PagedRows, load_operand
from flashlatte.ops.paged_attention.portable.scores import ScoreTerms, add_terms, is_visible
from flashlatte.ops.paged_attention.portable.tiles import VisibleRanges, visible_range, visible_to_all

# P in fp16 is scaled by 2^14, so its smallest nonzero value is 2^-39 of the maximum instead of 2^-25.
P_SHIFT = tl.constexpr(14)
# Pages that are checked together.
SCAN = tl.constexpr(256)


class PagedStep(NamedTuple):
    """The constants of a step over a block of keys.

    Attributes:
        block_m, block_n: query rows and keys.
        head_dim, first, rest: elements of a key, and the widths of its two tiles; rest is 0 if one tile suffices.
        head_dim_v, width_v: elements of a value, and the width of its tile.
        page_size: tokens of a page.
        num_stages: pipeline stages of the loop over keys.
        branches: whether fully visible blocks skip the mask in a branch. Not on GPUs for which Triton then does not
            detect the chain of two MMAs, and splits rows of P over several warps.
        ahead: whether the next block's QK MMA overlaps this block's softmax.
        has_terms: whether scores have terms other than the scale; softcap, alibi, alibi_sqrt: which of them.
        scaled_keys: whether each key and value has its own scale.
        halves: operands are fp16 instead of q's dtype. Rows of q are scaled to its range; P is scaled by 2^P_SHIFT.
        in_words: both caches have one-byte elements, which ``attend_bytes`` loads as words.
        key_heads: key heads per program; 1 unless ``in_words``.
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
    branches: bool
    ahead: bool
    has_terms: bool
    softcap: bool
    alibi: bool
    alibi_sqrt: bool
    scaled_keys: bool
    halves: bool
    in_words: bool
    key_heads: int


class PagedInputs(NamedTuple):
    """The inputs of the kernel, and of the loops with pointers to the rows of their key heads.

    ``query``: q [tokens, h_q, d].
    """

    query: HeadRows
    k: PagedRows
    v: PagedRows
    table: BlockTable
    visible: VisibleRanges
    terms: ScoreTerms


class PagedQueries(NamedTuple):
    """The query rows of a tile.

    Attributes:
        first, rest: the two tiles of q, [rows, PagedStep.first] and [rows, PagedStep.rest].
        inverse: [rows], the factors that undo the scaling of q for fp16 operands.
        token: [rows], the tile's query of each row.
        slopes: [rows], ALiBi's.
    """

    first: Any
    rest: Any
    inverse: Any
    token: Any
    slopes: Any


@triton.jit
def load_pages(table, request, start, tile, step: tl.constexpr):
    """The page of the block at key ``start``, or of each of its keys, from the block table; -1 for keys that are not
    read from pages."""
    entries = table.pages + request * table.stride
    if step.page_size % step.block_n == 0:
        mask = start < tl.minimum(tile.stop_key, tile.cached)
        return tl.load(entries + start // step.page_size, mask=mask, other=-1)
    else:
        keys = start + tl.arange(0, step.block_n)
        return tl.load(entries + keys // step.page_size, mask=_in_reach(keys, tile), other=-1)


@triton.jit
def _in_reach(keys, tile):
    """The mask of keys that are in the request's pages and in the visible range of the tile."""
    stop = tl.maximum(tl.minimum(tile.stop_key, tile.cached), tile.first_key)
    return within(keys - tile.first_key, stop - tile.first_key)


@triton.jit
def _first_absent(table, request, begin, stop, PAGE_SIZE: tl.constexpr):
    """The first key of the first invalid page between keys ``begin`` and ``stop``; at least ``stop`` if all are
    valid."""
    limit = tl.cdiv(stop, PAGE_SIZE)
    absent = limit
    for first in range(begin // PAGE_SIZE, limit, SCAN):
        column = first + tl.arange(0, SCAN)
        page = tl.load(table.pages + request * table.stride + column, mask=column < limit, other=-1)
        absent = tl.minimum(absent, tl.min(tl.where(within(page, table.num_pages), limit, column)))
    return absent * PAGE_SIZE


@triton.jit
def _addresses(pages, start, first_new, tile, table, step: tl.constexpr):
    """The addresses of the keys of the block at ``start``, given their pages: one, or one per key."""
    in_block = tl.arange(0, step.block_n)
    keys = start + in_block
    in_cache = within(pages, table.num_pages)
    page = tl.where(in_cache, pages, 0).to(tl.uint32)
    is_new = (keys >= tile.first_key) & (keys < tile.stop_key) & (keys >= tile.cached)
    first = 0
    if step.page_size % step.block_n == 0:
        in_cache &= _in_reach(keys, tile)
        first = start % step.page_size
        offset = in_block
    elif step.block_n % step.page_size == 0:
        # Blocks begin at multiples of their size.
        offset = in_block % step.page_size
    else:
        offset = keys % step.page_size
    return KeyAddresses(page, first, offset, in_cache, (first_new + keys).to(tl.int64), is_new)


@triton.jit
def _scales_of(scales, addresses):
    """The scale of each key [keys]; 1 for new keys."""
    if scales.scales is None:
        return tl.where(addresses.is_new, 1.0, scales.value)
    else:
        pointers = scales.scales + addresses.page.to(tl.int64) * scales.stride_page
        pointers += (addresses.first + addresses.offset) * scales.stride_token
        return tl.load(pointers, mask=addresses.in_cache, other=1.0)


@triton.jit
def _masked(scores, addresses, start, inputs, request, position, lower, upper, step: tl.constexpr):
    """Scores [rows, keys] of the block at ``start``, -inf where masked."""
    visible = is_visible(inputs.visible, request, position, lower, upper, start + tl.arange(0, step.block_n))
    exists = addresses.in_cache if inputs.k.new.start is None else addresses.in_cache | addresses.is_new
    return tl.where(visible & exists[None, :], scores, float("-inf"))


@triton.jit
def fit_halves(q, q_rest, HAS_REST: tl.constexpr):
    """Scale rows of q by powers of two so that their largest element is 2^14 to 2^15; also returns the inverses [rows].

    fp16 then represents all elements exactly, except those below 2^-29 of the largest.
    """
    largest = tl.max(tl.abs(q.to(tl.float32)), axis=1)
    if HAS_REST:
        largest = tl.maximum(largest, tl.max(tl.abs(q_rest.to(tl.float32)), axis=1))
    exponent = largest.to(tl.int32, bitcast=True) >> 23
    exponent = tl.minimum(tl.maximum(exponent, 15), 253)
    factor = ((268 - exponent) << 23).to(tl.float32, bitcast=True)
    inverse = ((exponent - 14) << 23).to(tl.float32, bitcast=True)
    return q.to(tl.float32) * factor[:, None], q_rest.to(tl.float32) * factor[:, None], inverse


@triton.jit
def _scores(queries, keys, addresses, dtype: tl.constexpr, K_FORM: tl.constexpr, step: tl.constexpr):
    """q · k of a block's keys [BLOCK_M, BLOCK_N], without any scale."""
    k = load_operand(keys, addresses, dtype, 0, min(step.head_dim, step.first), step.first, K_FORM)
    scores = tl.dot(queries.first, tl.trans(k))
    if step.rest > 0:
        k = load_operand(keys, addresses, dtype, step.first, step.head_dim - step.first, step.rest, K_FORM)
        scores = tl.dot(queries.rest, tl.trans(k), scores)
    return scores


@triton.jit
def attend(
    queries,
    inputs,
    tile,
    first_block,
    stop_block,
    scale,
    K_FORM: tl.constexpr,
    V_FORM: tl.constexpr,
    step: tl.constexpr,
    dtype: tl.constexpr,
):
    """(values [BLOCK_M, width_v], base-2 lse [BLOCK_M]) of a tile over some of its blocks of keys.

    ``scale`` includes log2(e).
    """
    keys = inputs.k
    table = inputs.table
    window = inputs.visible.window
    BLOCK_M: tl.constexpr = step.block_m
    BLOCK_N: tl.constexpr = step.block_n
    WIDTH_V: tl.constexpr = step.width_v
    in_block = tl.arange(0, BLOCK_N)
    origin = tile.first_key // BLOCK_N * BLOCK_N
    begin = origin + first_block * BLOCK_N
    stop = tl.minimum(origin + stop_block * BLOCK_N, tile.stop_key)
    position = tile.context + tile.own + queries.token
    lower, upper = visible_range(position, tile.stop_key, window)
    first_new = tile.first_token - tile.own - tile.cached
    request = tile.request.to(tl.int64)
    if step.branches:
        # Between these two, all keys are visible to all rows.
        full_begin, full_stop = visible_to_all(tile, window)
        full_stop = tl.minimum(full_stop, tl.minimum(stop, tile.cached))
        full_stop = tl.minimum(full_stop, _first_absent(table, request, begin, full_stop, step.page_size))

    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    values = tl.zeros([BLOCK_M, WIDTH_V], tl.float32)
    pages = load_pages(table, request, begin, tile, step)
    if step.ahead:
        first_addresses = _addresses(pages, begin, first_new, tile, table, step)
        scores = _scores(queries, keys, first_addresses, dtype, K_FORM, step)
        next_pages = load_pages(table, request, begin + BLOCK_N, tile, step)
    for start in tl.range(begin, stop, BLOCK_N, num_stages=step.num_stages):
        addresses = _addresses(pages, start, first_new, tile, table, step)
        if not step.ahead:
            scores = _scores(queries, keys, addresses, dtype, K_FORM, step)
        if step.scaled_keys:
            scores *= _scales_of(keys.scales, addresses)[None, :]
        if step.halves:
            scores *= queries.inverse[:, None]
        factor = scale
        if step.has_terms:
            query = tile.own + queries.token
            scores = add_terms(
                scores * scale, inputs.terms, queries.slopes, position, start + in_block, tile.context, query, step
            )
            factor = 1.0
        if step.branches:
            if (start < full_begin) | (start + BLOCK_N > full_stop):
                # Looked up again: keeping the pages would need a register per column of a thread's scores.
                again = load_pages(table, request, start, tile, step)
                again = _addresses(again, start, first_new, tile, table, step)
                scores = _masked(scores, again, start, inputs, request, position, lower, upper, step)
        else:
            scores = _masked(scores, addresses, start, inputs, request, position, lower, upper, step)

        if step.ahead:
            next_addresses = _addresses(next_pages, start + BLOCK_N, first_new, tile, table, step)
            next_scores = _scores(queries, keys, next_addresses, dtype, K_FORM, step)
        row_max, row_sum, alpha, p = softmax(row_max, row_sum, scores, factor, P_SHIFT=P_SHIFT if step.halves else 0)
        if step.scaled_keys:
            p *= _scales_of(inputs.v.scales, addresses)[None, :]
        v = load_operand(inputs.v, addresses, dtype, 0, step.head_dim_v, step.width_v, V_FORM)
        # The next block's pages are loaded one block ahead: the addresses of its rows depend on them.
        pages = load_pages(table, request, start + BLOCK_N, tile, step)
        if step.ahead:
            # Both are loaded, because Triton does not pipeline a loop in which next_pages is carried over to pages.
            next_pages = load_pages(table, request, start + 2 * BLOCK_N, tile, step)
        values = tl.dot(p.to(v.dtype), v, values * alpha[:, None])
        if step.ahead:
            scores = next_scores
    inverse, lse2 = finish(row_max, row_sum, 1.0 if step.has_terms else scale)
    if step.halves:
        lse2 -= P_SHIFT
    return values * inverse[:, None], lse2
