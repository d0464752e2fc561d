"""The producer of a CTA that has a peer (``clusters``): half of a block's tokens, for two CTAs.

A thread has one token of a block in registers, all of it, and the next block's under way. Else all is as in
``producer``: only what is copied by cp.async, each CTA has to itself, for all 64 tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashlatte.kernels.hopper import clusters
from flashlatte.kernels.hopper.clusters import OWN
from flashlatte.kernels.hopper.mla_pipeline import finish_producing
from flashlatte.kernels.hopper.mla_tiles import (
    K0_LEFT_EMPTY,
    K0_RIGHT_EMPTY,
    K1_LEFT_EMPTY,
    K1_RIGHT_EMPTY,
    LEFT,
    RIGHT,
)
from flashlatte.kernels.hopper.ptx import clusters as ptx_clusters
from flashlatte.kernels.hopper.ptx import e4m3
from flashlatte.kernels.hopper.ptx.registers import loaded
from flashlatte.kernels.hopper.word_layouts import THREADS
from flashlatte.ops.sparse_decode.hopper import schedule, tiles
from flashlatte.ops.sparse_decode.hopper.rows import (
    SCALES,
    arrive_full,
    copy_rope,
    cursor_at,
    load_indices,
    locate,
    publish_mask,
)
from flashlatte.ops.sparse_decode.hopper.tiles import MODEL1, V32, V41


@gluon.constexpr_function
def _own_layout(WIDTH, REGISTERS, LANES):
    """Words [32, WIDTH] of the tokens that a CTA of a cluster dequantizes; 8 tokens are a warp's."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, word] for word in REGISTERS],
        lane_bases=[*([0, word] for word in LANES), [1, 0], [2, 0], [4, 0]],
        warp_bases=[[8, 0], [16, 0]],
        block_bases=[],
        shape=[32, WIDTH],
    )


# 64 columns, as words of e4m3, 16 bytes of them a thread, and as words of bf16; and the four words of v32's or
# v41's scales.
_PIECE = gl.constexpr(_own_layout(16, [1, 2], [4, 8]))
_BF16_PIECE = gl.constexpr(_own_layout(32, [1, 2, 4], [8, 16]))
_OWN_SCALES = gl.constexpr(_own_layout(4, [1, 2], [0, 0]))
_TOKENS = gl.constexpr(gl.SliceLayout(1, _PIECE))


class Block(NamedTuple):
    """This CTA's tokens [32] of a block as they lie in the cache.

    Attributes:
        pieces: words [32, 16] of 64 columns each.
        scales: words [32] of one scale each (v32), or of four.
    """

    pieces: Any
    scales: Any


@gluon.jit
def _own(x):
    """The first 32 of [64] per token."""
    own, _ = gl.split(x.reshape([2, OWN]).permute((1, 0)))
    return gl.convert_layout(own, _TOKENS, assert_trivial=True)


@gluon.jit
def _load_piece(words, FIRST: gl.constexpr, PLAN: gl.constexpr):
    word = FIRST + gl.arange(0, 16, gl.SliceLayout(0, _PIECE))
    # The compiler does not see that tokens are aligned through ``_own``.
    ALIGNMENT: gl.constexpr = PLAN.alignment
    return gl.load(gl.multiple_of(words[:, None] + word[None, :], [1, ALIGNMENT]))


@gluon.jit
def _load_four_scales(words, valid, PLAN: gl.constexpr):
    tokens: gl.constexpr = gl.SliceLayout(1, _OWN_SCALES)
    scale = SCALES + gl.arange(0, 4, gl.SliceLayout(0, _OWN_SCALES))
    pointers = gl.convert_layout(words, tokens, assert_trivial=True)[:, None] + scale[None, :]
    ALIGNMENT: gl.constexpr = PLAN.alignment
    pointers = gl.multiple_of(pointers, [1, ALIGNMENT])
    pointers, mask = gl.broadcast(pointers, gl.convert_layout(valid, tokens, assert_trivial=True)[:, None])
    first_and_third, second_and_fourth = gl.split(gl.load(pointers, mask=mask, other=0).reshape([OWN, 2, 2]))
    first, third = gl.split(first_and_third)
    second, fourth = gl.split(second_and_fourth)
    return first, second, third, fourth


