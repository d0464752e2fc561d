"""A consumer's output [64, d_v] in registers: a tuple of one tile, or of two if one would be mostly padding.

Tile widths are powers of two: 72 and 80 columns use tiles of 64 and 16, 96 columns use 64 and 32.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from flashlatte.kernels.hopper import softmax
from flashlatte.kernels.hopper.two_consumers import ROWS, stage_of
from flashlatte.runtime.gluon_compat import reinterpret


@gluon.constexpr_function
def accumulator(columns):
    """The layout of a consumer's product [64, columns]."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.constexpr_function
def _columns(ring, keys):
    """Columns of a tile of values [keys, columns] in a ring [stages, rows, n]: a stage has chunks of n columns, one
    after the other."""
    return ring.shape[1] // keys * ring.shape[2]


@gluon.jit
def zeros(rings, KEYS: gl.constexpr):
    """The initial output: a tile for each of ``rings``, whose stages have KEYS values."""
    first = _zeros(_columns(rings[0], KEYS))
    if len(rings) == 1:
        return (first,)
    else:
        return first, _zeros(_columns(rings[1], KEYS))


@gluon.jit
def _zeros(COLUMNS: gl.constexpr):
    return gl.zeros([ROWS, COLUMNS], gl.float32, accumulator(COLUMNS))


@gluon.jit
def start(rings, step, p, output, KEYS: gl.constexpr):
    """Start P · v of the block of a step, which has arrived: one product per tile of ``output``."""
    first = _start_product(p, _values(rings[0], step, KEYS), output[0])
    if len(output) == 1:
        return (first,)
    else:
        return first, _start_product(p, _values(rings[1], step, KEYS), output[1])


@gluon.jit
def _values(ring, step, KEYS: gl.constexpr):
    """The values [KEYS, columns] of a step."""
    stage = ring.index(stage_of(step))
    if stage.shape[0] == KEYS:
        return stage
    else:
        return reinterpret(stage, stage.dtype, [KEYS, _columns(ring, KEYS)], stage.layout)


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
