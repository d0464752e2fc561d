"""The producer of a CTA in a cluster (``clusters``): it dequantizes half of a block's tokens for both CTAs.

In contrast to ``producer``, threads hold whole tokens of a block in registers while the loads of the next block are in
flight. Data that are copied by cp.async are not shared: each CTA copies them for all 64 tokens.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashlatte.kernels.hopper import clusters
from flashlatte.kernels.hopper.clusters import OWN_TOKENS
from flashlatte.kernels.hopper.mla_pipeline import finish_producer
from flashlatte.kernels.hopper.mla_tiles import (
    K0_LEFT_EMPTY,
    K0_RIGHT_EMPTY,
    K1_LEFT_EMPTY,
    K1_RIGHT_EMPTY,
    LEFT,
    RIGHT,
)
from flashlatte.kernels.hopper.ptx import clusters as ptx_clusters
from flashlatte.kernels.hopper.ptx import e2m1, e4m3
from flashlatte.kernels.hopper.ptx.registers import wait_loads
from flashlatte.kernels.hopper.word_layouts import THREADS
from flashlatte.ops.sparse_decode.hopper import schedule, tiles
from flashlatte.ops.sparse_decode.hopper.rows import (
    FP4_SCALES,
    SCALES,
    arrive_full,
    copy_rope,
    cursor_at,
    load_indices,
    locate,
    publish_mask,
)
from flashlatte.ops.sparse_decode.hopper.tiles import MODEL1, V32, V41, V41_FP4


@gluon.constexpr_function
def _own_layout(WIDTH, REGISTERS, LANES):
    """Layout of words [32, WIDTH] of the tokens that a CTA of a cluster dequantizes, 8 tokens per warp."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, word] for word in REGISTERS],
        lane_bases=[*([0, word] for word in LANES), [1, 0], [2, 0], [4, 0]],
        warp_bases=[[8, 0], [16, 0]],
        block_bases=[],
        shape=[32, WIDTH],
    )


# 64 columns as words of e4m3 (16 bytes per thread), of e2m1 (8 bytes) and of bf16; four words of scales.
_PIECE = gl.constexpr(_own_layout(16, [1, 2], [4, 8]))
_FP4_PIECE = gl.constexpr(_own_layout(8, [1], [2, 4]))
_BF16_PIECE = gl.constexpr(_own_layout(32, [1, 2, 4], [8, 16]))
_OWN_SCALES = gl.constexpr(_own_layout(4, [1, 2], [0, 0]))
_TOKENS = gl.constexpr(gl.SliceLayout(1, _PIECE))


class ClusterBlock(NamedTuple):
    """This CTA's tokens [32] of a block, as stored in the cache.

    Attributes:
        pieces: words [32, 16], or [32, 8] (v41_fp4), of 64 columns each.
        scales: words [32] of one scale each (v32), or of four.
    """

    pieces: Any
    scales: Any


@gluon.jit
def _own_tokens(x):
    """The first 32 of [64] per token."""
    own, _ = gl.split(x.reshape([2, OWN_TOKENS]).permute((1, 0)))
    return gl.convert_layout(own, _TOKENS, assert_trivial=True)


@gluon.constexpr_function
def _piece_layout(FORMAT):
    return _FP4_PIECE.value if FORMAT == V41_FP4 else _PIECE.value


@gluon.jit
def _load_piece(words, PIECE: gl.constexpr, CONFIG: gl.constexpr):
    LAYOUT: gl.constexpr = _piece_layout(CONFIG.format)
    WIDTH: gl.constexpr = LAYOUT.shape[1]
    words = gl.convert_layout(words, gl.SliceLayout(1, LAYOUT), assert_trivial=True)
    word = WIDTH * PIECE + gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    # The compiler's alignment analysis does not see through ``_own_tokens``.
    ALIGNMENT: gl.constexpr = CONFIG.alignment
    return gl.load(gl.multiple_of(words[:, None] + word[None, :], [1, ALIGNMENT]))


@gluon.jit
def _load_four_scales(words, valid, FIRST: gl.constexpr, CONFIG: gl.constexpr):
    tokens: gl.constexpr = gl.SliceLayout(1, _OWN_SCALES)
    scale = FIRST + gl.arange(0, 4, gl.SliceLayout(0, _OWN_SCALES))
    pointers = gl.convert_layout(words, tokens, assert_trivial=True)[:, None] + scale[None, :]
    ALIGNMENT: gl.constexpr = CONFIG.alignment
    pointers = gl.multiple_of(pointers, [1, ALIGNMENT])
    pointers, mask = gl.broadcast(pointers, gl.convert_layout(valid, tokens, assert_trivial=True)[:, None])
    first_and_third, second_and_fourth = gl.split(gl.load(pointers, mask=mask, other=0).reshape([OWN_TOKENS, 2, 2]))
    first, third = gl.split(first_and_third)
    second, fourth = gl.split(second_and_fourth)
    return first, second, third, fourth


