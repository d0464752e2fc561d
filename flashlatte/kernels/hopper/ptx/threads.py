"""Instructions that each thread executes once: named barriers, and what orders them."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def one_each(THREADS):
    """The layout of a vector [THREADS] with one element a thread."""
    return gl.BlockedLayout([1], [32], [THREADS // 32], [0])


@gluon.jit
def each_thread(x, THREADS: gl.constexpr = 128):
    """The number x for each thread of a partition."""
    return gl.full([THREADS], x, gl.int32, one_each(THREADS))


@gluon.constexpr_function
def _bar(instruction, barrier, threads):
    return f"{instruction} {barrier}, {threads}; mov.u32 $0, $1;"


@gluon.jit
def bar_arrive(BARRIER: gl.constexpr, MEETING: gl.constexpr, THREADS: gl.constexpr = 128):
    """A partition of THREADS threads arrives at a barrier of MEETING threads, and goes on."""
    thread = gl.arange(0, THREADS, one_each(THREADS))
    gl.inline_asm_elementwise(_bar("bar.arrive", BARRIER, MEETING), "=r,r", [thread], gl.int32, is_pure=False, pack=1)


@gluon.jit
def bar_sync(BARRIER: gl.constexpr, MEETING: gl.constexpr, THREADS: gl.constexpr = 128):
    """A partition of THREADS threads waits at a barrier of MEETING threads."""
    thread = gl.arange(0, THREADS, one_each(THREADS))
    gl.inline_asm_elementwise(_bar("bar.sync", BARRIER, MEETING), "=r,r", [thread], gl.int32, is_pure=False, pack=1)


@gluon.jit
def bar_arrive_at(barrier, MEETING: gl.constexpr, THREADS: gl.constexpr = 128):
    """``bar_arrive`` of a partition at a barrier whose number is known at run time."""
    numbers = gl.full([THREADS], 0, gl.int32, one_each(THREADS)) + barrier
    gl.inline_asm_elementwise(_bar("bar.arrive", "$1", MEETING), "=r,r", [numbers], gl.int32, is_pure=False, pack=1)


@gluon.jit
def bar_sync_at(barrier, MEETING: gl.constexpr, THREADS: gl.constexpr = 128):
    """``bar_sync`` of a partition at a barrier whose number is known at run time."""
    numbers = gl.full([THREADS], 0, gl.int32, one_each(THREADS)) + barrier
    gl.inline_asm_elementwise(_bar("bar.sync", "$1", MEETING), "=r,r", [numbers], gl.int32, is_pure=False, pack=1)


@gluon.jit
def lane():
    """The thread's number in its warp: a scalar to the compiler, which does not know that it differs."""
    return gl.inline_asm_elementwise("mov.u32 $0, %laneid;", "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
def of_lane(x, LANE: gl.constexpr):
    """What a lane of the warp has as the int32 scalar ``x``."""
    return gl.inline_asm_elementwise(
        f"shfl.sync.idx.b32 $0, $1, {LANE}, 31, -1;", "=r,r", [x], gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def of_lane_at(x, lane):
    """``of_lane`` of a lane whose number, the same for the warp, is known at run time."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, $2, 31, -1;", "=r,r,r", [x, lane], gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def of_lanes(x, lanes):
    """What the lanes ``lanes``, a tensor, have as the int32 scalar ``x``."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $2, $1, 31, -1;",
        "=r,r,r",
        [lanes, gl.zeros_like(lanes) + x],
        gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def lanes_below_zero(x):
    """A bit for each lane of the warp whose int32 scalar ``x`` is below 0."""
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
    """The threads of a warp meet. The compiler loads nothing ahead over this."""
    thread = gl.arange(0, 128, one_each(128))
    gl.inline_asm_elementwise(
        "bar.warp.sync 0xffffffff; mov.u32 $0, $1;", "=r,r", [thread], gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def stop_unless(condition):
    """Stop the program, with a launch failure, unless the scalar ``condition`` holds for each thread of four warps."""
    holds = each_thread(condition.to(gl.int32))
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.eq.s32 p, $1, 0; @p trap; mov.u32 $0, $1; }",
        "=r,r",
        [holds],
        gl.int32,
        is_pure=False,
        pack=1,
    )
