"""The producer: warps that fill the consumers' tiles.

A block passes in halves: the left 256 columns and the right ones, in the order in which they become empty: block 0's
left, block 0's right, block 1's right, block 1's left. Tokens of caches with scales lie in registers from the moment
they are asked for until their half of the tile is empty, are dequantized to bf16 there, and stored. The half after the
one that is being filled is under way; what follows is being brought into the L2 cache. Indices are asked for a step
ahead. All that is bf16 in the cache is copied by cp.async.

It is the partition that the kernel begins as, and so has the arguments of the kernel at hand, in constant memory:
to the others they come in registers, which are what it lacks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy

from flashlatte.kernels.hopper.mla_pipeline import finish_producing, wait_empty
from flashlatte.kernels.hopper.mla_tiles import (
    K0_LEFT_EMPTY,
    K0_RIGHT_EMPTY,
    K1_LEFT_EMPTY,
    K1_RIGHT_EMPTY,
    KEYS,
    LEFT,
    RIGHT,
    half_of,
)
from flashlatte.kernels.hopper.ptx import e4m3, memory
from flashlatte.kernels.hopper.ptx.registers import loaded, opaque
from flashlatte.kernels.hopper.word_layouts import THREADS, flat, load_words, words_layout, words_of
from flashlatte.ops.sparse_decode.hopper import schedule, tiles
from flashlatte.ops.sparse_decode.hopper.rows import (
    PLAIN_ROPE,
    SCALES,
    arrive_full,
    copy_rope,
    copy_words,
    cursor_at,
    load_indices,
    locate,
    publish_mask,
    token_bytes,
)
from flashlatte.ops.sparse_decode.hopper.tiles import MODEL1, PLAIN, V32, V41

# Lines [64, 8] of 128 bytes of the rows.
_LINES = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 4], [32, 0]],
        lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[8, 0], [16, 0]],
        block_bases=[],
        shape=[64, 8],
    )
)


class Half(NamedTuple):
    """Half of a block as it lies in the cache.

    Attributes:
        pieces: words [64, groups, n], all of one or of two pieces (``_piece_layout``).
        scales: words [64, 2] of each token's own (v32, v41), or [64] of the half's four (model1).
    """

    pieces: Any
    scales: Any


@gluon.constexpr_function
def _piece_layout(PIECE, SIDE, FORMAT):
    """Groups of 128 or, in model1, 64 columns. Its right half has three of them, in two pieces."""
    if FORMAT != MODEL1:
        return words_layout(2, 32)
    return words_layout((2, 1)[PIECE] if SIDE == RIGHT else 4, 16)


@gluon.jit
def _per_group(x, LAYOUT: gl.constexpr):
    """[64] per token as [64, 1] for the words of a ``LAYOUT``."""
    return gl.convert_layout(x, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)), assert_trivial=True)[:, None]


@gluon.jit
def _load_piece(rows, FIRST: gl.constexpr, LAYOUT: gl.constexpr):
    words = load_words(rows.words, FIRST, flat(LAYOUT)).reshape(LAYOUT.shape)
    return gl.convert_layout(words, LAYOUT, assert_trivial=True)


@gluon.jit
def load_half(rows, SIDE: gl.constexpr, PLAN: gl.constexpr):
    """Ask for half of the rows. Words of tokens that are not selected come from elsewhere, and get the scale 0."""
    if PLAN.format == PLAIN:
        return rows
    else:
        LAYOUT: gl.constexpr = _piece_layout(0, SIDE, PLAN.format)
        pieces = (_load_piece(rows, SIDE * 64, LAYOUT),)
        if SIDE == RIGHT and PLAN.format == MODEL1:
            pieces += (_load_piece(rows, SIDE * 64 + 32, _piece_layout(1, SIDE, PLAN.format)),)
        if PLAN.format == MODEL1:
            return Half(pieces, gl.load(rows.scales + SIDE, mask=rows.valid, other=0))
        else:
            group = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
            pointers = _per_group(rows.words, LAYOUT) + (SCALES + 2 * SIDE + group)[None, :]
            pointers, mask = gl.broadcast(pointers, _per_group(rows.valid, LAYOUT))
            return Half(pieces, gl.load(pointers, mask=mask, other=0))


@gluon.jit
def _of_four(x, LAYOUT: gl.constexpr):
    """[64, 2] per token and four groups as [64, 8] for the words of a ``LAYOUT``."""
    first, last = gl.split(x)
    group = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))[None, :]
    return gl.where(group < 4, _per_group(first, LAYOUT), _per_group(last, LAYOUT))


@gluon.jit
def _dequantize(words, scales, FIRST_GROUP: gl.constexpr, PLAN: gl.constexpr):
    if PLAN.format == V41:
        # Eight words, or 32 columns, have a scale, and four scales are a word.
        words = words.reshape([KEYS, 8, 8])
    LAYOUT: gl.constexpr = words.type.layout
    if PLAN.format == V32:
        factor = e4m3.factor_of_float(scales.to(gl.float32, bitcast=True))
    elif PLAN.format == V41:
        # Opaque: what follows from the group's number alone would be kept in registers.
        number = opaque(gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT))) % 4)[None, :]
        factor = e4m3.factor_of_exponent(_of_four(scales[0], LAYOUT), _of_four(scales[1], LAYOUT), number)
    else:
        group = FIRST_GROUP + gl.arange(0, words.shape[1], gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
        low, high = scales
        factor = e4m3.factor_of_exponent(_per_group(low, LAYOUT), _per_group(high, LAYOUT), group[None, :])
    return e4m3.dequantize(words, factor)


@gluon.jit
def fill(tile, half, PLAN: gl.constexpr):
    """Dequantize half of a block into its tile."""
    target = words_of(tile)
    scales = half.scales
    if PLAN.format != V32:
        scales = e4m3.split_exponents(scales)
    if len(half.pieces) == 1:
        target.store(_dequantize(half.pieces[0], scales, 0, PLAN))
    else:
        target.slice(0, 64, dim=1).store(_dequantize(half.pieces[0], scales, 0, PLAN))
        target.slice(64, 32, dim=1).store(_dequantize(half.pieces[1], scales, 2, PLAN))


@gluon.jit
def _provide(k, full, half, rows, SIDE: gl.constexpr, FULL: gl.constexpr, PLAN: gl.constexpr):
    """Fill half of a block, once it is empty, and say so. ``full``: the mbarriers of what comes by cp.async."""
    tile = half_of(k, SIDE)
    if PLAN.format == PLAIN:
        copy_words(tile, rows, SIDE * 128, 0, 128, True)
        if SIDE == RIGHT and PLAN.has_rope:
            copy_words(k.rope, rows, PLAIN_ROPE, 0, 32, True)
        async_copy.mbarrier_arrive(half_of(full, SIDE), increment_count=False)
    else:
        if SIDE == RIGHT:
            copy_rope(k, full, rows, PLAN)
        fill(tile, half, PLAN)
    arrive_full(FULL, PLAN)


@gluon.jit
def _loaded(words, THREADS_OF_ONE: gl.constexpr):
    """``words``, each of which so many threads have, once they have come."""
    (words,) = loaded((words,), words.numel * THREADS_OF_ONE // 128)
    return words


@gluon.jit
def half_loaded(half, PLAN: gl.constexpr):
    if PLAN.format == PLAIN:
        return half
    else:
        pieces = ()
        for i in gl.static_range(len(half.pieces)):
            pieces += (_loaded(half.pieces[i], 1),)
        return Half(pieces, _loaded(half.scales, THREADS))


@gluon.jit
def _selected_nan(words, rows):
    """Which tokens are selected and have a NaN in ``words`` [64, groups, n]."""
    LAYOUT: gl.constexpr = words.type.layout
    NUMBER: gl.constexpr = words.shape[1] * words.shape[2]
    words = gl.convert_layout(words.reshape([KEYS, NUMBER]), flat(LAYOUT), assert_trivial=True)
    nan = e4m3.has_nan((words,), NUMBER // THREADS)
    return gl.convert_layout(nan, rows.valid.type.layout, assert_trivial=True) & rows.valid


@gluon.jit
def with_nan(half, rows, PLAN: gl.constexpr):
    """Half of a block, with NaN as the scale of selected tokens that have a NaN in it."""
    if PLAN.format == PLAIN:
        return half
    else:
        nan = _selected_nan(half.pieces[0], rows)
        if len(half.pieces) == 2:
            nan = nan | _selected_nan(half.pieces[1], rows)
        scales = half.scales
        if PLAN.format != MODEL1:
            LAYOUT: gl.constexpr = half.pieces[0].type.layout
            nan, scales = gl.broadcast(_per_group(nan, LAYOUT), scales)
        return Half(half.pieces, gl.where(nan, e4m3.NAN_FLOAT if PLAN.format == V32 else e4m3.NAN_EXPONENTS, scales))


@gluon.jit
def _prefetch(rows, PLAN: gl.constexpr):
    """Bring rows with scales into the L2 cache."""
    if PLAN.format != PLAIN:
        LAST: gl.constexpr = (token_bytes(PLAN.format, PLAN.has_rope) - 1) // 128
        tokens: gl.constexpr = gl.SliceLayout(1, _LINES)
        line = gl.arange(0, 8, gl.SliceLayout(0, _LINES))
        words = gl.convert_layout(rows.words, tokens, assert_trivial=True)[:, None]
        pointers = words + (gl.minimum(line, LAST) * (128 // 4))[None, :]
        if PLAN.format == MODEL1:
            scales = gl.convert_layout(rows.scales, tokens, assert_trivial=True)[:, None]
            scales, pointers = gl.broadcast(scales, pointers)
            _, line = gl.broadcast(pointers, line[None, :])
            pointers = gl.where(line == LAST + 1, scales, pointers)
        memory.prefetch_l2(pointers)


@gluon.jit
def produce(call, PLAN: gl.constexpr):
    work, k0, k1, full = call.work, call.tiles.k0, call.tiles.k1, call.full
    cursor = cursor_at(work.range.first, work.range.first_cost, call, PLAN)
    block0 = cursor.split.begin
    indices0 = load_indices(cursor, block0, call, PLAN)
    indices1 = load_indices(cursor, block0 + 1, call, PLAN)
    left0 = load_half(locate(indices0, block0, cursor.split, call, PLAN), LEFT, PLAN)
    # Written while the first loads are under way: later, what it takes would have to be kept until then, or spilled.
    schedule.write_metadata(call.scratch, work, PLAN)
    # True. Without these branches the compiler would move the wait for the next half before the arrival of this one.
    always = call.key_lengths.num_items > 0
    for item in range(work.range.first, work.range.stop, work.stride):
        steps = schedule.num_steps(cursor.split)
        for step in range(steps):
            left0 = half_loaded(left0, PLAN)
            rows0 = locate(indices0, block0, cursor.split, call, PLAN)
            right0 = load_half(rows0, RIGHT, PLAN)
            rows1 = locate(indices1, block0 + 1, cursor.split, call, PLAN)
            _prefetch(rows1, PLAN)
            left0 = with_nan(left0, rows0, PLAN)
            if always:
                wait_empty(K0_LEFT_EMPTY, PLAN.producer_threads)
                publish_mask(call.masks.block0, rows0)
                _provide(k0, full.k0, left0, rows0, LEFT, tiles.K0_LEFT_FULL, PLAN)

            right0 = half_loaded(right0, PLAN)
            right1 = load_half(rows1, RIGHT, PLAN)
            block0 += 2
            if step == steps - 1:
                cost = cursor.cost + PLAN.overhead + cursor.split.blocks
                cursor = cursor_at(item + work.stride, cost, call, PLAN)
                block0 = cursor.split.begin
            indices0 = load_indices(cursor, block0, call, PLAN)
            right0 = with_nan(right0, rows0, PLAN)
            if always:
                wait_empty(K0_RIGHT_EMPTY, PLAN.producer_threads)
                _provide(k0, full.k0, right0, rows0, RIGHT, tiles.K0_RIGHT_FULL, PLAN)

            right1 = half_loaded(right1, PLAN)
            left1 = load_half(rows1, LEFT, PLAN)
            indices1 = load_indices(cursor, block0 + 1, call, PLAN)
            rows0 = locate(indices0, block0, cursor.split, call, PLAN)
            _prefetch(rows0, PLAN)
            right1 = with_nan(right1, rows1, PLAN)
            if always:
                wait_empty(K1_RIGHT_EMPTY, PLAN.producer_threads)
                publish_mask(call.masks.block1, rows1)
                _provide(k1, full.k1, right1, rows1, RIGHT, tiles.K1_RIGHT_FULL, PLAN)

            left1 = half_loaded(left1, PLAN)
            left0 = load_half(rows0, LEFT, PLAN)
            left1 = with_nan(left1, rows1, PLAN)
            if always:
                wait_empty(K1_LEFT_EMPTY, PLAN.producer_threads)
                _provide(k1, full.k1, left1, rows1, LEFT, tiles.K1_LEFT_FULL, PLAN)
    finish_producing(PLAN.producer_threads)
