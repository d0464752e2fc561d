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

from flashlatte.kernels.hopper import barriers
from flashlatte.kernels.hopper.mla_pipeline import finish_producer
from flashlatte.kernels.hopper.mla_tiles import (
    K0_LEFT_EMPTY,
    K0_RIGHT_EMPTY,
    KEYS,
    LEFT,
    RIGHT,
    of_block,
)
from flashlatte.kernels.hopper.ptx import copies, e2m1, e4m3
from flashlatte.kernels.hopper.ptx.registers import opaque, wait_loads
from flashlatte.kernels.hopper.word_layouts import THREADS, flat, load_words, words_layout, words_of
from flashlatte.ops.sparse_decode.hopper import schedule, tiles
from flashlatte.ops.sparse_decode.hopper.rows import (
    FP4_SCALES,
    PLAIN_ROPE,
    SCALES,
    SelectedRows,
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
        pieces: words [64, groups, n] of one piece, or of four (model1; ``_piece_layout``).
        scales: words [64, 2] of each token (v32, v41), [64, 4] (v41_fp4), or [64], one word with the half's four scales
            (model1).
    """

    pieces: Any
    scales: Any


@gluon.constexpr_function
def _piece_layout(FORMAT):
    """Layout of a piece, with groups of 128 columns or, in model1 and v41_fp4, 64."""
    return {MODEL1.value: words_layout(1, 16), V41_FP4.value: words_layout(4, 8)}.get(int(FORMAT), words_layout(2, 32))


@gluon.jit
def _per_group(x, LAYOUT: gl.constexpr):
    """[64] per token as [64, 1] for the words of a ``LAYOUT``."""
    return gl.convert_layout(x, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)), assert_trivial=True)[:, None]


@gluon.jit
def _load_piece(rows, FIRST: gl.constexpr, LAYOUT: gl.constexpr):
    words = load_words(rows.words, FIRST, flat(LAYOUT)).reshape(LAYOUT.shape)
    return gl.convert_layout(words, LAYOUT, assert_trivial=True)


@gluon.jit
def load_half(rows, side, CONFIG: gl.constexpr):
    """Start loading half of the rows. Unselected tokens load other words, with scale 0.

    ``side`` is a run-time value. Of model1, a right half has three groups, but four are loaded.
    """
    if CONFIG.format == PLAIN:
        return rows
    else:
        LAYOUT: gl.constexpr = _piece_layout(CONFIG.format)
        WORDS: gl.constexpr = 32 if CONFIG.format == V41_FP4 else 64
        half = SelectedRows(rows.words + side * WORDS, rows.scales, rows.valid)
        NUMBER: gl.constexpr = LAYOUT.shape[1]
        pieces = ()
        for piece in gl.static_range(WORDS // (NUMBER * LAYOUT.shape[2])):
            pieces += (_load_piece(half, piece * NUMBER * LAYOUT.shape[2], LAYOUT),)
        if CONFIG.format == MODEL1:
            return KeyHalf(pieces, gl.load(rows.scales + side, mask=rows.valid, other=0))
        else:
            FIRST_SCALE: gl.constexpr = FP4_SCALES if CONFIG.format == V41_FP4 else SCALES
            group = gl.arange(0, NUMBER, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
            pointers = _per_group(rows.words + side * NUMBER, LAYOUT) + (FIRST_SCALE + group)[None, :]
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
def fill(tile, half, side, CONFIG: gl.constexpr):
    """Dequantize half of a block into its tile."""
    target = words_of(tile)
    scales = half.scales
    if CONFIG.format == MODEL1 or CONFIG.format == V41:
        scales = e4m3.split_exponents(scales)
    if CONFIG.format == V41_FP4:
        target.store(_dequantize_fp4(half))
    elif CONFIG.format == MODEL1:
        for group in gl.static_range(3):
            target.slice(32 * group, 32, dim=1).store(_dequantize(half.pieces[group], scales, group, CONFIG))
        if side == LEFT:
            target.slice(96, 32, dim=1).store(_dequantize(half.pieces[3], scales, 3, CONFIG))
    else:
        target.store(_dequantize(half.pieces[0], scales, 0, CONFIG))


@gluon.jit
def _copy_rope(k0, k1, full, rows, odd, CONFIG: gl.constexpr):
    if odd == 1:
        copy_rope(k1, full.k1, rows, CONFIG)
    else:
        copy_rope(k0, full.k0, rows, CONFIG)


@gluon.jit
def _fill_half(tile, args, copied, half, rows, side, odd, FULL: gl.constexpr, CONFIG: gl.constexpr):
    """Fill half of a block, which is empty, and signal it. ``copied``: mbarrier of its cp.async copies."""
    k0, k1, full = args.tiles.k0, args.tiles.k1, args.full
    if CONFIG.format == PLAIN:
        at = SelectedRows(rows.words + side * 128, rows.scales, rows.valid)
        copy_words(tile, at, 0, 0, 128, True)
        if CONFIG.has_rope:  # noqa: SIM102
            if side == RIGHT:
                copy_words(of_block(odd, k0.rope, k1.rope), rows, PLAIN_ROPE, 0, 32, True)
        async_copy.mbarrier_arrive(copied, increment_count=False)
    else:
        if side == RIGHT:
            _copy_rope(k0, k1, full, rows, odd, CONFIG)
        fill(tile, half, side, CONFIG)
    barriers.arrive_at(FULL + 2 * odd, 128 + CONFIG.producer_threads, CONFIG.producer_threads)


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
def propagate_nan(half, rows, side, CONFIG: gl.constexpr):
    """Half of a block, with NaN as the scale of selected tokens with a NaN in it; values of v41_fp4 are never NaN."""
    if CONFIG.format == PLAIN or CONFIG.format == V41_FP4:
        return half
    else:
        LAYOUT: gl.constexpr = half.pieces[0].type.layout
        pieces = half.pieces
        if CONFIG.format == MODEL1:
            # The last group is not part of a right half.
            pieces = (pieces[0], pieces[1], pieces[2], gl.where(side == LEFT, pieces[3], 0))
        NUMBER: gl.constexpr = pieces[0].shape[1] * pieces[0].shape[2]
        words = ()
        for i in gl.static_range(len(pieces)):
            words += (gl.convert_layout(pieces[i].reshape([KEYS, NUMBER]), flat(LAYOUT), assert_trivial=True),)
        nan = e4m3.has_nan(words, NUMBER // THREADS)
        nan = gl.convert_layout(nan, rows.valid.type.layout, assert_trivial=True) & rows.valid
        scales = half.scales
        if CONFIG.format != MODEL1:
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
    block = cursor.split.begin
    indices = load_indices(cursor, block, args, CONFIG)
    next_indices = load_indices(cursor, block + 1, args, CONFIG)
    rows = locate(indices, block, cursor.split, args, CONFIG)
    first = load_half(rows, 0, CONFIG)
    block += 1
    # Written while the first loads are in flight: later, its operands would have to be kept in registers, or spilled.
    schedule.write_metadata(args.scratch, work, CONFIG)
    # Always true. Without these branches the compiler would move the wait for the next half before the arrival for this
    # one.
    always = args.key_lengths.num_items > 0
    for item in range(work.range.first, work.range.stop, work.stride):
        steps = schedule.num_steps(cursor.split)
        # One body for even and odd blocks, and for both orders of halves: its instructions may have to be fetched from
        # memory, as in a model.
        # Counted up to 0, so that no register holds the number of blocks.
        for number in range(-2 * steps, 0):
            odd = number & 1
            first = wait_half(first, CONFIG)
            second = load_half(rows, 1 - odd, CONFIG)
            next_rows = locate(next_indices, block, cursor.split, args, CONFIG)
            _prefetch(next_rows, CONFIG)
            first = propagate_nan(first, rows, odd, CONFIG)
            if always:
                barriers.wait_at(K0_LEFT_EMPTY + 2 * odd, 128 + CONFIG.producer_threads, CONFIG.producer_threads)
                publish_mask(of_block(odd, args.masks.block0, args.masks.block1), rows)
                tile = of_block(odd, k0.left, k1.right)
                copied = of_block(odd, full.k0.left, full.k1.right)
                _fill_half(tile, args, copied, first, rows, odd, odd, tiles.K0_LEFT_FULL, CONFIG)

            second = wait_half(second, CONFIG)
            first = load_half(next_rows, 1 - odd, CONFIG)
            block += 1
            # After the last item, the next block is empty.
            if (number == -2) & (item + work.stride < work.range.stop):
                cost = cursor.cost + CONFIG.overhead + cursor.split.blocks
                cursor = cursor_at(item + work.stride, cost, args, CONFIG)
                block = cursor.split.begin
            next_indices = load_indices(cursor, block, args, CONFIG)
            # Again, so that no register holds it meanwhile.
            odd = opaque(number) & 1
            second = propagate_nan(second, rows, 1 - odd, CONFIG)
            if always:
                barriers.wait_at(K0_RIGHT_EMPTY + 2 * odd, 128 + CONFIG.producer_threads, CONFIG.producer_threads)
                tile = of_block(odd, k0.right, k1.left)
                copied = of_block(odd, full.k0.right, full.k1.left)
                _fill_half(tile, args, copied, second, rows, 1 - odd, odd, tiles.K0_RIGHT_FULL, CONFIG)
            rows = next_rows
    finish_producer(CONFIG.producer_threads)
