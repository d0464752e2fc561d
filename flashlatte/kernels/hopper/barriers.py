"""Synchronization of warps in a CTA: the hardware's named barriers, and mbarriers for asynchronous copies.

The hardware has 16 named barriers, numbered from 0. A barrier completes when a given number of threads have arrived or
wait at it; shared memory written before an arrival is then visible to the waiting threads. Gluon puts a barrier of the
whole partition before an mbarrier's arrive; at a named barrier each warp arrives separately and continues.

A named barrier does not distinguish the threads that arrive. Each use therefore alternates strictly between arrivals
and one wait, and no warp may arrive twice in one phase: before it arrives again, it has waited for an event that
follows that wait.

Each buffer has an *empty* barrier (the last reader signals the producer) and a *full* barrier (the producer signals the
consumers). Copies that fill a buffer complete on an mbarrier.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

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
    "ALL_THREADS",
    "FIRST_FREE",
    "PAIR_THREADS",
    "allocate_mbarrier",
    "allocate_mbarriers",
    "allocate_uninitialized_mbarriers",
    "arrive",
    "arrive_at",
    "initialize_mbarriers",
    "sync_before_warp_specialize",
    "wait",
    "wait_at",
]

# The first named barrier that kernels may use, up to 15. Triton uses those below.
FIRST_FREE = 5

# Threads of a barrier: two partitions of four warps, or all three partitions.
PAIR_THREADS = gl.constexpr(256)
ALL_THREADS = gl.constexpr(384)


@gluon.jit
def sync_before_warp_specialize():
    """Call this before ``warp_specialize`` if a reduction precedes it.

    Triton passes the arguments of the partitions through shared memory that the reduction used, without a barrier
    between: a fast warp could overwrite a result that another warp has not read.
    """
    cta_barrier()


@gluon.jit
def allocate_mbarrier(COUNT: gl.constexpr = 1):
    """An mbarrier that completes after COUNT arrivals. Each mbarrier has its own allocation: for mbarriers that share
    one, the compiler inserts more CTA-wide barriers.

    Do not allocate an unused mbarrier. Triton reuses its memory without invalidating it; such kernels fail in various
    ways when processes share a GPU (docs/notes/sparse-decode.md).
    """
    barrier = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(barrier, count=COUNT)
    return barrier


@gluon.jit
def allocate_mbarriers(SLOTS: gl.constexpr, COUNT: gl.constexpr = 1):
    """The mbarriers [SLOTS, 1] of a ring's slots, each of which completes after COUNT arrivals."""
    barriers = allocate_uninitialized_mbarriers(SLOTS)
    initialize_mbarriers(barriers, COUNT)
    return barriers


@gluon.jit
def allocate_uninitialized_mbarriers(SLOTS: gl.constexpr):
    """The mbarriers [SLOTS, 1] of a ring's slots, for ``initialize_mbarriers``."""
    return gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())


@gluon.jit
def initialize_mbarriers(barriers, COUNT: gl.constexpr):
    """Initialize the mbarriers of a ring's slots; each completes after COUNT arrivals.

    Between two mbarriers of a ring the compiler inserts a barrier of the partition's warps. A partition of one warp
    needs none.
    """
    SLOTS: gl.constexpr = barriers.shape[0]
    for slot in gl.static_range(SLOTS):
        mbarrier.init(barriers.index(slot), count=COUNT)
