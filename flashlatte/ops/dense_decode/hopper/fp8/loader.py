"""The loader: four warps that fill the ring by TMA."""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_launch_dependents

from flashlatte.kernels.hopper import barriers
from flashlatte.kernels.hopper.e4m3.tiles import SLOT_EMPTY, SLOTS
from flashlatte.kernels.hopper.mla_tiles import KEYS, LATENT, ROPE
from flashlatte.ops.dense_decode.hopper import schedule
from flashlatte.ops.dense_decode.hopper.producer import load_boxes
from flashlatte.split_kv import device


@gluon.jit
def _load_block(args, slot, page, block, CONFIG: gl.constexpr):
    tiles, keys, kv_head = args.tiles, args.keys, args.work.group.kv_head
    full = tiles.full.index(slot)
    barriers.wait_at(SLOT_EMPTY + slot, barriers.ALL_THREADS)
    mbarrier.expect(full, KEYS * (LATENT + (ROPE if CONFIG.has_rope else 0)))
    load_boxes(keys.half, tiles.k.latent.index(slot), full, page, block, kv_head, 0, CONFIG)
    if CONFIG.has_rope:
        # The descriptors have elements of two bytes.
        load_boxes(keys.rope, tiles.k.rope.index(slot), full, page, block, kv_head, LATENT // 2, CONFIG)


@gluon.jit
def load(args, CONFIG: gl.constexpr):
    table, cta_range = args.table, args.work.range
    cost = cta_range.first_cost
    length = device.key_count(cta_range.first, args.key_lengths)
    slot = 0
    for item in range(cta_range.first, cta_range.stop):
        split = schedule.split_of(item, length, cost, args.work, CONFIG)
        cost += CONFIG.overhead + split.steps
        # Without this condition Triton 3.6 uses the first request's bounds for all requests (triton-lang/triton#9036).
        if split.end > split.begin:
            page = schedule.page_of(table, split, 2 * split.begin, CONFIG)
            for block in range(2 * split.begin, 2 * split.end):
                if CONFIG.box == KEYS:
                    page = gl.where(block < split.boxes, page, -1)
                next_page = schedule.page_of(table, split, block + 1, CONFIG)
                _load_block(args, slot, page, block, CONFIG)
                slot = (slot + 1) % SLOTS
                page = next_page
        length = device.key_count(item + 1, args.key_lengths)
    if args.results.scratch is not None:
        schedule.write_metadata(args.results.scratch, args.work, CONFIG)
    for last in gl.static_range(SLOTS):
        barriers.wait(SLOT_EMPTY + last, barriers.ALL_THREADS)
    gdc_launch_dependents()
