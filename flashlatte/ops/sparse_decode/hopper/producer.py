"""The producer: gathers the selected tokens, dequantizes them, and fills the tiles.

A block is filled in halves, the left 256 columns and the right ones, in the order in which they become empty: block 0's
left, block 0's right, block 1's right, block 1's left. For caches with scales, tokens are loaded into registers,
dequantized to bf16 and stored when their half of the tile is empty. Meanwhile the loads of the next half are in flight,
and later tokens are prefetched into L2. Indices are loaded one step ahead. Data that are bf16 in the cache are copied
by cp.async.

The producer is the default partition, because that reads kernel arguments from constant memory; the other partitions
receive them in registers, which the producer lacks.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy

from flashlatte.kernels.hopper.mla_pipeline import finish_producer, wait_empty
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
from flashlatte.kernels.hopper.ptx import copies, e2m1, e4m3
from flashlatte.kernels.hopper.ptx.registers import opaque, wait_loads
from flashlatte.kernels.hopper.word_layouts import THREADS, flat, load_words, words_layout, words_of
from flashlatte.ops.sparse_decode.hopper import schedule, tiles
from flashlatte.ops.sparse_decode.hopper.rows import (
    FP4_SCALES,
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
from flashlatte.ops.sparse_decode.hopper.tiles import MODEL1, PLAIN, V32, V41, V41_FP4


@gluon.constexpr_function
def _lines_layout(NUMBER):
    """Layout of the first NUMBER cache lines, 4 or 8, of 64 rows."""
    return gl.DistributedLinearLayout(
        reg_bases=[*([0, line] for line in (4,) if line < NUMBER), [32, 0]],
        lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[8, 0], [16, 0]],
        block_bases=[],
        shape=[64, NUMBER],
    )


class KeyHalf(NamedTuple):
    """Half of a block, as stored in the cache.

    Attributes:
        pieces: words [64, groups, n] of one or two pieces (``_piece_layout``).
        scales: words [64, 2] of each token (v32, v41), [64, 4] (v41_fp4), or [64], one word with the half's four scales
            (model1).
    """

    pieces: Any
    scales: Any


@gluon.constexpr_function
def _piece_layout(PIECE, SIDE, FORMAT):
    """Layout of a piece, with groups of 128 columns or, in model1 and v41_fp4, 64. The right half of model1 has three
    groups, in two pieces."""
    if FORMAT == V41_FP4:
        return words_layout(4, 8)
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
def load_half(rows, SIDE: gl.constexpr, CONFIG: gl.constexpr):
    """Start loading half of the rows. Unselected tokens load other words, with scale 0."""
    if CONFIG.format == PLAIN:
        return rows
    else:
        LAYOUT: gl.constexpr = _piece_layout(0, SIDE, CONFIG.format)
        FIRST: gl.constexpr = SIDE * (32 if CONFIG.format == V41_FP4 else 64)
        pieces = (_load_piece(rows, FIRST, LAYOUT),)
        if SIDE == RIGHT and CONFIG.format == MODEL1:
            pieces += (_load_piece(rows, SIDE * 64 + 32, _piece_layout(1, SIDE, CONFIG.format)),)
        if CONFIG.format == MODEL1:
            return KeyHalf(pieces, gl.load(rows.scales + SIDE, mask=rows.valid, other=0))
        else:
            NUMBER: gl.constexpr = LAYOUT.shape[1]
            FIRST_SCALE: gl.constexpr = (FP4_SCALES if CONFIG.format == V41_FP4 else SCALES) + NUMBER * SIDE
            group = gl.arange(0, NUMBER, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
            pointers = _per_group(rows.words, LAYOUT) + (FIRST_SCALE + group)[None, :]
            pointers, mask = gl.broadcast(pointers, _per_group(rows.valid, LAYOUT))
            return KeyHalf(pieces, gl.load(pointers, mask=mask, other=0))


@gluon.jit
def _of_four(x, LAYOUT: gl.constexpr):
    """[64, 2] per token and four groups as [64, 8] for the words of a ``LAYOUT``."""
    first, last = gl.split(x)
    group = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))[None, :]
    return gl.where(group < 4, _per_group(first, LAYOUT), _per_group(last, LAYOUT))


@gluon.jit
def _dequantize_fp4(half):
    # A group has four scales, and a scale is for two words.
    words = half.pieces[0].reshape([KEYS, 4, 4, 2])
    LAYOUT: gl.constexpr = gl.SliceLayout(3, words.type.layout)
    scales = gl.convert_layout(half.scales, gl.SliceLayout(2, LAYOUT), assert_trivial=True)
    number = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    factor = e2m1.factor_of_scale(scales[:, :, None], number[None, None, :]).reshape([KEYS, 16])
    words = words.reshape([KEYS, 16, 2])
    return e2m1.dequantize(words, gl.convert_layout(factor, gl.SliceLayout(2, words.type.layout), assert_trivial=True))


@gluon.jit
def _dequantize(words, scales, FIRST_GROUP: gl.constexpr, CONFIG: gl.constexpr):
    if CONFIG.format == V41:
        # Eight words (32 columns) share a scale, and a word holds four scales.
        words = words.reshape([KEYS, 8, 8])
    LAYOUT: gl.constexpr = words.type.layout
    if CONFIG.format == V32:
        factor = e4m3.factor_of_float(scales.to(gl.float32, bitcast=True))
    elif CONFIG.format == V41:
        # Opaque: values that depend only on the group's index would be kept in registers.
        number = opaque(gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT))) % 4)[None, :]
        factor = e4m3.factor_of_exponent(_of_four(scales[0], LAYOUT), _of_four(scales[1], LAYOUT), number)
    else:
        group = FIRST_GROUP + gl.arange(0, words.shape[1], gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
        low, high = scales
        factor = e4m3.factor_of_exponent(_per_group(low, LAYOUT), _per_group(high, LAYOUT), group[None, :])
    return e4m3.dequantize(words, factor)


@gluon.jit
def fill(tile, half, CONFIG: gl.constexpr):
    """Dequantize half of a block into its tile."""
    target = words_of(tile)
    scales = half.scales
    if CONFIG.format == MODEL1 or CONFIG.format == V41:
        scales = e4m3.split_exponents(scales)
    if CONFIG.format == V41_FP4:
        target.store(_dequantize_fp4(half))
    elif len(half.pieces) == 1:
        target.store(_dequantize(half.pieces[0], scales, 0, CONFIG))
    else:
        target.slice(0, 64, dim=1).store(_dequantize(half.pieces[0], scales, 0, CONFIG))
        target.slice(64, 32, dim=1).store(_dequantize(half.pieces[1], scales, 2, CONFIG))


@gluon.jit
def _fill_half(k, full, half, rows, SIDE: gl.constexpr, FULL: gl.constexpr, CONFIG: gl.constexpr):
    """Fill half of a block, which is empty, and signal it. ``full``: mbarriers of the cp.async copies."""
    tile = half_of(k, SIDE)
    if CONFIG.format == PLAIN:
        copy_words(tile, rows, SIDE * 128, 0, 128, True)
        if SIDE == RIGHT and CONFIG.has_rope:
            copy_words(k.rope, rows, PLAIN_ROPE, 0, 32, True)
        async_copy.mbarrier_arrive(half_of(full, SIDE), increment_count=False)
    else:
        if SIDE == RIGHT:
            copy_rope(k, full, rows, CONFIG)
        fill(tile, half, CONFIG)
    arrive_full(FULL, CONFIG)


@gluon.jit
def _loaded(words, THREADS_OF_ONE: gl.constexpr, WIDTH: gl.constexpr = 4):
    """``words`` after their loads of WIDTH words have completed; each word is held by THREADS_OF_ONE threads."""
    (words,) = wait_loads((words,), words.numel * THREADS_OF_ONE // 128, WIDTH)
    return words


@gluon.jit
def wait_half(half, CONFIG: gl.constexpr):
    if CONFIG.format == PLAIN:
        return half
    else:
        pieces = ()
        for i in gl.static_range(len(half.pieces)):
            pieces += (_loaded(half.pieces[i], 1, 2 if CONFIG.format == V41_FP4 else 4),)
        return KeyHalf(pieces, _loaded(half.scales, THREADS))


@gluon.jit
def _selected_nan(words, rows):
    """Which selected tokens have a NaN in ``words`` [64, groups, n]."""
    LAYOUT: gl.constexpr = words.type.layout
    NUMBER: gl.constexpr = words.shape[1] * words.shape[2]
    words = gl.convert_layout(words.reshape([KEYS, NUMBER]), flat(LAYOUT), assert_trivial=True)
    nan = e4m3.has_nan((words,), NUMBER // THREADS)
    return gl.convert_layout(nan, rows.valid.type.layout, assert_trivial=True) & rows.valid


@gluon.jit
def propagate_nan(half, rows, CONFIG: gl.constexpr):
    """Half of a block, with NaN as the scale of selected tokens with a NaN in it; values of v41_fp4 are never NaN."""
    if CONFIG.format == PLAIN or CONFIG.format == V41_FP4:
        return half
    else:
        nan = _selected_nan(half.pieces[0], rows)
        if len(half.pieces) == 2:
            nan = nan | _selected_nan(half.pieces[1], rows)
        scales = half.scales
        if CONFIG.format != MODEL1:
            LAYOUT: gl.constexpr = half.pieces[0].type.layout
            nan, scales = gl.broadcast(_per_group(nan, LAYOUT), scales)
        return KeyHalf(
            half.pieces, gl.where(nan, e4m3.NAN_FLOAT if CONFIG.format == V32 else e4m3.NAN_EXPONENTS, scales)
        )


@gluon.jit
def _prefetch(rows, CONFIG: gl.constexpr):
    """Prefetch rows with scales into L2."""
    if CONFIG.format != PLAIN:
        LAST: gl.constexpr = (token_bytes(CONFIG.format, CONFIG.has_rope) - 1) // 128
        NUMBER: gl.constexpr = 8 if LAST >= 4 else 4
        LINES: gl.constexpr = _lines_layout(NUMBER)
        tokens: gl.constexpr = gl.SliceLayout(1, LINES)
        line = gl.arange(0, NUMBER, gl.SliceLayout(0, LINES))
        words = gl.convert_layout(rows.words, tokens, assert_trivial=True)[:, None]
        pointers = words + (gl.minimum(line, LAST) * (128 // 4))[None, :]
        if CONFIG.format == MODEL1:
            scales = gl.convert_layout(rows.scales, tokens, assert_trivial=True)[:, None]
            scales, pointers = gl.broadcast(scales, pointers)
            _, line = gl.broadcast(pointers, line[None, :])
            pointers = gl.where(line == LAST + 1, scales, pointers)
        copies.prefetch_l2(pointers)


@gluon.jit
def produce(args, CONFIG: gl.constexpr):
    work, k0, k1, full = args.work, args.tiles.k0, args.tiles.k1, args.full
    cursor = cursor_at(work.range.first, work.range.first_cost, args, CONFIG)
    block0 = cursor.split.begin
    indices0 = load_indices(cursor, block0, args, CONFIG)
    indices1 = load_indices(cursor, block0 + 1, args, CONFIG)
    left0 = load_half(locate(indices0, block0, cursor.split, args, CONFIG), LEFT, CONFIG)
    # Written while the first loads are in flight: later, its operands would have to be kept in registers, or spilled.
    schedule.write_metadata(args.scratch, work, CONFIG)
    # Always true. Without these branches the compiler would move the wait for the next half before the arrival for this
    # one.
    always = args.key_lengths.num_items > 0
    for item in range(work.range.first, work.range.stop, work.stride):
        steps = schedule.num_steps(cursor.split)
        for step in range(steps):
            left0 = wait_half(left0, CONFIG)
            rows0 = locate(indices0, block0, cursor.split, args, CONFIG)
            right0 = load_half(rows0, RIGHT, CONFIG)
            rows1 = locate(indices1, block0 + 1, cursor.split, args, CONFIG)
            _prefetch(rows1, CONFIG)
            left0 = propagate_nan(left0, rows0, CONFIG)
            if always:
                wait_empty(K0_LEFT_EMPTY, CONFIG.producer_threads)
                publish_mask(args.masks.block0, rows0)
                _fill_half(k0, full.k0, left0, rows0, LEFT, tiles.K0_LEFT_FULL, CONFIG)

            right0 = wait_half(right0, CONFIG)
            right1 = load_half(rows1, RIGHT, CONFIG)
            block0 += 2
            if step == steps - 1:
                cost = cursor.cost + CONFIG.overhead + cursor.split.blocks
                cursor = cursor_at(item + work.stride, cost, args, CONFIG)
                block0 = cursor.split.begin
            indices0 = load_indices(cursor, block0, args, CONFIG)
            right0 = propagate_nan(right0, rows0, CONFIG)
            if always:
                wait_empty(K0_RIGHT_EMPTY, CONFIG.producer_threads)
                _fill_half(k0, full.k0, right0, rows0, RIGHT, tiles.K0_RIGHT_FULL, CONFIG)

            right1 = wait_half(right1, CONFIG)
            left1 = load_half(rows1, LEFT, CONFIG)
            indices1 = load_indices(cursor, block0 + 1, args, CONFIG)
            rows0 = locate(indices0, block0, cursor.split, args, CONFIG)
            _prefetch(rows0, CONFIG)
            right1 = propagate_nan(right1, rows1, CONFIG)
            if always:
                wait_empty(K1_RIGHT_EMPTY, CONFIG.producer_threads)
                publish_mask(args.masks.block1, rows1)
                _fill_half(k1, full.k1, right1, rows1, RIGHT, tiles.K1_RIGHT_FULL, CONFIG)

            left1 = wait_half(left1, CONFIG)
            left0 = load_half(rows0, LEFT, CONFIG)
            left1 = propagate_nan(left1, rows1, CONFIG)
            if always:
                wait_empty(K1_LEFT_EMPTY, CONFIG.producer_threads)
                _fill_half(k1, full.k1, left1, rows1, LEFT, tiles.K1_LEFT_FULL, CONFIG)
    finish_producer(CONFIG.producer_threads)
