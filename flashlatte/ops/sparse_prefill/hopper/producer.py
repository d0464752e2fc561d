"""The producer: copies q and gathers the selected rows of kv into shared memory.

It refills half of a block as soon as its last reader releases it, in this order: block 0's left, block 0's right, block
1's left, block 1's right.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from flashlatte.kernels.hopper.barriers import ALL_THREADS, PAIR_THREADS, wait
from flashlatte.kernels.hopper.mla_tiles import COPY, K0_LEFT_EMPTY, K0_RIGHT_EMPTY, K1_LEFT_EMPTY, K1_RIGHT_EMPTY
from flashlatte.kernels.hopper.ptx.copies import PIECE_ROWS, load_evict_first
from flashlatte.ops.sparse_prefill.hopper.state import Q_EMPTY, indices_of, num_selected, num_steps, row_exists, rows_of
from flashlatte.ops.sparse_prefill.hopper.unions import MEMBER_BITS, MEMBERS
from flashlatte.runtime.gluon_compat import cp_async
from flashlatte.runtime.kernel_records import Int32, Int64, OptionalInt32, Pointer

# A thread copies 16 bytes at a time, eight adjacent threads the 128 bytes of a swizzled row.
_ROWS = gl.constexpr(gl.SliceLayout(1, COPY))
_COLUMNS = gl.constexpr(gl.SliceLayout(0, COPY))


class SparsePrefillQueries(NamedTuple):
    """q in global memory, with strides in units of 16 bytes. ``rope``: its rotated part, if ``q`` has only the latent
    part; else None, as its strides."""

    q: Pointer
    token_stride: Int64
    head_stride: Int64
    heads: Int32
    rope: Pointer = None
    rope_token_stride: OptionalInt32 = None
    rope_head_stride: OptionalInt32 = None


class GatheredTokens(NamedTuple):
    """The rows of kv that a block gathers: pointers, validity, and the members of the group that selected them, all
    [64]."""

    pointers: Any
    valid: Any
    members: Any


@gluon.jit
def _load_indices(row, first, count):
    position = first + gl.arange(0, 64, _ROWS)
    return gl.load(row + position, mask=position < count, other=-1, eviction_policy="evict_first")


@gluon.jit
def _valid_or_none(indices, s_kv, GROUP: gl.constexpr):
    """int32 indices or entries, -1 for invalid ones."""
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
    # The stride is in units of 16 bytes, so that the compiler knows the alignment for 16-byte copies.
    ELEMENTS: gl.constexpr = 128 // kv.dtype.element_ty.primitive_bitwidth
    offsets = gl.where(valid, indices, 0).to(gl.int64) * stride * ELEMENTS
    return GatheredTokens(kv + offsets, valid, members)


@gluon.jit
def _copy(rows, FIRST: gl.constexpr, tile):
    WIDTH: gl.constexpr = tile.shape[1]
    # Invalid rows are filled with zeros: their P is 0, and 0 · NaN would be NaN.
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
def _load_q(queries, work, tile, shared, HEAD_DIM: gl.constexpr, GROUP: gl.constexpr):
    for first in range(0, 64, 16):
        row = first + gl.arange(0, 16, PIECE_ROWS)
        token, head = rows_of(tile // work.head_blocks, tile % work.head_blocks, row, GROUP)
        inside = row_exists(work, token, head, queries.heads, GROUP)
        if GROUP > 1:
            token = gl.where(inside, token, 0)
        of_token = queries.q + token.to(gl.int64) * queries.token_stride * 8
        pointers = of_token + gl.where(inside, head, 0).to(gl.int64) * queries.head_stride * 8
        load_evict_first(pointers, inside, row, shared.q_offsets.left, 256)
        load_evict_first(pointers + 256, inside, row, shared.q_offsets.right, 256)
        if queries.rope is not None:
            of_token = queries.rope + token.to(gl.int64) * queries.rope_token_stride * 8
            pointers = of_token + gl.where(inside, head, 0).to(gl.int64) * queries.rope_head_stride * 8
            load_evict_first(pointers, inside, row, shared.q_offsets.rope, 64)
        elif HEAD_DIM == 576:
            load_evict_first(pointers + 512, inside, row, shared.q_offsets.rope, 64)
    _signal(shared.q_full)


@gluon.jit
def _signal_empty_block(full):
    _signal(full.quarter0)
    _signal(full.quarter1)
    _signal(full.quarter2)
    _signal(full.quarter3)
    mbarrier.arrive(full.mask, count=1)


@gluon.jit
def produce(queries, kv, kv_stride, work, tiles, shared, HEAD_DIM: gl.constexpr, GROUP: gl.constexpr):
    k0 = tiles.k0
    k1 = tiles.k1
    full0 = shared.full0
    full1 = shared.full1

    first = gl.program_id(0)
    row = indices_of(work, first)
    count = num_selected(work, first)
    indices0 = _valid_or_none(_load_indices(row, 0, count), work.selections.s_kv, GROUP)
    indices1 = _valid_or_none(_load_indices(row, 64, count), work.selections.s_kv, GROUP)
    for tile in range(first, work.tiles, gl.num_programs(0)):
        next_tile = tile + gl.num_programs(0)
        next_row = indices_of(work, next_tile)
        next_count = num_selected(work, next_tile)
        steps = num_steps(count)

        wait(Q_EMPTY, ALL_THREADS)
        _load_q(queries, work, tile, shared, HEAD_DIM, GROUP)
        for step in range(steps):
            rows0 = _rows(indices0, kv, kv_stride, GROUP)
            rows1 = _rows(indices1, kv, kv_stride, GROUP)
            wait(K0_LEFT_EMPTY, PAIR_THREADS)
            _copy_left(rows0, k0, full0)
            _publish_mask(rows0, shared.mask0, full0)
            wait(K0_RIGHT_EMPTY, PAIR_THREADS)
            _copy_right(rows0, k0, full0, HEAD_DIM)
            # Indices come from HBM: those of the next step, also across tiles, are loaded half a step ahead.
            last = step == steps - 1
            next_first = gl.where(last, 0, (step + 1) * 128)
            next_list = gl.where(last, next_row, row)
            next_list_count = gl.where(last, next_count, count)
            next_indices0 = _load_indices(next_list, next_first, next_list_count)
            next_indices1 = _load_indices(next_list, next_first + 64, next_list_count)
            wait(K1_LEFT_EMPTY, PAIR_THREADS)
            _copy_left(rows1, k1, full1)
            _publish_mask(rows1, shared.mask1, full1)
            wait(K1_RIGHT_EMPTY, PAIR_THREADS)
            _copy_right(rows1, k1, full1, HEAD_DIM)
            indices0 = _valid_or_none(next_indices0, work.selections.s_kv, GROUP)
            indices1 = _valid_or_none(next_indices1, work.selections.s_kv, GROUP)
        row = next_row
        count = next_count

    # The even consumer computes one block of scores ahead, also after the last tile, so signal a tile and a block with
    # arbitrary contents.
    wait(Q_EMPTY, ALL_THREADS)
    _signal(shared.q_full)
    wait(K0_LEFT_EMPTY, PAIR_THREADS)
    wait(K0_RIGHT_EMPTY, PAIR_THREADS)
    _signal_empty_block(full0)
    wait(K1_LEFT_EMPTY, PAIR_THREADS)
    wait(K1_RIGHT_EMPTY, PAIR_THREADS)
