"""What both forms of the producer do: take turns with the consumers, wait for loads, copy what is bf16 in the cache."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy

from flashlatte.kernels.hopper import barriers
from flashlatte.kernels.hopper.mla_tiles import ROWS
from flashlatte.ops.sparse_decode.hopper import layouts, schedule
from flashlatte.ops.sparse_decode.hopper.selection import list_of
from flashlatte.ops.sparse_decode.hopper.tiles import PLAIN, SWIZZLED_WORDS, V32
from flashlatte.runtime.gluon_compat import cp_async, reinterpret

# Words from a token's begin to its scales (v32) and its rope.
V32_SCALES = gl.constexpr(512 // 4)
V32_ROPE = gl.constexpr(528 // 4)
MODEL1_ROPE = gl.constexpr(448 // 4)
PLAIN_ROPE = gl.constexpr(1024 // 4)


class Cursor(NamedTuple):
    """Where a work item begins on the line of costs, the CTA's split of it, and pointers to its lists of indices."""

    cost: Any
    split: Any
    row: Any
    extra_row: Any


@gluon.jit
def cursor_at(item, cost, selection, work, lists, PLAN: gl.constexpr):
    own, extra = selection
    split = schedule.split_of(item, cost, work, lists, PLAN)
    row = list_of(own, item, lists)
    extra_row = row
    if lists.extra_limit is not None:
        extra_row = list_of(extra, item, lists)
    return Cursor(cost, split, row, extra_row)


@gluon.jit
def arrive(BARRIER: gl.constexpr, PLAN: gl.constexpr):
    barriers.arrive(BARRIER, 128 + PLAN.producer_threads, PLAN.producer_threads)


@gluon.jit
def wait(BARRIER: gl.constexpr, PLAN: gl.constexpr):
    barriers.wait(BARRIER, 128 + PLAN.producer_threads, PLAN.producer_threads)


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
