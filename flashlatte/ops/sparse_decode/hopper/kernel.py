"""The kernel: compute the CTA's work, then run the producer and the two consumers."""

from __future__ import annotations

import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_wait

from flashlatte.kernels.hopper import barriers, clusters
from flashlatte.kernels.hopper.mla_tiles import allocate_full_barriers
from flashlatte.ops.sparse_decode.hopper import (
    cluster_producer,
    consumers,
    equal_splits,
    one_block,
    producer,
    rows,
    schedule,
    tiles,
)
from flashlatte.runtime.triton_internals import ClusterLaunch
from flashlatte.runtime.triton_kernel import gluon_kernel
from flashlatte.split_kv import device
from flashlatte.split_kv.gluon_device import PARTIAL
from flashlatte.split_kv.outputs import Outputs

# Registers per thread of a consumer. The producer gets the rest: 120 with four warps, 64 with eight.
_CONSUMER_REGISTERS = gl.constexpr(192)


def sparse_decode_kernel(
    q,
    q_stride_request: tl.int32,
    q_stride_token: tl.int32,
    q_stride_head: tl.int32,
    k_cache,
    page_stride: tl.int32,
    token_stride: tl.int32,
    num_slots: tl.int32,
    page_size: tl.int32,
    page_magic: tl.int64,
    page_shift: tl.int32,
    indices,
    indices_stride_request: tl.int64,
    indices_stride_token: tl.int64,
    extra_k_cache,
    extra_page_stride: tl.int32,
    extra_token_stride: tl.int32,
    extra_num_slots: tl.int32,
    extra_page_size: tl.int32,
    extra_page_magic: tl.int64,
    extra_page_shift: tl.int32,
    extra_indices,
    extra_indices_stride_request: tl.int64,
    extra_indices_stride_token: tl.int64,
    num_items: tl.int32,
    tokens: tl.int32,
    lengths,
    lengths_stride_request: tl.int64,
    lengths_stride_token: tl.int64,
    limit: tl.int32,
    extra_lengths,
    extra_lengths_stride_request: tl.int64,
    extra_lengths_stride_token: tl.int64,
    extra_limit: tl.int32,
    out,
    out_stride_request: tl.int64,
    out_stride_token: tl.int64,
    out_stride_head: tl.int64,
    lse,
    lse_stride_request: tl.int64,
    lse_stride_token: tl.int64,
    lse_stride_head: tl.int64,
    sink,
    sink_stride: tl.int64,
    heads: tl.int32,
    empty_lse: tl.float32,
    scratch,
    scale: tl.float32,
    num_groups: tl.int32,
    num_splits: tl.int32,
    CONFIG: tl.constexpr,
):
    """A CTA processes 64 heads, for a range of the keys of all items or for whole work items. Arguments as in
    ``launch``."""
    HAS_EXTRA: gl.constexpr = extra_indices is not None
    HAS_LENGTHS: gl.constexpr = lengths is not None or extra_lengths is not None
    BYTE: gl.constexpr = gl.pointer_type(gl.int8)
    own = rows.CacheSelection(
        k_cache.to(BYTE, bitcast=True),
        page_stride,
        token_stride,
        num_slots,
        page_size,
        page_magic,
        page_shift,
        indices,
        indices_stride_request,
        indices_stride_token,
    )
    extra = None
    if HAS_EXTRA:
        extra = rows.CacheSelection(
            extra_k_cache.to(BYTE, bitcast=True),
            extra_page_stride,
            extra_token_stride,
            extra_num_slots,
            extra_page_size,
            extra_page_magic,
            extra_page_shift,
            extra_indices,
            extra_indices_stride_request,
            extra_indices_stride_token,
        )
    key_lengths = device.KeyLengths(
        num_items,
        tokens,
        lengths,
        lengths_stride_request,
        lengths_stride_token,
        limit,
        extra_lengths,
        extra_lengths_stride_request,
        extra_lengths_stride_token,
        extra_limit if HAS_EXTRA else None,
    )
    outputs = Outputs(
        out,
        out_stride_request,
        out_stride_token,
        out_stride_head,
        lse,
        lse_stride_request,
        lse_stride_token,
        lse_stride_head,
        sink,
        sink_stride,
        tokens,
        heads,
        heads,
        empty_lse,
    )
    queries = consumers.SparseDecodeQuery(
        q.to(gl.pointer_type(gl.int32), bitcast=True), q_stride_request, q_stride_token, q_stride_head
    )
    shared, masks = tiles.allocate(out.dtype.element_ty, CONFIG.has_rope, CONFIG.cluster)
    # The even consumer copies the queries.
    halves: gl.constexpr = tiles.halves_copied(CONFIG.format, CONFIG.has_rope)
    full = allocate_full_barriers(128, CONFIG.producer_threads, halves, CONFIG.granularity)
    peer = None
    if CONFIG.cluster:
        peer = clusters.find_peer(shared.k0.left)
    # The preceding kernel in the stream may still run, and may write the lengths.
    if HAS_LENGTHS:
        gdc_wait()
    work = schedule.find_work(key_lengths, num_splits, num_groups, CONFIG)
    if not HAS_LENGTHS:
        gdc_wait()
    partials = None
    if CONFIG.equal_splits:
        partials = equal_splits.partial_of(scratch, work.number, work.group, num_groups)
    elif CONFIG.balanced:
        partials = scratch + device.partial_of_range(work.number, work.group, num_groups, True) * PARTIAL
    args = consumers.SparseDecodeArgs(
        queries, own, extra, key_lengths, work, scale, shared, masks, full, peer, outputs, scratch, partials
    )
    ONE_BLOCK: gl.constexpr = CONFIG.granularity == 1
    barriers.sync_before_warp_specialize()
    gl.warp_specialize(
        [
            (
                one_block.produce if ONE_BLOCK else (cluster_producer.produce if CONFIG.cluster else producer.produce),
                (args, CONFIG),
            ),
            (one_block.consume_even if ONE_BLOCK else consumers.consume_even, (args, CONFIG)),
            (one_block.consume_odd if ONE_BLOCK else consumers.consume_odd, (args, CONFIG)),
        ],
        [4, 4],
        [_CONSUMER_REGISTERS, _CONSUMER_REGISTERS],
    )


_BY_ELEMENT = ["indices", "extra_indices", "lengths", "extra_lengths", "sink", "lse"]

kernel = gluon_kernel(sparse_decode_kernel, by_element=_BY_ELEMENT)
# For CONFIG.cluster; its grid is in clusters.
cluster_kernel = gluon_kernel(
    sparse_decode_kernel, by_element=_BY_ELEMENT, cluster=ClusterLaunch(2, clusters.TAIL_BYTES.value)
)
