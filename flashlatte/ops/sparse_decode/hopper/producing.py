"""What both forms of the producer do: take turns with the consumers, wait for loads, copy what is bf16 in the cache."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy

from flashlatte.kernels.hopper import named_barriers
from flashlatte.ops.sparse_decode.hopper import layouts, schedule
from flashlatte.ops.sparse_decode.hopper.selection import list_of
from flashlatte.ops.sparse_decode.hopper.tiles import PLAIN, ROWS, SWIZZLED_WORDS, V32
from flashlatte.runtime.gluon_compat import cp_async, reinterpret

# Words from a token's begin to its scales (v32) and its rope.
V32_SCALES = gl.constexpr(512 // 4)
V32_ROPE = gl.constexpr(528 // 4)
MODEL1_ROPE = gl.constexpr(448 // 4)
PLAIN_ROPE = gl.constexpr(1024 // 4)


class Cursor(NamedTuple):
    """An item's place on the line of costs, the program's share of it, and pointers to its lists of indices."""

    cost: Any
    share: Any
    row: Any
    extra_row: Any


@gluon.jit
def cursor_at(item, cost, selection, place, lists, PLAN: gl.constexpr):
    own, extra = selection
    share = schedule.share_of(item, cost, place, lists, PLAN)
    row = list_of(own, item, lists)
    extra_row = row
    if lists.extra_limit is not None:
        extra_row = list_of(extra, item, lists)
    return Cursor(cost, share, row, extra_row)


@gluon.constexpr_function
def _barrier(INSTRUCTION, BARRIER, PRODUCER_THREADS):
    return named_barriers._instruction(INSTRUCTION, BARRIER, 128 + PRODUCER_THREADS)


@gluon.jit
def _reach(INSTRUCTION: gl.constexpr, BARRIER: gl.constexpr, PLAN: gl.constexpr):
    THREADS: gl.constexpr = PLAN.producer_threads
    instruction: gl.constexpr = _barrier(INSTRUCTION, BARRIER, THREADS)
    thread = gl.arange(0, THREADS, layouts.threads_layout(THREADS))
    gl.inline_asm_elementwise(instruction, "=r,r", [thread], gl.int32, is_pure=False, pack=1)


@gluon.jit
def arrive(BARRIER: gl.constexpr, PLAN: gl.constexpr):
    _reach("bar.arrive", BARRIER, PLAN)


@gluon.jit
def wait(BARRIER: gl.constexpr, PLAN: gl.constexpr):
    _reach("bar.sync", BARRIER, PLAN)


@gluon.jit
def copy_words(tile, rows, FIRST: gl.constexpr, COLUMN: gl.constexpr, WIDTH: gl.constexpr, PLAN: gl.constexpr):
    """Copy words from FIRST of the rows to words from COLUMN of a tile; 0 where a token is not selected."""
    LAYOUT: gl.constexpr = layouts.copy_layout(WIDTH, PLAN.format == PLAIN)
    ALL: gl.constexpr = tile.shape[2] // 2
    target = reinterpret(tile.index(0), gl.int32, [ROWS, ALL], SWIZZLED_WORDS)
    if WIDTH != ALL:
        target = target.slice(COLUMN, WIDTH, dim=1)
    tokens: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    words = gl.convert_layout(rows.words, tokens, assert_trivial=True)[:, None]
    valid = gl.convert_layout(rows.valid, tokens, assert_trivial=True)[:, None]
    column = FIRST + gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    pointers, mask = gl.broadcast(words + column[None, :], valid)
    cp_async(target, pointers, mask=mask)


@gluon.jit
def signal(barrier):
    """Have an mbarrier complete when what has been copied is there."""
    async_copy.mbarrier_arrive(barrier, increment_count=False)


@gluon.jit
def copy_rope(right_tile, rope_tile, rows, copied, PLAN: gl.constexpr):
    """Copy what a token of a format with scales has in bf16."""
    if PLAN.format == V32:
        copy_words(rope_tile, rows, V32_ROPE, 0, 32, PLAN)
    else:
        copy_words(right_tile, rows, MODEL1_ROPE, 96, 32, PLAN)
    signal(copied)


@gluon.jit
def publish(mask, rows):
    mask.store(rows.valid.to(gl.int32))


@gluon.constexpr_function
def _arrived_asm(count):
    # Operands: 0 to count - 1 the words, also count to 2 count - 1. One of each 16 bytes that were loaded will do. The
    # grid has one axis: z is 0, and the branch, over which no load moves, never taken.
    gather = [f"or.b32 t, t, ${i};" for i in range(0, count, 4 if count >= 8 else 1)]
    begin = ["{ .reg .b32 t, z; .reg .pred p;", "mov.u32 z, %ctaid.y;", "mov.b32 t, 0;"]
    return " ".join([*begin, *gather, "and.b32 t, t, z;", "setp.ne.u32 p, t, 0;", "@p trap; }"])


@gluon.constexpr_function
def _arrived_constraints(count):
    return ",".join(["=r"] * count + [str(i) for i in range(count)])


@gluon.constexpr_function
def _words_each(TENSORS):
    return (gl.int32,) * TENSORS


@gluon.jit
def arrived(tensors, PACK: gl.constexpr):
    """A tuple of words, PACK each of a thread, once they are there.

    ptxas has six scoreboards to wait for loads with, and gives one to several halves. The first use of a half would
    then wait for the next one too, which was asked for only just before: so a half is waited for before that.
    """
    COUNT: gl.constexpr = len(tensors) * PACK
    return gl.inline_asm_elementwise(
        _arrived_asm(COUNT),
        _arrived_constraints(COUNT),
        tensors,
        _words_each(len(tensors)),
        is_pure=False,
        pack=PACK,
    )
