"""Load the queries of a request as float16, each row scaled by a power of two."""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from flashlatte.kernels.hopper.mla_tiles import HALF, LATENT, ROPE
from flashlatte.ops.dense_decode.hopper.few_rows.tiles import ROWS, SCORES
from flashlatte.ops.dense_decode.hopper.producer import query_pointers
from flashlatte.runtime.gluon_compat import cta_barrier

# Exponent of a row's scaled maximum; float32's exponent bias; and the maximum exponent bits of a power of two whose
# inverse is a normal number.
_EXPONENT = gl.constexpr(14)
_BIAS = gl.constexpr(127)
_MAX_BITS = gl.constexpr(253)


@gluon.jit
def _load(args, item, FIRST_COL: gl.constexpr, COLS: gl.constexpr):
    """Load columns of a request's rows as float32, with 0 for missing rows."""
    pointers, in_use = query_pointers(args.query, item, args.work.group, ROWS, FIRST_COL, COLS)
    return gl.load(pointers, mask=in_use, other=0.0).to(gl.float32)


@gluon.jit
def _row_amax(args, item, FIRST_COL: gl.constexpr, COLS: gl.constexpr):
    return gl.max(gl.abs(_load(args, item, FIRST_COL, COLS)), 1)


@gluon.jit
def load_queries(args, item, CONFIG: gl.constexpr):
    """Store a request's queries in shared memory. Returns the inverse scale of each row [16], a factor for its
    scores."""
    q = args.tiles.q
    amax = gl.maximum(_row_amax(args, item, 0, HALF), _row_amax(args, item, HALF, HALF))
    if CONFIG.has_rope:
        amax = gl.maximum(amax, _row_amax(args, item, LATENT, ROPE))
    bits = 2 * _BIAS + _EXPONENT - (amax.to(gl.int32, bitcast=True) >> 23)
    bits = gl.minimum(bits, _MAX_BITS)
    factor = (bits << 23).to(gl.float32, bitcast=True)[:, None]
    q.left.index(0).store((_load(args, item, 0, HALF) * factor).to(gl.float16))
    q.right.index(0).store((_load(args, item, HALF, HALF) * factor).to(gl.float16))
    if CONFIG.has_rope:
        q.rope.index(0).store((_load(args, item, LATENT, ROPE) * factor).to(gl.float16))
    fence_async_shared()
    cta_barrier()
    inverse = ((2 * _BIAS - bits) << 23).to(gl.float32, bitcast=True)
    return gl.convert_layout(inverse, gl.SliceLayout(0, SCORES))
