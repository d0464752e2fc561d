"""The producer: copies q, and gathers the selected rows of kv, into shared memory.

It refills a half of a K block as soon as the consumer that multiplied it last lets go, in the order in which that
happens: block 0's left, block 0's right, block 1's left, block 1's right.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from flashlatte.kernels.hopper.barriers import ALL, PAIR, wait
from flashlatte.kernels.hopper.mla_tiles import (
    COPY,
    K0_LEFT_EMPTY,
    K0_RIGHT_EMPTY,
    K1_LEFT_EMPTY,
    K1_RIGHT_EMPTY,
)
from flashlatte.kernels.hopper.ptx.memory import PIECE_ROWS, load_once
from flashlatte.ops.sparse_prefill.hopper.state import (
    Q_EMPTY,
    indices_of,
    is_row,
    num_selected,
    num_steps,
    rows_of,
)
from flashlatte.ops.sparse_prefill.hopper.unions import MEMBER_BITS, MEMBERS
from flashlatte.runtime.gluon_compat import cp_async

# A thread copies 16 bytes at a time, eight neighbours the 128 bytes of a swizzled line.
_ROWS = gl.constexpr(gl.SliceLayout(1, COPY))
_COLUMNS = gl.constexpr(gl.SliceLayout(0, COPY))


class Queries(NamedTuple):
    """q as it lies in global memory; strides in units of 16 bytes."""

    q: Any
    token_stride: Any
    head_stride: Any
    heads: Any


class Selected(NamedTuple):
    """The rows of kv that a block gathers: pointers to them, which of them are selected, and by whom, all [64]."""

    pointers: Any
    valid: Any
    members: Any


@gluon.jit
def _load_indices(row, first, count):
    position = first + gl.arange(0, 64, _ROWS)
    return gl.load(row + position, mask=position < count, other=-1, eviction_policy="evict_first")


@gluon.jit
def _valid_or_none(indices, s_kv, GROUP: gl.constexpr):
    """int32 indices or entries, -1 for all that select nothing."""
    if GROUP > 1:
        return indices
    else:
        return gl.where((indices >= 0) & (indices < s_kv), indices, -1).to(gl.int32)


@gluon.jit
def _rows(indices, kv, stride, GROUP: gl.constexpr):
    valid = indices >= 0
    members = valid
    if GROUP > 1:
        members = gl.where(valid, indices & MEMBERS, 0)
        indices = indices >> MEMBER_BITS
    # The stride comes in units of 16 bytes, so that the compiler knows the alignment that 16-byte copies need.
    ELEMENTS: gl.constexpr = 128 // kv.dtype.element_ty.primitive_bitwidth
    offsets = gl.where(valid, indices, 0).to(gl.int64) * stride * ELEMENTS
    return Selected(kv + offsets, valid, members)


@gluon.jit
def _copy(rows, FIRST: gl.constexpr, tile):
    WIDTH: gl.constexpr = tile.shape[1]
    # Rows that select nothing are filled with zeros: their P is 0, and 0 · NaN would still be NaN.
    pointers = rows.pointers[:, None] + (FIRST + gl.arange(0, WIDTH, _COLUMNS))[None, :]
    cp_async(tile, pointers, mask=rows.valid[:, None])


@gluon.jit
def _signal(barrier):
    async_copy.mbarrier_arrive(barrier, increment_count=False)


@gluon.jit
def _copy_left(rows, k, full):
    left = k.left.index(0)
    _copy(rows, 0, left.slice(0, 128, dim=1))
    _signal(full.quarter0)
    _copy(rows, 128, left.slice(128, 128, dim=1))
    _signal(full.quarter1)


@gluon.jit
def _copy_right(rows, k, full, HEAD_DIM: gl.constexpr):
    right = k.right.index(0)
    if HEAD_DIM == 576:
        _copy(rows, 512, k.rope.index(0))
    _copy(rows, 256, right.slice(0, 128, dim=1))
    _signal(full.quarter2)
    _copy(rows, 384, right.slice(128, 128, dim=1))
    _signal(full.quarter3)


@gluon.jit
def _publish_mask(rows, mask, full):
    mask.store(rows.members.to(gl.int32))
    mbarrier.arrive(full.mask, count=1)


@gluon.jit
def _load_q(queries, problem, tile, shared, HEAD_DIM: gl.constexpr, GROUP: gl.constexpr):
    for first in range(0, 64, 16):
        row = first + gl.arange(0, 16, PIECE_ROWS)
        token, head = rows_of(tile // problem.head_blocks, tile % problem.head_blocks, row, GROUP)
        inside = is_row(problem, token, head, queries.heads, GROUP)
        if GROUP > 1:
            token = gl.where(inside, token, 0)
        of_token = queries.q + token.to(gl.int64) * queries.token_stride * 8
        pointers = of_token + gl.where(inside, head, 0).to(gl.int64) * queries.head_stride * 8
        load_once(pointers, inside, row, shared.q_offsets.left, 256)
        load_once(pointers + 256, inside, row, shared.q_offsets.right, 256)
        if HEAD_DIM == 576:
            load_once(pointers + 512, inside, row, shared.q_offsets.rope, 64)
    _signal(shared.q_full)


@gluon.jit
def _announce_nothing(full):
    _signal(full.quarter0)
    _signal(full.quarter1)
    _signal(full.quarter2)
    _signal(full.quarter3)
    mbarrier.arrive(full.mask, count=1)


@gluon.jit
def produce(queries, kv, kv_stride, problem, tiles, shared, HEAD_DIM: gl.constexpr, GROUP: gl.constexpr):
    k0 = tiles.k0
    k1 = tiles.k1
    full0 = shared.full0
    full1 = shared.full1

    first = gl.program_id(0)
    row = indices_of(problem, first)
    count = num_selected(problem, first)
    indices0 = _valid_or_none(_load_indices(row, 0, count), problem.s_kv, GROUP)
    indices1 = _valid_or_none(_load_indices(row, 64, count), problem.s_kv, GROUP)
    for tile in range(first, problem.tiles, gl.num_programs(0)):
        next_tile = tile + gl.num_programs(0)
        next_row = indices_of(problem, next_tile)
        next_count = num_selected(problem, next_tile)
        steps = num_steps(count)

        wait(Q_EMPTY, ALL)
        _load_q(queries, problem, tile, shared, HEAD_DIM, GROUP)
        for step in range(steps):
            rows0 = _rows(indices0, kv, kv_stride, GROUP)
            rows1 = _rows(indices1, kv, kv_stride, GROUP)
            wait(K0_LEFT_EMPTY, PAIR)
            _copy_left(rows0, k0, full0)
            _publish_mask(rows0, shared.mask0, full0)
            wait(K0_RIGHT_EMPTY, PAIR)
            _copy_right(rows0, k0, full0, HEAD_DIM)
            # Indices come from HBM: the next step's, also across tiles, are asked for half a step ahead.
            last = step == steps - 1
            ahead = gl.where(last, 0, (step + 1) * 128)
            ahead_row = gl.where(last, next_row, row)
            ahead_count = gl.where(last, next_count, count)
            ahead0 = _load_indices(ahead_row, ahead, ahead_count)
            ahead1 = _load_indices(ahead_row, ahead + 64, ahead_count)
            wait(K1_LEFT_EMPTY, PAIR)
            _copy_left(rows1, k1, full1)
            _publish_mask(rows1, shared.mask1, full1)
            wait(K1_RIGHT_EMPTY, PAIR)
            _copy_right(rows1, k1, full1, HEAD_DIM)
            indices0 = _valid_or_none(ahead0, problem.s_kv, GROUP)
            indices1 = _valid_or_none(ahead1, problem.s_kv, GROUP)
        row = next_row
        count = next_count

    # The even consumer runs one score ahead, also after the last tile: it gets a tile and a block of whatever is there.
    wait(Q_EMPTY, ALL)
    _signal(shared.q_full)
    wait(K0_LEFT_EMPTY, PAIR)
    wait(K0_RIGHT_EMPTY, PAIR)
    _announce_nothing(full0)
    wait(K1_LEFT_EMPTY, PAIR)
    wait(K1_RIGHT_EMPTY, PAIR)
