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

from flashlatte.kernels.hopper import barriers, clusters
from flashlatte.kernels.hopper.clusters import OWN_TOKENS
from flashlatte.kernels.hopper.mla_pipeline import finish_producer
from flashlatte.kernels.hopper.mla_tiles import (
    K0_LEFT_EMPTY,
    K0_RIGHT_EMPTY,
)
from flashlatte.kernels.hopper.ptx import clusters as ptx_clusters
from flashlatte.kernels.hopper.ptx import e2m1, e4m3
from flashlatte.kernels.hopper.ptx.registers import wait_loads
from flashlatte.kernels.hopper.word_layouts import THREADS
from flashlatte.ops.sparse_decode.hopper import schedule, tiles
from flashlatte.ops.sparse_decode.hopper.rows import (
    FP4_SCALES,
    SCALES,
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
def _load_block(rows, odd, CONFIG: gl.constexpr):
    """Start loading this CTA's tokens. Unselected tokens load other words, with scale 0.

    ``odd``: the pieces of the right half come first; but piece 3 of model1 is always the last one of the left half.
    """
    words = _own_tokens(rows.words)
    valid = _own_tokens(rows.valid)
    right: gl.constexpr = 32 if CONFIG.format == V41_FP4 else 64
    first, second = words + odd * right, words + (right - odd * right)
    pieces = ()
    for piece in gl.static_range(7 if CONFIG.format == MODEL1 else 8):
        if piece == 3 and CONFIG.format == MODEL1:
            pieces += (_load_piece(words, piece, CONFIG),)
        else:
            pieces += (_load_piece(first if piece < 4 else second, piece % 4, CONFIG),)
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
def _in_order(block, scale, odd):
    """The block with its first scale replaced, and the scales of its right half first if ``odd``."""
    HALF: gl.constexpr = len(block.scales) // 2
    first = (scale,)
    scales = first + block.scales[1:]
    ordered = ()
    for i in gl.static_range(2 * HALF):
        ordered += (gl.where(odd == 1, scales[(i + HALF) % (2 * HALF)], scales[i]),)
    return ClusterBlock(block.pieces, ordered)


@gluon.jit
def _of_block(odd, of_block0, of_block1):
    """A tile or an mbarrier of block 1 if ``odd``, else of block 0."""
    # Triton refuses a conditional expression of tiles.
    if odd == 1:  # noqa: SIM108
        chosen = of_block1
    else:
        chosen = of_block0
    return chosen


@gluon.jit
def _shifted(peer, odd, TILES: gl.constexpr):
    """Addresses such that constants of a half of block 0 denote the half of block 1 that is TILES tiles further on."""
    tiles = odd * (TILES * clusters.TILE_BYTES)
    # Barriers are in the order in which the halves are filled.
    shift = odd * 16
    return clusters.ClusterAddresses(
        peer.own + tiles, peer.peer + tiles, peer.barriers + shift, peer.peer_barriers + shift
    )


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


@gluon.jit
def _fill_pieces(block, addresses, is_left, ORDER: gl.constexpr, TILE: gl.constexpr, CONFIG: gl.constexpr):
    """Dequantize the first or second (ORDER) half of this CTA's tokens."""
    for piece in gl.static_range(3 if CONFIG.format == MODEL1 else 4):
        pairs = _dequantize(block.pieces[4 * ORDER + piece], block.scales, 4 * ORDER + piece, CONFIG)
        clusters.store(pairs, addresses, TILE, piece)
    if CONFIG.format == MODEL1:  # noqa: SIM102
        if is_left:
            # The scales of the left half are at ORDER.
            pairs = _dequantize(block.pieces[3], block.scales[ORDER:] + block.scales[:ORDER], 3, CONFIG)
            clusters.store(pairs, addresses, TILE, 3)


@gluon.jit
def _fill_half(
    block,
    addresses,
    peer,
    is_left,
    odd,
    TILE: gl.constexpr,
    ORDER: gl.constexpr,
    FULL: gl.constexpr,
    CONFIG: gl.constexpr,
):
    """Dequantize the first or second (ORDER) half of a block for this CTA and for the peer."""
    # The last piece of a right half of model1 is bf16 in the cache.
    VARIES: gl.constexpr = CONFIG.format == MODEL1
    if VARIES:
        if is_left:
            clusters.expect(FULL, 4, peer)
        else:
            clusters.expect(FULL, 3, peer)
    else:
        clusters.expect(FULL, 4, peer)
    _fill_pieces(block, addresses, is_left, ORDER, TILE, CONFIG)
    barriers.arrive_at(FULL + 2 * odd, 128 + CONFIG.producer_threads)
    if VARIES:
        if is_left:
            clusters.send(TILE, 4, FULL, peer)
        else:
            clusters.send(TILE, 3, FULL, peer)
    else:
        clusters.send(TILE, 4, FULL, peer)


@gluon.jit
def produce(args, CONFIG: gl.constexpr):
    work, k0, k1, full, peer = args.work, args.tiles.k0, args.tiles.k1, args.full, args.peer
    ptx_clusters.arrive()
    cursor = cursor_at(work.range.first, work.range.first_cost, args, CONFIG)
    block = cursor.split.begin
    indices = load_indices(cursor, block, args, CONFIG)
    next_indices = load_indices(cursor, block + 1, args, CONFIG)
    rows = locate(indices, block, cursor.split, args, CONFIG)
    own = _load_block(rows, 0, CONFIG)
    block += 1
    # Written while the first loads are in flight: later, its operands would have to be kept in registers, or spilled.
    schedule.write_metadata(args.scratch, work, CONFIG)
    first_addresses = clusters.addresses(peer, _BF16_PIECE)
    ptx_clusters.wait()
    # All tiles are empty at first.
    phase = 1
    # Always true. Without these branches the compiler would move the wait for the next block before the arrival for
    # this one.
    always = args.key_lengths.num_items > 0
    for item in range(work.range.first, work.range.stop, work.stride):
        blocks = schedule.num_steps(cursor.split) * 2
        for number in range(blocks):
            odd = number & 1
            own = _wait_block(own)
            # Loaded here and not between the halves, where the fence of the second half would wait for these loads.
            next_rows = locate(next_indices, block, cursor.split, args, CONFIG)
            next_own = _load_block(next_rows, 1 - odd, CONFIG)
            block += 1
            # After the last item, the next block is empty.
            if (number == blocks - 2) & (item + work.stride < work.range.stop):
                cost = cursor.cost + CONFIG.overhead + cursor.split.blocks
                cursor = cursor_at(item + work.stride, cost, args, CONFIG)
                block = cursor.split.begin
            next_indices = load_indices(cursor, block, args, CONFIG)
            own = _in_order(own, _first_scale(own, rows, CONFIG), odd)
            if always:
                first, second = _shifted(peer, odd, 3), _shifted(peer, odd, 1)
                clusters.wait(K0_LEFT_EMPTY, first, phase)
                publish_mask(_of_block(odd, args.masks.block0, args.masks.block1), rows)
                if odd == 1:
                    copy_rope(k1, full.k1, rows, CONFIG)
                addresses = first_addresses + odd * (3 * clusters.TILE_BYTES)
                _fill_half(own, addresses, first, odd == 0, odd, clusters.K0_LEFT, 0, tiles.K0_LEFT_FULL, CONFIG)
                clusters.wait(K0_RIGHT_EMPTY, second, phase)
                if odd == 0:
                    copy_rope(k0, full.k0, rows, CONFIG)
                addresses = first_addresses + odd * clusters.TILE_BYTES
                _fill_half(own, addresses, second, odd == 1, odd, clusters.K0_RIGHT, 1, tiles.K0_RIGHT_FULL, CONFIG)
            own, rows = next_own, next_rows
            phase ^= odd
    # After the last arrivals of both CTAs' consumers, the peer writes nothing more: both CTAs may exit.
    finish_producer(CONFIG.producer_threads, peer, phase)
