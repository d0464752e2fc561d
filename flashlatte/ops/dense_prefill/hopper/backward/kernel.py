"""The kernel: allocate shared memory, and run the three warpgroups."""

# Triton's annotations and calls are not Python's.
# pyright: reportCallIssue=false, reportInvalidTypeForm=false

from __future__ import annotations

import triton.language as tl
from triton.experimental.gluon import language as gl

from flashlatte.kernels.triton.rows import HeadRows, Window
from flashlatte.ops.dense_prefill.hopper.backward.consumers import consume
from flashlatte.ops.dense_prefill.hopper.backward.dq import QueryGradient
from flashlatte.ops.dense_prefill.hopper.backward.epilogue import store_gradients
from flashlatte.ops.dense_prefill.hopper.backward.producer import BackwardInputs, produce
from flashlatte.ops.dense_prefill.hopper.backward.schedule import block_of
from flashlatte.ops.dense_prefill.hopper.backward.state import allocate
from flashlatte.ops.dense_prefill.reference import DensePrefillRequests
from flashlatte.runtime.triton_kernel import gluon_kernel

# Registers per thread. The first consumer gets the rest of 12 warps with 168 each: 240.
_SECOND_REGISTERS = gl.constexpr(240)
_PRODUCER_REGISTERS = gl.constexpr(24)


@gluon_kernel
def backward_kernel(
    inputs: BackwardInputs,
    dq: QueryGradient,
    dk: HeadRows,
    dv: HeadRows,
    requests: DensePrefillRequests,
    window: Window,
    bisections: tl.int32,
    slots: tl.int32,
    group: tl.int32,
    scale_log2: tl.float32,
    HAS_ROPE: tl.constexpr,
):
    """A program processes a block of keys of a kv head. Arguments as in ``launch``."""
    kv_head = gl.program_id(0) // slots
    slot = gl.program_id(0) % slots
    if dq.semaphores is not None:
        # Additions are ordered from later blocks to earlier ones: blocks that others wait for must start first.
        slot = slots - 1 - slot
    block = block_of(slot, requests, window, bisections)
    shared = allocate(inputs.q.start.dtype.element_ty, HAS_ROPE)
    gl.warp_specialize(
        [
            (consume, (scale_log2, block, group, shared, 0, HAS_ROPE)),
            (consume, (scale_log2, block, group, shared, 1, HAS_ROPE)),
            (produce, (inputs, dq, block, kv_head, group, shared, HAS_ROPE)),
        ],
        [4, 4],
        [_SECOND_REGISTERS, _PRODUCER_REGISTERS],
    )
    store_gradients(dk, dv, shared, block, kv_head, HAS_ROPE)
