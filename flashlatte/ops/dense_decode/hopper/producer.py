"""The producer: four warps that keep the tiles filled, by TMA."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_launch_dependents

from flashlatte.kernels.hopper import barriers
from flashlatte.kernels.hopper.mla_tiles import (
    HALF,
    K0_LEFT_EMPTY,
    K0_RIGHT_EMPTY,
    K1_LEFT_EMPTY,
    K1_RIGHT_EMPTY,
    KEYS,
    LATENT,
    ROPE,
)
from flashlatte.kernels.hopper.ptx.threads import of_lane
from flashlatte.ops.dense_decode.hopper import queries, schedule
from flashlatte.ops.dense_decode.hopper.tiles import Q_EMPTY
from flashlatte.runtime.gluon_compat import tma_load
from flashlatte.split_kv import device


class Keys(NamedTuple):
    """Descriptors of the cache [pages, page_size, h_kv, d]: of boxes 256 wide, and of the rope (None without)."""

    keys_half: Any
    keys_rope: Any


@gluon.jit
def _load_boxes(descriptor, tile, full, page, block, kv_head, COL: gl.constexpr, PLAN: gl.constexpr):
    """Begin to load columns from COL of a block into a tile. Of a page -1 TMA writes zeros and reads nothing."""
    BOXES: gl.constexpr = KEYS // PLAN.box
    if BOXES == 1:
        token = block % PLAN.boxes_per_page * KEYS
        tma_load(descriptor, [page, token, kv_head, COL], full, tile.index(0))
    else:
        for box in gl.static_range(BOXES):
            token = (block * BOXES + box) % PLAN.boxes_per_page * PLAN.box
            rows = tile.index(0).slice(box * PLAN.box, PLAN.box, dim=0)
            tma_load(descriptor, [of_lane(page, box), token, kv_head, COL], full, rows)


@gluon.jit
def _load_left(keys, tile, full, page, block, kv_head, PLAN: gl.constexpr):
    mbarrier.expect(full, KEYS * HALF * 2)
    _load_boxes(keys.keys_half, tile, full, page, block, kv_head, 0, PLAN)


@gluon.jit
def _load_right(keys, tile, rope_tile, full, page, block, kv_head, PLAN: gl.constexpr):
    if keys.keys_rope is not None:
        mbarrier.expect(full, KEYS * (HALF + ROPE) * 2)
        _load_boxes(keys.keys_rope, rope_tile, full, page, block, kv_head, LATENT, PLAN)
    else:
        mbarrier.expect(full, KEYS * HALF * 2)
    _load_boxes(keys.keys_half, tile, full, page, block, kv_head, HALF, PLAN)


@gluon.jit
def finish(scratch, work, PLAN: gl.constexpr):
    """When the last block is under way: what the combine kernel needs, and the consumers' last arrivals."""
    if scratch is not None:
        schedule.write_metadata(scratch, work, PLAN)
    barriers.wait(Q_EMPTY, barriers.ALL)
    barriers.wait(K0_LEFT_EMPTY, barriers.PAIR)
    barriers.wait(K0_RIGHT_EMPTY, barriers.PAIR)
    barriers.wait(K1_RIGHT_EMPTY, barriers.PAIR)
    barriers.wait(K1_LEFT_EMPTY, barriers.PAIR)
    # The combine may be launched, and waits for what the consumers still write. Earlier, its programs would crowd on
    # the few SMs that are free first.
    gdc_launch_dependents()


@gluon.jit
def produce(query, corner, keys, table, lists, work, tiles, full, scratch, PLAN: gl.constexpr):
    kv_head = work.group.kv_head
    cta_range = work.range
    cost = cta_range.first_cost
    length = device.key_count(cta_range.first, lists)
    for item in range(cta_range.first, cta_range.stop):
        steps = schedule.num_steps(length)
        begin, end = device.split_of(cta_range, cost, steps, PLAN.overhead)
        boxes = schedule.num_boxes(length, PLAN)
        cost += PLAN.overhead + steps
        if end > begin:
            page0 = schedule.page_of(table, item, 2 * begin, boxes, PLAN)
            page1 = schedule.page_of(table, item, 2 * begin + 1, boxes, PLAN)
            barriers.wait(Q_EMPTY, barriers.ALL)
            queries.load(tiles, full.q, query, corner, item, work, PLAN.has_rope)
            for step in range(begin, end):
                block = 2 * step
                if PLAN.box == KEYS:
                    page1 = gl.where(block + 1 < boxes, page1, -1)
                barriers.wait(K0_LEFT_EMPTY, barriers.PAIR)
                _load_left(keys, tiles.k0_left, full.k0_left, page0, block, kv_head, PLAN)
                barriers.wait(K0_RIGHT_EMPTY, barriers.PAIR)
                if step == begin:
                    # P that lay here was read with block 0's right half.
                    queries.load_rope(tiles, full.q, query, corner, item, work, PLAN.has_rope)
                _load_right(keys, tiles.k0_right, tiles.k0_rope, full.k0_right, page0, block, kv_head, PLAN)
                barriers.wait(K1_LEFT_EMPTY, barriers.PAIR)
                _load_left(keys, tiles.k1_left, full.k1_left, page1, block + 1, kv_head, PLAN)
                barriers.wait(K1_RIGHT_EMPTY, barriers.PAIR)
                _load_right(
                    keys, tiles.k1_right, tiles.k1_rope, full.k1_right, page1, block + 1, work.group.kv_head, PLAN
                )
                if step == begin:
                    queries.signal(full.q, query)
                # Not before this step's loads, which would wait for the numbers.
                page0 = schedule.page_of(table, item, block + 2, boxes, PLAN)
                page1 = schedule.page_of(table, item, block + 3, boxes, PLAN)
        length = device.key_count(item + 1, lists)
    finish(scratch, work, PLAN)
