"""The producer: one warp that schedules tiles and fills the consumers' stages by TMA, page by page.

It is a single warp, because several warps would synchronize before each copy.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from flashlatte.kernels.hopper import barriers
from flashlatte.kernels.hopper.ptx.registers import opaque
from flashlatte.kernels.hopper.ptx.threads import ballot_negative, lane_id, shuffle_from_lane_at
from flashlatte.kernels.hopper.two_consumers import (
    BOTH_CONSUMER_THREADS,
    CHUNK,
    K_EMPTY,
    ONE_CONSUMER_THREADS,
    PRODUCER_THREADS,
    Q_EMPTY_FIRST,
    Q_EMPTY_SECOND,
    ROWS,
    STAGES,
    V_EMPTY,
    end_tiles,
    stage_of,
    write_scalar,
    write_scalars,
)
from flashlatte.kernels.triton.rows import BlockTable
from flashlatte.ops.paged_attention.hopper import schedule
from flashlatte.ops.paged_attention.hopper.tiles import KEYS, SWIZZLED, PagedPrefillTile
from flashlatte.runtime.gluon_compat import cta_barrier, reinterpret, tma_load
from flashlatte.runtime.kernel_records import Int32, Pointer


class PagedPrefillInputs(NamedTuple):
    """Inputs of the producer.

    Attributes:
        q: TMA descriptor of q [tokens, packs, pack, d] for boxes of 64 rows and 64 columns.
        k, v: TMA descriptors of the caches [pages, page_size, h_kv, d] for boxes of ``box`` tokens and 64 columns.
        boxes: copies per block and chunk of columns.
    """

    q: Pointer
    k: Pointer
    v: Pointer
    table: BlockTable
    boxes: Int32


class VisibleKeys(NamedTuple):
    """The keys of a request that are visible to a tile: ``first`` to ``to`` (exclusive)."""

    request: Any
    first: Any
    to: Any


@gluon.jit
def _look_up(inputs, visible, first_key, CONFIG: gl.constexpr):
    """The pages of the block at ``first_key``: lane l < 16 has the page of keys 8 l to 8 l + 7 of the block. The first
    result is -1 for pages that are not in the cache and for boxes without visible keys; the second is 0 for the
    latter."""
    key = first_key + lane_id() % 16 * 8 // CONFIG.box * CONFIG.box
    is_visible = (key < visible.to) & (key + CONFIG.box > visible.first)
    table = inputs.table
    pages = table.pages + visible.request.to(gl.int64) * table.stride
    entry = gl.load(pages + key // CONFIG.page_size, mask=is_visible, other=-1)
    page = gl.where((entry >= 0) & (entry < table.num_pages), entry, -1).to(gl.int32)
    return page, gl.where(is_visible, page, 0)


@gluon.jit
def _load_block(
    descriptor, boxes_of_block, ring, stage, full, page, first_key, head, CHUNKS: gl.constexpr, CONFIG: gl.constexpr
):
    """Start loading a block into a stage of a ring. For page -1, TMA fills zeros without reading memory."""
    BOX: gl.constexpr = CONFIG.box
    BOXES: gl.constexpr = KEYS // BOX
    COUNT: gl.constexpr = STAGES * CHUNKS * BOXES
    boxes = reinterpret(ring, ring.dtype, [COUNT, BOX, CHUNK], SWIZZLED)
    mbarrier.expect(full, KEYS * CHUNKS * CHUNK * 2)
    # The compiler does not know the count, so it does not unroll the loop: unrolled copies need too many registers.
    for box in range(boxes_of_block):
        offset = (first_key + box * BOX) % CONFIG.page_size
        box_page = shuffle_from_lane_at(page, box * (BOX // 8))
        for chunk in gl.static_range(CHUNKS):
            to = boxes.index((stage * CHUNKS + chunk) * BOXES + box)
            tma_load(descriptor, [box_page, offset, head, chunk * CHUNK], full, to)


@gluon.jit
def _load_q(inputs, consumer, work_tile, TOKEN: gl.constexpr, CONFIG: gl.constexpr):
    CHUNKS: gl.constexpr = CONFIG.chunks
    write_scalars(consumer.work_tile, work_tile)
    cta_barrier()
    full = consumer.full.index(0)
    mbarrier.expect(full, ROWS * CHUNKS * CHUNK * 2)
    for chunk in gl.static_range(CHUNKS):
        tma_load(
            inputs.q, [work_tile.token + TOKEN, work_tile.pack, 0, chunk * CHUNK], full, consumer.q[0].index(chunk)
        )


@gluon.jit
def _load_k(inputs, shared, step, page, absent, first_key, head, CONFIG: gl.constexpr):
    stage = stage_of(step)
    barriers.wait_at(K_EMPTY + stage, BOTH_CONSUMER_THREADS, PRODUCER_THREADS)
    write_scalar(shared.absent, stage, ballot_negative(absent) & 0xFFFF)
    cta_barrier()
    _load_block(
        inputs.k,
        inputs.boxes,
        shared.k[0],
        stage,
        shared.k_full.index(stage),
        page,
        first_key,
        head,
        CONFIG.chunks,
        CONFIG,
    )


@gluon.jit
def _load_v(inputs, shared, step, page, first_key, head, CONFIG: gl.constexpr):
    stage = stage_of(step)
    barriers.wait_at(V_EMPTY + stage, BOTH_CONSUMER_THREADS, PRODUCER_THREADS)
    _load_block(
        inputs.v,
        inputs.boxes,
        shared.v[0],
        stage,
        shared.v_full.index(stage),
        page,
        first_key,
        head,
        CONFIG.v_chunks,
        CONFIG,
    )


@gluon.jit
def produce(inputs, work, shared, CONFIG: gl.constexpr):
    num_blocks = schedule.count_blocks(work, CONFIG)
    num_tiles = num_blocks * work.packs
    tile = gl.program_id(0)
    work_tile, request = schedule.find_tile(work, tile, num_blocks, CONFIG)
    step = 0
    while tile < num_tiles:
        visible = VisibleKeys(request, work_tile.first_key, work_tile.keys)
        head = work_tile.pack // work.packs_per_kv_head
        first_key = work_tile.last * KEYS
        page, absent = _look_up(inputs, visible, first_key, CONFIG)
        # The stage becomes empty before the queries, which the last product of the previous tile still reads.
        _load_k(inputs, shared, step, page, absent, first_key, head, CONFIG)
        barriers.wait(Q_EMPTY_FIRST, ONE_CONSUMER_THREADS, PRODUCER_THREADS)
        _load_q(inputs, shared.first, work_tile, 0, CONFIG)
        barriers.wait(Q_EMPTY_SECOND, ONE_CONSUMER_THREADS, PRODUCER_THREADS)
        _load_q(inputs, shared.second, work_tile, ROWS // CONFIG.pack, CONFIG)
        next_page, next_absent = _look_up(inputs, visible, first_key - KEYS, CONFIG)
        _load_v(inputs, shared, step, page, first_key, head, CONFIG)
        step += 1
        blocks = opaque(work_tile.blocks)
        # Fetch the next tile while this tile's first block is in flight.
        tile = schedule.fetch_next_tile(work)
        work_tile, request = schedule.find_tile(work, tile, num_blocks, CONFIG)
        for _ in range(1, blocks):
            first_key -= KEYS
            page = next_page
            absent = next_absent
            next_page, next_absent = _look_up(inputs, visible, first_key - KEYS, CONFIG)
            _load_k(inputs, shared, step, page, absent, first_key, head, CONFIG)
            _load_v(inputs, shared, step, page, first_key, head, CONFIG)
            step += 1

    end_tiles(shared, step, PagedPrefillTile(0, 0, 0, 0, 0, 0, 0, 0))
