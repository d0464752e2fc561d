"""The kernel: allocate shared memory, and run the three partitions."""

# Triton's annotations and calls are not Python's.
# pyright: reportCallIssue=false, reportInvalidTypeForm=false

from __future__ import annotations

from triton.experimental.gluon import language as gl

from flashlatte.kernels.hopper import barriers
from flashlatte.ops.sparse_prefill.hopper.epilogue import SparsePrefillOutput
from flashlatte.ops.sparse_prefill.hopper.fp8.consumers import consume
from flashlatte.ops.sparse_prefill.hopper.fp8.loader import load
from flashlatte.ops.sparse_prefill.hopper.fp8.state import Fp8PrefillArgs, Fp8QueryBuffers, Fp8Workspace, allocate
from flashlatte.ops.sparse_prefill.hopper.producer import SparsePrefillQueries
from flashlatte.ops.sparse_prefill.hopper.state import SparsePrefillWork
from flashlatte.runtime.triton_kernel import gluon_kernel

# Registers per thread of a consumer. The loader gets the rest of 12 warps with 168 each: 40.
_REGISTERS = gl.constexpr(232)


@gluon_kernel
def sparse_prefill_fp8_kernel(
    output: SparsePrefillOutput,
    queries: SparsePrefillQueries,
    work: SparsePrefillWork,
    keys: Fp8Workspace,
    buffers: Fp8QueryBuffers,
    scale_log2: gl.float32,
    HAS_ROPE: gl.constexpr,
):
    """A CTA processes tiles of 64 heads of a query token. ``scale_log2``: softmax_scale · log2(e)."""
    tiles, shared = allocate(work.selections.indices.dtype.element_ty)
    k_scale = gl.load(keys.scale)
    args = Fp8PrefillArgs(tiles, shared, queries, buffers, keys, work, output, scale_log2 * k_scale, k_scale)
    barriers.sync_before_warp_specialize()
    gl.warp_specialize(
        [(load, (args, HAS_ROPE)), (consume, (args, 0, HAS_ROPE)), (consume, (args, 1, HAS_ROPE))],
        [4, 4],
        [_REGISTERS, _REGISTERS],
    )
