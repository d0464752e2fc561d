"""From a list of indices to addresses in a cache."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashlatte.ops.sparse_decode.hopper.tiles import KEYS, MODEL1

# Bytes of model1's tokens and scales in their planes.
_MODEL1_SCALES = gl.constexpr(8)


class Cache(NamedTuple):
    """A cache, and what its addresses are made of.

    Attributes:
        tokens: pointer to int32 words.
        page_stride, token_stride: in units of PLAN.unit bytes.
        num_slots: the tokens; an index from there on is invalid.
        page_size: tokens of a page.
        page_magic, page_shift: slot // page_size = (2 · slot · page_magic) >> 32 >> page_shift.
    """

    tokens: Any
    page_stride: Any
    token_stride: Any
    num_slots: Any
    page_size: Any
    page_magic: Any
    page_shift: Any


class Indices(NamedTuple):
    """Lists of indices at [request · stride_request + token · stride_token]."""

    indices: Any
    stride_request: Any
    stride_token: Any


class Rows(NamedTuple):
    """Tokens of a block: pointers to their words, to their scales (of model1), and which are selected."""

    words: Any
    scales: Any
    valid: Any


@gluon.jit
def list_of(indices, item, lists):
    """Pointer to an item's list."""
    # Beyond the last item nothing is read, but nor should an address be.
    item = gl.minimum(item, lists.num_items - 1)
    request = (item // lists.tokens).to(gl.int64)
    token = (item % lists.tokens).to(gl.int64)
    return indices.indices + request * indices.stride_request + token * indices.stride_token


@gluon.jit
def load_indices(row, extra_row, block, share, lists, LAYOUT: gl.constexpr):
    """Indices of a block of an item with these lists, -1 beyond the list's or the share's end."""
    first = block * KEYS
    length = share.length
    if lists.extra_limit is not None:
        is_extra = block >= share.own
        row = gl.where(is_extra, extra_row, row)
        first = gl.where(is_extra, first - share.own * KEYS, first)
        length = gl.where(is_extra, share.extra_length, length)
    length = gl.where(block < share.end, length, 0)
    position = first + gl.arange(0, KEYS, LAYOUT)
    return gl.load(row + position, mask=position < length, other=-1)


@gluon.jit
def cache_of(cache, extra_cache, block, share, lists):
    """The cache that a block is in."""
    if lists.extra_limit is not None:
        extra = block >= share.own
        return Cache(
            gl.where(extra, extra_cache.tokens, cache.tokens),
            gl.where(extra, extra_cache.page_stride, cache.page_stride),
            gl.where(extra, extra_cache.token_stride, cache.token_stride),
            gl.where(extra, extra_cache.num_slots, cache.num_slots),
            gl.where(extra, extra_cache.page_size, cache.page_size),
            gl.where(extra, extra_cache.page_magic, cache.page_magic),
            gl.where(extra, extra_cache.page_shift, cache.page_shift),
        )
    else:
        return cache


@gluon.jit
def locate(indices, cache, PLAN: gl.constexpr):
    """Addresses of the tokens; those of indices outside the cache are of token 0, and not valid."""
    valid = (indices >= 0) & (indices < cache.num_slots)
    slot = gl.where(valid, indices, 0).to(gl.int32)
    WORDS: gl.constexpr = PLAN.unit // 4
    scales = slot
    if PLAN.flat:
        offset = slot.to(gl.int64) * cache.token_stride
    else:
        page = (gl.umulhi((slot * 2).to(gl.uint32), cache.page_magic.to(gl.uint32)) >> cache.page_shift).to(gl.int32)
        in_page = slot - page * cache.page_size
        page_start = page.to(gl.int64) * cache.page_stride
        offset = page_start + in_page.to(gl.int64) * cache.token_stride
        if PLAN.format == MODEL1:
            PLANE: gl.constexpr = 576 // 4
            scales = cache.tokens + (page_start * WORDS + cache.page_size * PLANE + in_page * (_MODEL1_SCALES // 4))
    return Rows(cache.tokens + offset * WORDS, scales, valid)
