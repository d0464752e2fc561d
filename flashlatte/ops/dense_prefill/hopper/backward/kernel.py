"""The kernel: allocate shared memory, and run the three warpgroups."""

import functools

from triton.experimental.gluon import language as gl

from flashlatte.ops.dense_prefill.hopper.backward.consumers import consume_first, consume_second
from flashlatte.ops.dense_prefill.hopper.backward.dq import QueryGradient
from flashlatte.ops.dense_prefill.hopper.backward.epilogue import Gradient, store_gradients
from flashlatte.ops.dense_prefill.hopper.backward.producer import TileSource, produce
from flashlatte.ops.dense_prefill.hopper.backward.schedule import block_of
from flashlatte.ops.dense_prefill.hopper.backward.state import allocate
from flashlatte.runtime.triton_kernel import gluon_kernel

# Registers per thread. The first consumer gets the rest of 12 warps with 168 each: 240.
_SECOND_REGISTERS = gl.constexpr(240)
_PRODUCER_REGISTERS = gl.constexpr(24)


@functools.partial(gluon_kernel, by_element=("cu_q", "cu_k"))
def backward_kernel(
    q_main,
    q_rope,
    q,
    q_token_stride: gl.int64,  # strides of inputs in units of 16 bytes
    q_head_stride: gl.int64,
    dout_desc,
    dout,
    dout_token_stride: gl.int64,
    dout_head_stride: gl.int64,
    k_main,
    k_rope,
    k,
    k_token_stride: gl.int64,
    k_head_stride: gl.int64,
    v_desc,
    v,
    v_token_stride: gl.int64,
    v_head_stride: gl.int64,
    lse,  # float32 [heads, q_total]
    delta,
    dq_sums,  # descriptor of float32 [heads, q_total, d_qk]
    dq_semaphores,
    dk,
    dk_token_stride: gl.int64,  # strides of outputs in units of DK_ALIGN or DV_ALIGN elements
    dk_head_stride: gl.int64,
    dv,
    dv_token_stride: gl.int64,
    dv_head_stride: gl.int64,
    cu_q,
    cu_k,
    q_total: gl.int32,
    k_total: gl.int32,
    requests: gl.int32,
    bisections: gl.int32,
    slots: gl.int32,
    tiles_per_head: gl.int32,
    group: gl.int32,
    window_left: gl.int32,
    window_right: gl.int32,
    scale_log2: gl.float32,
    HAS_ROPE: gl.constexpr,
    DK_ALIGN: gl.constexpr,
    DV_ALIGN: gl.constexpr,
):
    kv_head = gl.program_id(0) // slots
    slot = gl.program_id(0) % slots
    if dq_semaphores is not None:
        # Additions are ordered from later blocks to earlier ones: blocks that others wait for must start first.
        slot = slots - 1 - slot
    block = block_of(slot, cu_q, cu_k, requests, q_total, k_total, window_left, window_right, bisections)
    shared = allocate(q.dtype.element_ty, HAS_ROPE)
    dq = QueryGradient(dq_sums, dq_semaphores, tiles_per_head)
    q_rows = TileSource(q, q_token_stride, q_head_stride, q_main, q_rope)
    dout_rows = TileSource(dout, dout_token_stride, dout_head_stride, dout_desc, dout_desc)
    k_rows = TileSource(k, k_token_stride, k_head_stride, k_main, k_rope)
    v_rows = TileSource(v, v_token_stride, v_head_stride, v_desc, v_desc)
    gl.warp_specialize(
        [
            (consume_first, (scale_log2, block, group, shared, HAS_ROPE)),
            (consume_second, (scale_log2, block, group, shared, HAS_ROPE)),
            (
                produce,
                (q_rows, dout_rows, k_rows, v_rows, dq, lse, delta, q_total, block, kv_head, group, shared, HAS_ROPE),
            ),
        ],
        [4, 4],
        [_SECOND_REGISTERS, _PRODUCER_REGISTERS],
    )
    store_gradients(
        Gradient(dk, dk_token_stride, dk_head_stride, DK_ALIGN),
        Gradient(dv, dv_token_stride, dv_head_stride, DV_ALIGN),
        shared,
        block,
        kv_head,
        HAS_ROPE,
    )
