"""The loader: one warp that fills the ring by TMA."""

# Triton's annotations and calls are not Python's.
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from flashlatte.kernels.hopper import barriers
from flashlatte.kernels.hopper.mla_tiles import HALF, KEYS, LATENT, ROPE
from flashlatte.ops.dense_decode.hopper.few_rows.tiles import SLOT_BARRIER_THREADS, SLOT_EMPTY, SLOTS
from flashlatte.ops.dense_decode.hopper.producer import load_boxes, load_in_order


@gluon.jit
def _load_half(args, half, page, block, COL: gl.constexpr, HAS_ROPE: gl.constexpr, CONFIG: gl.constexpr):
    """Load half ``half``, with the rope of its block if HAS_ROPE."""
    tiles, keys, kv_head = args.tiles, args.keys, args.work.group.kv_head
    slot = half % SLOTS
    full = tiles.ring_full.index(slot)
    barriers.wait_at(SLOT_EMPTY + slot, SLOT_BARRIER_THREADS, 32)
    mbarrier.expect(full, KEYS * (HALF + (ROPE if HAS_ROPE else 0)))
    # The descriptors have elements of two bytes.
    if HAS_ROPE:
        rope = tiles.ring_ropes.index(half // 2 % 2)
        load_boxes(keys.rope, rope, full, page, block, kv_head, LATENT // 2, CONFIG)
    load_boxes(keys.half, tiles.ring.index(slot), full, page, block, kv_head, COL // 2, CONFIG)


@gluon.jit
def _load_block(args, half, page, block, CONFIG: gl.constexpr):
    _load_half(args, half, page, block, 0, False, CONFIG)
    _load_half(args, half + 1, page, block, HALF, CONFIG.has_rope, CONFIG)
    return half + 2


@gluon.jit
def load(args, CONFIG: gl.constexpr):
    load_in_order(args, _load_block, CONFIG)
    for slot in gl.static_range(SLOTS):
        barriers.wait(SLOT_EMPTY + slot, SLOT_BARRIER_THREADS, 32)
