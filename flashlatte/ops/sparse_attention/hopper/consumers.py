"""The two consumers of the queries kernel.

Scores and dQ of a step on the tensor cores (Q and dO times K; dS times K):

    scores consumer   |    S     | P |    | dQ left        | S of the next step ...
    values consumer   |    dP    |   | dS | dQ right, RoPE | dP of the next step ...

The values consumer needs P without the sink's weight, for dS. The keys kernel needs it with the weight, so the weighted
P overwrites it afterwards.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flashlatte.kernels.hopper.barriers import PAIR_THREADS, arrive, wait
from flashlatte.kernels.hopper.mla_tiles import HALF, LATENT, SCORE_COLS, SCORE_ROWS, SCORES
from flashlatte.kernels.triton.online_softmax import LOG2_E
from flashlatte.ops.sparse_attention.hopper.state import BOX, DS, HEADS, KEYS, P, score_row
from flashlatte.ops.sparse_attention.hopper.tiles import (
    DS_FULL,
    GRADIENT,
    K_QUARTER0_EMPTY,
    K_QUARTER1_EMPTY,
    K_QUARTER2_EMPTY,
    K_QUARTER3_EMPTY,
    P_FULL,
    QUARTER,
)
from flashlatte.runtime.gluon_compat import cta_barrier, tma_store

_DS_OPERAND = gl.constexpr(gl.DotOperandLayout(0, GRADIENT, 2))
_DS_OPERAND_ROPE = gl.constexpr(gl.DotOperandLayout(0, SCORES, 2))


class QueryGradientArgs(NamedTuple):
    """Arguments of the consumers: a block of 64 heads of a query token, from ``head`` on.

    Attributes:
        rows, piece: ``state.SparseBackwardRows`` and ``SparseBackwardPiece``.
        dq: TMA descriptor [s_q, h_q, d] of boxes [1, 64, 64].
        steps: tiles of 64 selected keys.
    """

    tiles: Any
    rows: Any
    piece: Any
    dq: Any
    token: Any
    head: Any
    steps: Any
    softmax_scale: Any


@gluon.jit
def _start_products(rows, tiles, phase, zero, unused, HAS_ROPE: gl.constexpr):
    """Start the product ``rows`` · kᵀ [64 heads, 64 keys], quarter by quarter as k arrives."""
    full = tiles.k_full
    left, right = rows.left.index(zero), rows.right.index(zero)
    k_left, k_right = tiles.k.left.index(zero), tiles.k.right.index(zero)
    mbarrier.wait(full.quarter0, phase)
    products = _start_quarter(left, k_left, 0, unused, False)
    mbarrier.wait(full.quarter2, phase)
    products = _start_quarter(right, k_right, 0, products, True)
    mbarrier.wait(full.quarter1, phase)
    products = _start_quarter(left, k_left, QUARTER, products, True)
    mbarrier.wait(full.quarter3, phase)
    if HAS_ROPE:
        products = warpgroup_mma(
            rows.rope.index(zero), tiles.k.rope.index(zero).permute((1, 0)), products, is_async=True
        )
    return _start_quarter(right, k_right, QUARTER, products, True)


@gluon.jit
def _start_quarter(rows, k, FIRST: gl.constexpr, products, ADD: gl.constexpr):
    return warpgroup_mma(
        rows.slice(FIRST, QUARTER, dim=1),
        k.slice(FIRST, QUARTER, dim=1).permute((1, 0)),
        products,
        use_acc=ADD,
        is_async=True,
    )


@gluon.jit
def _wait_stored():
    """Wait until TMA has read this consumer's last stored tile, so that all of its warps may overwrite it."""
    tma.store_wait(0)
    cta_barrier()