@gluon.jit
def _load_block(rows, CONFIG: gl.constexpr):
    """Start loading this CTA's tokens. Unselected tokens load other words, with scale 0."""
    words = _own_tokens(rows.words)
    valid = _own_tokens(rows.valid)
    pieces = ()
    for piece in gl.static_range(7 if CONFIG.format == MODEL1 else 8):
        pieces += (_load_piece(words, piece, CONFIG),)
    if CONFIG.format == V41_FP4:
        scales = _load_four_scales(words, valid, FP4_SCALES, CONFIG)
        return ClusterBlock(pieces, scales + _load_four_scales(words, valid, FP4_SCALES + 4, CONFIG))
    elif CONFIG.format != MODEL1:
        return ClusterBlock(pieces, _load_four_scales(words, valid, SCALES, CONFIG))
    else:
        scales = _own_tokens(rows.scales)
        return ClusterBlock(pieces, (gl.load(scales, mask=valid, other=0), gl.load(scales + 1, mask=valid, other=0)))


@gluon.jit
def _wait_block(block):
    WIDTH: gl.constexpr = block.pieces[0].shape[1] // THREADS
    return ClusterBlock(wait_loads(block.pieces, WIDTH, WIDTH), wait_loads(block.scales, 1))


@gluon.jit
def _first_scale(block, rows, CONFIG: gl.constexpr):
    """The first scale of each token, or NaN if the token is selected and has a NaN in any column; values of v41_fp4 are
    never NaN."""
    scale = block.scales[0]
    if CONFIG.format == V41_FP4:
        return scale
    else:
        nan = e4m3.has_nan(block.pieces, 16 // THREADS) & _own_tokens(rows.valid)
        nan = gl.convert_layout(nan, scale.type.layout, assert_trivial=True)
        return gl.where(nan, e4m3.NAN_FLOAT if CONFIG.format == V32 else e4m3.NAN_EXPONENTS, scale)


@gluon.jit
def _with_first_scale(block, scale):
    first = (scale,)
    return ClusterBlock(block.pieces, first + block.scales[1:])


@gluon.constexpr_function
def _groups(FORMAT):
    """Groups of a piece's columns that have a scale each."""
    return {V41.value: 2, V41_FP4.value: 4}.get(int(FORMAT), 1)


@gluon.jit
def _factors(scales, PIECE: gl.constexpr, GROUPS: gl.constexpr, LAYOUT: gl.constexpr, CONFIG: gl.constexpr):
    """The scales of a piece's groups as pairs of bf16, [32, GROUPS]."""
    tokens: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    if CONFIG.format == V32:
        scale = gl.convert_layout(scales[PIECE // 2], tokens, assert_trivial=True)
        return e4m3.factor_of_float(scale.to(gl.float32, bitcast=True))[:, None]
    elif CONFIG.format == V41_FP4:
        scale = gl.convert_layout(scales[PIECE], tokens, assert_trivial=True)
        return e2m1.factor_of_scale(scale[:, None], gl.arange(0, GROUPS, gl.SliceLayout(0, LAYOUT))[None, :])
    else:
        FIRST: gl.constexpr = PIECE * GROUPS
        low, high = e4m3.split_exponents(scales[FIRST // 4])
        low = gl.convert_layout(low, tokens, assert_trivial=True)[:, None]
        high = gl.convert_layout(high, tokens, assert_trivial=True)[:, None]
        number = FIRST % 4 + gl.arange(0, GROUPS, gl.SliceLayout(0, LAYOUT))
        return e4m3.factor_of_exponent(low, high, number[None, :])


@gluon.jit
def _dequantize(words, scales, PIECE: gl.constexpr, CONFIG: gl.constexpr):
    """Dequantize the words [32, n] of a piece to pairs of bf16 [32, 32]."""
    GROUPS: gl.constexpr = _groups(CONFIG.format)
    words = words.reshape([OWN_TOKENS, GROUPS, words.shape[1] // GROUPS])
    factors = _factors(scales, PIECE, GROUPS, gl.SliceLayout(2, words.type.layout), CONFIG)
    pairs = e2m1.dequantize(words, factors) if CONFIG.format == V41_FP4 else e4m3.dequantize(words, factors)
    return gl.convert_layout(pairs, _BF16_PIECE, assert_trivial=True)


@gluon.constexpr_function
def _pieces(SIDE, FORMAT):
    """Pieces of a half that are dequantized; the last piece of model1 is bf16 in the cache."""
    return 3 if SIDE == RIGHT and FORMAT == MODEL1 else 4


@gluon.jit
def _fill_half(
    block,
    addresses,
    peer,
    TILE: gl.constexpr,
    SIDE: gl.constexpr,
    FULL: gl.constexpr,
    CONFIG: gl.constexpr,
):
    """Dequantize half of a block for this CTA and for the peer."""
    PIECES: gl.constexpr = _pieces(SIDE, CONFIG.format)
    clusters.expect(FULL, PIECES, peer)
    for piece in gl.static_range(PIECES):
        pairs = _dequantize(block.pieces[4 * SIDE + piece], block.scales, 4 * SIDE + piece, CONFIG)
        clusters.store(pairs, addresses, TILE, piece)
    arrive_full(FULL, CONFIG)
    clusters.send(TILE, PIECES, FULL, peer)


@gluon.jit
def produce(args, CONFIG: gl.constexpr):
    work, k0, k1, full, peer = args.work, args.tiles.k0, args.tiles.k1, args.full, args.peer
    ptx_clusters.arrive()
    cursor = cursor_at(work.range.first, work.range.first_cost, args, CONFIG)
    block0 = cursor.split.begin
    indices0 = load_indices(cursor, block0, args, CONFIG)
    indices1 = load_indices(cursor, block0 + 1, args, CONFIG)
    rows0 = locate(indices0, block0, cursor.split, args, CONFIG)
    own0 = _load_block(rows0, CONFIG)
    # Written while the first loads are in flight: later, its operands would have to be kept in registers, or spilled.
    schedule.write_metadata(args.scratch, work, CONFIG)
    addresses = clusters.addresses(peer, _BF16_PIECE)
    ptx_clusters.wait()
    # All tiles are empty at first.
    phase = 1
    # Always true. Without these branches the compiler would move the wait for the next block before the arrival for
    # this one.
    always = args.key_lengths.num_items > 0
    for item in range(work.range.first, work.range.stop, work.stride):
        steps = schedule.num_steps(cursor.split)
        for step in range(steps):
            own0 = _wait_block(own0)
            # Loaded here and not between the halves, where the fence of the second half would wait for these loads.
            rows1 = locate(indices1, block0 + 1, cursor.split, args, CONFIG)
            own1 = _load_block(rows1, CONFIG)
            block0 += 2
            if step == steps - 1:
                cost = cursor.cost + CONFIG.overhead + cursor.split.blocks
                cursor = cursor_at(item + work.stride, cost, args, CONFIG)
                block0 = cursor.split.begin
            indices0 = load_indices(cursor, block0, args, CONFIG)
            own0 = _with_first_scale(own0, _first_scale(own0, rows0, CONFIG))
            scale1 = own1.scales[0]
            if always:
                clusters.wait(K0_LEFT_EMPTY, peer, phase)
                publish_mask(args.masks.block0, rows0)
                _fill_half(own0, addresses, peer, clusters.K0_LEFT, LEFT, tiles.K0_LEFT_FULL, CONFIG)
                # NaN is searched here, where the next half waits for the consumers anyway, and the fence has waited for
                # block 1.
                scale1 = _first_scale(own1, rows1, CONFIG)
                clusters.wait(K0_RIGHT_EMPTY, peer, phase)
                copy_rope(k0, full.k0, rows0, CONFIG)
                _fill_half(own0, addresses, peer, clusters.K0_RIGHT, RIGHT, tiles.K0_RIGHT_FULL, CONFIG)

            own1 = _wait_block(_with_first_scale(own1, scale1))
            rows0 = locate(indices0, block0, cursor.split, args, CONFIG)
            next0 = _load_block(rows0, CONFIG)
            indices1 = load_indices(cursor, block0 + 1, args, CONFIG)
            if always:
                clusters.wait(K1_RIGHT_EMPTY, peer, phase)
                publish_mask(args.masks.block1, rows1)
                copy_rope(k1, full.k1, rows1, CONFIG)
                _fill_half(own1, addresses, peer, clusters.K1_RIGHT, RIGHT, tiles.K1_RIGHT_FULL, CONFIG)
                clusters.wait(K1_LEFT_EMPTY, peer, phase)
                _fill_half(own1, addresses, peer, clusters.K1_LEFT, LEFT, tiles.K1_LEFT_FULL, CONFIG)
            own0 = next0
            phase ^= 1
    # After the last arrivals of both CTAs' consumers, the peer writes nothing more: both CTAs may exit.
    finish_producer(CONFIG.producer_threads, peer, phase)
