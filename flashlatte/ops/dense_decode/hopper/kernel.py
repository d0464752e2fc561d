"""The kernel: compute the CTA's work, then run its partitions."""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportInvalidTypeForm=false

from __future__ import annotations

import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_wait

from flashlatte.kernels.hopper import barriers
from flashlatte.kernels.hopper.e4m3 import tiles as e4m3_tiles
from flashlatte.kernels.hopper.mla_tiles import allocate_full_barriers
from flashlatte.kernels.triton.cache_row import CacheScale, load_scale
from flashlatte.kernels.triton.rows import BlockTable
from flashlatte.ops.dense_decode.hopper import consumers, epilogue, one_byte_producer, producer, schedule, tiles
from flashlatte.ops.dense_decode.hopper.few_rows import tiles as few_rows_tiles
from flashlatte.ops.dense_decode.hopper.few_rows.caster import cast
from flashlatte.ops.dense_decode.hopper.few_rows.consumer import consume
from flashlatte.ops.dense_decode.hopper.few_rows.loader import load
from flashlatte.ops.dense_decode.hopper.fp8 import consumers as fp8_consumers
from flashlatte.ops.dense_decode.hopper.fp8 import loader as fp8_loader
from flashlatte.runtime.triton_kernel import gluon_kernel
from flashlatte.split_kv.device import KeyLengths, SplitGrid
from flashlatte.split_kv.outputs import Outputs
from flashlatte.split_kv.ranges import UniformRanges

# Registers per thread of a consumer. The producer gets the rest of the register file: 24, or 120 if it casts keys. With
# 104 it spills 24 times per step (16 heads, 128 requests of 4,096 keys: 192 µs instead of 160). With 184 or fewer
# registers for a consumer, ptxas serializes its products.
_REGISTERS = gl.constexpr(240)
_CAST_REGISTERS = gl.constexpr(192)
# Registers of the other partitions of ``few_rows``. The consumer gets the rest: the maximum per thread.
_CASTER_REGISTERS = gl.constexpr(168)
_LOADER_REGISTERS = gl.constexpr(40)


@gluon_kernel(same={"outputs_heads": "query_heads", "outputs_rows": "query_rows"})
def dense_decode_kernel(
    descriptors: producer.KeyDescriptors,
    query: producer.DenseDecodeQuery,
    table: BlockTable,
    key_lengths: KeyLengths,
    outputs: Outputs,
    grid: SplitGrid,
    uniform: UniformRanges,
    one_byte_keys: one_byte_producer.OneByteKeys,
    k_scale: CacheScale,
    scratch,
    causal_offset: tl.int32,
    scale: tl.float32,
    CONFIG: tl.constexpr,
):
    """A CTA processes 64 query rows of a kv head (``few_rows``: all rows, at most 16) for a range of the keys of all
    requests.

    Arguments as in ``launch``.
    """
    keys = descriptors
    if CONFIG.one_byte and not CONFIG.few_rows and not CONFIG.fp8:
        keys = one_byte_producer.in_words(one_byte_keys)
    if CONFIG.few_rows:
        shared = few_rows_tiles.allocate()
        full = None
    elif CONFIG.fp8:
        shared = e4m3_tiles.allocate(1)
        full = None
    else:
        shared = tiles.allocate(query.q.dtype.element_ty, CONFIG)
        full = allocate_full_barriers(1, 1)
    group = schedule.find_group(grid)
    query_origin = producer.find_query_origin(query, group)
    # The preceding kernel in the stream may still run.
    gdc_wait()
    work = schedule.find_work(group, key_lengths, grid, uniform, CONFIG)
    if CONFIG.one_byte:
        key_factor = load_scale(k_scale)
        scale *= key_factor
        results = epilogue.DenseDecodeResults(outputs, scratch, key_factor)
    else:
        results = epilogue.DenseDecodeResults(outputs, scratch, None)
    args = consumers.DenseDecodeArgs(
        query, query_origin, keys, key_lengths, table, work, causal_offset, scale, shared, full, None, results
    )
    barriers.sync_before_warp_specialize()
    if CONFIG.few_rows:
        gl.warp_specialize(
            [(consume, (args, CONFIG)), (cast, (args, CONFIG)), (load, (args, CONFIG))],
            [4, 1],
            [_CASTER_REGISTERS, _LOADER_REGISTERS],
        )
    elif CONFIG.fp8:
        gl.warp_specialize(
            [
                (fp8_loader.load, (args, CONFIG)),
                (fp8_consumers.consume, (args, 0, CONFIG)),
                (fp8_consumers.consume, (args, 1, CONFIG)),
            ],
            [4, 4],
            [_REGISTERS, _REGISTERS],
        )
    else:
        CONSUMER_REGISTERS: gl.constexpr = _CAST_REGISTERS if CONFIG.one_byte else _REGISTERS
        gl.warp_specialize(
            [
                (one_byte_producer.produce if CONFIG.one_byte else producer.produce, (args, CONFIG)),
                (consumers.consume_even, (args, CONFIG)),
                (consumers.consume_odd, (args, CONFIG)),
            ],
            [4, 4],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS],
        )
