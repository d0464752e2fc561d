"""Quantize the queries of a request to e4m3, each row with a power-of-two scale."""

# Triton's annotations and calls are not Python's.
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from flashlatte.kernels.hopper import barriers
from flashlatte.kernels.hopper.e4m3.rounding import largest_of, two_terms
from flashlatte.kernels.hopper.e4m3.steps import SMALLEST_FACTOR
from flashlatte.kernels.hopper.e4m3.tiles import SCORE_ROWS, TILE, latent_of, rope_of
from flashlatte.kernels.hopper.mla_tiles import HALF, LATENT, ROPE
from flashlatte.kernels.triton.row_scales import power_of_two_scale
from flashlatte.ops.dense_decode.hopper.producer import query_pointers

# Rows that a consumer quantizes.
_ROWS = gl.constexpr(32)


@gluon.jit
def _load(args, item, FIRST_ROW: gl.constexpr, FIRST_COL: gl.constexpr, COLS: gl.constexpr):
    """Columns of a request's rows, with 0 for missing rows."""
    pointers, in_use = query_pointers(args.query, item, args.work.group, _ROWS, FIRST_COL, COLS, FIRST_ROW)
    return gl.load(pointers, mask=in_use, other=0.0)


@gluon.jit
def _store(tile, x, FIRST_ROW: gl.constexpr, FIRST_COL: gl.constexpr):
    rows = tile.slice(FIRST_ROW, _ROWS, dim=0)
    rows.slice(FIRST_COL, x.shape[1], dim=1).store(x)


@gluon.jit
def quantize(args, item, ODD: gl.constexpr, CONFIG: gl.constexpr):
    """Store a request's queries in shared memory; each consumer stores half of the rows. Returns the factor of the
    scores of each row [64]: its scale times ``args.scale``.

    The scale is the smallest power of two for which all values are at most 448. The rope is the sum of two e4m3 terms.
    """
    FIRST_ROW: gl.constexpr = ODD * _ROWS
    q = args.tiles.q
    left = _load(args, item, FIRST_ROW, 0, HALF)
    right = _load(args, item, FIRST_ROW, HALF, HALF)
    amax = gl.maximum(largest_of(left), largest_of(right))
    if CONFIG.has_rope:
        rope = _load(args, item, FIRST_ROW, LATENT, ROPE)
        amax = gl.maximum(amax, largest_of(rope))
    scale = power_of_two_scale(amax)
    args.tiles.q_scale.slice(FIRST_ROW, _ROWS).store(scale)
    inverse = (1.0 / scale)[:, None]
    latent = latent_of(q, 0)
    _store(latent, (left.to(gl.float32) * inverse).to(gl.float8e4nv), FIRST_ROW, 0)
    _store(latent, (right.to(gl.float32) * inverse).to(gl.float8e4nv), FIRST_ROW, HALF)
    if CONFIG.has_rope:
        first_term, second_term = two_terms(rope.to(gl.float32) * inverse)
        _store(rope_of(q, 0), first_term, FIRST_ROW, 0)
        _store(rope_of(q, 1), second_term, FIRST_ROW, 0)
    fence_async_shared()
    barriers.wait(TILE, barriers.PAIR_THREADS)
    return gl.maximum(args.tiles.q_scale.load(SCORE_ROWS) * args.scale, SMALLEST_FACTOR)
