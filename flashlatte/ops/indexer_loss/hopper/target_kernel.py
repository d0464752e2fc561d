"""The target kernel: the attention probabilities of up to 128 heads of a query token, summed over the heads.

Each of two consumers holds 64 heads of q in registers, as the left operand of its products, so that shared memory has
room for three tiles of 64 keys. With up to 64 heads both consumers hold the same heads, and each has half of the keys
of a tile. A warp sums over its 16 heads; the producer sums over the warps and stores the target.

    consumers | scores of tile n (36 products each) | P, sums of the warps | scores of tile n + 1 ...
    producer  |                                     | copies of tile n + 3; target of tile n - 1 | ...
"""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false, reportCallIssue=false, reportInvalidTypeForm=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, warpgroup_mma, warpgroup_mma_wait

from flashlatte.kernels.hopper.barriers import (
    ALL_THREADS,
    FIRST_FREE,
    allocate_mbarrier,
    arrive,
    arrive_at,
    sync_before_warp_specialize,
    wait,
    wait_at,
)
from flashlatte.kernels.hopper.mla_tiles import HALF, KEYS, LATENT, ROPE, ROWS, SWIZZLED
from flashlatte.kernels.hopper.row_loads import GATHERED_ROWS, LatentKeys, copy_columns, gathered_keys, load_columns
from flashlatte.kernels.triton.online_softmax import LOG2_E
from flashlatte.ops.indexer_loss.hopper.head_sums import KEY_OF_SUM, WARPS, add_sums, allocate_sums, store_sums
from flashlatte.ops.indexer_loss.seen_keys import SlotRanges
from flashlatte.runtime.kernel_records import Int32, Int64, Pointer
from flashlatte.runtime.triton_kernel import gluon_kernel

# Stages: tiles of keys in shared memory.
STAGES = gl.constexpr(3)
# Named barriers, consumers to producer. One per stage: the stage is empty, and the sums of the previous tile are
# stored.
_EMPTY = gl.constexpr(FIRST_FREE)
# The sums of the last tile are stored.
_SUMS_FULL = gl.constexpr(FIRST_FREE + 3)
# Tiles whose sums are in shared memory: the producer reads the sums of a tile before it signals the fourth tile after
# it.
_SUMS = gl.constexpr(4)
# The stage of the first tile. The consumers' q arrives in the other two stages.
_FIRST_STAGE = gl.constexpr(2)
# Registers per thread. The first consumer gets the rest of 12 warps with 168 each: 224.
_CONSUMER_REGISTERS = gl.constexpr(224)
_PRODUCER_REGISTERS = gl.constexpr(56)


class TargetHeads(NamedTuple):
    """q, a TMA descriptor [s_q, h_q, d] of boxes [1, 64 heads, 64 columns], and lse [s_q, h_q]."""

    q: Pointer
    lse: Pointer
    lse_stride_token: Int64
    lse_stride_head: Int64
    h_q: Int32


class TargetTiles(NamedTuple):
    """Shared memory. Axis 0 is the stage; in ``sums`` it is the tile's number modulo 4."""

    latent: Any  # [3, 64, 512]
    rope: Any  # [3, 64, 64]
    sums: Any  # float32 [4, warps, 64]: P of a tile, summed over the heads of each warp
    full: Any
    q_full: Any


class TargetWork(NamedTuple):
    """Slots ``first`` to ``last`` - 1 of a token, in ``steps`` tiles. Slots before ``begin`` are masked."""

    token: Any
    begin: Any
    first: Any
    last: Any
    steps: Any


@gluon.jit
def _allocate(DTYPE: gl.constexpr, HAS_ROPE: gl.constexpr, BLOCKS: gl.constexpr):
    latent = gl.allocate_shared_memory(DTYPE, [STAGES, KEYS, LATENT], SWIZZLED)
    rope = gl.allocate_shared_memory(DTYPE, [STAGES, KEYS, ROPE], SWIZZLED) if HAS_ROPE else latent
    sums = allocate_sums(_SUMS, BLOCKS * WARPS)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=128)
    return TargetTiles(latent, rope, sums, full, allocate_mbarrier())


