"""The loader: a warp that keeps the ring full, by TMA."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from flashlatte.kernels.hopper import barriers
from flashlatte.kernels.hopper.mla_tiles import HALF, KEYS, LATENT, ROPE
from flashlatte.ops.dense_decode.hopper import schedule
from flashlatte.ops.dense_decode.hopper.few_rows.tiles import SLOT_EMPTY, SLOT_MEETING, SLOTS
from flashlatte.ops.dense_decode.hopper.producer import load_boxes
from flashlatte.split_kv import device


@gluon.jit
def _load_half(call, half, page, block, COL: gl.constexpr, HAS_ROPE: gl.constexpr, PLAN: gl.constexpr):
    """Load half number ``half``, with its block's rope if HAS_ROPE."""
    tiles, keys, kv_head = call.tiles, call.keys, call.work.group.kv_head
    slot = half % SLOTS
    full = tiles.ring_full.index(slot)
    barriers.wait_at(SLOT_EMPTY + slot, SLOT_MEETING, 32)
    mbarrier.expect(full, KEYS * (HALF + (ROPE if HAS_ROPE else 0)))
    # The descriptors count bytes in pairs.
    if HAS_ROPE:
        rope = tiles.ring_ropes.index(half // 2 % 2)
        load_boxes(keys.keys_rope, rope, full, page, block, kv_head, LATENT // 2, PLAN)
    load_boxes(keys.keys_half, tiles.ring.index(slot), full, page, block, kv_head, COL // 2, PLAN)


@gluon.jit
def load(call, PLAN: gl.constexpr):
    table, cta_range = call.table, call.work.range
    cost = cta_range.first_cost
    length = device.key_count(cta_range.first, call.key_lengths)
    half = 0
    for item in range(cta_range.first, cta_range.stop):
        split = schedule.split_of(item, length, cost, call.work, PLAN)
        cost += PLAN.overhead + split.steps
        # Without the condition Triton 3.6 would take the first request's bounds for all (triton-lang/triton#9036).
        if split.end > split.begin:
            page = schedule.page_of(table, split, 2 * split.begin, PLAN)
            for block in range(2 * split.begin, 2 * split.end):
                if PLAN.box == KEYS:
                    page = gl.where(block < split.boxes, page, -1)
                next_page = schedule.page_of(table, split, block + 1, PLAN)
                _load_half(call, half, page, block, 0, False, PLAN)
                _load_half(call, half + 1, page, block, HALF, PLAN.has_rope, PLAN)
                half += 2
                page = next_page
        length = device.key_count(item + 1, call.key_lengths)
    for slot in gl.static_range(SLOTS):
        barriers.wait(SLOT_EMPTY + slot, SLOT_MEETING, 32)
