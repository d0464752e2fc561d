"""The named barriers of this kernel, and how to reach those that a ring of stages has one of for each stage.

A barrier counts arrivals whoever they come from. Here nobody can arrive twice in one phase: a stage is free again only
after it has been refilled, and the refill waited for the arrivals before.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashlatte.kernels.hopper.named_barriers import FIRST_FREE

# A consumer's queries may be replaced (that consumer to the producer).
Q_FREE_FIRST = gl.constexpr(FIRST_FREE)
Q_FREE_SECOND = gl.constexpr(FIRST_FREE + 1)
# A consumer may start its multiplications (the other one to it).
TURN_FIRST = gl.constexpr(FIRST_FREE + 2)
TURN_SECOND = gl.constexpr(FIRST_FREE + 3)
# A stage may be refilled (both consumers to the producer); two each.
K_FREE = gl.constexpr(FIRST_FREE + 4)
V_FREE = gl.constexpr(FIRST_FREE + 6)

# Two warpgroups, or all three.
PAIR = gl.constexpr(256)
ALL = gl.constexpr(384)

# One element for each thread of four warps.
_THREADS = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def arrive_stage(FIRST: gl.constexpr, stage):
    barrier = gl.full([128], FIRST, gl.int32, _THREADS) + stage
    gl.inline_asm_elementwise("bar.arrive $1, 384; mov.u32 $0, $1;", "=r,r", [barrier], gl.int32, is_pure=False, pack=1)


@gluon.jit
def wait_stage(FIRST: gl.constexpr, stage):
    barrier = gl.full([128], FIRST, gl.int32, _THREADS) + stage
    gl.inline_asm_elementwise("bar.sync $1, 384; mov.u32 $0, $1;", "=r,r", [barrier], gl.int32, is_pure=False, pack=1)