@gluon.jit
def _load_block(rows, PLAN: gl.constexpr):
    """Ask for this CTA's tokens. Words of those that are not selected come from elsewhere, and get the scale 0."""
    words = _own(rows.words)
    valid = _own(rows.valid)
    pieces = ()
    for piece in gl.static_range(7 if PLAN.format == MODEL1 else 8):
        pieces += (_load_piece(words, 16 * piece, PLAN),)
    if PLAN.format != MODEL1:
        return Block(pieces, _load_four_scales(words, valid, PLAN))
    else:
        scales = _own(rows.scales)
        return Block(pieces, (gl.load(scales, mask=valid, other=0), gl.load(scales + 1, mask=valid, other=0)))


@gluon.jit
def _block_loaded(block):
    return Block(loaded(block.pieces, 4), loaded(block.scales, 1))


@gluon.jit
def _first_scale(block, rows, PLAN: gl.constexpr):
    """The first of each token's scales, or NaN if the token is selected and has a NaN, wherever."""
    scale = block.scales[0]
    nan = e4m3.has_nan(block.pieces, 16 // THREADS) & _own(rows.valid)
    nan = gl.convert_layout(nan, scale.type.layout, assert_trivial=True)
    return gl.where(nan, e4m3.NAN_FLOAT if PLAN.format == V32 else e4m3.NAN_EXPONENTS, scale)


@gluon.jit
def _with_first_scale(block, scale):
    first = (scale,)
    return Block(block.pieces, first + block.scales[1:])


@gluon.jit
def _factors(scales, PIECE: gl.constexpr, GROUPS: gl.constexpr, LAYOUT: gl.constexpr, PLAN: gl.constexpr):
    """The scales of a piece's groups as pairs of bf16, [32, GROUPS]."""
    tokens: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    if PLAN.format == V32:
        scale = gl.convert_layout(scales[PIECE // 2], tokens, assert_trivial=True)
        return e4m3.factor_of_float(scale.to(gl.float32, bitcast=True))[:, None]
    else:
        FIRST: gl.constexpr = PIECE * GROUPS
        low, high = e4m3.split_exponents(scales[FIRST // 4])
        low = gl.convert_layout(low, tokens, assert_trivial=True)[:, None]
        high = gl.convert_layout(high, tokens, assert_trivial=True)[:, None]
        number = FIRST % 4 + gl.arange(0, GROUPS, gl.SliceLayout(0, LAYOUT))
        return e4m3.factor_of_exponent(low, high, number[None, :])


@gluon.jit
def _dequantize(words, scales, PIECE: gl.constexpr, PLAN: gl.constexpr):
    """Words [32, 16] of a piece to pairs of bf16 [32, 32]."""
    GROUPS: gl.constexpr = 2 if PLAN.format == V41 else 1
    words = words.reshape([OWN, GROUPS, 16 // GROUPS])
    factors = _factors(scales, PIECE, GROUPS, gl.SliceLayout(2, words.type.layout), PLAN)
    return gl.convert_layout(e4m3.dequantize(words, factors), _BF16_PIECE, assert_trivial=True)


@gluon.constexpr_function
def _pieces(SIDE, FORMAT):
    """Pieces of a half that are dequantized: the last one of model1 is bf16 in the cache."""
    return 3 if SIDE == RIGHT and FORMAT == MODEL1 else 4


@gluon.jit
def _provide(
    block,
    addresses,
    peer,
    TILE: gl.constexpr,
    SIDE: gl.constexpr,
    FULL: gl.constexpr,
    PLAN: gl.constexpr,
):
    """Dequantize half of a block, here and for the peer."""
    PIECES: gl.constexpr = _pieces(SIDE, PLAN.format)
    clusters.expect(FULL, PIECES, peer)
    for piece in gl.static_range(PIECES):
        pairs = _dequantize(block.pieces[4 * SIDE + piece], block.scales, 4 * SIDE + piece, PLAN)
        clusters.store(pairs, addresses, TILE, piece)
    arrive_full(FULL, PLAN)
    clusters.send(TILE, PIECES, FULL, peer)


@gluon.jit
def produce(call, PLAN: gl.constexpr):
    work, k0, k1, full, peer = call.work, call.tiles.k0, call.tiles.k1, call.full, call.peer
    ptx_clusters.arrive()
    cursor = cursor_at(work.range.first, work.range.first_cost, call, PLAN)
    block0 = cursor.split.begin
    indices0 = load_indices(cursor, block0, call, PLAN)
    indices1 = load_indices(cursor, block0 + 1, call, PLAN)
    rows0 = locate(indices0, block0, cursor.split, call, PLAN)
    own0 = _load_block(rows0, PLAN)
    # Written while the first loads are under way: later, what it takes would have to be kept until then, or spilled.
    schedule.write_metadata(call.scratch, work, PLAN)
    addresses = clusters.addresses(peer, _BF16_PIECE)
    ptx_clusters.meet()
    # All tiles are free at first.
    phase = 1
    # True. Without these branches the compiler would move the wait for the next block before the arrival of this one.
    always = call.key_lengths.num_items > 0
    for item in range(work.range.first, work.range.stop, work.stride):
        steps = schedule.num_steps(cursor.split)
        for step in range(steps):
            own0 = _block_loaded(own0)
            # Asked for here, not between the halves, where the second one's fence would wait for these loads.
            rows1 = locate(indices1, block0 + 1, cursor.split, call, PLAN)
            own1 = _load_block(rows1, PLAN)
            block0 += 2
            if step == steps - 1:
                cost = cursor.cost + PLAN.overhead + cursor.split.blocks
                cursor = cursor_at(item + work.stride, cost, call, PLAN)
                block0 = cursor.split.begin
            indices0 = load_indices(cursor, block0, call, PLAN)
            own0 = _with_first_scale(own0, _first_scale(own0, rows0, PLAN))
            scale1 = own1.scales[0]
            if always:
                clusters.wait(K0_LEFT_EMPTY, peer, phase)
                publish_mask(call.masks.block0, rows0)
                _provide(own0, addresses, peer, clusters.K0_LEFT, LEFT, tiles.K0_LEFT_FULL, PLAN)
                # Looked for here, where the next half has to wait for the consumers, and the fence has waited for block
                # 1.
                scale1 = _first_scale(own1, rows1, PLAN)
                clusters.wait(K0_RIGHT_EMPTY, peer, phase)
                copy_rope(k0, full.k0, rows0, PLAN)
                _provide(own0, addresses, peer, clusters.K0_RIGHT, RIGHT, tiles.K0_RIGHT_FULL, PLAN)

            own1 = _block_loaded(_with_first_scale(own1, scale1))
            rows0 = locate(indices0, block0, cursor.split, call, PLAN)
            next0 = _load_block(rows0, PLAN)
            indices1 = load_indices(cursor, block0 + 1, call, PLAN)
            if always:
                clusters.wait(K1_RIGHT_EMPTY, peer, phase)
                publish_mask(call.masks.block1, rows1)
                copy_rope(k1, full.k1, rows1, PLAN)
                _provide(own1, addresses, peer, clusters.K1_RIGHT, RIGHT, tiles.K1_RIGHT_FULL, PLAN)
                clusters.wait(K1_LEFT_EMPTY, peer, phase)
                _provide(own1, addresses, peer, clusters.K1_LEFT, LEFT, tiles.K1_LEFT_FULL, PLAN)
            own0 = next0
            phase ^= 1
    # After the last arrivals of both CTAs' consumers nothing comes from the peer: it may leave, and so may this CTA.
    finish_producing(PLAN.producer_threads, peer, phase)
