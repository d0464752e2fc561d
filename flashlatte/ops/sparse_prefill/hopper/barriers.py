"""The named barriers of this kernel.

Each alternates strictly between its arrivals and its wait, so that no party arrives twice in one phase.
"""

from triton.experimental.gluon import language as gl

from flashlatte.kernels.hopper.named_barriers import FIRST_FREE

# A half of a K block may be refilled (consumer to producer).
LEFT0_FREE = gl.constexpr(FIRST_FREE)
RIGHT0_FREE = gl.constexpr(FIRST_FREE + 1)
LEFT1_FREE = gl.constexpr(FIRST_FREE + 2)
RIGHT1_FREE = gl.constexpr(FIRST_FREE + 3)
# q may be replaced (both consumers to producer).
Q_FREE = gl.constexpr(FIRST_FREE + 4)
# Block 0's weights and their reference, block 1's reference, block 1's weights (consumer to consumer).
WEIGHTS0_READY = gl.constexpr(FIRST_FREE + 5)
REFERENCE1_READY = gl.constexpr(FIRST_FREE + 6)
WEIGHTS1_READY = gl.constexpr(FIRST_FREE + 7)

# Two warpgroups, or all three.
PAIR = gl.constexpr(256)
ALL = gl.constexpr(384)
