"""The kernel: allocate shared memory, and run the two consumers and the producer."""

from __future__ import annotations

import triton.language as tl
from triton.experimental.gluon import language as gl

from flashlatte.kernels.hopper.two_consumers import CONSUMER_REGISTERS, PRODUCER_REGISTERS, PrefillArgs
from flashlatte.kernels.triton.packed import Window
from flashlatte.ops.dense_prefill.hopper.forward import consumers, epilogue, producer, schedule, tiles
from flashlatte.runtime.triton_kernel import gluon_kernel


def dense_prefill_forward_kernel(
    q,
    k,
    v,
    q_rest,
    k_rest,
    v_rest,
    cu_q,
    cu_k,
    requests: tl.int32,
    tokens_q: tl.int32,
    tokens_k: tl.int32,
    window_left: tl.int32,
    window_right: tl.int32,
    heads: tl.int32,
    group: tl.int32,
    group_kv: tl.int32,
    tile_counter,
    out,
    out_stride_token: tl.int64,
    out_stride_head: tl.int64,
    lse,
    lse_stride_token: tl.int64,
    lse_stride_head: tl.int64,
    scale_log2: tl.float32,
    empty_lse: tl.float32,
    D_QK: tl.constexpr,
    D_V: tl.constexpr,
    OUT_ALIGN: tl.constexpr,
):
    """A persistent kernel: each program processes tiles of 128 query rows of a head until none are left. Arguments as
    in ``launch``."""
    shared = tiles.allocate(out.dtype.element_ty, D_QK, D_V)
    work = schedule.DensePrefillWork(
        cu_q, cu_k, requests, tokens_q, tokens_k, window_left, window_right, heads, group, group_kv, tile_counter
    )
    inputs = producer.DensePrefillInputs(
        producer.with_rest(q, q_rest), producer.with_rest(k, k_rest), producer.with_rest(v, v_rest)
    )
    results = epilogue.DensePrefillResults(
        out, out_stride_token, out_stride_head, lse, lse_stride_token, lse_stride_head, empty_lse
    )
    args = PrefillArgs(shared, Window(window_left, window_right), scale_log2, results)
    gl.warp_specialize(
        [
            (consumers.consume_first, (args, D_QK, D_V, OUT_ALIGN)),
            (consumers.consume_second, (args, D_QK, D_V, OUT_ALIGN)),
            (producer.produce, (inputs, work, shared)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


kernel = gluon_kernel(dense_prefill_forward_kernel, by_element=["cu_q", "cu_k", "tile_counter", "lse"])
