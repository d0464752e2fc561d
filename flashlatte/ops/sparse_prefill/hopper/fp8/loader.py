"""The loader: four warps that gather the selected rows of the workspace into the ring."""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from flashlatte.kernels.hopper import barriers
from flashlatte.kernels.hopper.e4m3.tiles import SLOT_EMPTY, SLOTS
from flashlatte.kernels.hopper.mla_tiles import COPY, KEYS, LATENT
from flashlatte.kernels.hopper.ptx.registers import opaque
from flashlatte.ops.sparse_prefill.hopper.fp8.queries import PIECES, copy_queries, quantize_piece
from flashlatte.ops.sparse_prefill.hopper.state import indices_of, num_selected, num_steps
from flashlatte.runtime.gluon_compat import cp_async

# A thread copies 16 bytes at a time, eight adjacent threads the 128 bytes of a swizzled row.
_ROWS = gl.constexpr(gl.SliceLayout(1, COPY))
_COLUMNS = gl.constexpr(gl.SliceLayout(0, COPY))


@gluon.jit
def _load_indices(row, first, count):
    position = first + gl.arange(0, KEYS, _ROWS)
    return gl.load(row + position, mask=position < count, other=-1, eviction_policy="evict_first")


@gluon.jit
def _valid_or_none(indices, s_kv):
    """int32 indices, -1 for invalid ones."""
    return gl.where((indices >= 0) & (indices < s_kv), indices, -1).to(gl.int32)


@gluon.jit
def _copy(tile, pointers, valid, FIRST_COL: gl.constexpr):
    # Invalid rows are filled with zeros: their P is 0, and 0 · NaN would be NaN.
    col = FIRST_COL // 2 + gl.arange(0, tile.shape[1], _COLUMNS)
    cp_async(tile, pointers[:, None] + col[None, :], mask=valid[:, None])


@gluon.jit
def _least_of_warps(indices):
    """[4], the least index of the rows that each warp copies."""
    # Rows are numbered by (register, warp, lanes).
    return gl.min(indices.reshape([4, 4, 4]).permute((1, 0, 2)).reshape([4, 16]), 1)


@gluon.jit
def _load_block(args, slot, indices, HAS_ROPE: gl.constexpr):
    """Gather the rows ``indices`` [64], -1 for none, into a slot."""
    tiles, shared, keys = args.tiles, args.shared, args.keys
    full = tiles.full.index(slot)
    valid = indices >= 0
    # In units of 16 bytes, so that the compiler knows the alignment for 16-byte copies.
    pointers = keys.pairs + gl.where(valid, indices, 0).to(gl.int64) * keys.stride * 8
    least = _least_of_warps(indices)
    barriers.wait_at(SLOT_EMPTY + slot, barriers.ALL_THREADS)
    _copy(tiles.k.latent.index(slot), pointers, valid, 0)
    if HAS_ROPE:
        _copy(tiles.k.rope.index(slot), pointers, valid, LATENT)
    async_copy.mbarrier_arrive(full, increment_count=False)
    shared.selected.index(slot).store(valid.to(gl.int32))
    shared.least.index(slot).store(least)
    mbarrier.arrive(full, count=1)


@gluon.jit
def load(args, HAS_ROPE: gl.constexpr):
    work = args.work
    first = gl.program_id(0)
    for piece in range(PIECES):
        quantize_piece(args, first, 0, piece, HAS_ROPE)
    row = indices_of(work, first)
    count = num_selected(work, first)
    indices0 = _load_indices(row, 0, count)
    indices1 = _load_indices(row, KEYS, count)
    slot = 0
    parity = 0
    for tile in range(first, work.tiles, gl.num_programs(0)):
        next_tile = tile + gl.num_programs(0)
        next_row = indices_of(work, next_tile)
        next_count = num_selected(work, next_tile)
        steps = opaque(num_steps(count))
        pieces = gl.where(next_tile < work.tiles, PIECES, 0)
        pieces_per_step = (PIECES + steps - 1) // steps
        for step in range(steps):
            is_last = step == steps - 1
            next_first = gl.where(is_last, 0, (step + 1) * (2 * KEYS))
            next_list = gl.where(is_last, next_row, row)
            next_list_count = gl.where(is_last, next_count, count)
            _load_block(args, slot, _valid_or_none(indices0, work.s_kv), HAS_ROPE)
            # Indices come from HBM: those of the next step, also across tiles, are loaded a step ahead.
            indices0 = _load_indices(next_list, next_first, next_list_count)
            _load_block(args, slot + 1, _valid_or_none(indices1, work.s_kv), HAS_ROPE)
            indices1 = _load_indices(next_list, next_first + KEYS, next_list_count)
            slot ^= 2
            if step == 0:
                # Keys are loaded earlier, because the consumers release the queries after the last step.
                # The compiler would keep their pointers in registers.
                copy_queries(args, opaque(parity), HAS_ROPE)
            piece = step * pieces_per_step
            for number in range(piece, gl.minimum(piece + pieces_per_step, pieces)):
                quantize_piece(args, next_tile, parity ^ 1, number, HAS_ROPE)
        row = next_row
        count = next_count
        parity ^= 1
    # The consumers' last arrivals.
    for last in gl.static_range(SLOTS):
        barriers.wait(SLOT_EMPTY + last, barriers.ALL_THREADS)