@gluon.jit
def _stage_of(step):
    return (step + _FIRST_STAGE) % STAGES


@gluon.jit
def _work(slots, first_token, SPLIT: gl.constexpr):
    splits = (slots.width + SPLIT - 1) // SPLIT
    token = first_token + gl.program_id(0) // splits
    number = gl.program_id(0) % splits
    begin = gl.load(slots.ranges + token)
    end = gl.load(slots.ranges + slots.s_q + token)
    first = gl.maximum(number * SPLIT, begin // KEYS * KEYS)
    last = gl.minimum((number + 1) * SPLIT, end)
    return TargetWork(token, begin, first, last, gl.maximum(last - first + KEYS - 1, 0) // KEYS)


@gluon.jit
def _load_q(heads, token, tiles, HAS_ROPE: gl.constexpr, BLOCKS: gl.constexpr):
    mbarrier.expect(tiles.q_full, BLOCKS * ROWS * (LATENT + (ROPE if HAS_ROPE else 0)) * 2)
    for block in gl.static_range(BLOCKS):
        load_columns(heads.q, token, block * ROWS, 0, tiles.q_full, tiles.latent.index(block))
        if HAS_ROPE:
            load_columns(heads.q, token, block * ROWS, LATENT, tiles.q_full, tiles.rope.index(block))


@gluon.jit
def _keys_at(slots, work, step, ROWS_LAYOUT: gl.constexpr):
    """The keys [64] at the slots of a tile, -1 for masked slots."""
    slot = work.first + step * KEYS + gl.arange(0, KEYS, ROWS_LAYOUT)
    in_use = (slot >= work.begin) & (slot < work.last)
    if slots.indices is not None:
        return gl.load(slots.indices + work.token.to(gl.int64) * slots.indices_stride + slot, mask=in_use, other=-1)
    else:
        return gl.where(in_use, slot, -1)


@gluon.jit
def _store_target(slots, work, target, step, tiles):
    """Store the target [64] of a tile: 0 for invalid keys, because P may not be finite if the query has no key."""
    total = add_sums(tiles.sums.index(step % _SUMS))
    key = _keys_at(slots, work, step, KEY_OF_SUM)
    slot = work.first + step * KEYS + gl.arange(0, KEYS, KEY_OF_SUM)
    valid = (key >= 0) & (key < slots.s_kv)
    gl.store(target + slot, gl.where(valid, total, 0.0), mask=(slot >= work.begin) & (slot < work.last))


@gluon.jit
def _produce(heads, keys, slots, work, target, tiles, HAS_ROPE: gl.constexpr, BLOCKS: gl.constexpr):
    _load_q(heads, work.token, tiles, HAS_ROPE, BLOCKS)
    indices = _keys_at(slots, work, 0, GATHERED_ROWS)
    for step in range(work.steps + STAGES):
        stage = _stage_of(step)
        gathered = gathered_keys(indices, keys, slots.s_kv)
        # Indices come from HBM, so the next step's are loaded ahead.
        indices = _keys_at(slots, work, step + 1, GATHERED_ROWS)
        wait_at(_EMPTY + stage, ALL_THREADS)
        if step < work.steps:
            latent = tiles.latent.index(stage)
            for column in gl.static_range(0, LATENT, HALF):
                copy_columns(gathered, column, latent.slice(column, HALF, dim=1))
            if HAS_ROPE:
                copy_columns(gathered, LATENT, tiles.rope.index(stage))
        # After the copies, for which the consumers wait, and before the consumers may overwrite the sums.
        if step > STAGES:
            _store_target(slots, work, target, step - STAGES - 1, tiles)
        if step < work.steps:
            async_copy.mbarrier_arrive(tiles.full.index(stage), increment_count=False)
    wait(_SUMS_FULL, ALL_THREADS)
    if work.steps > 0:
        _store_target(slots, work, target, work.steps - 1, tiles)


@gluon.jit
def _consume(heads, work, scale_log2, tiles, OWN: gl.constexpr, HAS_ROPE: gl.constexpr, BLOCKS: gl.constexpr):
    BLOCK: gl.constexpr = OWN if BLOCKS == 2 else 0
    OWN_KEYS: gl.constexpr = KEYS if BLOCKS == 2 else KEYS // 2
    FIRST_KEY: gl.constexpr = 0 if BLOCKS == 2 else OWN * OWN_KEYS
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, OWN_KEYS, 16])
    Q_OPERAND: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 2)

    arrive_at(_EMPTY + _FIRST_STAGE, ALL_THREADS)
    head = BLOCK * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    offset = work.token.to(gl.int64) * heads.lse_stride_token + head.to(gl.int64) * heads.lse_stride_head
    # Heads after the last one have P 0.
    lse = gl.load(heads.lse + offset, mask=head < heads.h_q, other=float("inf")) * LOG2_E
    mbarrier.wait(tiles.q_full, 0)
    q = tiles.latent.index(BLOCK).load(Q_OPERAND)
    if HAS_ROPE:
        q_rope = tiles.rope.index(BLOCK).load(Q_OPERAND)
    arrive_at(_EMPTY, ALL_THREADS)
    arrive_at(_EMPTY + 1, ALL_THREADS)

    unused = gl.zeros([ROWS, OWN_KEYS], gl.float32, LAYOUT)
    for step in range(work.steps):
        stage = _stage_of(step)
        mbarrier.wait(tiles.full.index(stage), step // STAGES & 1)
        k = tiles.latent.index(stage).slice(FIRST_KEY, OWN_KEYS, dim=0)
        scores = warpgroup_mma(q, k.permute((1, 0)), unused, use_acc=False, is_async=True)
        if HAS_ROPE:
            k_rope = tiles.rope.index(stage).slice(FIRST_KEY, OWN_KEYS, dim=0)
            scores = warpgroup_mma(q_rope, k_rope.permute((1, 0)), scores, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[scores])
        arrive_at(_EMPTY + stage, ALL_THREADS)
        p = gl.exp2(scores * scale_log2 - lse[:, None])
        own = tiles.sums.index(step % _SUMS).slice(BLOCK * WARPS, WARPS, dim=0)
        store_sums(p, own.slice(FIRST_KEY, OWN_KEYS, dim=1))
    arrive(_SUMS_FULL, ALL_THREADS)


@gluon_kernel
def attention_target_kernel(
    heads: TargetHeads,
    keys: LatentKeys,
    slots: SlotRanges,
    first_token: gl.int32,
    target,
    softmax_scale: gl.float32,
    SPLIT: gl.constexpr,
    HAS_ROPE: gl.constexpr,
    BLOCKS: gl.constexpr,
):
    """A program computes SPLIT slots of a token, from ``first_token`` on.

    Args:
        target: float32 [tokens, width].
        BLOCKS: number of blocks of 64 heads, 1 or 2.
    """
    work = _work(slots, first_token, SPLIT)
    tiles = _allocate(keys.start.dtype.element_ty, HAS_ROPE, BLOCKS)
    of_token = target + (work.token - first_token).to(gl.int64) * slots.width
    scale_log2 = softmax_scale * LOG2_E
    sync_before_warp_specialize()
    gl.warp_specialize(
        [
            (_consume, (heads, work, scale_log2, tiles, 0, HAS_ROPE, BLOCKS)),
            (_consume, (heads, work, scale_log2, tiles, 1, HAS_ROPE, BLOCKS)),
            (_produce, (heads, keys, slots, work, of_token, tiles, HAS_ROPE, BLOCKS)),
        ],
        [4, 4],
        [_CONSUMER_REGISTERS, _PRODUCER_REGISTERS],
    )
