"""Queries of a request as float16, each row times a power of two."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from flashlatte.kernels.hopper.mla_tiles import HALF, LATENT, ROPE
from flashlatte.ops.dense_decode.hopper.few_rows.tiles import ROWS, SCORES
from flashlatte.ops.dense_decode.hopper.producer import query_pointers
from flashlatte.runtime.gluon_compat import cta_barrier

# The exponent of a row's largest number, in float16; float32's bias, and the largest exponent bits that leave a power
# of two and its inverse normal numbers.
_EXPONENT = gl.constexpr(14)
_BIAS = gl.constexpr(127)
_MOST_BITS = gl.constexpr(253)


@gluon.jit
def _load(call, item, FIRST_COL: gl.constexpr, COLS: gl.constexpr):
    """Columns of a request's rows as float32, 0 in rows that there are not."""
    pointers, in_use = query_pointers(call.query, item, call.work.group, ROWS, FIRST_COL, COLS)
    return gl.load(pointers, mask=in_use, other=0.0).to(gl.float32)


@gluon.jit
def _largest(call, item, FIRST_COL: gl.constexpr, COLS: gl.constexpr):
    return gl.max(gl.abs(_load(call, item, FIRST_COL, COLS)), 1)


@gluon.jit
def take_queries(call, item, PLAN: gl.constexpr):
    """Store a request's queries, and return what the scores of each row [16] are to be multiplied with."""
    q = call.tiles.q
    largest = gl.maximum(_largest(call, item, 0, HALF), _largest(call, item, HALF, HALF))
    if PLAN.has_rope:
        largest = gl.maximum(largest, _largest(call, item, LATENT, ROPE))
    bits = 2 * _BIAS + _EXPONENT - (largest.to(gl.int32, bitcast=True) >> 23)
    bits = gl.minimum(bits, _MOST_BITS)
    factor = (bits << 23).to(gl.float32, bitcast=True)[:, None]
    q.left.index(0).store((_load(call, item, 0, HALF) * factor).to(gl.float16))
    q.right.index(0).store((_load(call, item, HALF, HALF) * factor).to(gl.float16))
    if PLAN.has_rope:
        q.rope.index(0).store((_load(call, item, LATENT, ROPE) * factor).to(gl.float16))
    fence_async_shared()
    cta_barrier()
    inverse = ((2 * _BIAS - bits) << 23).to(gl.float32, bitcast=True)
    return gl.convert_layout(inverse, gl.SliceLayout(0, SCORES))
