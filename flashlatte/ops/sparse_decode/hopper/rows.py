"""Rows of a cache that a work item selects: from its lists of indices to addresses, and to tiles in shared memory.

What both forms of the producer, for one CTA and for two of a cluster, have in common.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy

from flashlatte.kernels.hopper import barriers
from flashlatte.kernels.hopper.clusters import OWN
from flashlatte.kernels.hopper.mla_tiles import KEYS
from flashlatte.kernels.hopper.word_layouts import words_of
from flashlatte.ops.sparse_decode.hopper import schedule
from flashlatte.ops.sparse_decode.hopper.tiles import MODEL1, PLAIN, V32, V41, halves_copied
from flashlatte.runtime.gluon_compat import cp_async

# Bytes of a token's scales in model1, which follow the tokens of a page.
_MODEL1_SCALES = gl.constexpr(8)
# Words from a token's begin to its scales (v32, v41) and its rope.
SCALES = gl.constexpr(512 // 4)
V32_ROPE = gl.constexpr(528 // 4)
MODEL1_ROPE = gl.constexpr(448 // 4)
PLAIN_ROPE = gl.constexpr(1024 // 4)


@gluon.constexpr_function
def token_bytes(FORMAT, HAS_ROPE):
    """Bytes from token to token of a format with scales. HAS_ROPE: of ``V32``, whether it has its rope values."""
    return {V32.value: 656 if HAS_ROPE else 528, MODEL1.value: 576, V41.value: 528}[int(FORMAT)]


@gluon.constexpr_function
def copy_layout(WIDTH, IS_PLAIN):
    """Words [64, WIDTH] of 16-byte copies.

    For caches with scales a thread has the tokens of ``words_layout``. For others, which are copied whole, eight
    threads have a token's 128 bytes, of different banks.
    """
    more = [[0, 32], [0, 64]] if WIDTH == 128 else []
    if IS_PLAIN:
        reg_bases = [[0, 1], [0, 2], [16, 0], *more]
        lane_bases = [[0, 4], [0, 8], [1, 0], [0, 16], [2, 0]]
        warp_bases = [[4, 0], [8, 0], [32, 0]]
    else:
        reg_bases = [[0, 1], [0, 2], [0, 16], *more, [32, 0]]
        lane_bases = [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]]
        warp_bases = [[8, 0], [16, 0]]
    return gl.DistributedLinearLayout(reg_bases, lane_bases, warp_bases, block_bases=[], shape=[64, WIDTH])


@gluon.constexpr_function
def tokens_layout(IS_PLAIN):
    return gl.SliceLayout(1, copy_layout(32, IS_PLAIN))


class Selection(NamedTuple):
    """A cache, what its addresses are made of, and the lists of indices that select its tokens.

    Attributes:
        k_cache: in the kernel a pointer to bytes.
        page_stride, token_stride: in bytes.
        num_slots: the tokens; an index from there on is invalid.
        page_size: tokens of a page.
        page_magic, page_shift: slot // page_size = (2 · slot · page_magic) >> 32 >> page_shift.
        indices: lists at [request · indices_stride_request + token · indices_stride_token].
    """

    k_cache: Any
    page_stride: Any
    token_stride: Any
    num_slots: Any
    page_size: Any
    page_magic: Any
    page_shift: Any
    indices: Any
    indices_stride_request: Any
    indices_stride_token: Any


class Rows(NamedTuple):
    """Tokens of a block: pointers to their words, to their scales (of model1; else anything), and which are selected.
    Or heads of a query: all that exist are."""

    words: Any
    scales: Any
    valid: Any


@gluon.jit
def _list_of(selection, item, key_lengths):
    """Pointer to an item's list."""
    # Beyond the last item nothing is read, but nor should an address be.
    item = gl.minimum(item, key_lengths.num_items - 1)
    request = (item // key_lengths.tokens).to(gl.int64)
    token = (item % key_lengths.tokens).to(gl.int64)
    return selection.indices + request * selection.indices_stride_request + token * selection.indices_stride_token


@gluon.jit
def load_indices(cursor, block, call, PLAN: gl.constexpr):
    """Indices [64] of a block, -1 beyond the list or the split. Of a cluster, each CTA has its half of them first."""
    token = gl.arange(0, KEYS, tokens_layout(PLAN.format == PLAIN))
    turn = 0
    if PLAN.cluster:
        turn = call.work.group % 2 * OWN
    split, row = cursor.split, cursor.row
    first = block * KEYS
    length = split.length
    if call.extra is not None:
        is_extra = block >= split.own
        row = gl.where(is_extra, cursor.extra_row, row)
        first = gl.where(is_extra, first - split.own * KEYS, first)
        length = gl.where(is_extra, split.extra_length, length)
    length = gl.where(block < split.end, length, 0)
    # A block begins at a multiple of 64. (token ^ turn would be kept in registers.)
    position = (first ^ turn) ^ token
    return gl.load(row + position, mask=position < length, other=-1)


@gluon.jit
def locate(indices, block, split, call, PLAN: gl.constexpr):
    """Addresses of a block's tokens; those of indices outside the cache are of token 0, and not valid."""
    if call.extra is not None:
        if block >= split.own:  # noqa: SIM108
            rows = _locate(indices, call.extra, PLAN)
        else:
            rows = _locate(indices, call.own, PLAN)
        return rows
    else:
        return _locate(indices, call.own, PLAN)


@gluon.jit
def _times(count, stride):
    return count.to(gl.int64) * stride


@gluon.jit
def _words(pointers, PLAN: gl.constexpr):
    ALIGNMENT: gl.constexpr = PLAN.alignment
    return gl.multiple_of(pointers.to(gl.pointer_type(gl.int32), bitcast=True), [ALIGNMENT])


@gluon.jit
def _locate(indices, cache, PLAN: gl.constexpr):
    valid = (indices >= 0) & (indices < cache.num_slots)
    slot = gl.where(valid, indices, 0).to(gl.int32)
    token_stride = cache.token_stride.to(gl.int64) if PLAN.format == PLAIN else token_bytes(PLAN.format, PLAN.has_rope)
    if PLAN.flat:
        words = cache.k_cache + _times(slot, token_stride)
        return Rows(_words(words, PLAN), slot, valid)
    else:
        page = (gl.umulhi((slot * 2).to(gl.uint32), cache.page_magic.to(gl.uint32)) >> cache.page_shift).to(gl.int32)
        in_page = slot - page * cache.page_size
        page_start = cache.k_cache + _times(page, cache.page_stride.to(gl.int64))
        scales = slot
        if PLAN.format == MODEL1:
            scales = page_start + _times(cache.page_size, token_bytes(MODEL1, False)) + _times(in_page, _MODEL1_SCALES)
            scales = scales.to(gl.pointer_type(gl.int32), bitcast=True)
        return Rows(_words(page_start + _times(in_page, token_stride), PLAN), scales, valid)


class Cursor(NamedTuple):
    """Where a work item begins on the line of costs, the CTA's split of it, and pointers to its lists of indices."""

    cost: Any
    split: Any
    row: Any
    extra_row: Any


@gluon.jit
def cursor_at(item, cost, call, PLAN: gl.constexpr):
    split = schedule.split_of(item, cost, call.work, call.key_lengths, PLAN)
    row = _list_of(call.own, item, call.key_lengths)
    extra_row = row
    if call.extra is not None:
        extra_row = _list_of(call.extra, item, call.key_lengths)
    return Cursor(cost, split, row, extra_row)


@gluon.jit
def arrive_full(FULL: gl.constexpr, PLAN: gl.constexpr):
    barriers.arrive(FULL, 128 + PLAN.producer_threads, PLAN.producer_threads)


@gluon.jit
def copy_words(tile, rows, FIRST: gl.constexpr, COLUMN: gl.constexpr, WIDTH: gl.constexpr, IS_PLAIN: gl.constexpr):
    """Copy words from FIRST of 64 rows to words from COLUMN of a tile; 0 where a row is not valid.

    IS_PLAIN: the eight warps of a producer that only copies do, not four.
    """
    LAYOUT: gl.constexpr = copy_layout(WIDTH, IS_PLAIN)
    target = words_of(tile)
    if target.shape[1] != WIDTH:
        target = target.slice(COLUMN, WIDTH, dim=1)
    tokens: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    words = gl.convert_layout(rows.words, tokens, assert_trivial=True)[:, None]
    valid = gl.convert_layout(rows.valid, tokens, assert_trivial=True)[:, None]
    column = FIRST + gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    pointers, mask = gl.broadcast(words + column[None, :], valid)
    cp_async(target, pointers, mask=mask)


@gluon.jit
def copy_rope(k, full, rows, PLAN: gl.constexpr):
    """Copy what a token of a format with scales has in bf16, if anything, and count it to the right half."""
    if PLAN.format == V32 and PLAN.has_rope:
        copy_words(k.rope, rows, V32_ROPE, 0, 32, False)
    elif PLAN.format == MODEL1:
        copy_words(k.right, rows, MODEL1_ROPE, 96, 32, False)
    if halves_copied(PLAN.format, PLAN.has_rope) > 0:
        async_copy.mbarrier_arrive(full.right, increment_count=False)


@gluon.jit
def publish_mask(mask, rows):
    mask.store(rows.valid.to(gl.int32))
