"""The keys kernel: the gradients of the keys that a query token selected, added to dkv.

A program keeps half of the columns of a token's q and dout, of up to 128 heads, in shared memory. Its two consumers
process alternate tiles of 64 keys independently: a consumer loads dS and P of all heads, multiplies, stages the result
in the shared memory of dS and P, and adds its rows to dkv. The RoPE columns of a tile belong to one of the two halves.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportInvalidTypeForm=false

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flashlatte.kernels.hopper.barriers import allocate_mbarrier, sync_before_warp_specialize
from flashlatte.kernels.hopper.mla_tiles import HALF, LATENT, SCORES, SWIZZLED
from flashlatte.kernels.hopper.ptx.copies import wait_stores_read
from flashlatte.kernels.hopper.ptx.staged_rows import STAGED_COLUMNS, row_of_thread, send_rows, stage_rows
from flashlatte.kernels.hopper.ptx.threads import warp_sync
from flashlatte.kernels.hopper.shared_memory import find_tiles, offset_of
from flashlatte.kernels.triton.selections import TokenSelections, first_index, selected_count
from flashlatte.ops.sparse_attention.hopper.state import (
    BOX,
    DS,
    HEADS,
    KEYS,
    PARTS,
    P,
    SparseBackwardPiece,
    SparseBackwardRows,
    score_row,
)
from flashlatte.runtime.gluon_compat import cta_barrier, tma_load
from flashlatte.runtime.kernel_records import Constant, Int32, Int64, Pointer
from flashlatte.runtime.triton_kernel import gluon_kernel

# Layouts of the result [64, 256] and of its RoPE columns [64, 64].
_GRADIENT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
# Registers per thread of the second consumer; the first gets the rest of 8 warps with 255 each.
_CONSUMER_REGISTERS = gl.constexpr(240)
# Boxes [64, 64] of dS and P in shared memory. A consumer's staged rows, 34,816 bytes, begin at its first box and end
# after its fourth; the second consumer's rows begin before its boxes.
_BOXES = gl.constexpr(9)
_UNUSED_BOX = gl.constexpr(4)
_FIRST_BOX = gl.constexpr([0, 5])
_STAGED_OFFSET = gl.constexpr([0, 36864])


class KeyGradientSlots(NamedTuple):
    """Slots of the tokens' lists that a launch processes, and the destination of their gradients.

    Attributes:
        first_token, first_slot: first token and slot of the launch; first_slot is a multiple of 64.
        slots: slots of each token.
        target: float32 [s_kv, d] with ``add``, else [tokens, slots, d].
        add: whether rows are added to the rows of the selected keys, or stored one per slot.
    """

    first_token: Int32
    first_slot: Int32
    slots: Int32
    target: Pointer
    stride: Int64
    add: Constant


class KeyGradientTiles(NamedTuple):
    """Shared memory. Axis 0 of q, rope and dout is the block of heads."""

    q: Any  # [blocks, 64, 256]
    rope: Any  # [blocks, 64, 64]
    dout: Any  # [blocks, 64, 256]
    boxes: Any  # [9, 64, 64]
    offset: Any  # of the boxes, in bytes from the start of shared memory
    rows_full: Any
    first_full: Any
    second_full: Any


class KeyGradientArgs(NamedTuple):
    """Arguments of the consumers: half ``side`` of the columns of a token, with ``count`` selected slots in the
    launch."""

    tiles: KeyGradientTiles
    selections: Any
    piece: Any
    slots: Any
    token: Any
    side: Any
    count: Any


@gluon.jit
def _allocate(DTYPE: gl.constexpr, HAS_ROPE: gl.constexpr, BLOCKS: gl.constexpr):
    q = gl.allocate_shared_memory(DTYPE, [BLOCKS, HEADS, HALF], SWIZZLED)
    rope = gl.allocate_shared_memory(DTYPE, [BLOCKS, HEADS, BOX], SWIZZLED) if HAS_ROPE else q
    dout = gl.allocate_shared_memory(DTYPE, [BLOCKS, HEADS, HALF], SWIZZLED)
    boxes = gl.allocate_shared_memory(DTYPE, [_BOXES, HEADS, KEYS], SWIZZLED)
    offset = offset_of(0, find_tiles((boxes.index(_UNUSED_BOX),))) - _UNUSED_BOX * (HEADS * KEYS * 2)
    return KeyGradientTiles(q, rope, dout, boxes, offset, allocate_mbarrier(), allocate_mbarrier(), allocate_mbarrier())


@gluon.jit
def _load_rows(rows, token, side, tiles, HAS_ROPE: gl.constexpr):
    BLOCKS: gl.constexpr = tiles.q.shape[0]
    COLUMNS: gl.constexpr = 2 * HALF + (BOX if HAS_ROPE else 0)
    full = tiles.rows_full
    mbarrier.expect(full, BLOCKS * HEADS * COLUMNS * 2)
    for block in gl.static_range(BLOCKS):
        head = block * HEADS
        for column in gl.static_range(0, HALF, BOX):
            at = side * HALF + column
            tma_load(rows.q, [token, head, at], full, tiles.q.index(block).slice(column, BOX, dim=1))
            tma_load(rows.dout, [token, head, at], full, tiles.dout.index(block).slice(column, BOX, dim=1))
        if HAS_ROPE:
            tma_load(rows.q, [token, head, LATENT], full, tiles.rope.index(block))


@gluon.jit
def _load_scores(args, tile, full, OWN: gl.constexpr):
    BLOCKS: gl.constexpr = args.tiles.q.shape[0]
    piece = args.piece
    row = score_row(piece, args.token - piece.first_token, tile, 0, 0)
    mbarrier.expect(full, BLOCKS * PARTS * HEADS * KEYS * 2)
    for box in gl.static_range(BLOCKS * PARTS):
        tma_load(piece.scores, [row + box * HEADS, 0], full, args.tiles.boxes.index(_FIRST_BOX[OWN] + box))


@gluon.jit
def _targets(args, tile, ADD: gl.constexpr):
    """For each thread, the row of a tile that it sends, whether it sends one, and the pointer to the destination."""
    slots = args.slots
    row = row_of_thread()
    slot = tile * KEYS - slots.first_slot + row  # of the launch
    sends = (row >= 0) & (slot < args.count)
    list_of_token = first_index(args.selections, args.token)
    index = gl.load(list_of_token + slots.first_slot + slot, mask=sends, other=-1)
    sends = sends & (index >= 0) & (index < args.selections.s_kv)
    if ADD:
        target = gl.where(sends, index, 0).to(gl.int64)
    else:
        target = (args.token - slots.first_token).to(gl.int64) * slots.slots + slot
    return row, sends, slots.target + target * slots.stride


@gluon.jit
def _product(tiles, block, PART: gl.constexpr, right, total, zero, OWN: gl.constexpr, ADD: gl.constexpr):
    """Start the product of dSᵀ or Pᵀ [64 keys, 64 heads] of a block of heads with ``right`` [64 heads, columns]."""
    box = tiles.boxes.index(zero + (_FIRST_BOX[OWN] + block * PARTS + PART))
    return warpgroup_mma(box.permute((1, 0)), right, total, use_acc=ADD, is_async=True)


@gluon.jit
def _send(args, targets, result, FIRST: gl.constexpr, column, OWN: gl.constexpr, ADD: gl.constexpr):
    """Stage columns of ``result`` from FIRST on, and add them to dkv from ``column`` on."""
    COLUMNS: gl.constexpr = min(result.shape[1] - FIRST, STAGED_COLUMNS)
    row, sends, target = targets
    offset = args.tiles.offset + _STAGED_OFFSET[OWN]
    stage_rows(result, offset, FIRST)
    fence_async_shared()
    warp_sync()
    send_rows(target + column, offset, row, sends, COLUMNS, ADD)
    wait_stores_read()
    warp_sync()


@gluon.jit
def _consume(args, OWN: gl.constexpr, HAS_ROPE: gl.constexpr, ADD: gl.constexpr):
    BLOCKS: gl.constexpr = args.tiles.q.shape[0]
    tiles, side = args.tiles, args.side
    full = tiles.second_full if OWN else tiles.first_full
    unused = gl.zeros([KEYS, HALF], gl.float32, _GRADIENT)
    unused_rope = gl.zeros([KEYS, BOX], gl.float32, SCORES)
    first_tile = args.slots.first_slot // KEYS
    end_tile = first_tile + (args.count + KEYS - 1) // KEYS
    phase = 0
    for tile in range(first_tile + OWN, end_tile, 2):
        zero = tile >> 30
        _load_scores(args, tile, full, OWN)
        targets = _targets(args, tile, ADD)
        mbarrier.wait(full, phase)
        phase ^= 1
        # Waits only for the first tile. It is in the loop, so that the rows and the first tile load at the same time.
        mbarrier.wait(tiles.rows_full, 0)
        result = _product(tiles, 0, DS, tiles.q.index(zero), unused, zero, OWN, False)
        result = _product(tiles, 0, P, tiles.dout.index(zero), result, zero, OWN, True)
        if BLOCKS == 2:
            result = _product(tiles, 1, DS, tiles.q.index(zero + 1), result, zero, OWN, True)
            result = _product(tiles, 1, P, tiles.dout.index(zero + 1), result, zero, OWN, True)
        if HAS_ROPE:
            rope = _product(tiles, 0, DS, tiles.rope.index(zero), unused_rope, zero, OWN, False)
            if BLOCKS == 2:
                rope = _product(tiles, 1, DS, tiles.rope.index(zero + 1), rope, zero, OWN, True)
            result, rope = warpgroup_mma_wait(0, deps=[result, rope])
        else:
            result = warpgroup_mma_wait(0, deps=[result])
        # The products of all warps have read dS and P, which the staged rows overwrite.
        cta_barrier()
        _send(args, targets, result, 0, side * HALF, OWN, ADD)
        _send(args, targets, result, STAGED_COLUMNS, side * HALF + STAGED_COLUMNS, OWN, ADD)
        if HAS_ROPE:  # noqa: SIM102
            if (tile >> 1) & 1 == side:
                _send(args, targets, rope, 0, LATENT, OWN, ADD)
        cta_barrier()


@gluon_kernel
def key_gradients_kernel(
    rows: SparseBackwardRows,
    selections: TokenSelections,
    piece: SparseBackwardPiece,
    slots: KeyGradientSlots,
    HAS_ROPE: gl.constexpr,
    BLOCKS: gl.constexpr,
):
    """A program processes a token of the launch and half of the columns. BLOCKS: ``piece.head_blocks``, 1 or 2."""
    token = slots.first_token + gl.program_id(0) // 2
    side = gl.program_id(0) % 2
    count = gl.minimum(selected_count(selections, token, selections.topk) - slots.first_slot, slots.slots)
    tiles = _allocate(rows.q.dtype, HAS_ROPE, BLOCKS)
    # Without keys nobody waits for the rows, and they would arrive in the shared memory of the SM's next program.
    if count > 0:
        _load_rows(rows, token, side, tiles, HAS_ROPE)
    args = KeyGradientArgs(tiles, selections, piece, slots, token, side, gl.maximum(count, 0))
    sync_before_warp_specialize()
    gl.warp_specialize(
        # ``slots.add`` would not be a compile-time constant in a partition: constants of a tuple become tensors there.
        [(_consume, (args, 0, HAS_ROPE, slots.add)), (_consume, (args, 1, HAS_ROPE, slots.add))],
        [4],
        [_CONSUMER_REGISTERS],
    )
