"""The producer: eight warps that fill the consumers' tiles.

A block passes in halves: the left 256 columns and the right ones. Tokens of caches with scales lie in registers from
the moment they are asked for until their half of the tile is free, are widened to bf16 there, and stored. Two halves
are under way at any time: in the order in which halves become free, block 0's left, block 0's right, block 1's right,
block 1's left. Indices are asked for a pair of blocks ahead. All that is bf16 in the cache is copied by cp.async.

It is the partition that the program begins as, and so has the arguments of the kernel at hand, in constant memory:
to the others they come in registers, which are what it lacks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from flashlatte import named_barriers
from flashlatte.gluon_compat import cp_async
from flashlatte.ops.sparse_decode.hopper import schedule, tiles
from flashlatte.ops.sparse_decode.hopper.conversion import factor_of_exponent, factor_of_float, widened
from flashlatte.ops.sparse_decode.hopper.selection import cache_of, list_of, load_indices, locate
from flashlatte.ops.sparse_decode.hopper.tiles import KEYS, MODEL1, PLAIN, ROWS, SWIZZLED_WORDS, THREE, V32

_reinterpret = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret


@gluon.constexpr_function
def _words_layout(GROUPS, WIDTH):
    """Words [64, GROUPS, WIDTH] of 256 columns, or of 128 or 64: a thread has 16 bytes at a time of two tokens.

    Eight threads that store together have two tokens' neighbouring 128 bytes of bf16, in different banks.
    """
    columns = [[0, 0, 4], [0, 0, 8], [1, 0, 0]]
    columns += [[0, 0, 16]] if WIDTH == 32 else [[0, 1, 0]] if GROUPS > 1 else [[0, 0, 0]]
    more = [[0, GROUPS // 2, 0]] if GROUPS * WIDTH == 64 else []
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 0, 2], *more, [16, 0, 0]],
        lane_bases=[*columns, [2, 0, 0]],
        warp_bases=[[4, 0, 0], [8, 0, 0], [32, 0, 0]],
        block_bases=[],
        shape=[64, GROUPS, WIDTH],
    )


@gluon.constexpr_function
def _copy_layout(WIDTH):
    """Words [64, WIDTH] of 16-byte copies, of the same tokens for a thread as ``_words_layout``."""
    more = [[0, 32], [0, 64]] if WIDTH == 128 else []
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [16, 0], *more],
        lane_bases=[[0, 4], [0, 8], [1, 0], [0, 16], [2, 0]],
        warp_bases=[[4, 0], [8, 0], [32, 0]],
        block_bases=[],
        shape=[64, WIDTH],
    )


_NARROW_COPY = gl.constexpr(_copy_layout(32))
_WIDE_COPY = gl.constexpr(_copy_layout(128))
_TOKENS = gl.constexpr(gl.SliceLayout(1, _copy_layout(32)))
_THREADS = gl.constexpr(gl.BlockedLayout([1], [32], [8], [0]))

# Words from a token's begin to its scales (v32) and its rope.
_V32_SCALES = gl.constexpr(512 // 4)
_V32_ROPE = gl.constexpr(528 // 4)
_MODEL1_ROPE = gl.constexpr(448 // 4)
_PLAIN_ROPE = gl.constexpr(1024 // 4)


class Query(NamedTuple):
    """The queries as words, their strides in units of 16 bytes."""

    q: Any
    stride_request: Any
    stride_token: Any
    stride_head: Any
    heads: Any


class Half(NamedTuple):
    """Half of a block as it lies in the cache: its words (of model1's right half, the last in ``tail``), their scales,
    and which tokens are selected."""

    words: Any
    tail: Any
    scales: Any
    valid: Any


class Cursor(NamedTuple):
    """An item's place on the line of costs, the program's share of it, and pointers to its lists of indices."""

    cost: Any
    share: Any
    row: Any
    extra_row: Any


@gluon.jit
def _arrive(BARRIER: gl.constexpr, THREADS: gl.constexpr):
    gl.inline_asm_elementwise(
        named_barriers._instruction("bar.arrive", BARRIER, THREADS),
        "=r,r",
        [gl.arange(0, 256, _THREADS)],
        gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _wait(BARRIER: gl.constexpr, THREADS: gl.constexpr):
    gl.inline_asm_elementwise(
        named_barriers._instruction("bar.sync", BARRIER, THREADS),
        "=r,r",
        [gl.arange(0, 256, _THREADS)],
        gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _per_group(x, LAYOUT: gl.constexpr):
    """[64] per token as [64, 1] for the words of a ``LAYOUT``."""
    return gl.convert_layout(x, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)), assert_trivial=True)[:, None]


@gluon.jit
def _load_words(rows, FIRST: gl.constexpr, LAYOUT: gl.constexpr):
    GROUPS: gl.constexpr = LAYOUT.shape[1]
    WIDTH: gl.constexpr = LAYOUT.shape[2]
    group = gl.arange(0, GROUPS, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    word = gl.arange(0, WIDTH, gl.SliceLayout(0, gl.SliceLayout(0, LAYOUT)))
    offsets = FIRST + (group * WIDTH)[None, :][:, :, None] + word[None, :][None, :, :]
    pointers = _per_group(rows.words, LAYOUT)[:, :, None] + offsets
    pointers, mask = gl.broadcast(pointers, _per_group(rows.valid, LAYOUT)[:, :, None])
    return gl.load(pointers, mask=mask)


@gluon.jit
def _load_half(rows, SIDE: gl.constexpr, PLAN: gl.constexpr):
    """Ask for half of the rows."""
    if PLAN.format == V32:
        LAYOUT: gl.constexpr = _words_layout(2, 32)
        words = _load_words(rows, SIDE * 64, LAYOUT)
        group = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
        pointers = _per_group(rows.words, LAYOUT) + (_V32_SCALES + 2 * SIDE + group)[None, :]
        pointers, mask = gl.broadcast(pointers, _per_group(rows.valid, LAYOUT))
        return Half(words, rows.valid, gl.load(pointers, mask=mask, other=0), rows.valid)
    elif PLAN.format == MODEL1:
        words = _load_words(rows, SIDE * 64, _words_layout(4 - 2 * SIDE, 16))
        tail = rows.valid
        if SIDE == 1:
            tail = _load_words(rows, 96, _words_layout(1, 16))
        return Half(words, tail, gl.load(rows.scales + SIDE, mask=rows.valid, other=0), rows.valid)
    else:
        return rows


@gluon.jit
def _widen(words, scales, valid, FIRST_GROUP: gl.constexpr, PLAN: gl.constexpr):
    LAYOUT: gl.constexpr = words.type.layout
    if PLAN.format == V32:
        # Those of tokens that are not selected were read as 0.
        factor = factor_of_float(scales.to(gl.float32, bitcast=True))
    else:
        valid = _per_group(valid, LAYOUT)
        group = FIRST_GROUP + gl.arange(0, words.shape[1], gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
        factor = factor_of_exponent((_per_group(scales, LAYOUT) >> (8 * group)[None, :]) & 255, valid)
    return widened(words, factor)


@gluon.jit
def _fill(tile, half, SIDE: gl.constexpr, PLAN: gl.constexpr):
    """Widen half of a block into its tile."""
    target = _reinterpret(tile.index(0), gl.int32, [KEYS, 128], SWIZZLED_WORDS)
    if SIDE == 1 and PLAN.format == MODEL1:
        target.slice(0, 64, dim=1).store(_widen(half.words, half.scales, half.valid, 0, PLAN))
        target.slice(64, 32, dim=1).store(_widen(half.tail, half.scales, half.valid, 2, PLAN))
    else:
        target.store(_widen(half.words, half.scales, half.valid, 0, PLAN))


@gluon.jit
def _copy(tile, rows, valid, FIRST: gl.constexpr, COLUMN: gl.constexpr, WIDTH: gl.constexpr):
    """Copy words from FIRST of the rows to words from COLUMN of a tile; 0 where a token is not selected."""
    LAYOUT: gl.constexpr = _NARROW_COPY if WIDTH == 32 else _WIDE_COPY
    ALL: gl.constexpr = tile.shape[2] // 2
    target = _reinterpret(tile.index(0), gl.int32, [ROWS, ALL], SWIZZLED_WORDS)
    if WIDTH != ALL:
        target = target.slice(COLUMN, WIDTH, dim=1)
    tokens: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    rows = gl.convert_layout(rows, tokens, assert_trivial=True)[:, None]
    valid = gl.convert_layout(valid, tokens, assert_trivial=True)[:, None]
    column = FIRST + gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    pointers, mask = gl.broadcast(rows + column[None, :], valid)
    cp_async(target, pointers, mask=mask)


@gluon.jit
def _signal(barrier):
    async_copy.mbarrier_arrive(barrier, increment_count=False)


@gluon.jit
def _provide(
    tile,
    rope_tile,
    half,
    rows,
    copied,
    SIDE: gl.constexpr,
    READY: gl.constexpr,
    PLAN: gl.constexpr,
):
    """Fill half of a block, once it is free, and say so. ``copied`` is the mbarrier of what comes by cp.async."""
    if PLAN.format == PLAIN:
        _copy(tile, rows.words, rows.valid, SIDE * 128, 0, 128)
        if SIDE == 1 and PLAN.has_rope:
            _copy(rope_tile, rows.words, rows.valid, _PLAIN_ROPE, 0, 32)
        _signal(copied)
    else:
        if SIDE == 1:
            if PLAN.format == V32:
                _copy(rope_tile, rows.words, rows.valid, _V32_ROPE, 0, 32)
            else:
                _copy(tile, rows.words, rows.valid, _MODEL1_ROPE, 96, 32)
            _signal(copied)
        _fill(tile, half, SIDE, PLAN)
    _arrive(READY, THREE)


@gluon.jit
def _publish(mask, rows):
    mask.store(rows.valid.to(gl.int32))


@gluon.jit
def _copy_query(shared, ready, query, item, place, lists, PLAN: gl.constexpr):
    head = place.group * ROWS + gl.arange(0, ROWS, _TOKENS)
    offset = (
        (item // lists.tokens).to(gl.int64) * query.stride_request
        + (item % lists.tokens).to(gl.int64) * query.stride_token
        + head.to(gl.int64) * query.stride_head
    )
    rows = query.q + offset * 4
    valid = head < query.heads
    _copy(shared.q_left, rows, valid, 0, 0, 128)
    _copy(shared.q_right, rows, valid, 128, 0, 128)
    if PLAN.has_rope:
        _copy(shared.q_rope, rows, valid, 256, 0, 32)
    _signal(ready.query)


@gluon.jit
def _cursor(item, cost, selection, place, lists, PLAN: gl.constexpr):
    own, extra = selection
    share = schedule.share_of(item, cost, place, lists, PLAN)
    row = list_of(own, item, lists)
    extra_row = row
    if lists.extra_limit is not None:
        extra_row = list_of(extra, item, lists)
    return Cursor(cost, share, row, extra_row)


@gluon.jit
def _indices(cursor, block, lists):
    return load_indices(cursor.row, cursor.extra_row, block, cursor.share, lists, _TOKENS)


@gluon.jit
def _rows(indices, caches, cursor, block, lists, PLAN: gl.constexpr):
    own, extra = caches
    return locate(indices, cache_of(own, extra, block, cursor.share, lists), PLAN)


@gluon.jit
def produce(query, caches, selection, lists, place, shared, ready, PLAN: gl.constexpr):
    cursor = _cursor(place.part.first, place.part.first_cost, selection, place, lists, PLAN)
    block0 = cursor.share.begin
    indices0 = _indices(cursor, block0, lists)
    indices1 = _indices(cursor, block0 + 1, lists)
    rows0 = _rows(indices0, caches, cursor, block0, lists, PLAN)
    left0 = _load_half(rows0, 0, PLAN)
    right0 = _load_half(rows0, 1, PLAN)
    query_phase = 1
    for item in range(place.part.first, place.part.stop, place.stride):
        pairs = schedule.pairs_of(cursor.share)
        if pairs > 0:
            mbarrier.wait(ready.query_free, query_phase)
            query_phase ^= 1
            _copy_query(shared, ready, query, item, place, lists, PLAN)
        for pair in range(pairs):
            _wait(tiles.K0_LEFT_FREE, THREE)
            # Addresses are computed again rather than kept: registers are what this loop lacks.
            rows0 = _rows(indices0, caches, cursor, block0, lists, PLAN)
            _publish(shared.mask0, rows0)
            _provide(shared.k0_left, shared.k0_rope, left0, rows0, ready.k0_left, 0, tiles.K0_LEFT_READY, PLAN)
            rows1 = _rows(indices1, caches, cursor, block0 + 1, lists, PLAN)
            right1 = _load_half(rows1, 1, PLAN)
            _wait(tiles.K0_RIGHT_FREE, THREE)
            _provide(shared.k0_right, shared.k0_rope, right0, rows0, ready.k0_right, 1, tiles.K0_RIGHT_READY, PLAN)
            left1 = _load_half(rows1, 0, PLAN)

            block0 += 2
            if pair == pairs - 1:
                cost = cursor.cost + PLAN.overhead + cursor.share.blocks
                cursor = _cursor(item + place.stride, cost, selection, place, lists, PLAN)
                block0 = cursor.share.begin
            indices0 = _indices(cursor, block0, lists)
            indices1 = _indices(cursor, block0 + 1, lists)

            _wait(tiles.K1_RIGHT_FREE, THREE)
            _publish(shared.mask1, rows1)
            _provide(shared.k1_right, shared.k1_rope, right1, rows1, ready.k1_right, 1, tiles.K1_RIGHT_READY, PLAN)
            rows0 = _rows(indices0, caches, cursor, block0, lists, PLAN)
            left0 = _load_half(rows0, 0, PLAN)
            _wait(tiles.K1_LEFT_FREE, THREE)
            _provide(shared.k1_left, shared.k1_rope, left1, rows1, ready.k1_left, 0, tiles.K1_LEFT_READY, PLAN)
            right0 = _load_half(rows0, 1, PLAN)
    # The consumers' last arrivals.
    _wait(tiles.K0_LEFT_FREE, THREE)
    _wait(tiles.K0_RIGHT_FREE, THREE)
    _wait(tiles.K1_RIGHT_FREE, THREE)
    _wait(tiles.K1_LEFT_FREE, THREE)
