"""Named barriers whose number is a run-time value, as a ring of stages needs. For partitions of four warps."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# One element for each thread of four warps.
_THREADS = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.constexpr_function
def _instruction(name, threads):
    return f"{name} $1, {threads}; mov.u32 $0, $1;"


@gluon.jit
def _reach(barrier, INSTRUCTION: gl.constexpr):
    numbers = gl.full([128], 0, gl.int32, _THREADS) + barrier
    gl.inline_asm_elementwise(INSTRUCTION, "=r,r", [numbers], gl.int32, is_pure=False, pack=1)


@gluon.jit
def arrive(barrier, THREADS: gl.constexpr):
    """Reach a barrier without waiting for the others."""
    _reach(barrier, _instruction("bar.arrive", THREADS))


@gluon.jit
def wait(barrier, THREADS: gl.constexpr):
    """Reach a barrier and wait for the others."""
    _reach(barrier, _instruction("bar.sync", THREADS))


@gluon.jit
def settle():
    """Keep the compiler from loading ahead, past this point, what would only wait in registers."""
    gl.inline_asm_elementwise(
        "bar.warp.sync 0xffffffff; mov.u32 $0, $1;",
        "=r,r",
        [gl.arange(0, 128, _THREADS)],
        gl.int32,
        is_pure=False,
        pack=1,
    )
