"""Instructions that each thread executes once: named barriers, shuffles, votes and traps."""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def one_per_thread(THREADS):
    """The layout of a vector [THREADS] with one element per thread."""
    return gl.BlockedLayout([1], [32], [THREADS // 32], [0])


@gluon.jit
def broadcast_to_threads(x):
    """The scalar x as a vector with one element for each of a partition's 128 threads."""
    return gl.full([128], x, gl.int32, one_per_thread(128))


@gluon.constexpr_function
def _bar(instruction, barrier, threads):
    return f"{instruction} {barrier}, {threads}; mov.u32 $0, $1;"


@gluon.jit
def bar_arrive(BARRIER: gl.constexpr, BARRIER_THREADS: gl.constexpr, THREADS: gl.constexpr = 128):
    """A partition of THREADS threads arrives at a named barrier of BARRIER_THREADS threads, without waiting."""
    thread = gl.arange(0, THREADS, one_per_thread(THREADS))
    gl.inline_asm_elementwise(
        _bar("bar.arrive", BARRIER, BARRIER_THREADS), "=r,r", [thread], gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def bar_sync(BARRIER: gl.constexpr, BARRIER_THREADS: gl.constexpr, THREADS: gl.constexpr = 128):
    """A partition of THREADS threads waits at a named barrier of BARRIER_THREADS threads."""
    thread = gl.arange(0, THREADS, one_per_thread(THREADS))
    gl.inline_asm_elementwise(
        _bar("bar.sync", BARRIER, BARRIER_THREADS), "=r,r", [thread], gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def bar_arrive_at(barrier, BARRIER_THREADS: gl.constexpr, THREADS: gl.constexpr = 128):
    """``bar_arrive`` at a barrier whose number is a run-time value."""
    numbers = gl.full([THREADS], 0, gl.int32, one_per_thread(THREADS)) + barrier
    gl.inline_asm_elementwise(
        _bar("bar.arrive", "$1", BARRIER_THREADS), "=r,r", [numbers], gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def bar_sync_at(barrier, BARRIER_THREADS: gl.constexpr, THREADS: gl.constexpr = 128):
    """``bar_sync`` at a barrier whose number is a run-time value."""
    numbers = gl.full([THREADS], 0, gl.int32, one_per_thread(THREADS)) + barrier
    gl.inline_asm_elementwise(
        _bar("bar.sync", "$1", BARRIER_THREADS), "=r,r", [numbers], gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def lane_id():
    """The lane of the thread, as a scalar. The compiler does not know that it differs between threads."""
    return gl.inline_asm_elementwise("mov.u32 $0, %laneid;", "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
def shuffle_from_lane(x, LANE: gl.constexpr):
    """The int32 scalar ``x`` of lane LANE."""
    return gl.inline_asm_elementwise(
        f"shfl.sync.idx.b32 $0, $1, {LANE}, 31, -1;", "=r,r", [x], gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def shuffle_from_lane_at(x, lane_id):
    """``shuffle_from_lane`` with a run-time lane, which is the same for the whole warp."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, $2, 31, -1;", "=r,r,r", [x, lane_id], gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def shuffle_from_lanes(x, lanes):
    """The int32 scalars ``x`` of the lanes ``lanes``, a tensor."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $2, $1, 31, -1;",
        "=r,r,r",
        [lanes, gl.zeros_like(lanes) + x],
        gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def ballot_negative(x):
    """Ballot: bit i is set if the int32 scalar ``x`` of lane i is negative."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred below; setp.lt.s32 below, $1, 0; vote.sync.ballot.b32 $0, below, -1; }",
        "=r,r",
        [x],
        gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def warp_sync():
    """Synchronize the threads of a warp. The compiler does not move loads before this."""
    thread = gl.arange(0, 128, one_per_thread(128))
    gl.inline_asm_elementwise(
        "bar.warp.sync 0xffffffff; mov.u32 $0, $1;", "=r,r", [thread], gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def trap_unless(condition):
    """Trap, which fails the launch, unless the scalar ``condition`` holds in each thread of four warps."""
    holds = broadcast_to_threads(condition.to(gl.int32))
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.eq.s32 p, $1, 0; @p trap; mov.u32 $0, $1; }",
        "=r,r",
        [holds],
        gl.int32,
        is_pure=False,
        pack=1,
    )
