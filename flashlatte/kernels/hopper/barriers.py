"""How warps of a CTA wait for each other: named barriers of the hardware, and mbarriers for what is copied.

There are 16 named barriers, by number. One completes when so many threads, arriving or waiting, have reached it; shared
memory written before is then visible to those that waited. An mbarrier's arrive is preceded by a barrier of the whole
partition; at a named barrier each warp arrives for itself, and goes on.

A named barrier counts arrivals whoever they come from. So each one alternates strictly between its arrivals and its
wait, and nobody can reach it twice in one phase: whoever arrives again has waited for something that came after the
wait.

Buffers have an *empty* barrier (their last reader has read them: to the producer) and a *full* one (they have been
filled: to the consumers). On an mbarrier complete the copies that fill a buffer.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from flashlatte.kernels.hopper.ptx.threads import bar_arrive as arrive
from flashlatte.kernels.hopper.ptx.threads import bar_arrive_at as arrive_at
from flashlatte.kernels.hopper.ptx.threads import bar_sync as wait
from flashlatte.kernels.hopper.ptx.threads import bar_sync_at as wait_at
from flashlatte.runtime.gluon_compat import cta_barrier

__all__ = [
    "ALL",
    "FIRST_FREE",
    "PAIR",
    "allocate_mbarrier",
    "arrive",
    "arrive_at",
    "before_partitions",
    "wait",
    "wait_at",
]

# Numbers are free from here to 15. Triton takes those below for its own barriers.
FIRST_FREE = 5

# Threads that meet: two partitions of four warps, or all three.
PAIR = gl.constexpr(256)
ALL = gl.constexpr(384)


@gluon.jit
def before_partitions():
    """Stands before ``warp_specialize`` where a reduction came before.

    What that hands to the partitions lies in shared memory where the reduction's results were, and Triton sets no
    barrier between: a warp that is ahead would write over a result that another one has yet to read.
    """
    cta_barrier()


@gluon.jit
def allocate_mbarrier(COUNT: gl.constexpr = 1):
    """An mbarrier that COUNT arrivals complete. Each has an allocation of its own: barriers that share one draw more
    barriers of the whole CTA from the compiler.

    Make none that nobody uses. Triton lays other things over its memory, which nothing invalidates it for: such kernels
    end with faults of all kinds where processes share a GPU (docs/notes/sparse-decode.md).
    """
    barrier = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(barrier, count=COUNT)
    return barrier
