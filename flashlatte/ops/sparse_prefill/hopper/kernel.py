"""The kernel: allocate shared memory, and run the three partitions."""

# Triton's annotations and calls are not Python's.
# pyright: reportCallIssue=false, reportInvalidTypeForm=false

from __future__ import annotations

from triton.experimental.gluon import language as gl

from flashlatte.kernels.hopper import barriers
from flashlatte.ops.sparse_prefill.hopper.consumers import SparsePrefillArgs, consume_even, consume_odd
from flashlatte.ops.sparse_prefill.hopper.epilogue import SparsePrefillOutput
from flashlatte.ops.sparse_prefill.hopper.producer import SparsePrefillQueries, produce
from flashlatte.ops.sparse_prefill.hopper.state import SparsePrefillWork, allocate
from flashlatte.runtime.triton_kernel import gluon_kernel

# Registers per thread. The even consumer gets the rest of 12 warps with 168 each: 232.
_ODD_REGISTERS = gl.constexpr(232)
_PRODUCER_REGISTERS = gl.constexpr(40)


@gluon_kernel
def sparse_prefill_kernel(
    output: SparsePrefillOutput,
    queries: SparsePrefillQueries,
    work: SparsePrefillWork,
    kv,
    kv_stride: gl.int64,
    scale_log2: gl.float32,
    HEAD_DIM: gl.constexpr,
    GROUP: gl.constexpr,
):
    """GROUP: query tokens of a tile, 1, 2 or 4. ``kv_stride``: in units of 16 bytes."""
    shared_tiles, shared = allocate(kv.dtype.element_ty, HEAD_DIM)
    args = SparsePrefillArgs(shared_tiles, shared, scale_log2, None, work, output)
    barriers.sync_before_warp_specialize()
    gl.warp_specialize(
        [
            (consume_even, (args, HEAD_DIM, GROUP)),
            (consume_odd, (args, HEAD_DIM, GROUP)),
            (produce, (queries, kv, kv_stride, work, shared_tiles, shared, HEAD_DIM, GROUP)),
        ],
        [4, 4],
        [_ODD_REGISTERS, _PRODUCER_REGISTERS],
    )
