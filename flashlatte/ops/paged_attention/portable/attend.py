"""The loop of paged attention: the online softmax of a tile of queries over keys that lie in pages, or are new.

A block's pages are looked up while the one before it is multiplied.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashlatte.kernels.triton.online_softmax import within
from flashlatte.ops.paged_attention.portable.keys import Places, load_operand
from flashlatte.ops.paged_attention.portable.scores import add_terms, is_visible
from flashlatte.ops.paged_attention.portable.tiles import seen_by

# P as fp16 is relative to 2^-14 of its maximum, so that the smallest that counts is 2^-39 of it, and not 2^-25.
P_SHIFT = tl.constexpr(14)


class Step(NamedTuple):
    """What a step over a block of keys is compiled for.

    Attributes:
        block_m, block_n: query rows and keys.
        head_dim, first, rest: numbers of a key, and widths of the two tiles that hold it; rest 0 if one does.
        head_dim_v, width_v: numbers of a value, and the width of its tile.
        page_size, num_stages: of pages, and of Triton's pipeline.
        has_terms: whether more is done to scores than scaling them; softcap, alibi, alibi_sqrt: some of it.
        scaled_keys: whether each key and value has a scale of its own.
        halves: operands are fp16, and not q's dtype. Rows of q come scaled to fit it; P is, by 2^P_SHIFT.
        in_words: both caches hold bytes, which ``attend_bytes`` reads by words.
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
    softcap: bool
    alibi: bool
    alibi_sqrt: bool
    scaled_keys: bool
    halves: bool
    in_words: bool
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
def load_pages(table, request, keys, tile, PAGE_SIZE: tl.constexpr):
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
def fit_halves(q, q_rest, HAS_REST: tl.constexpr):
    """Rows of q, times powers of two that make their largest number 2^14 to 2^15, and the inverse of those [rows].

    So fp16 has them exactly, but for numbers below 2^-29 of the largest, of which bits are lost.
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
def attend(
    q,
    q_rest,
    q_inverse,
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

    ``row_token`` [BLOCK_M]: which query of the tile a row belongs to. ``q_inverse`` [BLOCK_M]: what scores of halves
    are multiplied with. ``scale`` includes log2(e).
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
    pages = load_pages(table, request, begin if PAGE_PER_BLOCK else begin + in_block, tile, PAGE_SIZE)
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
        if step.halves:
            scores *= q_inverse[:, None]
        factor = scale
        if step.has_terms:
            scores = add_terms(
                scores * scale,
                terms,
                position,
                keys,
                tile.context,
                tile.own + row_token,
                step.softcap,
                step.alibi,
                step.alibi_sqrt,
            )
            factor = 1.0
        exists = in_cache | is_new if keys_of.new is not None else in_cache
        visible = is_visible(terms, request, position, lower, upper, keys) & exists[None, :]
        scores = tl.where(visible, scores, float("-inf"))

        new_max = tl.maximum(row_max, tl.max(scores, axis=1))
        shift = tl.where(new_max == float("-inf"), 0.0, new_max * factor)
        alpha = tl.exp2(row_max * factor - shift)
        if step.halves:
            shift -= P_SHIFT
        p = tl.exp2(scores * factor - shift[:, None])
        row_sum = row_sum * alpha + tl.sum(p, axis=1)
        row_max = new_max
        if step.scaled_keys:
            p *= _scales_of(v_scale, places)[None, :]
        v = load_operand(values_of, places, dtype, 0, step.head_dim_v, step.width_v, V_FORM)
        # The next block's pages are fetched one block ahead: the addresses of its rows wait for them.
        following = start + BLOCK_N
        pages = load_pages(table, request, following if PAGE_PER_BLOCK else following + in_block, tile, PAGE_SIZE)
        values = tl.dot(p.to(v.dtype), v, values * alpha[:, None])
    is_empty = row_sum == 0
    row_sum = tl.where(is_empty, 1.0, row_sum)
    lse2 = tl.where(is_empty, float("-inf"), row_max * (1.0 if step.has_terms else scale) + tl.log2(row_sum))
    if step.halves:
        lse2 -= P_SHIFT
    return values * (1.0 / row_sum)[:, None], lse2
