"""The kernel: allocate shared memory, and run the two consumers and the producer."""

from __future__ import annotations

import triton.language as tl
from triton.experimental.gluon import language as gl

from flashlatte.kernels.hopper.two_consumers import CONSUMER_REGISTERS, PRODUCER_REGISTERS, PrefillArgs, Window
from flashlatte.ops.paged_attention.hopper import consumers, epilogue, producer, schedule, tiles
from flashlatte.runtime.triton_kernel import gluon_kernel


def paged_prefill_kernel(
    q,
    k,
    v,
    block_table,
    table_stride: tl.int64,
    num_pages: tl.int32,
    boxes: tl.int32,
    cu_q,
    seqused_k,
    seqused_stride: tl.int64,
    capacity: tl.int32,
    requests: tl.int32,
    tokens: tl.int32,
    min_queries: tl.int32,
    window_left: tl.int32,
    window_right: tl.int32,
    packs: tl.int32,
    packs_per_kv_head: tl.int32,
    tile_counter,
    out,
    out_stride_token: tl.int64,
    out_stride_head: tl.int64,
    lse,
    lse_stride_token: tl.int64,
    lse_stride_head: tl.int64,
    sink,
    sink_stride: tl.int64,
    scale_log2: tl.float32,
    empty_lse: tl.float32,
    CONFIG: tl.constexpr,
):
    """A persistent kernel: each program processes tiles of 128 query rows until none are left. Arguments as in
    ``launch``."""
    shared = tiles.allocate(out.dtype.element_ty, CONFIG)
    work = schedule.PagedPrefillWork(
        cu_q,
        seqused_k,
        seqused_stride,
        capacity,
        requests,
        tokens,
        min_queries,
        window_left,
        window_right,
        packs,
        packs_per_kv_head,
        tile_counter,
    )
    inputs = producer.PagedPrefillInputs(q, k, v, block_table, table_stride, num_pages, boxes)
    results = epilogue.PagedPrefillResults(
        out, out_stride_token, out_stride_head, lse, lse_stride_token, lse_stride_head, sink, sink_stride, empty_lse
    )
    args = PrefillArgs(shared, Window(window_left, window_right), scale_log2, results)
    gl.warp_specialize(
        [
            (consumers.consume_first, (args, CONFIG)),
            (consumers.consume_second, (args, CONFIG)),
            (producer.produce, (inputs, work, shared, CONFIG)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


kernel = gluon_kernel(
    paged_prefill_kernel, by_element=["block_table", "cu_q", "seqused_k", "tile_counter", "lse", "sink"]
)