@gluon.jit
def _store_scores(args, step, tile, PART: gl.constexpr):
    """Start the TMA store of P or dS. All warps of this consumer must have written and fenced it."""
    cta_barrier()
    row = score_row(args.piece, args.token - args.piece.first_token, step, args.head // HEADS, PART)
    tma_store(args.piece.scores, [row, 0], tile)


@gluon.jit
def _stage(args, staging, dq):
    """Write columns of dq to shared memory, with 0 for heads without keys, because their dout may be NaN."""
    lse = _row_sums(args, 0, float("inf"), gl.SliceLayout(1, dq.type.layout))
    staging.store(gl.where((lse == float("inf"))[:, None], 0.0, dq).to(staging.dtype))


@gluon.jit
def _store_columns(args, FIRST: gl.constexpr, tile):
    WIDTH: gl.constexpr = tile.shape[1]
    for column in gl.static_range(0, WIDTH, BOX):
        tma_store(args.dq, [args.token, args.head, FIRST + column], tile.slice(column, BOX, dim=1))


@gluon.jit
def _row_sums(args, NUMBER: gl.constexpr, OTHER: gl.constexpr, LAYOUT: gl.constexpr = SCORE_ROWS):
    """Row NUMBER of ``row_sums`` for the block's heads [64], OTHER after the last head."""
    rows = args.rows
    head = args.head + gl.arange(0, HEADS, LAYOUT)
    start = rows.sums + NUMBER * rows.rows + args.token.to(gl.int64) * rows.h_q
    return gl.load(start + head, mask=head < rows.h_q, other=OTHER)


@gluon.jit
def consume_scores(args, HAS_ROPE: gl.constexpr):
    tiles = args.tiles
    arrive(K_QUARTER0_EMPTY, PAIR_THREADS)
    arrive(K_QUARTER1_EMPTY, PAIR_THREADS)
    lse = _row_sums(args, 0, float("inf"))
    tiles.weight.store(_row_sums(args, 1, 0.0))
    scale_log2 = args.softmax_scale * LOG2_E
    dq0 = gl.zeros([HEADS, QUARTER], gl.float32, GRADIENT)
    dq1 = gl.zeros([HEADS, QUARTER], gl.float32, GRADIENT)
    unused = gl.zeros([HEADS, KEYS], gl.float32, SCORES)
    mbarrier.wait(tiles.q_full, 0)
    for step in range(args.steps):
        # A zero that is opaque to the compiler, which would otherwise hoist the descriptors of all tiles out of the
        # loop.
        zero = step >> 30
        phase = step & 1
        p_tile, ds_tile, k_left = tiles.p.index(zero), tiles.ds.index(zero), tiles.k.left.index(zero)
        pending = _start_products(tiles.q, tiles, phase, zero, unused, HAS_ROPE)
        mbarrier.wait(tiles.k_full.mask, phase)
        valid = (tiles.mask.load(SCORE_COLS) != 0)[None, :]
        _wait_stored()
        scores = warpgroup_mma_wait(0, deps=[pending])
        p = gl.where(valid, gl.exp2(scores * scale_log2 - lse[:, None]), 0.0)
        p_tile.store(p.to(p_tile.dtype))
        arrive(P_FULL, PAIR_THREADS)

        wait(DS_FULL, PAIR_THREADS)
        dq0 = warpgroup_mma(ds_tile, k_left.slice(0, QUARTER, dim=1), dq0, is_async=True)
        dq1 = warpgroup_mma(ds_tile, k_left.slice(QUARTER, QUARTER, dim=1), dq1, is_async=True)
        # Loaded from shared memory: otherwise the compiler computes the weighted P before P is published.
        weight = tiles.weight.load(SCORE_ROWS)
        p_tile.store((p * weight[:, None]).to(p_tile.dtype))
        fence_async_shared()
        _store_scores(args, step, p_tile, P)
        dq0 = warpgroup_mma_wait(1, deps=[dq0])
        if step + 1 < args.steps:
            arrive(K_QUARTER0_EMPTY, PAIR_THREADS)
        dq1 = warpgroup_mma_wait(0, deps=[dq1])
        if step + 1 < args.steps:
            arrive(K_QUARTER1_EMPTY, PAIR_THREADS)

    # q is no longer read: dq is stored through its tiles.
    staging = tiles.q.left.index(0)
    _stage(args, staging.slice(0, QUARTER, dim=1), dq0)
    _stage(args, staging.slice(QUARTER, QUARTER, dim=1), dq1)
    fence_async_shared()
    cta_barrier()
    _store_columns(args, 0, staging)
    tma.store_wait(0)


@gluon.jit
def consume_values(args, HAS_ROPE: gl.constexpr):
    tiles = args.tiles
    arrive(K_QUARTER2_EMPTY, PAIR_THREADS)
    arrive(K_QUARTER3_EMPTY, PAIR_THREADS)
    weight = _row_sums(args, 1, 0.0) * args.softmax_scale
    delta = _row_sums(args, 2, 0.0) * args.softmax_scale
    dq2 = gl.zeros([HEADS, QUARTER], gl.float32, GRADIENT)
    dq3 = gl.zeros([HEADS, QUARTER], gl.float32, GRADIENT)
    dq_rope = gl.zeros([HEADS, BOX], gl.float32, SCORES)
    unused = gl.zeros([HEADS, KEYS], gl.float32, SCORES)
    mbarrier.wait(tiles.dout_full, 0)
    for step in range(args.steps):
        zero = step >> 30
        p_tile, ds_tile, k_right = tiles.p.index(zero), tiles.ds.index(zero), tiles.k.right.index(zero)
        pending = _start_products(tiles.dout, tiles, step & 1, zero, unused, False)
        _wait_stored()
        dp = warpgroup_mma_wait(0, deps=[pending]) * weight[:, None] - delta[:, None]
        wait(P_FULL, PAIR_THREADS)
        p = p_tile.load(SCORES)
        # NaN if dout is NaN, also for invalid keys, whose gradients are not stored.
        ds = (p.to(gl.float32) * dp).to(ds_tile.dtype)
        ds_tile.store(ds)
        fence_async_shared()
        arrive(DS_FULL, PAIR_THREADS)

        operand = gl.convert_layout(ds, _DS_OPERAND, assert_trivial=True)
        dq2 = warpgroup_mma(operand, k_right.slice(0, QUARTER, dim=1), dq2, is_async=True)
        dq3 = warpgroup_mma(operand, k_right.slice(QUARTER, QUARTER, dim=1), dq3, is_async=True)
        if HAS_ROPE:
            operand_rope = gl.convert_layout(ds, _DS_OPERAND_ROPE, assert_trivial=True)
            dq_rope = warpgroup_mma(operand_rope, tiles.k.rope.index(zero), dq_rope, is_async=True)
        _store_scores(args, step, ds_tile, DS)
        dq2 = warpgroup_mma_wait(2 if HAS_ROPE else 1, deps=[dq2])
        if step + 1 < args.steps:
            arrive(K_QUARTER2_EMPTY, PAIR_THREADS)
        if HAS_ROPE:
            dq3, dq_rope = warpgroup_mma_wait(0, deps=[dq3, dq_rope])
        else:
            dq3 = warpgroup_mma_wait(0, deps=[dq3])
        if step + 1 < args.steps:
            arrive(K_QUARTER3_EMPTY, PAIR_THREADS)

    staging = tiles.q.right.index(0)
    _stage(args, staging.slice(0, QUARTER, dim=1), dq2)
    _stage(args, staging.slice(QUARTER, QUARTER, dim=1), dq3)
    if HAS_ROPE:
        _stage(args, tiles.q.rope.index(0), dq_rope)
    fence_async_shared()
    cta_barrier()
    _store_columns(args, HALF, staging)
    if HAS_ROPE:
        _store_columns(args, LATENT, tiles.q.rope.index(0))
    tma.store_wait(0)
