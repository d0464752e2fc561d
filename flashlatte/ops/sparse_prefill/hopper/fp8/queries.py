"""Quantize the queries of a tile to e4m3, a few rows at a time, and copy them to shared memory.

The loader quantizes the next tile's queries between the steps of the current tile. Shared memory has room for only one
tile of queries, so the quantized queries are buffered in global memory, where they stay in the L2.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from flashlatte.kernels.hopper.e4m3.rounding import largest_of, two_terms
from flashlatte.kernels.hopper.mla_tiles import COPY, LATENT, ROPE, ROWS
from flashlatte.kernels.hopper.ptx.copies import prefetch_l2
from flashlatte.kernels.triton.row_scales import power_of_two_scale
from flashlatte.ops.sparse_prefill.hopper.fp8.state import VECTOR
from flashlatte.ops.sparse_prefill.hopper.state import list_of
from flashlatte.runtime.gluon_compat import cp_async, cta_barrier, reinterpret

# Pieces of a tile, each with one row for each warp of the loader.
_PIECE = gl.constexpr(4)
PIECES = gl.constexpr(ROWS.value // _PIECE.value)
# Bytes of a quantized query.
WIDTH = gl.constexpr(LATENT.value + 2 * ROPE.value)
# Elements of a cache line of 128 bytes. A thread prefetches one line.
_LINE = gl.constexpr(64)
_LINES = gl.constexpr(gl.BlockedLayout([1, 1], [4, 8], [4, 1], [1, 0]))
_LATENT = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0]))
_ROPE = gl.constexpr(gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0]))


@gluon.jit
def prefetch_queries(args, tile, HAS_ROPE: gl.constexpr):
    """Prefetch a tile's queries into the L2."""
    queries, work = args.queries, args.work
    head = tile % work.head_blocks * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, _LINES))
    offset = list_of(work, tile).to(gl.int64) * queries.token_stride
    offset += gl.minimum(head, queries.heads - 1).to(gl.int64) * queries.head_stride
    rows = queries.q + offset * 8
    col = gl.arange(0, LATENT // _LINE, gl.SliceLayout(0, _LINES)) * _LINE
    prefetch_l2(rows[:, None] + col[None, :])
    if HAS_ROPE:
        prefetch_l2(rows + LATENT)


@gluon.jit
def _load(args, tile, piece, FIRST_COL: gl.constexpr, COLS: gl.constexpr, LAYOUT: gl.constexpr):
    """Columns of a piece's rows, with 0 for missing heads."""
    queries, work = args.queries, args.work
    head = tile % work.head_blocks * ROWS + piece * _PIECE + gl.arange(0, _PIECE, gl.SliceLayout(1, LAYOUT))
    inside = head < queries.heads
    offset = list_of(work, tile).to(gl.int64) * queries.token_stride
    offset += gl.where(inside, head, 0).to(gl.int64) * queries.head_stride
    col = FIRST_COL + gl.arange(0, COLS, gl.SliceLayout(0, LAYOUT))
    return gl.load(queries.q + (offset * 8)[:, None] + col[None, :], mask=inside[:, None], other=0.0)


@gluon.jit
def _store(args, parity, piece, x, FIRST_COL: gl.constexpr):
    LAYOUT: gl.constexpr = x.type.layout
    row = _first_row(parity) + piece * _PIECE + gl.arange(0, _PIECE, gl.SliceLayout(1, LAYOUT))
    col = FIRST_COL + gl.arange(0, x.shape[1], gl.SliceLayout(0, LAYOUT))
    gl.store(args.buffers.elements + (row * WIDTH)[:, None] + col[None, :], x)


@gluon.jit
def _first_row(parity):
    """First row of a buffer: [CTAs, 2, 64] rows."""
    return (gl.program_id(0) * 2 + parity) * ROWS


@gluon.jit
def quantize_piece(args, tile, parity, piece, HAS_ROPE: gl.constexpr):
    """Quantize piece ``piece`` of PIECES of a tile's queries. ``parity``: parity of the tile's number within the CTA.

    The scale of a row is the smallest power of two for which all values are at most 448.
    """
    latent = _load(args, tile, piece, 0, LATENT, _LATENT)
    amax = largest_of(latent)
    if HAS_ROPE:
        rope = _load(args, tile, piece, LATENT, ROPE, _ROPE)
        amax = gl.maximum(amax, gl.convert_layout(largest_of(rope), amax.type.layout))
    scale = power_of_two_scale(amax)
    # [2 · PIECES, 4]
    scales = reinterpret(args.shared.q_scales, gl.float32, [2 * PIECES, _PIECE], VECTOR)
    scales.index(parity * PIECES + piece).store(scale)
    inverse = 1.0 / scale
    _store(args, parity, piece, (latent.to(gl.float32) * inverse[:, None]).to(gl.float8e4nv), 0)
    if HAS_ROPE:
        inverse = gl.convert_layout(inverse, gl.SliceLayout(1, _ROPE))
        first_term, second_term = two_terms(rope.to(gl.float32) * inverse[:, None])
        _store(args, parity, piece, first_term, LATENT)
        _store(args, parity, piece, second_term, LATENT + ROPE)


@gluon.jit
def _copy(args, tile, parity, FIRST_COL: gl.constexpr):
    """Start copying columns to ``tile`` [64, n] of pairs."""
    row = _first_row(parity) + gl.arange(0, ROWS, gl.SliceLayout(1, COPY))
    col = FIRST_COL // 2 + gl.arange(0, tile.shape[1], gl.SliceLayout(0, COPY))
    cp_async(tile, args.buffers.pairs + (row * (WIDTH // 2))[:, None] + col[None, :])


@gluon.jit
def copy_queries(args, parity, HAS_ROPE: gl.constexpr):
    """Start copying a tile's quantized queries, after the consumers have released the previous ones."""
    q, shared = args.tiles.q, args.shared
    mbarrier.wait(shared.q_empty, parity ^ 1)
    # Other threads have stored the queries.
    cta_barrier()
    _copy(args, q.latent.index(0), parity, 0)
    if HAS_ROPE:
        _copy(args, q.rope.index(0), parity, LATENT)
        _copy(args, q.rope.index(1), parity, LATENT + ROPE)
    async_copy.mbarrier_arrive(shared.q_full, increment_count=False)
    mbarrier.arrive(shared.q_full, count=1)
