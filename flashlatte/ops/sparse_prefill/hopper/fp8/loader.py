"""The loader: four warps that gather the selected rows of the workspace into the ring."""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from flashlatte.kernels.hopper import barriers
from flashlatte.kernels.hopper.e4m3.tiles import SLOT_EMPTY, SLOTS
from flashlatte.kernels.hopper.mla_tiles import COPY, KEYS, LATENT
from flashlatte.kernels.hopper.ptx.registers import opaque
from flashlatte.kernels.hopper.ptx.threads import one_per_thread
from flashlatte.ops.sparse_prefill.hopper.fp8.queries import PIECES, copy_queries, prefetch_queries, quantize_piece
from flashlatte.ops.sparse_prefill.hopper.state import indices_of, num_selected, num_steps
from flashlatte.runtime.gluon_compat import cp_async, cta_barrier

# A thread copies 16 bytes at a time, eight adjacent threads the 128 bytes of a swizzled row.
_ROWS = gl.constexpr(gl.SliceLayout(1, COPY))
_COLUMNS = gl.constexpr(gl.SliceLayout(0, COPY))
_THREADS = gl.constexpr(one_per_thread(128))


@gluon.jit
def _copy_indices(args, row, first, count, parity):
    """Start copying the indices of a step to shared memory, from index ``first`` of the list ``row`` [count] on.

    They are prefetched from HBM. If they were loaded into registers, the compiler would spill them, and the spill would
    wait for the load.
    """
    thread = gl.arange(0, 2 * KEYS, _THREADS)
    cp_async(args.shared.indices.index(parity), row + first + thread, mask=first + thread < count)
    async_copy.commit_group()


@gluon.jit
def _indices_of_block(args, first, count, parity, NUMBER: gl.constexpr):
    """Indices [64] of block NUMBER of a step, -1 for invalid ones."""
    indices = args.shared.indices.index(parity).slice(NUMBER * KEYS, KEYS).load(_ROWS)
    position = first + NUMBER * KEYS + gl.arange(0, KEYS, _ROWS)
    s_kv = args.work.selections.s_kv
    return gl.where((indices >= 0) & (indices < s_kv) & (position < count), indices, -1).to(gl.int32)


@gluon.jit
def _copy(tile, pointers, valid, FIRST_COL: gl.constexpr):
    # Invalid rows are filled with zeros: their P is 0, and 0 · NaN would be NaN.
    col = FIRST_COL // 2 + gl.arange(0, tile.shape[1], _COLUMNS)
    cp_async(tile, pointers[:, None] + col[None, :], mask=valid[:, None])


@gluon.jit
def _min_of_warps(indices):
    """The minimum [4] of the indices that each warp copies."""
    # Rows are numbered by (register, warp, lanes).
    return gl.min(indices.reshape([4, 4, 4]).permute((1, 0, 2)).reshape([4, 16]), 1)


@gluon.jit
def _load_block(args, slot, indices, HAS_ROPE: gl.constexpr):
    """Gather the rows ``indices`` [64], -1 for none, into a slot."""
    tiles, shared, keys = args.tiles, args.shared, args.keys
    full = tiles.full.index(slot)
    valid = indices >= 0
    # Offsets are in units of 16 bytes, so that the compiler can derive the alignment for 16-byte copies.
    pointers = keys.pairs + gl.where(valid, indices, 0).to(gl.int64) * keys.stride * 8
    lowest = _min_of_warps(indices)
    barriers.wait_at(SLOT_EMPTY + slot, barriers.ALL_THREADS)
    _copy(tiles.k.latent.index(slot), pointers, valid, 0)
    if HAS_ROPE:
        _copy(tiles.k.rope.index(slot), pointers, valid, LATENT)
    async_copy.mbarrier_arrive(full, increment_count=False)
    shared.selected.index(slot).store(valid.to(gl.int32))
    shared.min_indices.index(slot).store(lowest)
    mbarrier.arrive(full, count=1)


@gluon.jit
def load(args, HAS_ROPE: gl.constexpr):
    work = args.work
    first = gl.program_id(0)
    prefetch_queries(args, first, HAS_ROPE)
    for piece in range(PIECES):
        quantize_piece(args, first, 0, piece, HAS_ROPE)
    row = indices_of(work, first)
    count = num_selected(work, first)
    _copy_indices(args, row, 0, count, 0)
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
            if step == 0:
                # Opaque; otherwise the compiler keeps the pointers in registers across steps.
                prefetch_queries(args, opaque(next_tile), HAS_ROPE)
            # Also waits for the keys of the step before the last, but not for the last step's, which are not committed.
            async_copy.wait_group(0)
            cta_barrier()
            first_index = step * (2 * KEYS)
            is_last = step == steps - 1
            next_index = gl.where(is_last, 0, first_index + 2 * KEYS)
            next_list = gl.where(is_last, next_row, row)
            next_list_count = gl.where(is_last, next_count, count)
            _copy_indices(args, next_list, next_index, next_list_count, (slot >> 1) ^ 1)
            _load_block(args, slot, _indices_of_block(args, first_index, count, slot >> 1, 0), HAS_ROPE)
            _load_block(args, slot + 1, _indices_of_block(args, first_index, count, slot >> 1, 1), HAS_ROPE)
            slot ^= 2
            if step == 0:
                # After the keys' copies, because the consumers release the queries only after the tile's last step.
                # Opaque; otherwise the compiler keeps the pointers in registers across steps.
                copy_queries(args, opaque(parity), HAS_ROPE)
            piece = step * pieces_per_step
            for number in range(piece, gl.minimum(piece + pieces_per_step, pieces)):
                quantize_piece(args, next_tile, parity ^ 1, number, HAS_ROPE)
        row = next_row
        count = next_count
        parity ^= 1
    # Wait for the copy of the indices after the last tile, and for the consumers' last arrivals.
    async_copy.wait_group(0)
    for last in gl.static_range(SLOTS):
        barriers.wait(SLOT_EMPTY + last, barriers.ALL_THREADS)
