"""Register layouts of the consumers' tiles."""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def _accumulator(columns):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


# [64 keys, 64 queries], and its rows and columns.
SCORE_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
SCORE_ROW = gl.constexpr(gl.SliceLayout(1, SCORE_LAYOUT))
SCORE_COLUMN = gl.constexpr(gl.SliceLayout(0, SCORE_LAYOUT))
# Gradients [64 keys, columns], and dQ [64 queries, columns].
GRAD_128 = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
GRAD_64 = SCORE_LAYOUT
DQ_64 = SCORE_LAYOUT
DQ_32 = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16]))


@gluon.constexpr_function
def operand(columns):
    """P or dS as the left operand of a product with ``columns`` columns."""
    return gl.DotOperandLayout(0, _accumulator(columns), 2)
