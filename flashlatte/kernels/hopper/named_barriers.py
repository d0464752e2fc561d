"""The 16 hardware barriers of a Hopper block, by number, from Gluon kernels.

An mbarrier's arrive is preceded by a barrier of the whole partition; here each warp arrives for itself, and goes on.
Triton takes the numbers below ``FIRST_FREE``. A barrier completes when ``THREADS`` threads, arriving or waiting, have
reached it; shared memory written before is then visible to those that waited.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

FIRST_FREE = 5
LAST = 15

# One element for each thread of four warps.
_THREADS = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.constexpr_function
def _instruction(name, barrier, threads):
    return f"{name} {barrier}, {threads}; mov.u32 $0, $1;"


@gluon.jit
def arrive(BARRIER: gl.constexpr, THREADS: gl.constexpr):
    """Reach a barrier without waiting for the others. For partitions of four warps."""
    gl.inline_asm_elementwise(
        _instruction("bar.arrive", BARRIER, THREADS),
        "=r,r",
        [gl.arange(0, 128, _THREADS)],
        gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def wait(BARRIER: gl.constexpr, THREADS: gl.constexpr):
    """Reach a barrier and wait for the others. For partitions of four warps."""
    gl.inline_asm_elementwise(
        _instruction("bar.sync", BARRIER, THREADS),
        "=r,r",
        [gl.arange(0, 128, _THREADS)],
        gl.int32,
        is_pure=False,
        pack=1,
    )
