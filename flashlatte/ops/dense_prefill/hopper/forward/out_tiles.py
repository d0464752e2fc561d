"""A consumer's output [64, d_v] in registers: a tuple of one tile, or of two if one would be mostly padding.

Tile widths are powers of two: 72 and 80 columns use tiles of 64 and 16, 96 columns use 64 and 32.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from flashlatte.kernels.hopper import softmax
from flashlatte.kernels.hopper.two_consumers import ROWS, stage_of
from flashlatte.ops.dense_prefill.hopper.forward.tiles import accumulator, first_columns, second_columns


@gluon.jit
def zeros(D_V: gl.constexpr):
    first = _zeros(first_columns(D_V))
    if second_columns(D_V) == 0:
        return (first,)
    else:
        return first, _zeros(second_columns(D_V))


@gluon.jit
def _zeros(COLUMNS: gl.constexpr):
    return gl.zeros([ROWS, COLUMNS], gl.float32, accumulator(COLUMNS))


@gluon.jit
def start(shared, step, p, output):
    """Start P · v of the block of a step, which has arrived: one product per tile of ``output``."""
    first = _start_product(p, shared.v[0].index(stage_of(step)), output[0])
    if len(output) == 1:
        return (first,)
    else:
        return first, _start_product(p, shared.v[1].index(stage_of(step)), output[1])


@gluon.jit
def _start_product(p, v, tile):
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, accumulator(v.shape[1]), 2)
    return warpgroup_mma(gl.convert_layout(p, OPERAND, assert_trivial=True), v, tile, is_async=True)


@gluon.jit
def wait(pending: gl.constexpr, output):
    """Wait until at most ``pending`` products are pending; returns the output."""
    if len(output) == 1:
        return (warpgroup_mma_wait(pending, deps=[output[0]]),)
    else:
        return warpgroup_mma_wait(pending, deps=[output[0], output[1]])


@gluon.jit
def wait_with(output, p):
    """Wait for all products; returns the output and ``p``. P passes through the wait so that it is not rounded earlier,
    which would keep another operand in registers."""
    if len(output) == 1:
        tile, p = warpgroup_mma_wait(0, deps=[output[0], p])
        return (tile,), p
    else:
        first, second, p = warpgroup_mma_wait(0, deps=[output[0], output[1], p])
        return (first, second), p


@gluon.jit
def rescale(output, alpha):
    if len(output) == 1:
        return (softmax.rescale(output[0], alpha),)
    else:
        return softmax.rescale(output[0], alpha), softmax.rescale(output[1], alpha)
