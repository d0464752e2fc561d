"""The kernel: compute the CTA's work, then run the producer and the two consumers."""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportInvalidTypeForm=false

from __future__ import annotations

import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_wait

from flashlatte.kernels.hopper import barriers, clusters
from flashlatte.kernels.hopper.mla_tiles import allocate_full_barriers
from flashlatte.ops.sparse_decode.hopper import cluster_producer, consumers, one_block, producer, rows, schedule, tiles
from flashlatte.runtime.triton_internals import ClusterLaunch
from flashlatte.runtime.triton_kernel import gluon_kernel
from flashlatte.split_kv import device, fp24_partials
from flashlatte.split_kv.device import KeyLengths
from flashlatte.split_kv.gluon_device import PARTIAL
from flashlatte.split_kv.outputs import Outputs

# Registers per thread of a consumer. The producer gets the rest: 120 with four warps, 64 with eight.
_CONSUMER_REGISTERS = gl.constexpr(192)


def sparse_decode_kernel(
    query: consumers.SparseDecodeQuery,
    own: rows.CacheSelection,
    extra: rows.CacheSelection,
    key_lengths: KeyLengths,
    outputs: Outputs,
    scratch,
    scale: tl.float32,
    num_groups: tl.int32,
    num_splits: tl.int32,
    CONFIG: tl.constexpr,
):
    """A CTA processes 64 heads, for a range of the keys of all items or for whole work items. Arguments as in
    ``launch``."""
    HAS_LENGTHS: gl.constexpr = key_lengths.lengths is not None or key_lengths.extra_lengths is not None
    own = rows.in_bytes(own)
    extra = rows.in_bytes(extra) if extra.indices is not None else None
    shared, masks = tiles.allocate(outputs.out.dtype.element_ty, CONFIG.has_rope, CONFIG.cluster)
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
        partials = fp24_partials.partial_of_split(scratch, work.number, work.group, num_groups)
    elif CONFIG.balanced:
        partials = scratch + device.partial_of_range(work.number, work.group, num_groups, True) * PARTIAL
    args = consumers.SparseDecodeArgs(
        query, own, extra, key_lengths, work, scale, shared, masks, full, peer, outputs, scratch, partials
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


# A work item has the heads of one query token.
_SAME = {"outputs_tokens": "key_lengths_tokens", "outputs_rows": "outputs_heads"}
kernel = gluon_kernel(sparse_decode_kernel, same=_SAME)
# For CONFIG.cluster; its grid is in clusters.
cluster_kernel = gluon_kernel(sparse_decode_kernel, cluster=ClusterLaunch(2, clusters.TAIL_BYTES.value), same=_SAME)
