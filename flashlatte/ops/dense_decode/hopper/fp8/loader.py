"""The loader: four warps that fill the ring by TMA."""

# Triton's annotations and calls are not Python's.
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_launch_dependents

from flashlatte.kernels.hopper import barriers
from flashlatte.kernels.hopper.e4m3.tiles import SLOT_EMPTY, SLOTS
from flashlatte.kernels.hopper.mla_tiles import KEYS, LATENT, ROPE
from flashlatte.ops.dense_decode.hopper import schedule
from flashlatte.ops.dense_decode.hopper.producer import load_boxes, load_in_order


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
    return (slot + 1) % SLOTS


@gluon.jit
def load(args, CONFIG: gl.constexpr):
    load_in_order(args, _load_block, CONFIG)
    if args.results.scratch is not None:
        schedule.write_metadata(args.results.scratch, args.work, CONFIG)
    for last in gl.static_range(SLOTS):
        barriers.wait(SLOT_EMPTY + last, barriers.ALL_THREADS)
    gdc_launch_dependents()
